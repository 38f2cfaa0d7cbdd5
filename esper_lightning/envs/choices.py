"""Actions of any environment: one choice or several, independent or each given another, with or without masks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class Choices(NamedTuple):
    """One decision per environment. H heads."""

    numbers: Tensor  # [..., N, H] int64


class ChoiceMasks(NamedTuple):
    """What is possible. C: the cells of all heads' tables, see `ChoiceSpace.tables`; 0 if everything always is."""

    possible: Tensor  # [..., N, C] bool
    forced: Tensor  # [..., N] bool: nothing is left to decide
    ended: Tensor  # [..., N] bool: this was over before, so what is decided here is nothing


@dataclass(frozen=True)
class ChoiceSpace:
    """Heads that are drawn one after the other, and what each is given."""

    sizes: Mapping[str, int]
    """Number of choices by head."""

    given: Mapping[str, str] = field(default_factory=dict)
    """By head the earlier one that it knows: it then has a row of logits, and of the mask, for each choice of that."""

    masked: bool = False
    """Whether anything is ever impossible."""

    def __post_init__(self) -> None:
        names = list(self.sizes)
        if not names or min(self.sizes.values()) < 1:
            raise ValueError(f"an action needs heads of at least one choice each, got {dict(self.sizes)}")
        for head, other in self.given.items():
            if head not in names or other not in names[: names.index(head)]:
                raise ValueError(f"given: {head!r} cannot know {other!r}; heads are drawn in the order {names}")

    @property
    def tables(self) -> dict[str, tuple[int, int]]:
        """Rows and choices of each head: a row for each choice of what it is given. Masks hold them one by one."""
        return {head: (self.sizes.get(self.given.get(head, ""), 1), size) for head, size in self.sizes.items()}

    @property
    def cells(self) -> int:
        """C of the masks."""
        return sum(rows * size for rows, size in self.tables.values()) if self.masked else 0

    def blank(self, n_envs: int, device: torch.device) -> Choices:
        """Storage for an action."""
        return Choices(torch.zeros(n_envs, len(self.sizes), dtype=torch.int64, device=device))

    def heads_of(self, action: Choices) -> Iterator[tuple[Tensor, int]]:
        """What each head chose, and among how many."""
        return zip(action.numbers.unbind(-1), self.sizes.values(), strict=True)

    def free(self, n_envs: int, device: torch.device) -> ChoiceMasks:
        """Masks that leave everything possible, as storage too."""
        only = all(size == 1 for size in self.sizes.values())
        return ChoiceMasks(
            possible=torch.ones(n_envs, self.cells, dtype=torch.bool, device=device),
            forced=torch.full((n_envs,), only, device=device),
            ended=torch.zeros(n_envs, dtype=torch.bool, device=device),
        )

    def split(self, possible: Tensor) -> dict[str, Tensor]:  # [..., C] -> [..., rows, choices] by head
        """The masks of the heads."""
        parts = possible.split([rows * size for rows, size in self.tables.values()], -1)
        return {head: part.unflatten(-1, shape) for (head, shape), part in zip(self.tables.items(), parts, strict=True)}

    def forced(self, possible: Tensor) -> Tensor:  # [..., C] -> [...]
        """Where every head has one choice, whatever was chosen before it."""
        return torch.stack([mask.sum(-1).le(1).all(-1) for mask in self.split(possible).values()]).all(0)
