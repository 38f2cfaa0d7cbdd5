"""Interface between PPO and vector environments: N environments that are stepped together, with tensors in and out.

`HostPool` implements it for hosts, `GymVector` for any gymnasium environment. T steps in a rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper_lightning.profiling import PhaseClock


class ActionSpaceProtocol(Protocol):
    """Action space."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Number of choices of each head."""
        ...

    def zeros(self, n_envs: int, device: torch.device) -> Any:
        """Return an action of zeros, a record of tensors [N, …], as storage."""

    def iter_heads(self, action: Any) -> Iterator[tuple[Tensor, int]]:
        """Iterate over the heads: chosen indices [..., N] and number of choices."""
        ...


class Observation(NamedTuple):
    """Observation of N environments."""

    features: Tensor  # [..., N, D] float; of hosts [..., N, K, R], a row for each of K slots


class FinalObservation(NamedTuple):
    """Observation and privileged features at the end of an episode, before the automatic reset.

    Rows of environments whose episode did not end are undefined.
    """

    observation: Observation
    privileged: Tensor | None


class VectorStep(NamedTuple):
    """Result of a step of N environments."""

    action: Any  # the executed action
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode reached a terminal state
    truncated: Tensor  # [N] bool: a time limit cut the episode; its last state keeps its value
    final: FinalObservation | None  # required if an environment was truncated and has reset itself
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
    """Record of tensors [N, …] with `forced` [N] bool, only one action is possible, and `ended` [N] bool, the episode
    has ended and actions have no effect."""
    episode_starts: Tensor
    """True where the last step ended a trajectory and the present observation starts another one, [N] bool."""
    clock: PhaseClock

    @property
    def space(self) -> ActionSpaceProtocol: ...

    @property
    def privileged(self) -> Tensor | None:
        """Privileged features for the critic alone and only in training, [N, P] float. None: there are none."""
        ...

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        ...

    def step(self, action: Any) -> Any:
        """Step every environment and return a `VectorStep`, or a record that has its fields."""
