"""Settings of the reward, and the registry of rewards."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from esper_lightning.registry import Registry, check_part_name
from esper_lightning.rewards.tick import HostStep

ModeName = Literal["objective", "kept", "sparse", "shaped", "basic", "basic_plus", "escrow"]
"""Names of the rewards of this package."""


ROLLBACK_TERM = "rollback"
"""Name of the term that is added where hosts are watched: the penalty of a rollback by the Governor."""


class Reward(NamedTuple):
    """Reward of one environment step of one host, as a sum of named terms."""

    terms: tuple[str, ...]
    """Names of the terms; they appear in plots as `reward/<name>`."""
    compute: "Callable[[HostStep, RewardConfig], Mapping[str, float]]"
    """Function that returns every term by name."""
    depends_on_seeds: bool = True
    """True if the records of slots are needed; without them `HostStep.slots` is empty."""
    needs_host_only: bool = False
    """True if every host must also be validated with all seeds switched off."""


REWARDS: Registry[Reward] = Registry("reward")
"""Rewards by name."""

RewardFunction = TypeVar("RewardFunction", bound="Callable[[HostStep, RewardConfig], Mapping[str, float]]")


def register(
    name: str, terms: Collection[str], *, needs_host_only: bool = False
) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a reward as `name`.

    The function takes the record of one environment step of one host and the settings, and returns every term by name.
    Their sum is the reward. It is not called for the step in which a host is rolled back, whose terms are 0.

    Args:
        name: Value of `data.env.reward.mode`.
        terms: Names of the terms. `rollback` is that of the Governor's penalty, and cannot be one of them.
        needs_host_only: Validate every host with all seeds switched off, too: `HostStep.host_only_accuracy`.

    A second definition of the same function, as when a cell of a notebook runs again, replaces the first. Raises
    ValueError if the name is taken, or if the terms are no list of different names.
    """
    check_part_name(REWARDS.kind, name)

    def add(compute: RewardFunction) -> RewardFunction:
        if not terms or isinstance(terms, str):
            raise ValueError(f"reward {name!r}: terms must be a list of names, got {terms!r}")
        if len(set(terms)) < len(terms) or ROLLBACK_TERM in terms:
            raise ValueError(
                f"reward {name!r}: terms must be different names, and none may be {ROLLBACK_TERM!r}, the Governor's "
                f"penalty, got {list(terms)}"
            )
        reward = Reward(tuple(terms), compute, needs_host_only=needs_host_only)
        REWARDS.add(name, reward, compute)
        return compute

    return add


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of a controller's reward. Evaluation always uses the objective, whatever the reward."""

    mode: str = "objective"
    """Name or import path of the reward. objective: the change of the objective in each tick. kept: the change of the
    objective with fossilized seeds only: the same sum, but a seed is rewarded when it is fossilized, not when it is
    blended. sparse: the objective at the end only. shaped: accuracy points attributed to
    seeds, shaping, rent, warnings, costs of ops. basic: shaping, rent, a bonus for fossilizing a good seed, and at the
    end 5 times the gain in accuracy. basic_plus: basic, with most of the bonus spread over the rest of the episode.
    escrow: credit for progress that depends on a seed, taken back unless the seed is fossilized. See
    docs/concepts/rewards.md; docs/guides/extending.md shows how to add your own."""

    shaping: float = 0.3
    """Weight of the shaping by stages (shaped, basic, basic_plus)."""

    rent: float = 0.5
    """Cost per tick of a growth by a factor of e (shaped)."""

    rent_cap: float = 1.0
    """Largest rent per tick (shaped, basic, basic_plus)."""

    budget: float = 1.0
    """Growth that costs 0.1 per tick: 1 is a doubling of the host (basic, basic_plus)."""

    fossilize_bonus: float = 1.0
    """Bonus for fossilizing a seed that contributes 10 accuracy points (basic, basic_plus)."""

    gamma: float = 1.0
    """Discount factor of the shaping; copied from model.ppo.gamma, so set that instead."""

    horizon_is_end: bool = True
    """Treat the horizon as the end of shaping; copied from model.ppo.horizon_is_end, so set that instead."""

    @property
    def needs_host_only(self) -> bool:
        """True if every host must also be validated with all seeds switched off."""
        return REWARDS.find(self.mode).needs_host_only

    @property
    def depends_on_seeds(self) -> bool:
        """True if the reward depends on what happens to seeds."""
        return REWARDS.find(self.mode).depends_on_seeds

    def __post_init__(self) -> None:
        REWARDS.find(self.mode)  # raises ValueError if there is none
        for name in ("shaping", "rent", "rent_cap", "fossilize_bonus"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"reward.{name} must be finite and not negative, got {getattr(self, name)}")
        if not 0.0 < self.budget < math.inf:
            raise ValueError(f"reward.budget must be positive and finite, got {self.budget}")
