"""The objective J, and rewards of the policy: pure functions of one environment step of one host."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.registry import Registry, check_part_name

SMALLEST_HOST = 200
"""Least number of parameters that growth is relative to: relative to a tiny host every seed would look enormous."""

RENT_CAP = 1.0
"""Largest rent: no score is above 1, so a larger rent would mean nothing."""

ROLLBACK_TERM = "rollback"
"""Name of the term that is added where hosts are watched: the penalty of a rollback by the Governor."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of the objective J: score minus rent for the parameters of fossilized seeds."""

    price: float = 0.05
    """Score that fossilized growth of the parameters by a factor of e (2.72) must add to pay."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.price < math.inf:
            raise ValueError(f"objective.price must be finite and not negative, got {self.price}")


def rent(parameters: Tensor, host_parameters: Tensor | int, price: Tensor | float) -> Tensor:
    """Return the rent [N] of networks with `parameters` [N], grown from hosts: price·ln(1 + growth), capped."""
    growth = (parameters - host_parameters) / torch.as_tensor(host_parameters).clamp(min=SMALLEST_HOST)
    return (price * torch.log1p(growth)).clamp(max=RENT_CAP)


def objective(score: Tensor, parameters: Tensor, host_parameters: Tensor | int, price: Tensor | float) -> Tensor:  # [N]
    """Return J [N] of networks with `score` [N] and `parameters` [N]; see `rent` for the other arguments."""
    return score - rent(parameters, host_parameters, price)


class SlotStatus(NamedTuple):
    """State of a slot after an environment step."""

    stage: Stage  # DORMANT for an empty slot
    ticks_in_stage: int
    age: int  # ticks since the seed was germinated
    contribution: float  # in points of 100; 0 for a seed that is not blended
    parameters: int  # of the seed, fossilized or not; 0 for an empty slot
    growth: float  # `parameters` divided by those of the host, or by 200 if that is more


class HostStep(NamedTuple):
    """One environment step of one host: the action, and the measurements `…_before` and after it.

    Scores and losses are validated with all live seeds; `fossilized_…` with the fossilized seeds alone.
    """

    op: str  # name of the op that was carried out, after vetoes
    already_ended: bool  # before this step; nothing happens any more
    at_horizon: bool  # the step reaches the horizon; seeds that are not fossilized are dropped
    diverged: bool
    """The host was rolled back: the trajectory ends, and the measurements do not result from the action."""
    objective_before: float
    objective: float
    """J with all live seeds; at the horizon with fossilized seeds only."""
    fossilized_objective_before: float
    fossilized_objective: float
    """J as if the episode ended here."""
    score_before: float
    score: float
    fossilized_score: float
    loss: float
    slots: tuple[SlotStatus, ...]  # [K]


class Reward(NamedTuple):
    """Reward of one environment step of one host, as a sum of named terms; see `register`."""

    terms: tuple[str, ...]
    compute: "Callable[[HostStep, RewardConfig], Mapping[str, float]]"


REWARDS: Registry[Reward] = Registry("reward")

RewardFunction = TypeVar("RewardFunction", bound="Callable[[HostStep, RewardConfig], Mapping[str, float]]")


def register(name: str, terms: Collection[str]) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a reward as `name`, the value of `data.env.reward.mode`.

    The function takes the record of one environment step of one host and the settings, and returns every term by name.
    Their sum is the reward.

    `terms` are their names, which appear in plots as `reward/<name>`. Raises ValueError if the name is taken, or if the
    terms are no list of different names.
    """
    check_part_name(REWARDS.kind, name)

    def add(compute: RewardFunction) -> RewardFunction:
        if not terms or isinstance(terms, str) or len(set(terms)) < len(terms) or ROLLBACK_TERM in terms:
            raise ValueError(
                f"reward {name!r}: terms must be a list of different names, and none may be {ROLLBACK_TERM!r}, the "
                f"Governor's penalty, got {terms!r}"
            )
        REWARDS.add(name, Reward(tuple(terms), compute), compute)
        return compute

    return add


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of a controller's reward. Evaluation always uses the objective, whatever the reward."""

    mode: str = "objective"
    """Name or import path of the reward: objective, kept, sparse. See docs/concepts/environment.md."""

    gamma: float = 1.0
    """Discount factor; copied from model.ppo.gamma, so set that instead."""

    horizon_is_end: bool = True
    """Treat the horizon as the end; copied from model.ppo.horizon_is_end, so set that instead."""

    def __post_init__(self) -> None:
        REWARDS.find(self.mode)  # raises ValueError if there is none


@register("objective", ["objective"])
def objective_change(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Change of J, so that an episode's rewards sum to J at its end minus J at its start."""
    return {"objective": step.objective - step.objective_before}


@register("kept", ["kept"])
def fossilized_objective_change(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Change of J with fossilized seeds only: the same sum over an episode, paid when a seed is fossilized."""
    return {"kept": step.fossilized_objective - step.fossilized_objective_before}


@register("sparse", ["end"])
def objective_at_end(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """J at the horizon, clipped to [-1, 1]."""
    return {"end": max(-1.0, min(1.0, step.objective)) if step.at_horizon else 0.0}


def compute_terms(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Return every term of the config's reward for one step by name; their sum is the reward.

    All are 0 where the host is rolled back or had ended. Raises ValueError unless each declared term is a finite
    number, or the host's own measurements are not finite.
    """
    reward = REWARDS.find(config.mode)
    if step.already_ended or step.diverged:
        return dict.fromkeys(reward.terms, 0.0)
    returned = reward.compute(step, config)
    if not isinstance(returned, Mapping) or set(returned) != set(reward.terms):
        raise ValueError(
            f"reward {config.mode!r} returned {returned!r:.80}, not its terms; return a dictionary of "
            f"{list(reward.terms)}"
        )
    is_measured = all(math.isfinite(number) for number in step if isinstance(number, float))
    terms = {}
    for name in reward.terms:
        try:
            terms[name] = float(returned[name])  # also a tensor or an array of one element
            is_fine = math.isfinite(terms[name]) or not is_measured
        except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
            is_fine = False
        if not is_fine:
            raise ValueError(
                f"reward {config.mode!r} returned {returned[name]!r:.80} as its term {name!r}; return a finite number"
            )
    return terms
