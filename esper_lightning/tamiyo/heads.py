"""Factored, masked action distributions: each head is drawn given the choices of earlier heads.

All conditional tables are computed at once, so sampling, log-probability and the exact entropy use the same numbers.
`HostDistribution` is for hosts: the op first, then a slot given the op, then the remaining heads given op and slot.
`ChoiceDistribution` is for any `ChoiceSpace`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import HEADS, Action, Masks
from esper_lightning.envs.spaces.actions import RELEVANT_OPS, relevance_table, zero_irrelevant_heads
from esper_lightning.envs.spaces.choices import ChoiceAction, ChoiceMasks, ChoiceSpace
from esper_lightning.envs.vector_env import ActionSpaceProtocol
from esper_lightning.ranks import ALONE, Ranks

MASKED_LOGIT = -1e4
"""Logit of an impossible choice: its probability is exactly 0 in float32, and the number fits in half precision."""

LARGEST_LOGIT = 5e3
"""Largest absolute logit of a possible choice: a possible choice is never less likely than an impossible one."""

SMALLEST_WEIGHT = 1e-30
"""Weight of an impossible choice where a distribution is not a number: never drawn unless no choice is possible."""


class ConditionalHead(nn.Module):
    """Logits of `choices` for each of `contexts`, from hidden features.

    Args:
        width: Number of hidden features.
        contexts: Number of values of the condition (ops, slots); 1 for an unconditional head.
        choices: Number of choices.
    """

    def __init__(self, width: int, contexts: int, choices: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, width // 2)
        self.context = nn.Parameter(torch.zeros(contexts, width // 2))
        self.output = nn.Linear(width // 2, choices)
        nn.init.orthogonal_(self.input.weight, math.sqrt(2))
        nn.init.zeros_(self.input.bias)
        nn.init.normal_(self.context, std=0.1)  # different for each context from the start
        nn.init.orthogonal_(self.output.weight, 0.01)  # yet nearly uniform over choices
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., width] -> [..., contexts, choices]
        return self.output(F.relu(self.input(hidden).unsqueeze(-2) + self.context))


HeadTables = dict[str, Tensor]
"""Tables by head [..., rows, choices], with one row for each context on which the choice is conditioned."""

PARENT_HEADS: dict[str, tuple[str, ...]] = {
    "op": (),
    "slot": ("op",),
    "blueprint": ("slot",),
    "style": ("slot",),
    "tempo": ("slot",),
    "target": ("slot",),
    "speed": ("op", "slot"),
    "curve": ("speed",),
}
"""Earlier heads on which each head is conditioned."""

REQUIRED_HEADS = ("op", "slot", "blueprint", "tempo")
"""Heads that every policy has; another head exists only if it has more than one choice."""


def table_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the numbers of rows and choices of every existing head, given the number of choices of each head."""
    return {
        head: (math.prod(sizes[name] for name in parents), sizes[head])
        for head, parents in PARENT_HEADS.items()
        if head in REQUIRED_HEADS or sizes[head] > 1
    }


def uniform_logits(sizes: Mapping[str, int], n_envs: int) -> HeadTables:
    """Return logits that make all choices equally likely in `n_envs` environments."""
    return {head: torch.zeros(n_envs, *shape) for head, shape in table_shapes(sizes).items()}


class Heads(nn.Module):
    """Logits of all heads, as one table per head. In a host's action space a missing head always chooses 0.

    Args:
        width: Number of hidden features.
        space: Action space of the environments.
        floors: Least probability of each possible choice, by head; the other heads have none.

    Raises ValueError if a floor is for a head without a choice, or too high for the number of choices.
    """

    def __init__(self, width: int, space: ActionSpaceProtocol, floors: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.space = space
        self.floors = dict(floors or {})
        shapes = space.mask_shapes if isinstance(space, ChoiceSpace) else table_shapes(space.sizes)
        self.sizes = {head: choices for head, (_, choices) in shapes.items()}  # number of choices of each head
        check_floors(self.floors, {head: choices for head, choices in self.sizes.items() if choices > 1})
        self.tables = nn.ModuleDict({head: ConditionalHead(width, *shape) for head, shape in shapes.items()})

    def forward(self, hidden: Tensor) -> HeadTables:  # [..., width]
        return {head: table(hidden) for head, table in self.tables.items()}

    def distribution(self, hidden: Tensor, masks: Any) -> "HostDistribution | ChoiceDistribution":
        """Return the distribution over actions [...] for hidden features [..., width]."""
        if isinstance(self.space, ChoiceSpace):
            return ChoiceDistribution(self(hidden), masks, self.space, self.floors)
        return HostDistribution(self(hidden), masks, self.floors)

    def decide(self, hidden: Tensor, masks: Any) -> Any:
        """Return the most likely action: the mode of `distribution`."""
        return self.distribution(hidden, masks).mode()


def check_floors(floors: Mapping[str, float], sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless every floor is for one of the heads in `sizes`, and all its choices can have it."""
    for head, floor in floors.items():
        if head not in sizes:
            raise ValueError(
                f"policy.probability_floors: there is no head {head!r} with a choice; there are {', '.join(sizes)}"
            )
        if not 0.0 < floor * sizes[head] < 1.0:
            raise ValueError(
                f"policy.probability_floors: {head} has {sizes[head]} choices, so its floor must lie in "
                f"(0, {1.0 / sizes[head]:.3g}), got {floor}"
            )


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities over the last axis; a row without a possible choice is uniform and never drawn from."""
    bounded = logits.float().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return F.log_softmax(torch.where(mask, bounded, MASKED_LOGIT), -1)


def raise_to_floor(log_probs: Tensor, mask: Tensor, floor: float) -> Tensor:
    """Return log-probabilities over the last axis, mixed with a uniform choice so that each is at least ln(floor).

    The probability of a choice becomes floor + (1 - n·floor)·p, where n choices are possible. The order of the choices
    stays the same. Impossible choices, and the only possible choice of a row, do not change.
    """
    count = mask.sum(-1, keepdim=True)
    mixed = (floor + (1.0 - count * floor) * log_probs.exp()).log()
    return torch.where(mask & (count > 1), mixed, log_probs)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy over the last axis as a fraction of that of a uniform choice among the possible.

    It is 0 where at most one choice is possible.
    """
    count = mask.sum(-1)
    entropy = -(log_probs.exp() * log_probs * mask).sum(-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)


def head_mask(head: str, masks: Masks, table: Tensor) -> Tensor:
    """Return the mask of a head's table, [..., rows, choices] bool."""
    match head:
        case "op":
            return masks.op.unsqueeze(-2)
        case "speed":
            return masks.speed.flatten(-3, -2)
        case "slot" | "blueprint" | "target" | "curve":
            return getattr(masks, head)
        case _:
            return torch.ones_like(table, dtype=torch.bool)


def select_row(table: Tensor, row: Tensor | None) -> Tensor:  # [..., choices]
    """Return the row of a table [..., rows, choices] with index `row` [...]; None: its only row."""
    if row is None:
        return table.squeeze(-2)
    index = row[..., None, None].expand(*row.shape, 1, table.shape[-1])
    return table.gather(-2, index).squeeze(-2)


def draw_rows(weights: Tensor, generator: torch.Generator, ranks: Ranks) -> Tensor:  # [n, choices] -> [n]
    """Draw one choice per row, in proportion to its weights; rows are the environments of this rank."""
    if ranks.world == 1:
        return torch.multinomial(weights, 1, generator=generator).squeeze(1)
    # As torch.multinomial does it: every rank draws the noise of all environments, and uses that of its own.
    noise = weights.new_empty(ranks.total, weights.shape[1]).exponential_(generator=generator)
    return (weights / ranks.rows(noise)).argmax(1)


class FactoredDistribution(ABC):
    """Distribution over actions [..., N] with one table of conditional log-probabilities per head.

    Args:
        logits: Table of each head, [..., rows, choices], in the order in which heads are drawn.
        masks: Possible choices, of the same shapes, bool.
        floors: Least probability of each possible choice, by head; the other heads have none.
    """

    def __init__(self, logits: HeadTables, masks: HeadTables, floors: Mapping[str, float] | None) -> None:
        self.heads = tuple(logits)
        self.mask_tables = masks
        self.log_probs: HeadTables = {head: masked_log_softmax(table, masks[head]) for head, table in logits.items()}
        for head, floor in (floors or {}).items():
            self.log_probs[head] = raise_to_floor(self.log_probs[head], masks[head], floor)

    def sample(self, generator: torch.Generator, ranks: Ranks = ALONE) -> Any:
        """Draw an action; `generator` must be on the device of the logits.

        Where log-probabilities are NaN, all possible choices are equally likely: to draw from NaN would end a GPU's
        process. The action's log-probability stays NaN, so that nothing is learned from it.

        With several ranks, whose generators are in the same state, the actions are those that one process would draw
        for the environments of all ranks.
        """

        def draw(head: str, row: Tensor | None) -> Tensor:
            log_probs, mask = self.log_probs[head], self.mask_tables[head]
            table = torch.where(log_probs.isnan(), mask + SMALLEST_WEIGHT, log_probs.exp())
            weights = select_row(table, row)
            return draw_rows(weights.flatten(0, -2), generator, ranks).view(weights.shape[:-1])

        return self._action(self._choose(draw))

    def mode(self) -> Any:
        """Return the most likely choice of each head, given the choices of earlier heads."""
        return self._action(self._choose(lambda head, row: select_row(self.log_probs[head], row).argmax(-1)))

    def _choose(self, choose: Callable[[str, Tensor | None], Tensor]) -> dict[str, Tensor]:
        """Return the choice of each head, given a function of the head and the selected row of its table."""
        chosen: dict[str, Tensor] = {}
        for head in self.heads:
            chosen[head] = choose(head, self._row_index(head, chosen))
        return chosen

    def _row(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor:  # [..., choices]
        """Return the log-probabilities of a head given the choices of earlier heads."""
        return select_row(self.log_probs[head], self._row_index(head, chosen))

    def _log_prob(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor:  # [...]
        return self._row(head, chosen).gather(-1, chosen[head].unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """Return the entropy of each head and the probability that it matters, both [..., heads]; both are exact.

        The entropy of a head is normalised (1: uniform over the possible choices) and averaged over its contexts,
        weighted by their probabilities. The product of both, summed over heads, is the entropy of the action in these
        units.
        """
        return self._mean_over_contexts(lambda head: normalised_entropy(self.log_probs[head], self.mask_tables[head]))

    def choice_probability(self) -> Tensor:  # [..., heads]
        """Return the probability that a head matters and has several possible choices; else its entropy is 0."""
        has_choice, relevance = self._mean_over_contexts(lambda head: (self.mask_tables[head].sum(-1) > 1).float())
        return has_choice * relevance

    @abstractmethod
    def log_prob(self, action: Any) -> Tensor:  # [...]
        """Return the log-probability of the action: the sum over the heads that matter for it."""

    @abstractmethod
    def _action(self, chosen: dict[str, Tensor]) -> Any:
        """Return the action made of the choices of all heads."""

    @abstractmethod
    def _row_index(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor | None:
        """Return the row of a head's table that the choices of earlier heads select; None if there is only one."""

    @abstractmethod
    def _mean_over_contexts(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of each head's `row_values(head)` [..., rows], and the probability that the head matters."""


class HostDistribution(FactoredDistribution):
    """Distribution over the actions of hosts, given the logits of the heads, the masks and the probability floors."""

    def __init__(self, logits: HeadTables, masks: Masks, floors: Mapping[str, float] | None = None) -> None:
        super().__init__(logits, {head: head_mask(head, masks, table) for head, table in logits.items()}, floors)
        self.n_slots = masks.slot.shape[-1]
        self.relevant = relevance_table(masks.slot.device)[: masks.slot.shape[-2]]  # [ops, heads]

    def _action(self, chosen: dict[str, Tensor]) -> Action:
        return host_action(chosen, self.relevant)

    def log_prob(self, action: Action) -> Tensor:  # [...]
        return self.head_log_probs(action).sum(-1)

    def head_log_probs(self, action: Action) -> Tensor:  # [..., heads]
        """Return the log-probability of each head's choice given those of earlier heads; 0 where it does not matter."""
        chosen = action._asdict()
        heads = [self._log_prob(head, chosen) * self._relevance(head, action.op) for head in self.heads]
        return torch.stack(heads, -1)

    def _relevance(self, head: str, op: Tensor) -> Tensor:
        return self.relevant[:, HEADS.index(head)][op]

    def _row_index(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor | None:
        return row_index(head, chosen, self.n_slots)

    def _mean_over_contexts(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        op = self.log_probs["op"].exp().squeeze(-2)  # [..., ops]
        columns = [HEADS.index(head) for head in self.heads]
        op_weights = op.unsqueeze(-1) * self.relevant[:, columns]  # [..., ops, heads]
        relevances = op_weights.sum(-2)
        pairs = [
            self._mean_of_head(head, row_values(head), op_weights[..., i], relevance=relevances[..., i])
            for i, head in enumerate(self.heads)
        ]
        means, head_relevances = zip(*pairs, strict=True)
        return torch.stack(means, -1), torch.stack(head_relevances, -1)

    def _mean_of_head(
        self, head: str, per_row: Tensor, op_weights: Tensor, *, relevance: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the mean of one head over its contexts, and the probability that the head matters.

        Args:
            head: Name of the head.
            per_row: Values to average, [..., rows].
            op_weights: Probability of each op that uses the head, 0 for the others, [..., ops].
            relevance: Sum of `op_weights`, [...].
        """
        if head == "op":
            return per_row.squeeze(-1), relevance
        if PARENT_HEADS[head] == ("op",):
            return (per_row * op_weights).sum(-1) / relevance.clamp(min=1e-8), relevance
        slots = self.log_probs["slot"].exp()  # [..., ops, K]
        if PARENT_HEADS[head] == ("slot",):
            (op,) = RELEVANT_OPS[head]
            return (per_row * slots[..., op, :]).sum(-1), relevance
        rows = (op_weights.unsqueeze(-1) * slots).flatten(-2)  # [..., ops · K]
        if PARENT_HEADS[head] == ("speed",):
            # A change of alpha at once has no curve to choose, so the head does not matter there.
            has_choice = self.mask_tables[head].sum(-1) > 1
            rows = (rows.unsqueeze(-1) * self.log_probs["speed"].exp()).sum(-2) * has_choice
            relevance = rows.sum(-1)
        return (per_row * rows).sum(-1) / relevance.clamp(min=1e-8), relevance


def row_index(head: str, chosen: Mapping[str, Tensor], n_slots: int) -> Tensor | None:
    """Return the row of a head's table that the choices of earlier heads select; None if there is only one."""
    parents = PARENT_HEADS[head]
    if parents == ("op", "slot"):
        return chosen["op"] * n_slots + chosen["slot"]
    return chosen[parents[0]] if parents else None


def host_action(chosen: Mapping[str, Tensor], relevant: Tensor) -> Action:
    """Return the action made of the choices of the existing heads; `relevant` is that of `relevance_table`."""
    missing = torch.zeros_like(chosen["op"])
    return zero_irrelevant_heads(Action(*(chosen.get(head, missing) for head in HEADS)), relevant)


class ChoiceDistribution(FactoredDistribution):
    """Distribution over the actions of a `ChoiceSpace`, given logits of the heads, masks and probability floors."""

    def __init__(
        self, logits: HeadTables, masks: ChoiceMasks, space: ChoiceSpace, floors: Mapping[str, float] | None = None
    ) -> None:
        all_possible = {head: torch.ones_like(table, dtype=torch.bool) for head, table in logits.items()}
        super().__init__(logits, space.split_mask(masks.possible) if space.masked else all_possible, floors)
        self.parents = space.parents

    def _action(self, chosen: dict[str, Tensor]) -> ChoiceAction:
        return ChoiceAction(torch.stack(list(chosen.values()), -1))

    def log_prob(self, action: ChoiceAction) -> Tensor:  # [...]
        chosen = dict(zip(self.heads, action.indices.unbind(-1), strict=True))
        return torch.stack([self._log_prob(head, chosen) for head in self.heads]).sum(0)

    def _row_index(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor | None:
        return chosen[self.parents[head]] if head in self.parents else None

    def _mean_over_contexts(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        marginals: HeadTables = {}  # [..., choices] of each head: marginal probabilities
        means = []
        for head in self.heads:
            per_row = row_values(head)
            weights = marginals[self.parents[head]] if head in self.parents else torch.ones_like(per_row)
            marginals[head] = (weights.unsqueeze(-1) * self.log_probs[head].exp()).sum(-2)
            means.append((weights * per_row).sum(-1))
        mean = torch.stack(means, -1)
        return mean, torch.ones_like(mean)
