"""May this seed advance? Gates are pure functions that return the reasons against; an empty list is a pass.

G0, whether a blueprint can grow in a slot at all, is found out by trying: see `growth.probe`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from esper_lightning.blueprints import Birth
from esper_lightning.growth.gradients import GradientStats


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """How seeds begin, when they advance, and what they must show first. Ticks are host epochs."""

    birth: Birth = "identity"
    """A new seed's output is the host's feature itself, or random."""

    training_ticks: int = 3
    """Ticks a seed must spend in TRAINING before it is blended. 0: blend right after the tick of germination."""

    min_gradient_health: float = 0.7
    """Least gradient health (1: every tensor learns) for blending."""

    max_gradient_norm: float = 100.0
    """A seed whose gradient norm is above this is exploding and is not blended."""

    auto_blend: bool = True
    """Blend a seed as soon as it may be. Off, the controller decides by ADVANCE."""

    alpha_target: float = 1.0
    """Alpha at the end of a new seed's ramp."""

    min_alpha_reached: float = 0.95
    """Share of the alpha target that ends blending."""

    auto_probation: bool = True
    """Put a seed on probation as soon as it is blended in. Off, the controller decides by ADVANCE."""

    min_contribution: float | None = 1.0
    """Accuracy points (of 100) a seed must contribute before it may be fossilized. None: none needed."""

    auto_cull: bool = True
    """Cull probationary seeds that contribute nothing or that time out."""

    probation_ticks: int = 5
    """Ticks after which a probationary seed times out, if `probation_share` of the horizon is shorter."""

    probation_share: float = 0.1
    """Share of the episode's horizon after which a probationary seed times out, if `probation_ticks` is shorter."""

    min_cull_age: int = 1
    """Ticks before a seed may be culled: a younger one has had no time to show its worth."""

    embargo_ticks: int = 5
    """Ticks a slot stays closed after a cull."""

    def __post_init__(self) -> None:
        for name in ("training_ticks", "embargo_ticks", "min_cull_age", "probation_ticks"):
            if getattr(self, name) < 0:
                raise ValueError(f"lifecycle.{name} must not be negative, got {getattr(self, name)}")
        for name in ("min_gradient_health", "min_alpha_reached", "probation_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"lifecycle.{name} must lie in [0, 1], got {getattr(self, name)}")
        if self.max_gradient_norm <= 0.0:
            raise ValueError(f"lifecycle.max_gradient_norm must be positive, got {self.max_gradient_norm}")
        if not 0.0 < self.alpha_target <= 1.0:
            raise ValueError(f"lifecycle.alpha_target must lie in (0, 1], got {self.alpha_target}")

    def probation_limit(self, horizon: int) -> int:
        """Ticks a seed may stay probationary in an episode of `horizon` ticks."""
        return max(self.probation_ticks, round(self.probation_share * horizon))


class Evidence(NamedTuple):
    """What has been measured of a seed. None: not measured yet."""

    age: int
    """Host epochs since germination."""
    ticks_in_stage: int
    in_optimizer: bool
    """An optimizer holds the seed's parameters."""
    alpha_share: float
    """How near alpha was to its target in the last host epoch, 0 … 1."""
    alpha_rests: bool
    """Alpha was at its target in the last host epoch already, and that is not 0."""
    gradient: GradientStats | None = None
    contribution: float | None = None
    """Accuracy with the seed minus accuracy without it, in points of 100, on the same validation pass."""


def against_gradient(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Is the seed's gradient known, alive and calm?"""
    gradient = evidence.gradient
    if gradient is None:
        return ["gradient not measured"]
    against = []
    if not gradient.norm <= config.max_gradient_norm:  # also catches NaN
        against.append(f"gradient norm {gradient.norm:.3g} above {config.max_gradient_norm:g}")
    if gradient.health < config.min_gradient_health:
        against.append(f"gradient health {gradient.health:.2f} below {config.min_gradient_health:g}")
    return against


def against_training(evidence: Evidence) -> list[str]:
    """G1: will the seed learn?"""
    return [] if evidence.in_optimizer else ["no optimizer holds its parameters"]


def against_blending(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G2: has the seed learned long enough, and is it healthy?"""
    against = against_gradient(evidence, config)
    if evidence.ticks_in_stage < config.training_ticks:
        against.append(f"{evidence.ticks_in_stage} of {config.training_ticks} ticks in TRAINING")
    return against


def against_probation(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G3: is the ramp of alpha at its end?"""
    if evidence.alpha_share < config.min_alpha_reached:
        return [f"alpha at {evidence.alpha_share:.2f} of its target, below {config.min_alpha_reached:g}"]
    return []


def against_culling(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G4: has the seed had its time?"""
    if evidence.age < config.min_cull_age:
        return [f"{evidence.age} ticks old, younger than {config.min_cull_age}"]
    return []


def against_fossilizing(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G5: is the seed healthy, at rest, and its contribution large enough to keep it for good?"""
    against = against_gradient(evidence, config)
    if not evidence.alpha_rests:
        against.append("alpha is still moving")
    if config.min_contribution is None:
        return against
    if evidence.contribution is None or math.isnan(evidence.contribution):
        against.append("contribution not measured")
    elif evidence.contribution < config.min_contribution:
        against.append(f"contribution {evidence.contribution:+.2f} points below {config.min_contribution:g}")
    return against


def reasons_to_cull(evidence: Evidence, config: LifecycleConfig, horizon: int) -> list[str]:
    """Why a probationary seed is culled without being asked; empty: it may stay."""
    if not config.auto_cull:
        return []
    why = []
    if evidence.contribution is not None and not evidence.contribution > 0.0:  # also catches NaN
        why.append(f"contribution {evidence.contribution:+.2f} points is not positive")
    limit = config.probation_limit(horizon)
    if evidence.ticks_in_stage >= limit:
        unknown = ", contribution never measured" if evidence.contribution is None else ""
        why.append(f"on probation for {limit} ticks{unknown}")
    return why
