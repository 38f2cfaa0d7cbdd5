"""Gates G1 to G5: pure functions that return the reasons why a seed may not change its stage; none means it may.

G0, the question whether a blueprint can grow in a slot at all, is answered by trial: see `probe_seeds`. Below them are
the gradient statistics by which they judge, computed without waiting for the device.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from esper_lightning.growth.blend import Isolation
from esper_lightning.growth.blueprints import Birth, suggest_name

MAX_GRADIENT_NORM = 100.0  # largest gradient norm of a healthy seed
MIN_ALPHA = 0.95  # alpha at which a seed becomes probationary: what follows is measured with nearly the whole seed

MIN_PROBATION_TICKS, PROBATION_SHARE = 5, 0.1
"""Time after which a probationary seed times out: ticks, and share of the horizon. The larger one counts."""


@dataclass(frozen=True, kw_only=True)
class LifecycleConfig:
    """Initial state of seeds, and conditions for each change of stage. A tick is one host epoch."""

    birth: Birth = "identity"
    """Initial output of a new seed: its input (`identity`), or that of randomly initialised layers (`random`)."""

    isolation: Isolation = "proximal"
    """Gradient from which a seed learns before it is blended. proximal: the loss gradient at its slot, plus a pull to
    the host's feature. straight_through: the loss gradient alone; seeds that learn so for several epochs do harm."""

    training_ticks: int = 0
    """Ticks a seed must spend in TRAINING before it is blended. 0: blend at the end of the tick of germination."""

    min_gradient_health: float = 0.7
    """Minimum gradient health (1: every tensor learns) for blending and for fossilization."""

    min_contribution: float | None = 1.0
    """Minimum contribution for fossilization, in points (of 100). None: no minimum."""

    auto_cull: bool = True
    """Cull probationary seeds automatically if their contribution is not positive or they time out."""

    min_cull_age: int = 1
    """Minimum age in ticks for culling: a younger seed has had no time to prove useful."""

    embargo_ticks: int = 5
    """Ticks for which a slot stays closed after a cull."""

    def __post_init__(self) -> None:
        for name, known in (("isolation", get_args(Isolation)), ("birth", get_args(Birth))):
            if (given := getattr(self, name)) not in known:
                raise ValueError(f"lifecycle.{name} {given!r} is not known; {suggest_name(given, known)}")
        for name in ("training_ticks", "embargo_ticks", "min_cull_age"):
            if getattr(self, name) < 0:
                raise ValueError(f"lifecycle.{name} must not be negative, got {getattr(self, name)}")
        if not 0.0 <= self.min_gradient_health <= 1.0:
            raise ValueError(f"lifecycle.min_gradient_health must lie in [0, 1], got {self.min_gradient_health}")


VANISHED_NORM = 1e-7  # gradient norm below which a tensor does not learn: float32 rounding noise for weights near 1
EXPLODED_NORM = 5.0  # gradient norm above which a tensor dominates every update

VANISHED_HEALTH_COST, EXPLODED_HEALTH_COST = 0.5, 0.8
"""Health lost when every tensor has vanished or exploded; exploded ones also disturb the training of the others."""


class GradientStats(NamedTuple):
    """Gradient statistics of one group of parameters."""

    norm: float  # Euclidean norm over all elements
    rms: float  # root mean square over all elements: comparable between groups of different size
    vanished: float  # share of the tensors with a norm below `VANISHED_NORM`, or without a gradient
    exploded: float  # share of the tensors with a norm above `EXPLODED_NORM`, or NaN

    @property
    def health(self) -> float:
        """Gradient health 1 - 0.5·vanished - 0.8·exploded, at least 0; 1 means that every tensor learns."""
        return max(0.0, 1.0 - VANISHED_HEALTH_COST * self.vanished - EXPLODED_HEALTH_COST * self.exploded)

    def ratio(self, host: "GradientStats") -> float | None:
        """Return this norm divided by the norm of `host`; None if either is zero or not finite."""
        is_defined = 0.0 < self.norm < math.inf and 0.0 < host.norm < math.inf
        return self.norm / host.norm if is_defined else None


class Evidence(NamedTuple):
    """Measurements of a seed that the gates judge. None: not measured yet."""

    age: int  # host epochs since germination
    ticks_in_stage: int  # host epochs in the present stage
    in_optimizer: bool  # False if the seed has germinated and no optimizer holds its parameters yet
    alpha: float  # alpha in the last host epoch, under which the contribution was measured
    gradient: GradientStats | None = None  # gradient statistics of the seed's parameters
    contribution: float | None = None  # score with the seed minus score without it, in points, on the same data


def reasons_against_gradient(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Return the reasons why the seed's gradient is not healthy; one is that it was not measured."""
    gradient = evidence.gradient
    if gradient is None:
        return ["gradient not measured"]
    reasons = []
    if not gradient.norm <= MAX_GRADIENT_NORM:  # also catches NaN
        reasons.append(f"gradient norm {gradient.norm:.3g} above {MAX_GRADIENT_NORM:g}")
    if gradient.health < config.min_gradient_health:
        reasons.append(f"gradient health {gradient.health:.2f} below {config.min_gradient_health:g}")
    return reasons


def reasons_against_training(evidence: Evidence) -> list[str]:
    """Gate G1, GERMINATED to TRAINING: an optimizer must hold the seed's parameters."""
    return [] if evidence.in_optimizer else ["no optimizer holds its parameters"]


def reasons_against_blending(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Gate G2, TRAINING to BLENDING: trained long enough, with a healthy gradient."""
    reasons = reasons_against_gradient(evidence, config)
    if evidence.ticks_in_stage < config.training_ticks:
        reasons.append(f"{evidence.ticks_in_stage} of {config.training_ticks} ticks in TRAINING")
    return reasons


def reasons_it_is_stuck(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Return why a seed cannot be blended at the tick when its time in TRAINING is over twice; empty at any other."""
    overdue = evidence.ticks_in_stage - config.training_ticks
    return reasons_against_blending(evidence, config) if overdue == max(1, config.training_ticks) else []


def reasons_against_probation(evidence: Evidence) -> list[str]:
    """Gate G3, BLENDING to PROBATIONARY: alpha must be near 1."""
    return [f"alpha at {evidence.alpha:.2f}, below {MIN_ALPHA:g}"] if evidence.alpha < MIN_ALPHA else []


def reasons_against_culling(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Gate G4, to CULLED: the seed must have the minimum age."""
    young = evidence.age < config.min_cull_age
    return [f"{evidence.age} ticks old, younger than {config.min_cull_age}"] if young else []


def reasons_against_fossilizing(evidence: Evidence, config: LifecycleConfig) -> list[str]:
    """Gate G5, PROBATIONARY to FOSSILIZED: healthy gradient, alpha at 1, and a sufficient contribution."""
    reasons = reasons_against_gradient(evidence, config)
    if evidence.alpha < 1.0:
        reasons.append("alpha is still moving")
    if config.min_contribution is None:
        return reasons
    if evidence.contribution is None or math.isnan(evidence.contribution):
        reasons.append("contribution not measured")
    elif evidence.contribution < config.min_contribution:
        reasons.append(f"contribution {evidence.contribution:+.2f} points below {config.min_contribution:g}")
    return reasons


def reasons_to_cull(evidence: Evidence, config: LifecycleConfig, horizon: int) -> list[str]:
    """Return the reasons to cull a probationary seed automatically in an episode of `horizon` ticks."""
    if not config.auto_cull or evidence.alpha < 1.0:
        return []
    reasons = []
    if evidence.contribution is not None and not evidence.contribution > 0.0:  # also catches NaN
        reasons.append(f"contribution {evidence.contribution:+.2f} points is not positive")
    limit = max(MIN_PROBATION_TICKS, round(PROBATION_SHARE * horizon))
    if evidence.ticks_in_stage >= limit:
        note = ", contribution never measured" if evidence.contribution is None else ""
        reasons.append(f"on probation for {limit} ticks{note}")
    return reasons


# Gradient statistics.


NO_GRADIENT = GradientStats(norm=0.0, rms=0.0, vanished=0.0, exploded=0.0)  # statistics of an empty group of parameters


def gradient_stats(
    parameters: Iterable[nn.Parameter], device: torch.device | None = None
) -> Tensor:  # [4] = GradientStats, on the parameters' device, or on `device` if there are none
    """Return statistics of the present gradients: NO_GRADIENT if nothing is trainable; no gradient means vanished."""
    tensors = [parameter for parameter in parameters if parameter.requires_grad]
    norms = [torch.linalg.vector_norm(p.grad) for p in tensors if p.grad is not None]
    if not norms:
        # Filled on the device: a copy from the CPU would wait for all queued work.
        stats = torch.zeros(len(NO_GRADIENT), device=tensors[0].device if tensors else device)
        stats[NO_GRADIENT._fields.index("vanished")].fill_(float(bool(tensors)))
        return stats
    return stats_of_norms(torch.stack(norms), sum(p.numel() for p in tensors), len(tensors) - len(norms))


def stats_of_norms(norms: Tensor, num_elements: int, num_missing: int = 0) -> Tensor:  # [..., tensors] -> [..., 4]
    """Return GradientStats from the norms of tensors, `num_elements` in all; `num_missing` more have no gradient."""
    num_tensors = norms.shape[-1] + num_missing
    norm = torch.linalg.vector_norm(norms, dim=-1)
    vanished = ((norms < VANISHED_NORM).sum(-1) + num_missing) / num_tensors
    exploded = (~(norms <= EXPLODED_NORM)).sum(-1) / num_tensors
    return torch.stack([norm, norm / math.sqrt(num_elements), vanished, exploded], -1)
