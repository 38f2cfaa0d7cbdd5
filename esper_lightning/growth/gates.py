"""May this seed advance? Gates are pure functions that return the reasons against; an empty list is a pass."""

from dataclasses import dataclass
from typing import NamedTuple

from esper_lightning.growth.alpha import Curve


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """When seeds advance, and what they must show first. Ticks are host epochs."""

    training_ticks: int = 3
    """Ticks a seed must spend in TRAINING before it is blended. 0: blend right after the tick of germination."""

    min_gradient_health: float = 0.7
    """Least gradient health (1: every tensor learns) for blending."""

    max_gradient_norm: float = 100.0
    """A seed whose gradient norm is above this is exploding and is not blended."""

    curve: Curve = "linear"
    """Shape of the alpha ramp."""

    alpha_target: float = 1.0
    """Alpha at the end of the ramp."""

    min_alpha_reached: float = 0.95
    """Share of the alpha target that ends blending."""

    min_contribution: float | None = 1.0
    """Accuracy points (of 100) a seed must contribute before it may be fossilized. None: no threshold."""

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

    ticks_in_stage: int
    alpha_share: float
    """Alpha over its target."""
    gradient_norm: float | None = None
    gradient_health: float | None = None
    contribution: float | None = None
    """Accuracy with the seed minus accuracy without it, in points of 100, on the same validation pass."""


def gradient_reasons(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Is the seed's gradient known, alive and calm?"""
    if evidence.gradient_norm is None or evidence.gradient_health is None:
        return ["gradient not measured"]
    against = []
    if not evidence.gradient_norm <= config.max_gradient_norm:  # also catches NaN
        against.append(f"gradient norm {evidence.gradient_norm:.3g} above {config.max_gradient_norm:g}")
    if evidence.gradient_health < config.min_gradient_health:
        against.append(f"gradient health {evidence.gradient_health:.2f} below {config.min_gradient_health:g}")
    return against


def gate_blending(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G2: has the seed learned long enough, and is it healthy?"""
    against = gradient_reasons(evidence, config)
    if evidence.ticks_in_stage < config.training_ticks:
        against.append(f"{evidence.ticks_in_stage} of {config.training_ticks} ticks in TRAINING")
    return against


def gate_probation(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G3: is the ramp of alpha at its end?"""
    if evidence.alpha_share < config.min_alpha_reached:
        return [f"alpha at {evidence.alpha_share:.2f} of its target, below {config.min_alpha_reached:g}"]
    return []


def gate_fossil(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """G5: is the seed healthy, and its contribution large enough to keep it for good?"""
    against = gradient_reasons(evidence, config)
    if evidence.contribution is None:
        against.append("contribution not measured")
    elif config.min_contribution is not None and evidence.contribution < config.min_contribution:
        against.append(f"contribution {evidence.contribution:+.2f} points below {config.min_contribution:g}")
    return against


def reasons_to_cull(evidence: Evidence, config: LifecycleConfig, horizon: int) -> list[str]:
    """Why a probationary seed is culled without being asked; empty: it may stay."""
    if not config.auto_cull:
        return []
    why = []
    if evidence.contribution is not None and evidence.contribution <= 0.0:
        why.append(f"contribution {evidence.contribution:+.2f} points is not positive")
    limit = config.probation_limit(horizon)
    if evidence.ticks_in_stage >= limit:
        why.append(f"on probation for {limit} ticks")
    return why
