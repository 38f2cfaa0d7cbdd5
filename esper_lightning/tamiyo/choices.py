"""Action distribution for any environment with a `ChoiceSpace`."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from esper_lightning.envs.choices import ChoiceMasks, Choices, ChoiceSpace
from esper_lightning.tamiyo.heads import ConditionalHead, Tables, masked_log_softmax, normalised_entropy


class ChoiceHeads(nn.Module):
    """Logits of all heads, as one table per head.

    Args:
        width: Number of hidden features.
        space: Heads, and the head on which each is conditioned.
    """

    def __init__(self, width: int, space: ChoiceSpace) -> None:
        super().__init__()
        self.space = space
        self.tables = nn.ModuleDict({head: ConditionalHead(width, *shape) for head, shape in space.tables.items()})

    def forward(self, hidden: Tensor) -> Tables:  # [..., width]
        return {head: table(hidden) for head, table in self.tables.items()}

    def distribution(self, hidden: Tensor, masks: ChoiceMasks) -> "ChoiceDistribution":
        """Return the distribution over actions [...] for hidden features [..., width]."""
        return ChoiceDistribution(self(hidden), masks, self.space)


class ChoiceDistribution:
    """Distribution over actions [..., N], given the logits of the heads and the masks."""

    def __init__(self, logits: Tables, masks: ChoiceMasks, space: ChoiceSpace) -> None:
        self.heads = tuple(logits)
        self.given = space.given
        self.possible: Tables | None = space.split(masks.possible) if space.masked else None
        self.log_probs: Tables = {
            head: table.float().log_softmax(-1) if self.possible is None else self._masked(head, table)
            for head, table in logits.items()
        }

    def _masked(self, head: str, table: Tensor) -> Tensor:
        return masked_log_softmax(table, self.possible[head])

    def sample(self, generator: torch.Generator) -> Choices:
        """Draw an action; `generator` must be on the device of the logits."""

        def draw(log_probs: Tensor) -> Tensor:
            flat = torch.multinomial(log_probs.exp().flatten(0, -2), 1, generator=generator)
            return flat.view(log_probs.shape[:-1])

        return self._choose(draw)

    def mode(self) -> Choices:
        """Return the most likely choice of each head, given the choices of earlier heads."""
        return self._choose(lambda log_probs: log_probs.argmax(-1))

    def _choose(self, draw: Callable[[Tensor], Tensor]) -> Choices:
        chosen: dict[str, Tensor] = {}
        for head in self.heads:
            chosen[head] = draw(self._row(head, chosen))
        return Choices(torch.stack(list(chosen.values()), -1))

    def log_prob(self, action: Choices) -> Tensor:  # [...]
        """Return the log-probability of the action: the sum over all heads."""
        chosen = dict(zip(self.heads, action.numbers.unbind(-1), strict=True))
        rows = [self._row(head, chosen).gather(-1, chosen[head].unsqueeze(-1)) for head in self.heads]
        return (rows[0] if len(rows) == 1 else torch.stack(rows).sum(0)).squeeze(-1)

    def _row(self, head: str, chosen: dict[str, Tensor]) -> Tensor:  # [..., choices]
        """Return the log-probabilities of a head given the choices of earlier heads."""
        table = self.log_probs[head]
        if head not in self.given:
            return table.squeeze(-2)
        row = chosen[self.given[head]]
        index = row[..., None, None].expand(*row.shape, 1, table.shape[-1])
        return table.gather(-2, index).squeeze(-2)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """Return the normalised entropy of each head and the probability that it matters, here 1; both [..., heads].

        The entropy is exact: the mean over the choices of the parent head, weighted by their probabilities.
        """
        entropy = self._over_contexts(lambda head: normalised_entropy(self.log_probs[head], self._there(head)))
        return entropy, torch.ones_like(entropy)

    def freedom(self) -> Tensor:  # [..., heads]
        """Return the probability that a head has more than one possible choice, without which its entropy is 0."""
        return self._over_contexts(lambda head: (self._there(head).sum(-1) > 1).float())

    def _there(self, head: str) -> Tensor:
        table = self.log_probs[head]
        return torch.ones_like(table, dtype=torch.bool) if self.possible is None else self.possible[head]

    def _over_contexts(self, of_rows: Callable[[str], Tensor]) -> Tensor:  # [..., heads]
        """Return the mean of each head's `row_values(head)` [..., rows], weighted by the rows' probabilities."""
        likely: Tables = {}  # [..., choices] of each head: marginal probabilities
        means = []
        for head in self.heads:
            per_row = of_rows(head)
            rows = likely[self.given[head]] if head in self.given else torch.ones_like(per_row)
            likely[head] = (rows.unsqueeze(-1) * self.log_probs[head].exp()).sum(-2)
            means.append((rows * per_row).sum(-1))
        return torch.stack(means, -1)
