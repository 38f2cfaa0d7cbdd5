"""What PPO needs of environments: N of them side by side, stepped together, tensors in and tensors out.

`HostPool` is one kind; `GymVector` makes one of any gymnasium environment. T steps in a rollout.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper_lightning.envs.execution.timing import PhaseClock


class Space(Protocol):
    """What can be decided."""

    sizes: Mapping[str, int]
    """Number of choices by head."""

    def blank(self, n_envs: int, device: torch.device) -> Any:
        """An action of `n_envs` environments, a record of tensors [N, …], as storage for another one."""

    def heads_of(self, action: Any) -> Iterator[tuple[Tensor, int]]:
        """What each head chose, [..., N], and among how many."""


class Seen(NamedTuple):
    """What is seen of environments that show numbers alone. (Hosts show more: see `Observation`.)"""

    features: Tensor  # [..., N, D] float


class Ended(NamedTuple):
    """What environments looked like at the end of an episode, where they have reset themselves since.

    Rows of environments that go on hold anything.
    """

    observation: Any
    privileged: Tensor | None


class VectorStep(NamedTuple):
    """What followed from a step."""

    action: Any  # that was carried out
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode came to its end
    truncated: Tensor  # [N] bool: the episode was cut by a time limit; its last state keeps its value
    ended: Ended | None  # there must be one if an environment was truncated and has reset itself
    shown: dict[str, float]  # worth watching: how well is it going?


class VectorEnv(Protocol):
    """N environments. Observation, masks and privileged features are their own storage: a step overwrites them."""

    n_envs: int
    device: torch.device
    horizon: int
    """Steps T of a rollout."""
    goes_on: bool
    """Whether environments reset themselves and episodes may begin and end anywhere in a rollout. If not, a rollout is
    an episode, for which the environments are reset."""
    space: Space
    categories: int
    """How many values the whole numbers of the observation's second field can take; 0: there is none."""
    observation: Any
    """A record of tensors [N, …]: `features` first."""
    privileged: Tensor | None
    """What only the critic may see, and only in training [N, P] float."""
    masks: Any
    """A record of tensors [N, …] with `forced` and `ended` [N]: was there nothing to decide; is it over, so that
    nothing follows?"""
    episode_starts: Tensor
    """[N] bool: the last step ended a trajectory, and the present observation is the first of another."""
    clock: PhaseClock

    def reset(self, seeds: Sequence[int]) -> Any:
        """Begins an episode everywhere: the i-th depends on `seeds[i]` alone."""

    def step(self, action: Any) -> Any:
        """A VectorStep, or more."""
