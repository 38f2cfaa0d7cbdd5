"""A factored action distribution: the op first, then a slot for this op, then blueprint and tempo for this slot.

All conditional tables are computed at once: sampling, log-probability and the exact entropy read the same numbers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import Action, Masks, Op
from esper_lightning.envs.actions import blank_irrelevant, relevance

MASKED = -1e4
"""Logit of an impossible choice: its probability is exactly 0 in float32, and the number fits in half precision."""


class ConditionalHead(nn.Module):
    """Logits of `choices` for each of `contexts`, from hidden features.

    Args:
        width: Of the hidden features.
        contexts: Number of things the choice may depend on (ops, slots); 1 for none.
        choices: Number of choices.
    """

    def __init__(self, width: int, contexts: int, choices: int) -> None:
        super().__init__()
        self.input = nn.Linear(width, width // 2)
        self.context = nn.Parameter(torch.zeros(contexts, width // 2))
        self.output = nn.Linear(width // 2, choices)
        nn.init.orthogonal_(self.input.weight, math.sqrt(2))
        nn.init.zeros_(self.input.bias)
        nn.init.normal_(self.context, std=0.1)  # contexts differ from the start
        nn.init.orthogonal_(self.output.weight, 0.01)  # and yet every choice is about as likely
        nn.init.zeros_(self.output.bias)

    def forward(self, hidden: Tensor) -> Tensor:  # [..., width] -> [..., contexts, choices]
        return self.output(F.relu(self.input(hidden).unsqueeze(-2) + self.context))


class Logits(NamedTuple):
    """A table per head: one row for each context that its choice is conditioned on."""

    op: Tensor  # [..., ops]
    slot: Tensor  # [..., ops, K]
    blueprint: Tensor  # [..., K, P]
    tempo: Tensor  # [..., K, M]


class Heads(nn.Module):
    """The logits of every head in every context.

    Args:
        width: Of the hidden features.
        slots, blueprints, tempos: Numbers of choices K, P, M.
    """

    def __init__(self, width: int, slots: int, blueprints: int, tempos: int) -> None:
        super().__init__()
        self.op = ConditionalHead(width, 1, len(Op))
        self.slot = ConditionalHead(width, len(Op), slots)
        self.blueprint = ConditionalHead(width, slots, blueprints)
        self.tempo = ConditionalHead(width, slots, tempos)

    def forward(self, hidden: Tensor) -> Logits:
        return Logits(self.op(hidden).squeeze(-2), self.slot(hidden), self.blueprint(hidden), self.tempo(hidden))


def masked_log_softmax(logits: Tensor, mask: Tensor) -> Tensor:
    """Log-probabilities over the last axis; a row where nothing is possible is uniform, and nobody draws from it."""
    return F.log_softmax(torch.where(mask, logits.float(), MASKED), -1)


def normalised_entropy(log_probs: Tensor, mask: Tensor) -> Tensor:
    """Entropy over the last axis, divided by that of a uniform choice among the possible; 0 where at most one is."""
    count = mask.sum(-1)
    entropy = -(log_probs.exp() * log_probs * mask).sum(-1)
    return torch.where(count > 1, entropy / count.clamp(min=2).log(), 0.0)


class FactoredDistribution:
    """A distribution over actions [..., N], from logits and masks."""

    def __init__(self, logits: Logits, masks: Masks) -> None:
        self.masks = masks
        every_tempo = torch.ones_like(logits.tempo, dtype=torch.bool)
        self.possible = Logits(masks.op, masks.slot, masks.blueprint, every_tempo)
        self.log_probs = Logits(*map(masked_log_softmax, logits, self.possible))
        self.relevant = relevance(logits.op.device)  # [ops, heads]

    def sample(self, generator: torch.Generator) -> Action:
        """Draws from the distribution; `generator` lives on its device."""

        def draw(log_probs: Tensor) -> Tensor:
            flat = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator)
            return flat.view(log_probs.shape[:-1])

        return self._choose(draw)

    def mode(self) -> Action:
        """The likeliest op, then the likeliest choice of each head given what was chosen before."""
        return self._choose(lambda log_probs: log_probs.argmax(-1))

    def _choose(self, draw: Callable[[Tensor], Tensor]) -> Action:
        op = draw(self.log_probs.op)
        slot = draw(_pick_row(self.log_probs.slot, op))
        blueprint = draw(_pick_row(self.log_probs.blueprint, slot))
        tempo = draw(_pick_row(self.log_probs.tempo, slot))
        return blank_irrelevant(Action(op, slot, blueprint, tempo), self.relevant)

    def log_prob(self, action: Action) -> Tensor:  # [...]
        """Of the whole decision: the sum over the heads that matter for its op."""
        rows = (
            self.log_probs.op,
            _pick_row(self.log_probs.slot, action.op),
            _pick_row(self.log_probs.blueprint, action.slot),
            _pick_row(self.log_probs.tempo, action.slot),
        )
        heads = [row.gather(-1, head.unsqueeze(-1)).squeeze(-1) for row, head in zip(rows, action, strict=True)]
        return (torch.stack(heads, -1) * self.relevant[action.op]).sum(-1)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """Entropy of each head and the probability that it matters, both [..., heads]; neither is sampled.

        A head's entropy is normalised (1: uniform over what is possible) and averaged over its contexts by how likely
        they are. Their product summed over heads is the decision's entropy in these units.
        """
        op_probs = self.log_probs.op.exp()  # [..., ops]
        use = op_probs.unsqueeze(-1) * self.relevant  # [..., ops, heads]
        share = use.sum(-2)
        per_op = normalised_entropy(self.log_probs.slot, self.possible.slot)  # [..., ops]
        slot_probs = self.log_probs.slot.exp()[..., Op.GERMINATE, :]  # [..., K]
        entropies = [
            normalised_entropy(self.log_probs.op, self.possible.op),
            (per_op * use[..., 1]).sum(-1) / share[..., 1].clamp(min=1e-8),
            (normalised_entropy(self.log_probs.blueprint, self.possible.blueprint) * slot_probs).sum(-1),
            (normalised_entropy(self.log_probs.tempo, self.possible.tempo) * slot_probs).sum(-1),
        ]
        return torch.stack(entropies, -1), share


def _pick_row(table: Tensor, row: Tensor) -> Tensor:
    """table [..., R, C], row [...] -> [..., C]"""
    index = row[..., None, None].expand(*row.shape, 1, table.shape[-1])
    return table.gather(-2, index).squeeze(-2)
