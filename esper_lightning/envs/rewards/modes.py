"""The rewards of this package.

`objective`, `kept` and `sparse` are in units of the score, as J is; `shaped` is in points of 100. The Governor's
penalty is the same in every mode.
"""

import math

from esper_lightning.envs.rewards.reward import HostStep, RewardConfig, SlotStatus, register
from esper_lightning.growth.stages import BLENDED, LIVE, Stage

POINTS = 100.0
"""Points in a score of 1."""

POTENTIALS = (0.0, 1.0, 2.0, 3.5, 5.5, 6.0, 0.0, 0.0)
"""Potential by stage: DORMANT, GERMINATED, TRAINING, BLENDING, PROBATIONARY, FOSSILIZED, CULLED, EMBARGOED."""

POTENTIAL_PER_TICK, MAX_POTENTIAL_FOR_TICKS = 0.3, 2.0
"""Potential added by each tick in a stage whose potential is not 0, and the largest sum of these additions."""

GOOD_POINTS = 1.0
"""Least contribution of a good seed, in points; equals the default of the gate before fossilization."""

RELIANCE_DECAY_PER_POINT = 3.0
"""Steepness, per point, with which attributions shrink where all seeds together make the host worse."""

RANSOM_POINTS, RANSOM_GAIN = 0.1, -0.2
"""A seed holds the host to ransom if it contributes more, though all seeds together gain less, in points."""

SHAPING, RENT, MAX_RENT = 0.3, 0.5, 1.0
"""Weight of the shaping by stages, cost per tick of a growth by a factor of e, and its maximum."""

OP_COSTS = {"GERMINATE": 0.02, "FOSSILIZE": 0.01, "CULL": 0.005}
AUTO_CULL_COST, RANSOM_COST, END_WEIGHT = 0.2, 0.3, 0.05


@register("objective", ["objective"], depends_on_seeds=False)
def objective_change(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Change of J, so that an episode's rewards sum to J at its end minus J at its start."""
    return {"objective": step.objective - step.objective_before}


@register("kept", ["kept"], depends_on_seeds=False)
def fossilized_objective_change(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Change of J with fossilized seeds only: the same sum over an episode, paid when a seed is fossilized."""
    return {"kept": step.fossilized_objective - step.fossilized_objective_before}


@register("sparse", ["end"], depends_on_seeds=False)
def objective_at_end(step: HostStep, config: RewardConfig) -> dict[str, float]:
    return {"end": max(-1.0, min(1.0, step.objective)) if step.at_horizon else 0.0}


@register(
    "shaped",
    ["attribution", "ransom", "shaping", "rent", "warnings", "op", "auto_cull", "end"],
    needs_host_only=True,
    taken_back=["shaping"],
)
def shaped(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Points attributed to seeds, potential-based shaping, rent, and costs of ops and of bad habits."""
    gain = POINTS * (step.score - step.host_only_score)  # of all seeds together
    gain_before = POINTS * (step.score_before - step.host_only_score_before)
    attributed = ransom = warnings = auto_cull = 0.0
    for slot in step.slots:
        acted = slot.after_action
        progress = POINTS * (step.score - slot.score_at_germination)
        if acted.stage in BLENDED:  # a seed that is culled automatically is paid a last time
            attributed += attribution(slot.contribution, progress, gain)
        # A cull takes the last payment back.
        if slot.culled_by_action and slot.before.stage in BLENDED:
            progress_before = POINTS * (step.score_before - slot.score_at_germination)
            attributed -= attribution(slot.contribution_before, progress_before, gain_before)
        # The host depends on the seed although all seeds together reduce its score.
        if acted.stage in LIVE and slot.contribution > RANSOM_POINTS and gain < RANSOM_GAIN:
            ransom += RANSOM_COST
        # It is blended although the host has become worse since it was germinated.
        if acted.stage is Stage.BLENDING and progress < 0.0:
            warnings += 0.1 + min(0.05 * acted.ticks_in_stage, 0.3)
        # A good seed waits for the decision, from its second tick in PROBATIONARY on.
        waited, is_good = slot.before.ticks_in_stage - 2, slot.contribution_before >= GOOD_POINTS
        if step.op == "WAIT" and slot.before.stage is Stage.PROBATIONARY and is_good and waited >= 0:
            warnings += min(0.1 + 0.05 * waited, 0.3)
        if slot.removed_after_training:
            auto_cull += AUTO_CULL_COST
    # γφ' - φ telescopes in the discounted sum. With φ' = 0 where the trajectory ends it changes no policy's rank (Ng,
    # Harada, Russell 1999, https://people.eecs.berkeley.edu/~russell/papers/icml99-shaping.pdf).
    ended = step.diverged or (step.at_horizon and config.horizon_is_end)
    before = sum(potential(slot.before) for slot in step.slots)
    after = 0.0 if ended else sum(potential(slot.after) for slot in step.slots)
    growth = sum(slot.growth for slot in step.slots)
    return {
        "attribution": attributed,
        "ransom": -ransom,
        "shaping": SHAPING * (config.gamma * after - before),
        "rent": -min(RENT * math.log1p(growth), MAX_RENT),
        "warnings": -warnings,
        "op": -OP_COSTS.get(step.op, 0.0),
        "auto_cull": -auto_cull,
        "end": END_WEIGHT * POINTS * step.fossilized_score if step.at_horizon else 0.0,
    }


def potential(slot: SlotStatus) -> float:
    """Return the potential of a slot, which grows as its seed comes closer to being fossilized."""
    base = POTENTIALS[slot.stage]
    return base + min(POTENTIAL_PER_TICK * slot.ticks_in_stage, MAX_POTENTIAL_FOR_TICKS) if base > 0.0 else 0.0


def attribution(contribution: float, progress: float, gain: float) -> float:
    """Return the points of the host that are attributed to one seed.

    Args:
        contribution: Score with the seed minus score without it.
        progress: Score now minus score when the seed was germinated.
        gain: Score now minus score with every seed switched off. If it is negative, contributions look too large: a
            positive attribution is then less than half, and tends to 0.
    """
    if contribution < 0.0:
        return contribution
    if progress <= 0.0:
        return 0.0
    points = math.sqrt(progress * contribution) if progress <= contribution else contribution
    return points / (1.0 + math.exp(-RELIANCE_DECAY_PER_POINT * gain)) if gain < 0.0 else points
