"""Factored, masked action distributions: each head is drawn given the choices of earlier heads.

For hosts it is the op first, then a slot given the op, then the remaining heads given the slot.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.envs import HEADS, Action, Masks
from esper_lightning.envs.actions import RELEVANT_OPS, relevance_table, zero_irrelevant_heads
from esper_lightning.envs.vector_env import ChoiceAction, ChoiceMasks, ChoiceSpace
from esper_lightning.runtime.ranks import ALONE, Ranks

MASKED_LOGIT = -1e4
"""Logit of an impossible choice: its probability is exactly 0 in float32, and the number fits in half precision."""

LARGEST_LOGIT = 5e3
"""Largest absolute logit of a possible choice: a possible choice is never less likely than an impossible one."""

SMALLEST_WEIGHT = 1e-30
"""Weight of an impossible choice where a distribution is not a number: never drawn unless no choice is possible."""

HeadTables = dict[str, Tensor]
"""Tables by head [..., rows, choices], with one row for each choice of the head's parent; a single row without one."""

HOST_PARENTS = {"slot": "op", "blueprint": "slot", "tempo": "slot"}
"""Earlier head on which each head of a host's action is conditioned; the op has none."""


def host_table_shapes(sizes: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return the shape (rows, choices) of each head's table, given the number of choices of each head."""
    return {
        head: (sizes[HOST_PARENTS[head]] if head in HOST_PARENTS else 1, choices) for head, choices in sizes.items()
    }


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Return log-probabilities over the last axis; a row without a possible choice is uniform and never drawn from."""
    bounded = logits.float().clamp(-LARGEST_LOGIT, LARGEST_LOGIT)
    return F.log_softmax(torch.where(mask, bounded, MASKED_LOGIT), -1)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Return the entropy over the last axis as a fraction of that of a uniform choice; 0 where there is no choice."""
    count = mask.sum(-1)
    entropy = -(log_probs.exp() * log_probs * mask).sum(-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)


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

    Heads are drawn in the order of their tables; the choice of the parent, an earlier head, selects the row of a table.
    """

    def __init__(self, logits: HeadTables, masks: HeadTables, parents: Mapping[str, str]) -> None:
        self.heads = tuple(logits)
        self.masks = masks
        self.parents = parents
        self.log_probs: HeadTables = {head: masked_log_softmax(table, masks[head]) for head, table in logits.items()}

    def sample(self, generator: torch.Generator, ranks: Ranks = ALONE) -> Any:
        """Draw an action; `generator` is on the device of the logits, and in the same state on all ranks.

        Where log-probabilities are NaN, all possible choices are equally likely (torch.multinomial on NaN would make
        the GPU unusable for the process), and the action's log-probability stays NaN, so that it teaches nothing.
        """
        chosen: dict[str, Tensor] = {}
        for head in self.heads:
            log_probs, mask = self.log_probs[head], self.masks[head]
            weights = torch.where(log_probs.isnan(), mask + SMALLEST_WEIGHT, log_probs.exp())
            weights = self._row(head, weights, chosen)
            chosen[head] = draw_rows(weights.flatten(0, -2), generator, ranks).view(weights.shape[:-1])
        return self._action(chosen)

    def mode(self) -> Any:
        """Return the most likely choice of each head, given the choices of earlier heads."""
        chosen: dict[str, Tensor] = {}
        for head in self.heads:
            chosen[head] = self._row(head, self.log_probs[head], chosen).argmax(-1)
        return self._action(chosen)

    def _row(self, head: str, table: Tensor, chosen: Mapping[str, Tensor]) -> Tensor:  # [..., choices]
        """Return the row of a head's table that the choice of its parent selects."""
        return select_row(table, chosen[self.parents[head]] if head in self.parents else None)

    def _log_prob(self, head: str, chosen: Mapping[str, Tensor]) -> Tensor:  # [...]
        row = self._row(head, self.log_probs[head], chosen)
        return row.gather(-1, chosen[head].unsqueeze(-1)).squeeze(-1)

    def log_prob(self, action: Any) -> Tensor:  # [...]
        """Return the log-probability of the action: the sum over the heads that matter for it."""
        return self.head_log_probs(action).sum(-1)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """Return the exact entropy of each head and the probability that it matters, both [..., heads].

        The entropy of a head is normalised (1: uniform over the possible choices) and averaged over the rows of its
        table, weighted by their probabilities.
        """
        return self._mean_over_rows(lambda head: normalised_entropy(self.log_probs[head], self.masks[head]))

    def choice_probability(self) -> Tensor:  # [..., heads]
        """Return the probability that a head matters and has several possible choices; else its entropy is 0."""
        has_choice, relevance = self._mean_over_rows(lambda head: (self.masks[head].sum(-1) > 1).float())
        return has_choice * relevance

    @abstractmethod
    def head_log_probs(self, action: Any) -> Tensor:  # [..., heads]
        """Return the log-probability of each head's choice given those of earlier heads; 0 where it does not matter."""

    @abstractmethod
    def _action(self, chosen: dict[str, Tensor]) -> Any:
        """Return the action made of the choices of all heads."""

    @abstractmethod
    def _mean_over_rows(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        """Return the mean of each head's `row_values(head)` [..., rows] over the rows, weighted by their probability
        where the head matters, and the probability that it matters, both [..., heads]."""


class HostDistribution(FactoredDistribution):
    """Distribution over the actions of hosts, given the logits of the heads and the masks."""

    def __init__(self, logits: HeadTables, masks: Masks) -> None:
        super().__init__(logits, {head: host_mask(head, masks, table) for head, table in logits.items()}, HOST_PARENTS)
        self.relevant = relevance_table(masks.slot.device)  # [ops, all heads of an action]

    def _action(self, chosen: dict[str, Tensor]) -> Action:
        return host_action(chosen)

    def head_log_probs(self, action: Action) -> Tensor:  # [..., heads]
        chosen, relevant = action._asdict(), self.relevant[action.op]
        parts = [self._log_prob(head, chosen) * relevant[..., HEADS.index(head)] for head in self.heads]
        return torch.stack(parts, -1)

    def _mean_over_rows(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        op = self.log_probs["op"].exp().squeeze(-2)  # [..., ops]
        # Columns, because an index list would be copied to the device synchronously.
        relevant = torch.stack([self.relevant[:, HEADS.index(head)] for head in self.heads], -1)
        weights = op.unsqueeze(-1) * relevant  # [..., ops, heads]
        relevance = weights.sum(-2)  # [..., heads]
        means = []
        for i, head in enumerate(self.heads):
            values = row_values(head)
            if head == "op":  # a single row
                mean = values.squeeze(-1)
            elif self.parents[head] == "op":  # a row for each op
                mean = (values * weights[..., i]).sum(-1) / relevance[..., i].clamp(min=1e-8)
            else:  # a row for each slot; the head matters for one op alone
                (only_op,) = RELEVANT_OPS[head]
                slot_probability = self.log_probs["slot"].exp()[..., only_op, :]
                mean = (values * slot_probability).sum(-1)
            means.append(mean)
        return torch.stack(means, -1), relevance


def host_mask(head: str, masks: Masks, table: Tensor) -> Tensor:
    """Return the mask of a head's table, [..., rows, choices] bool."""
    tables = {"op": masks.op.unsqueeze(-2), "slot": masks.slot, "blueprint": masks.blueprint}
    return tables[head] if head in tables else torch.ones_like(table, dtype=torch.bool)


def host_action(chosen: Mapping[str, Tensor]) -> Action:
    """Return the action made of the choices of the existing heads; missing ones, and those without effect, are 0."""
    missing = torch.zeros_like(chosen["op"])
    action = Action(*(chosen.get(head, missing) for head in HEADS))
    return zero_irrelevant_heads(action, relevance_table(missing.device))


def uniform_distribution(sizes: Mapping[str, int], masks: Masks) -> HostDistribution:
    """Return the distribution in which all possible choices of a head are equally likely."""
    shapes = host_table_shapes(sizes).items()
    return HostDistribution({head: torch.zeros(len(masks.ended), *shape) for head, shape in shapes}, masks)


class ChoiceDistribution(FactoredDistribution):
    """Distribution over the actions of a `ChoiceSpace`, given the logits of the heads and the masks."""

    def __init__(self, logits: HeadTables, masks: ChoiceMasks, space: ChoiceSpace) -> None:
        possible = space.split_mask(masks.possible) if space.masked else {}
        tables = {
            head: possible[head].unsqueeze(-2) if head in possible else torch.ones_like(table, dtype=torch.bool)
            for head, table in logits.items()
        }
        super().__init__(logits, tables, {})

    def _action(self, chosen: dict[str, Tensor]) -> ChoiceAction:
        return ChoiceAction(torch.stack(list(chosen.values()), -1))

    def head_log_probs(self, action: ChoiceAction) -> Tensor:  # [..., heads]
        chosen = dict(zip(self.heads, action.indices.unbind(-1), strict=True))
        return torch.stack([self._log_prob(head, chosen) for head in self.heads], -1)

    def _mean_over_rows(self, row_values: Callable[[str], Tensor]) -> tuple[Tensor, Tensor]:
        mean = torch.stack([row_values(head).squeeze(-1) for head in self.heads], -1)
        return mean, torch.ones_like(mean)
