"""Discrete actions of any environment: one head or several, independent or conditional, with or without masks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor


class ChoiceAction(NamedTuple):
    """One action per environment with H heads."""

    indices: Tensor  # [..., N, H] int64


class ChoiceMasks(NamedTuple):
    """Action masks with C = `ChoiceSpace.mask_size` flags per environment; C = 0 if all choices are always possible."""

    possible: Tensor  # [..., N, C] bool
    forced: Tensor  # [..., N] bool: only one action is possible
    ended: Tensor  # [..., N] bool: the episode had ended, so actions have no effect


@dataclass(frozen=True)
class ChoiceSpace:
    """Action space of heads that are sampled in order, each of which may depend on an earlier one."""

    sizes: Mapping[str, int]
    """Number of choices of each head."""

    parents: Mapping[str, str] = field(default_factory=dict)
    """Parent of each conditional head: an earlier head. Logits and mask have one row for each choice of the parent."""

    masked: bool = False
    """True if choices can be impossible."""

    def __post_init__(self) -> None:
        names = list(self.sizes)
        if not names or min(self.sizes.values()) < 1:
            raise ValueError(f"an action needs heads of at least one choice each, got {dict(self.sizes)}")
        for head, other in self.parents.items():
            if head not in names or other not in names[: names.index(head)]:
                raise ValueError(f"parents: {head!r} cannot depend on {other!r}; heads are drawn in the order {names}")

    @property
    def table_shapes(self) -> dict[str, tuple[int, int]]:
        """Shape (rows, choices) of each head's table: one row per choice of its parent, or a single row."""
        return {head: (self.sizes.get(self.parents.get(head, ""), 1), size) for head, size in self.sizes.items()}

    @property
    def mask_size(self) -> int:
        """Number of flags C in the masks of one environment."""
        return sum(rows * size for rows, size in self.table_shapes.values()) if self.masked else 0

    def zeros(self, n_envs: int, device: torch.device) -> ChoiceAction:
        """Return an action of zeros for `n_envs` environments, as storage."""
        return ChoiceAction(torch.zeros(n_envs, len(self.sizes), dtype=torch.int64, device=device))

    def iter_heads(self, action: ChoiceAction) -> Iterator[tuple[Tensor, int]]:
        """Iterate over the heads: chosen indices [..., N] and number of choices."""
        return zip(action.indices.unbind(-1), self.sizes.values(), strict=True)

    def full_masks(self, n_envs: int, device: torch.device) -> ChoiceMasks:
        """Return masks under which every choice is possible; they also serve as storage."""
        is_forced = all(size == 1 for size in self.sizes.values())
        return ChoiceMasks(
            possible=torch.ones(n_envs, self.mask_size, dtype=torch.bool, device=device),
            forced=torch.full((n_envs,), is_forced, device=device),
            ended=torch.zeros(n_envs, dtype=torch.bool, device=device),
        )

    def split_mask(self, possible: Tensor) -> dict[str, Tensor]:  # [..., C] -> [..., rows, choices] by head
        """Split flags into the masks of the heads."""
        parts = possible.split([rows * size for rows, size in self.table_shapes.values()], -1)
        shapes = self.table_shapes.items()
        return {head: part.unflatten(-1, shape) for (head, shape), part in zip(shapes, parts, strict=True)}

    def forced(self, possible: Tensor) -> Tensor:  # [..., C] -> [...]
        """Return True where every row of every head's mask allows at most one choice."""
        return torch.stack([mask.sum(-1).le(1).all(-1) for mask in self.split_mask(possible).values()]).all(0)
