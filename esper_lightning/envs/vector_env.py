"""Interface between PPO and vector environments: N environments that are stepped together, with tensors in and out.

`HostPool` implements it for hosts, `GymVector` for any gymnasium environment. T steps in a rollout. RNG seeds of
training episodes are even, and those of evaluation odd.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from esper_lightning.runtime.machine import PhaseClock

TRAINING, EVALUATION = 0, 1
"""Purposes of an episode: the lowest bit of its RNG seed."""

MAX_RUN_RNG_SEED = 2**32 - 1
"""Largest RNG seed of a run or an evaluation: the largest that numpy's global generator takes."""


def check_rng_seed(setting: str, rng_seed: int) -> None:
    """Raise ValueError, naming the setting, unless a number can be an RNG seed."""
    if not 0 <= rng_seed <= MAX_RUN_RNG_SEED:
        kind = "not be negative" if rng_seed < 0 else f"be at most {MAX_RUN_RNG_SEED}"
        raise ValueError(f"{setting} must {kind}, got {rng_seed}")


def episode_rng_seeds(run_rng_seed: int, purpose: int, episode: int, *, n_envs: int) -> list[int]:
    """Return the RNG seed of each environment's episode, given the number of the `episode` in the run."""
    drawn = np.random.SeedSequence([run_rng_seed, purpose, episode]).generate_state(n_envs, np.uint64)
    return [int(rng_seed) >> 2 << 1 | purpose for rng_seed in drawn]


def draw_rng_seed(generator: np.random.Generator, purpose: int) -> int:
    return int(generator.integers(2**62)) << 1 | purpose


class Observation(NamedTuple):
    """Observation of N environments."""

    features: Tensor  # [..., N, D] float; of hosts [..., N, K, R], a row for each of K slots


class VectorStep(NamedTuple):
    """Result of a step of N environments."""

    action: Any  # the executed action
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode reached a terminal state
    truncated: Tensor  # [N] bool: a time limit cut the episode; its last state keeps its value
    final: tuple[Observation, Tensor | None] | None
    """Observation and privileged features of the last states of truncated episodes, where the environments have reset
    themselves; other rows are undefined."""
    log: dict[str, float]  # scalars to log
    terms: Mapping[str, Tensor] = MappingProxyType({})  # [N] each: the reward is their sum


class VectorEnv(Protocol):
    """N environments stepped together. Each step overwrites observation, masks and privileged features in place."""

    n_envs: int
    horizon: int
    """Number of steps T in a rollout."""
    device: torch.device
    autoreset: bool
    """True if environments reset themselves, so episodes begin and end anywhere in a rollout. False: a rollout is one
    episode, before which the environments are reset."""
    observation: Observation
    masks: Any
    """Record of tensors [N, …]. Two are bool [N]: `forced`, True where one action alone is possible, and `ended`, True
    where the episode has ended and actions have no effect."""
    episode_starts: Tensor
    """True where the last step ended a trajectory and the present observation starts another one, [N] bool."""
    clock: PhaseClock

    @property
    def space(self) -> Any: ...  # as `ChoiceSpace`: sizes of the heads, and `zeros`

    @property
    def privileged(self) -> Tensor | None: ...  # features for the critic alone, only in training, [N, P]. None: none

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        ...

    def step(self, action: Any) -> Any:
        """Step every environment and return a `VectorStep`, or a record that has its fields."""


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

    sizes: Mapping[str, int]  # number of choices of each head
    masked: bool = False  # choices can be impossible

    @property
    def mask_size(self) -> int:
        """Number of flags C in the masks of one environment."""
        return sum(self.sizes.values()) if self.masked else 0

    def zeros(self, n_envs: int, device: torch.device) -> ChoiceAction:
        """Return an action of zeros for `n_envs` environments, as storage."""
        return ChoiceAction(torch.zeros(n_envs, len(self.sizes), dtype=torch.int64, device=device))

    def full_masks(self, n_envs: int, device: torch.device) -> ChoiceMasks:
        """Return masks under which every choice is possible; they also serve as storage."""
        is_forced = all(size == 1 for size in self.sizes.values())
        return ChoiceMasks(
            possible=torch.ones(n_envs, self.mask_size, dtype=torch.bool, device=device),
            forced=torch.full((n_envs,), is_forced, device=device),
            ended=torch.zeros(n_envs, dtype=torch.bool, device=device),
        )

    def split_mask(self, possible: Tensor) -> dict[str, Tensor]:  # [..., C] -> [..., choices] by head
        return dict(zip(self.sizes, possible.split(list(self.sizes.values()), -1), strict=True))

    def forced(self, possible: Tensor) -> Tensor:  # [..., C] -> [...]
        """Return True where every head's mask allows at most one choice."""
        return torch.stack([mask.sum(-1).le(1) for mask in self.split_mask(possible).values()]).all(0)
