"""Factored action distribution: the op first, then a slot given the op, then the remaining heads given op and slot.

All conditional tables are computed at once, so sampling, log-probability and the exact entropy use the same numbers.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import HEADS, Action, Masks
from esper_lightning.envs.actions import RELEVANT, blank_irrelevant, relevance

MASKED = -1e4
"""Logit of an impossible choice: its probability is exactly 0 in float32, and the number fits in half precision."""


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


Tables = dict[str, Tensor]
"""Tables by head [..., rows, choices], with one row for each context on which the choice is conditioned."""

CONTEXTS: dict[str, tuple[str, ...]] = {
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

MAIN = ("op", "slot", "blueprint", "tempo")
"""Heads that every policy has; another head exists only if it has more than one choice."""


def table_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the numbers of rows and choices of every existing head, given the number of choices of each head."""
    return {
        head: (math.prod(sizes[name] for name in given), sizes[head])
        for head, given in CONTEXTS.items()
        if head in MAIN or sizes[head] > 1
    }


def uniform(sizes: Mapping[str, int], n_envs: int) -> Tables:
    """Return logits that make all choices equally likely in `n_envs` environments."""
    return {head: torch.zeros(n_envs, *shape) for head, shape in table_shapes(sizes).items()}


class Heads(nn.Module):
    """Logits of all heads, as one table per head. A missing head always chooses 0.

    Args:
        width: Number of hidden features.
        sizes: Number of choices of each head.
    """

    def __init__(self, width: int, sizes: Mapping[str, int]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(
            {head: ConditionalHead(width, *shape) for head, shape in table_shapes(sizes).items()}
        )

    def forward(self, hidden: Tensor) -> Tables:  # [..., width]
        return {head: table(hidden) for head, table in self.tables.items()}

    def distribution(self, hidden: Tensor, masks: Masks) -> "FactoredDistribution":
        """Return the distribution over actions [...] for hidden features [..., width]."""
        return FactoredDistribution(self(hidden), masks)


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities over the last axis; a row without a possible choice is uniform and never drawn from."""
    return F.log_softmax(torch.where(mask, logits.float(), MASKED), -1)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy over the last axis as a fraction of that of a uniform choice among the possible.

    It is 0 where at most one choice is possible.
    """
    count = mask.sum(-1)
    entropy = -(log_probs.exp() * log_probs * mask).sum(-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)


def possible(head: str, masks: Masks, table: Tensor) -> Tensor:
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


class FactoredDistribution:
    """Distribution over actions [..., N], given the logits of the heads and the masks."""

    def __init__(self, logits: Tables, masks: Masks) -> None:
        self.possible: Tables = {head: possible(head, masks, table) for head, table in logits.items()}
        self.log_probs: Tables = {
            head: masked_log_softmax(table, self.possible[head]) for head, table in logits.items()
        }
        self.heads = tuple(logits)
        self.slots = masks.slot.shape[-1]
        self.relevant = relevance(masks.slot.device)[: masks.slot.shape[-2]]  # [ops, heads]

    def sample(self, generator: torch.Generator) -> Action:
        """Draw an action; `generator` must be on the device of the logits."""

        def draw(log_probs: Tensor) -> Tensor:
            flat = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator)
            return flat.view(log_probs.shape[:-1])

        return self._choose(draw)

    def mode(self) -> Action:
        """Return the most likely op, then the most likely choice of each head given the choices of earlier heads."""
        return self._choose(lambda log_probs: log_probs.argmax(-1))

    def _choose(self, draw: Callable[[Tensor], Tensor]) -> Action:
        chosen = {"op": draw(self._row("op", {}))}
        for head in HEADS[1:]:
            there = head in self.log_probs
            chosen[head] = draw(self._row(head, chosen)) if there else torch.zeros_like(chosen["op"])
        return blank_irrelevant(Action(**chosen), self.relevant)

    def log_prob(self, action: Action) -> Tensor:  # [...]
        """Return the log-probability of the action: the sum over the heads that matter for its op."""
        chosen = action._asdict()
        heads = [
            self._row(head, chosen).gather(-1, chosen[head].unsqueeze(-1)).squeeze(-1) * self._matters(head, action.op)
            for head in self.log_probs
        ]
        return torch.stack(heads, -1).sum(-1)

    def _matters(self, head: str, op: Tensor) -> Tensor:
        return self.relevant[:, HEADS.index(head)][op]

    def _row(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor:  # [..., choices]
        """Return the log-probabilities of a head given the choices of earlier heads."""
        table, given = self.log_probs[head], CONTEXTS[head]
        if not given:
            return table.squeeze(-2)
        row = chosen["op"] * self.slots + chosen["slot"] if given == ("op", "slot") else chosen[given[0]]
        index = row[..., None, None].expand(*row.shape, 1, table.shape[-1])
        return table.gather(-2, index).squeeze(-2)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """Return the entropy of each head and the probability that it matters, both [..., heads]; both are exact.

        The entropy of a head is normalised (1: uniform over the possible choices) and averaged over its contexts,
        weighted by their probabilities. The product of both, summed over heads, is the entropy of the action in these
        units.
        """
        return self._over_contexts(lambda head: normalised_entropy(self.log_probs[head], self.possible[head]))

    def freedom(self) -> Tensor:  # [..., heads]
        """Return the probability that a head matters and has several possible choices; else its entropy is 0."""
        free, share = self._over_contexts(lambda head: (self.possible[head].sum(-1) > 1).float())
        return free * share

    def _over_contexts(self, of_rows: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of each head's `row_values(head)` [..., rows], and the probability that the head matters."""
        op = self.log_probs["op"].exp().squeeze(-2)  # [..., ops]
        columns = [HEADS.index(head) for head in self.heads]
        use = op.unsqueeze(-1) * self.relevant[:, columns]  # [..., ops, heads]
        share = use.sum(-2)
        both = [self._mean(head, of_rows(head), use[..., i], share[..., i]) for i, head in enumerate(self.heads)]
        means, shares = zip(*both, strict=True)
        return torch.stack(means, -1), torch.stack(shares, -1)

    def _mean(self, head: str, per_row: Tensor, use: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean of one head over its contexts, and the probability that the head matters.

        Args:
            head: Name of the head.
            per_row: Values to average, [..., rows].
            op_weights: Probability of each op that uses the head, 0 for the others, [..., ops].
            relevance: Sum of `op_weights`, [...].
        """
        if head == "op":
            return per_row.squeeze(-1), share
        if CONTEXTS[head] == ("op",):
            return (per_row * use).sum(-1) / share.clamp(min=1e-8), share
        slots = self.log_probs["slot"].exp()  # [..., ops, K]
        if CONTEXTS[head] == ("slot",):
            (op,) = RELEVANT[head]
            return (per_row * slots[..., op, :]).sum(-1), share
        rows = (use.unsqueeze(-1) * slots).flatten(-2)  # [..., ops · K]
        if CONTEXTS[head] == ("speed",):
            # A change of alpha at once has no curve to choose, so the head does not matter there.
            free = self.possible[head].sum(-1) > 1
            rows = (rows.unsqueeze(-1) * self.log_probs["speed"].exp()).sum(-2) * free
            share = rows.sum(-1)
        return (per_row * rows).sum(-1) / share.clamp(min=1e-8), share
