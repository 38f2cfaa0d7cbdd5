"""What a controller sees of an environment: named features, each within [-1, 1] or nearly so.

The names are the layout: `features` of an environment returns them with their values, in a fixed order.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import Tensor

from esper_lightning.blueprints import nearest
from esper_lightning.envs.actions import STYLES
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gradients import GradientStats
from esper_lightning.growth.network import count_parameters
from esper_lightning.growth.stages import LIVE, Stage

WINDOW = 5
"""Host epochs of history that are shown: enough to see a trend, and a plateau as `plateau`."""

MISSING = -1.0
"""Stands for what has not been measured; no measured value of these features is negative."""

PLATEAU_STEP = 0.005
"""Rise of the best accuracy below which a tick counts as part of a plateau: one image of 200."""

CONTRIBUTION_SCALE = 10.0
"""Accuracy points of contribution that count as 1; more is clipped."""

LOG_LOSS_SCALE = 7.0
"""Symlog of a loss is divided by this, and larger ones count as 1: that is a loss of 1,096."""

LOG_SIZE_SCALE = 5.0
"""Log of the growth is divided by this, and more counts as 1: that is 148 times the host."""

LOG_NORM_SCALE = 5.0
"""Natural log of 1 + gradient norm is divided by this, and larger ones count as 1: that is a norm of 147."""


SHARE = "share."
"""Begins the names of the shares of slots in each stage."""

BLUEPRINTS = "blueprints"
"""Name of the blueprint in each slot, which is seen beside the features."""


@dataclass(frozen=True, kw_only=True)
class SightConfig:
    """What a policy is shown: for ablations. Hand-written rules know what they ask for in any case."""

    shown: list[str] = field(default_factory=lambda: ["*"])
    """Names or patterns of features (`loss.*`); `blueprints` for what grows in each slot. [progress]: time alone."""

    hidden: list[str] = field(default_factory=list)
    """Names or patterns of those that are not shown all the same. ["*.contribution*"]: no counterfactuals."""

    masks: bool = True
    """Whether the policy is offered only what is possible. False: everything, always, and what is impossible is done as
    WAIT, while the policy learns from what it chose."""

    def select(self, names: Sequence[str]) -> list[bool]:
        """Which of `names` are shown. Raises ValueError if a pattern fits none, or none is left."""
        for pattern in (*self.shown, *self.hidden):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"env.sight: no feature is called {pattern!r}; {nearest(pattern, names)}")
        chosen = [
            any(fnmatchcase(name, pattern) for pattern in self.shown)
            and not any(fnmatchcase(name, pattern) for pattern in self.hidden)
            for name in names
        ]
        if not any(shown for name, shown in zip(names, chosen, strict=True) if name != BLUEPRINTS):
            raise ValueError("env.sight shows no feature; show one at least, as `progress`")
        return chosen


class Observation(NamedTuple):
    """What a controller sees of every environment."""

    features: Tensor  # [..., N, D] float
    blueprints: Tensor  # [..., N, K] int64: 0 for an empty slot, else 1 + index of the seed's blueprint


def symlog(x: float, scale: float) -> float:
    """Sign and log(1 + |x|) over `scale`, at most 1 in size; not a number counts as infinity."""
    if math.isnan(x):
        return 1.0
    return math.copysign(min(1.0, math.log1p(abs(x)) / scale), x)


def clip(x: float, bound: float = 1.0) -> float:
    return max(-bound, min(bound, x))


def last(values: list[float], name: str) -> dict[str, float]:
    """The last WINDOW values, newest first, named by their age in ticks."""
    newest_first = values[: -WINDOW - 1 : -1]
    padded = newest_first + [MISSING] * (WINDOW - len(newest_first))
    return {f"{name}.{age}": value for age, value in enumerate(padded)}


def plateau_length(accuracy: list[float]) -> int:
    """Ticks since accuracy last rose above its best by more than PLATEAU_STEP."""
    best, since = 0.0, -1
    for value in accuracy:
        since += 1
        if value > best + PLATEAU_STEP:
            best, since = value, 0
    return max(since, 0)


def features(env: HostEnv) -> dict[str, float]:
    """Every feature of one environment by name."""
    history = env.history
    seen = {"progress": env.tick / env.horizon}
    seen |= last([symlog(loss, LOG_LOSS_SCALE) for loss in history.train_loss], "train_loss")
    seen |= last([symlog(loss, LOG_LOSS_SCALE) for loss in history.loss], "loss")
    seen |= last(history.accuracy, "accuracy")
    seen["gap"] = history.train_accuracy[-1] - history.accuracy[-1] if history.train_accuracy else 0.0
    seen["plateau"] = plateau_length(history.accuracy) / env.horizon
    prices = env.prices
    seen["price"] = min(1.0, prices.parameters)
    if env.objective_config.prices_compute:
        seen["price.compute"] = min(1.0, prices.compute)
        seen["compute.committed"] = clip(math.log(env.committed_flops / env.compute.host) / LOG_SIZE_SCALE)
    seen["parameters.committed"] = log_size(env.committed_parameters - env.host_parameters, env)
    seen["parameters.live"] = log_size(env.seed_parameters(LIVE), env)
    seen["host.gradient_norm"] = log_norm(env.host_gradient)
    for stage in Stage:
        seen[f"{SHARE}{stage.name}"] = sum(slot.stage is stage for slot in env.slots) / len(env.slots)
    for op in env.space.op:
        seen[f"last_op.{op}"] = float(env.last_op.name == op)
    for k in range(len(env.slots)):
        seen |= slot_features(env, k)
    return seen


def log_size(added: int, env: HostEnv) -> float:
    """Parameters added to the host, on a bounded logarithmic scale: log(1 + added / host)."""
    return clip(math.log1p(added / env.host_parameters) / LOG_SIZE_SCALE)


def log_norm(gradient: GradientStats | None) -> float:
    """A gradient's norm on a bounded logarithmic scale."""
    return MISSING if gradient is None else symlog(gradient.norm, LOG_NORM_SCALE)


def slot_features(env: HostEnv, k: int) -> dict[str, float]:
    """The features of one slot, their names beginning with the slot's."""
    slot, record = env.slots[k], env.records[k]
    gradient, contribution, before = record.gradient, record.contribution, record.previous_contribution
    seen = {stage.name: float(slot.stage is stage) for stage in Stage}
    seen["alpha"] = slot.alpha_now
    seen["alpha.velocity"] = slot.alpha_velocity
    seen["alpha.target"] = slot.ramp.target if slot.occupied else 0.0
    seen["age"] = slot.age / env.horizon
    seen["ticks_in_stage"] = min(1.0, slot.ticks_in_stage / env.horizon)
    seen["contribution.known"] = float(contribution is not None)
    seen["contribution"] = clip((contribution or 0.0) / CONTRIBUTION_SCALE)
    rise = contribution - before if contribution is not None and before is not None else 0.0
    seen["contribution.velocity"] = clip(rise / CONTRIBUTION_SCALE)
    seen["gradient.norm"] = log_norm(gradient)
    seen["gradient.health"] = gradient.health if gradient else MISSING
    seen["gradient.ratio"] = log_ratio(gradient, env.host_gradient)
    curves = dict.fromkeys([*(curve for curve, _ in map(STYLES.__getitem__, env.space.style)), *env.space.curve])
    blends = dict.fromkeys(blend for _, blend in map(STYLES.__getitem__, env.space.style))
    if len(curves) > 1:
        seen |= {f"curve.{curve}": float(slot.occupied and slot.ramp.curve == curve) for curve in curves}
    if len(blends) > 1:
        seen |= {f"blend.{blend}": float(slot.occupied and slot.style == blend) for blend in blends}
    seen["parameters"] = log_size(count_parameters(slot.seed), env)
    return {f"{slot.name}.{name}": value for name, value in seen.items()}


def log_ratio(seed: GradientStats | None, host: GradientStats | None) -> float:
    """Seed gradient over host gradient on a bounded logarithmic scale; 0 where either is unknown, zero or infinite."""
    ratio = seed.ratio(host) if seed is not None and host is not None else None
    return 0.0 if ratio is None else clip(math.log(ratio) / LOG_NORM_SCALE)


def seed_number(env: HostEnv, blueprint: str | None) -> int:
    return 0 if blueprint is None else 1 + env.space.blueprint.index(blueprint)
