"""Measurements of hosts and slots as named features, each approximately within [-1, 1], and the choice among them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.growth.gates import GradientStats
from esper_lightning.growth.stages import LIVE, Stage

HISTORY_WINDOW = 5
"""Host epochs of history in an observation: enough for a trend; longer plateaus are the feature `plateau`."""

MISSING = -1.0
"""Value of a feature that has not been measured; measured values of those features are never negative."""

PLATEAU_MIN_RISE = 0.005
"""Minimum rise of the best score that ends a plateau: one image of 200."""

CONTRIBUTION_SCALE = 10.0
"""Contribution in points that maps to 1; larger ones are clipped."""

LOG_LOSS_SCALE = 7.0
"""Divisor of a loss after symlog; a loss of 1,096 maps to 1 and larger ones are clipped."""

LOG_SIZE_SCALE = 5.0
"""Divisor of log growth; growth to 148 times the host maps to 1 and more is clipped."""

LOG_NORM_SCALE = 5.0
"""Divisor of log(1 + gradient norm); a norm of 147 maps to 1 and larger ones are clipped."""


@dataclass(frozen=True, kw_only=True)
class ObservationConfig:
    """Features that a policy observes. Rule-based controllers are not affected."""

    shown: list[str] = field(default_factory=lambda: ["*"])
    """Names or patterns of observed features (`loss.*`, `slot.*`, `blueprint.*`). [progress]: time only."""

    hidden: list[str] = field(default_factory=list)
    """Names or patterns of features to remove from `shown`. ["*.contribution*"]: no counterfactuals."""

    def select(self, names: Sequence[str]) -> list[bool]:
        """Return for each name whether it is observed.

        Raises ValueError if a pattern matches no name or no feature remains.
        """
        for pattern in (*self.shown, *self.hidden):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"env.sight: no feature is called {pattern!r}; {suggest_name(pattern, names)}")
        selected = [
            any(fnmatchcase(name, pattern) for pattern in self.shown)
            and not any(fnmatchcase(name, pattern) for pattern in self.hidden)
            for name in names
        ]
        if not any(selected):
            raise ValueError("env.sight shows no feature; show one at least, as `progress`")
        return selected


def symlog(x: float, scale: float) -> float:
    """Return sign(x) · log(1 + |x|) / `scale`, clipped to [-1, 1]; NaN gives 1, as infinity does."""
    if math.isnan(x):
        return 1.0
    return math.copysign(min(1.0, math.log1p(abs(x)) / scale), x)


def clip(x: float, bound: float = 1.0) -> float:
    return max(-bound, min(bound, x))


def last_values(values: list[float], name: str) -> dict[str, float]:
    """Return the last HISTORY_WINDOW values, newest first, named by their age in ticks."""
    newest_first = values[: -HISTORY_WINDOW - 1 : -1]
    padded = newest_first + [MISSING] * (HISTORY_WINDOW - len(newest_first))
    return {f"{name}.{age}": value for age, value in enumerate(padded)}


def plateau_length(score: list[float]) -> int:
    """Return the ticks since score last exceeded its best by more than PLATEAU_MIN_RISE."""
    best, since = 0.0, -1
    for value in score:
        since += 1
        if value > best + PLATEAU_MIN_RISE:
            best, since = value, 0
    return max(since, 0)


def host_features(env: GrowthRecord) -> dict[str, float]:
    """Return the features of the host as a whole by name. None depends on the number of its slots."""
    history = env.history
    # Compute once had a price: the policies of the package have weights for these two.
    values = {"price.compute": 0.0, "compute.committed": 0.0, "progress": min(1.0, env.tick / env.horizon)}
    for name, losses in (("train_loss", history.train_loss), ("loss", history.loss)):
        values |= last_values([symlog(loss, LOG_LOSS_SCALE) for loss in losses[-HISTORY_WINDOW:]], name)
    values |= last_values(history.score, "score")
    values["gap"] = history.train_score[-1] - history.score[-1] if history.train_score else 0.0
    values["plateau"] = plateau_length(history.score) / env.horizon
    values["price"] = min(1.0, env.price)
    values["parameters.committed"] = log_size(env.fossilized_parameters - env.host_parameters, env)
    values["parameters.live"] = log_size(env.seed_parameters(LIVE), env)
    values["host.gradient_norm"] = log_norm(env.host_gradient)
    values |= {f"last_op.{op}": float(env.last_op.name == op) for op in env.space.op}
    values["ticks_left"] = math.log1p(max(0, env.horizon - env.tick)) / LOG_SIZE_SCALE
    values["lr"] = env.lr_share
    values["host.parameters"] = math.log(env.host_parameters) / (2 * LOG_SIZE_SCALE)
    if env.flops_left is not None:
        values["budget"] = clip(math.log(env.targets_per_parameter(env.fossilized_parameters)) / LOG_SIZE_SCALE)
    return values


def slot_features(env: GrowthRecord, k: int) -> dict[str, float]:
    """Return the features of slot `k` by name."""
    slot, record = env.slots[k], env.records[k]
    gradient, contribution, previous = record.gradient, record.contribution, record.previous_contribution
    values = {stage.name: float(slot.stage is stage) for stage in Stage}
    values["alpha"] = slot.alpha_now
    values["alpha.velocity"] = slot.alpha_velocity
    values["alpha.target"] = float(slot.occupied)
    values["age"] = slot.age / env.horizon
    values["ticks_in_stage"] = min(1.0, slot.ticks_in_stage / env.horizon)
    values["contribution.known"] = float(contribution is not None)
    values["contribution"] = clip((contribution or 0.0) / CONTRIBUTION_SCALE)
    rise = contribution - previous if contribution is not None and previous is not None else 0.0
    values["contribution.velocity"] = clip(rise / CONTRIBUTION_SCALE)
    values["gradient.norm"] = log_norm(gradient)
    values["gradient.health"] = gradient.health if gradient else MISSING
    values["gradient.ratio"] = log_ratio(gradient, env.host_gradient)
    values["parameters"] = log_size(slot.size, env)
    return values


def log_size(added_parameters: int, env: GrowthRecord) -> float:
    """Return log(1 + added / host) for a number of added parameters, scaled and clipped."""
    return clip(math.log1p(added_parameters / env.host_parameters) / LOG_SIZE_SCALE)


def log_norm(gradient: GradientStats | None) -> float:
    """Return log(1 + gradient norm), scaled and clipped; MISSING without a gradient."""
    return MISSING if gradient is None else symlog(gradient.norm, LOG_NORM_SCALE)


def log_ratio(seed: GradientStats | None, host: GradientStats | None) -> float:
    """Return log(seed norm / host norm), scaled and clipped; 0 if either norm is unknown, zero or infinite."""
    ratio = seed.ratio(host) if seed is not None and host is not None else None
    return 0.0 if ratio is None else clip(math.log(ratio) / LOG_NORM_SCALE)
