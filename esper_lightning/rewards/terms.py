"""Building blocks of reward terms: pure functions of numbers. Contributions and progress are accuracy points of 100.

`MODES` lists the terms of each mode.
"""

import math

POTENTIALS = (0.0, 1.0, 2.0, 3.5, 5.5, 6.0, 0.0, 0.0)
"""Potential by stage: DORMANT, GERMINATED, TRAINING, BLENDING, PROBATIONARY, FOSSILIZED, CULLED, EMBARGOED."""

POTENTIAL_PER_TICK, MAX_POTENTIAL_FOR_TICKS = 0.3, 2.0
"""Potential added by each tick in a stage whose potential is not 0, and the largest sum of these additions."""

MAX_POINTS = 100.0
"""Largest possible contribution, in accuracy points."""

MIN_CONTRIBUTION_POINTS = 1.0
"""Least contribution of a good seed, in accuracy points; equals the default of the gate before fossilization."""

FULL_BONUS_POINTS = 10.0
"""Contribution in accuracy points that earns the whole bonus for fossilization; observations show it as 1."""

FOSSILIZE_BONUS_IMMEDIATE_SHARE = 0.3
"""Share of the bonus for fossilization that `basic_plus` pays immediately."""

MIN_DELAYED_BONUS, MAX_DELAYED_BONUS = -0.05, 0.1
"""Least and largest delayed part of the bonus, for one seed in one tick."""

RELIANCE_DECAY_PER_POINT = 3.0
"""Steepness, per accuracy point, with which attributions shrink where all seeds together make the host worse."""

MAX_CREDIT_STEP = 2.0
"""Largest change of a seed's credit in one tick, in accuracy points."""


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def potential(stage: int, ticks_in_stage: int) -> float:
    """Return the potential of a slot, which grows as its seed comes closer to being fossilized."""
    base = POTENTIALS[stage]
    return base + min(POTENTIAL_PER_TICK * ticks_in_stage, MAX_POTENTIAL_FOR_TICKS) if base > 0.0 else 0.0


def shaping(before: float, after: float, gamma: float) -> float:
    """Return γφ' - φ, whose discounted sum telescopes.

    The potential of a terminal state must be 0; then shaping does not change which policy is optimal
    (https://people.eecs.berkeley.edu/~russell/papers/icml99-shaping.pdf).
    """
    return gamma * after - before


def attribution(contribution: float, progress: float, gain_over_host_only: float) -> float:
    """Return the accuracy points of the host that are attributed to one seed.

    Args:
        contribution: Accuracy with the seed minus accuracy without it.
        progress: Accuracy now minus accuracy when the seed was germinated.
        gain_over_host_only: Accuracy now minus accuracy with every seed switched off. If it is negative, the host
            depends on seeds that have not made it better, so that each seed's contribution looks too large: a positive
            attribution is then less than half, and tends to 0 the further the gain is below 0. A negative one is kept.
    """
    if contribution < 0.0:
        return contribution
    if progress <= 0.0:
        return 0.0
    gain = math.sqrt(progress * contribution) if progress <= contribution else contribution
    return (
        gain / (1.0 + math.exp(-RELIANCE_DECAY_PER_POINT * gain_over_host_only)) if gain_over_host_only < 0.0 else gain
    )


def is_ransom(contribution: float, gain_over_host_only: float) -> bool:
    """Return True if the host depends on the seed although all seeds together reduce its accuracy."""
    return contribution > 0.1 and gain_over_host_only < -0.2


def credit_due(contribution: float, progress: float) -> float:
    """Return the credit due to a seed in accuracy points: the geometric mean of its contribution and the progress."""
    return math.sqrt(max(0.0, contribution) * max(0.0, progress))


def credit_after(credit: float, due: float) -> float:
    """Return the credit in accuracy points after a bounded step from the credit paid so far towards the credit due."""
    return credit + clip(due - credit, -MAX_CREDIT_STEP, MAX_CREDIT_STEP)


def fossilize_bonus(contribution: float, bonus: float) -> float:
    """Return the bonus for fossilizing a seed, proportional to its contribution and of the same sign."""
    return bonus * clip(contribution / FULL_BONUS_POINTS, -1.0, 1.0)


def delayed_bonus_per_tick(contribution: float, bonus: float, ticks_left: int) -> float:
    """Return one tick's part of the delayed bonus, in proportion to the fossilized seed's present contribution.

    With a constant contribution over all `ticks_left` ticks, and unless clipped, the parts sum to the delayed share.
    """
    return clip(
        (1.0 - FOSSILIZE_BONUS_IMMEDIATE_SHARE) * fossilize_bonus(contribution, bonus) / ticks_left,
        MIN_DELAYED_BONUS,
        MAX_DELAYED_BONUS,
    )


def log_rent(growth: float, weight: float, cap: float) -> float:
    """Return weight·ln(1 + growth), at most `cap`."""
    return min(weight * math.log1p(growth), cap)


def blending_warning(ticks_in_stage: int) -> float:
    """Return the cost of blending a seed since whose germination the host has become worse."""
    return 0.1 + min(0.05 * ticks_in_stage, 0.3)


def waiting_warning(ticks_in_stage: int) -> float:
    """Return the cost of leaving a good seed in PROBATIONARY, from its second tick there on."""
    return min(0.1 + 0.05 * (ticks_in_stage - 2), 0.3) if ticks_in_stage >= 2 else 0.0
