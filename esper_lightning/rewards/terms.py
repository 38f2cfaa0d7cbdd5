"""Terms of the rewards: pure functions on numbers. Contributions and progress are accuracy points of 100.

Which mode is paid by which terms is in `modes`.
"""

import math

POTENTIALS = (0.0, 1.0, 2.0, 3.5, 5.5, 6.0, 0.0, 0.0)
"""Of a slot by stage: DORMANT, GERMINATED, TRAINING, BLENDING, PROBATIONARY, FOSSILIZED, CULLED, EMBARGOED."""

POTENTIAL_PER_TICK, MOST_FOR_TICKS = 0.3, 2.0
"""What each tick in a stage with a potential adds to it, and the most that it adds."""

MOST_POINTS = 100.0
"""No contribution is larger."""

CONTRIBUTES = 1.0
"""Accuracy points from which on a seed is good: what the gate before fossilization asks for by default."""

BONUS_POINTS = 10.0
"""Contribution that earns the whole bonus of a fossilization: what observations show as 1."""

AT_ONCE = 0.3
"""Share of that bonus that `basic_plus` pays at once."""

LEAST_DRIP, MOST_DRIP = -0.05, 0.1
"""Of one seed in one tick."""

MOST_CREDIT_STEP = 2.0
"""Accuracy points by which the credit owed to a seed moves in a tick."""

MOST_LOSS_CHANGE = 5.0
"""Deviations by which a loss can count as changed."""


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def potential(stage: int, ticks_in_stage: int) -> float:
    """Of a slot: how near its seed is to being kept."""
    base = POTENTIALS[stage]
    return base + min(POTENTIAL_PER_TICK * ticks_in_stage, MOST_FOR_TICKS) if base > 0.0 else 0.0


def shaping(before: float, after: float, gamma: float) -> float:
    """γφ' - φ (https://people.eecs.berkeley.edu/~russell/papers/icml99-shaping.pdf): its discounted sum telescopes.

    The potential of a state in which the trajectory ends is 0: so it cannot change which policy is best.
    """
    return gamma * after - before


def attribution(contribution: float, progress: float, clean: float) -> float:
    """What one seed has done for the host.

    Args:
        contribution: Accuracy with it minus accuracy without it.
        progress: Accuracy now minus accuracy when it was germinated.
        clean: Accuracy now minus accuracy with every seed off. Where that is negative the seeds have made themselves
            needed without making the host better, and a gain counts for less; a loss is a loss.
    """
    if contribution < 0.0:
        return contribution
    if progress <= 0.0:
        return 0.0
    gain = math.sqrt(progress * contribution) if progress <= contribution else contribution
    return gain / (1.0 + math.exp(-3.0 * clean)) if clean < 0.0 else gain


def is_ransom(contribution: float, clean: float) -> bool:
    """Does a seed make itself needed while the seeds together do harm?"""
    return contribution > 0.1 and clean < -0.2


def credit_due(contribution: float, progress: float) -> float:
    """Accuracy points that a seed has earned: the geometric mean of what depends on it and what was gained with it."""
    return math.sqrt(max(0.0, contribution) * max(0.0, progress))


def credit_after(credit: float, due: float) -> float:
    """The credit paid so far moves towards what is due, by a bounded step."""
    return credit + clip(due - credit, -MOST_CREDIT_STEP, MOST_CREDIT_STEP)


def fossil_bonus(contribution: float, bonus: float) -> float:
    """For keeping a seed: in proportion to its contribution, negative if that is."""
    return bonus * clip(contribution / BONUS_POINTS, -1.0, 1.0)


def drip(contribution: float, bonus: float, rest: int) -> float:
    """One tick's part of the later share of that bonus, by what the kept seed contributes now.

    With the same contribution for all the `rest` of the ticks, and within its limits, it sums to that share.
    """
    return clip((1.0 - AT_ONCE) * fossil_bonus(contribution, bonus) / rest, LEAST_DRIP, MOST_DRIP)


def log_rent(growth: float, weight: float, cap: float) -> float:
    """weight·ln(1 + growth), at most `cap`."""
    return min(weight * math.log1p(growth), cap)


def blending_warning(ticks_in_stage: int) -> float:
    """Cost of blending in a seed since whose germination the host has become worse."""
    return 0.1 + min(0.05 * ticks_in_stage, 0.3)


def waiting_warning(ticks_in_stage: int) -> float:
    """Cost of leaving a good seed on probation, from its second tick there on."""
    return min(0.1 + 0.05 * (ticks_in_stage - 2), 0.3) if ticks_in_stage >= 2 else 0.0


def loss_change(before: float, after: float, deviation: float) -> float:
    """How much better a loss has become, in deviations; half where it is worse. One that is no number is the worst."""
    if not math.isfinite(after):
        change = -MOST_LOSS_CHANGE
    elif not math.isfinite(before):
        change = MOST_LOSS_CHANGE
    else:
        change = clip((before - after) / deviation, -MOST_LOSS_CHANGE, MOST_LOSS_CHANGE)
    return change if change > 0.0 else 0.5 * change


def loss_left(loss: float, chance: float) -> float:
    """Share of the loss of guessing that was overcome, 0 … 1."""
    return clip((chance - loss) / chance, 0.0, 1.0) if math.isfinite(loss) else 0.0
