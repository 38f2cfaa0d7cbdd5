"""Discrete actions of any environment: one head or several, independent of each other, with or without masks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    """Action space of heads that do not depend on each other."""

    sizes: Mapping[str, int]
    """Number of choices of each head."""

    masked: bool = False
    """True if choices can be impossible."""

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes.values()) < 1:
            raise ValueError(f"an action needs heads of at least one choice each, got {dict(self.sizes)}")

    @property
    def mask_size(self) -> int:
        """Number of flags C in the masks of one environment."""
        return sum(self.sizes.values()) if self.masked else 0

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

    def split_mask(self, possible: Tensor) -> dict[str, Tensor]:  # [..., C] -> [..., choices] by head
        """Split flags into the masks of the heads."""
        return dict(zip(self.sizes, possible.split(list(self.sizes.values()), -1), strict=True))

    def forced(self, possible: Tensor) -> Tensor:  # [..., C] -> [...]
        """Return True where every head's mask allows at most one choice."""
        return torch.stack([mask.sum(-1).le(1) for mask in self.split_mask(possible).values()]).all(0)
