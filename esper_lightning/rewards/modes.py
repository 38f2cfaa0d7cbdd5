"""Reward modes: each is a named sum of terms, and each term is a function of one environment step of one host.

Scale: `objective`, `kept`, `sparse` and `minimal` are in accuracy 0 … 1, as J is. `shaped` and `escrow` are in accuracy
points of 100. In `simplified`, `basic` and `basic_plus` 1 is about a stage's worth of shaping, and accuracies are
0 … 1 times the factor named; in `loss` 1 is `loss_deviation`. The Governor's penalty is the same in every mode.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, get_args

from esper_lightning.growth.stages import BLENDED, LIVE, Stage
from esper_lightning.rewards import terms
from esper_lightning.rewards.config import ModeName, RewardConfig
from esper_lightning.rewards.terms import MOST_POINTS
from esper_lightning.rewards.tick import Account, SlotTick, Tick

YOUNG = 5
"""Age in ticks below which a cull counts as early (minimal)."""

GRACE = 3
"""Age in ticks below which a seed costs no rent (loss)."""

OP_COSTS = {"GERMINATE": 0.02, "FOSSILIZE": 0.01, "CULL": 0.005}
"""Cost of an op by its name (shaped)."""

AUTO_CULL_COST = 0.2
RANSOM_COST = 0.3
MOST_POTENTIAL = max(terms.POTENTIALS) + terms.MOST_FOR_TICKS


class Term(NamedTuple):
    """Term of a reward."""

    pay: Callable[[Tick, RewardConfig], float]
    """Function that returns the term for one step."""
    bound: Callable[[RewardConfig, int], float]
    """Function of the config and the number of slots K that returns an upper bound of the term's absolute value."""
    closes: bool = False
    """Also paid where a rollback ends the trajectory, because the term takes back what earlier steps lent."""


def objective_change(tick: Tick, config: RewardConfig) -> float:
    return tick.objective - tick.objective_before


def kept_objective_change(tick: Tick, config: RewardConfig) -> float:
    return tick.kept_objective - tick.kept_objective_before


def objective_at_end(tick: Tick, config: RewardConfig) -> float:
    return terms.clip(tick.objective, -1.0, 1.0) if tick.last else 0.0


def early_cull(tick: Tick, config: RewardConfig) -> float:
    return -0.1 * any(slot.dismissed and slot.before.age < YOUNG for slot in tick.slots)


def shaping(tick: Tick, config: RewardConfig) -> float:
    before = sum(terms.potential(slot.before.stage, slot.before.ticks_in_stage) for slot in tick.slots)
    after = sum(terms.potential(slot.after.stage, slot.after.ticks_in_stage) for slot in tick.slots)
    over = tick.diverged or (tick.last and config.horizon_is_end)
    return config.shaping * terms.shaping(before, 0.0 if over else after, config.gamma)


def any_op(tick: Tick, config: RewardConfig) -> float:
    return -0.01 * (tick.op != "WAIT")


def op_cost(tick: Tick, config: RewardConfig) -> float:
    return -OP_COSTS.get(tick.op, 0.0)


def auto_cull(tick: Tick, config: RewardConfig) -> float:
    return -AUTO_CULL_COST * sum(slot.left and not slot.acted.fading for slot in tick.slots)


def gain_at_end(tick: Tick, config: RewardConfig) -> float:
    return 5.0 * (tick.kept_accuracy - tick.accuracy_at_start) if tick.last else 0.0


def good_fossils(tick: Tick, config: RewardConfig) -> float:
    fossils = [slot for slot in tick.slots if slot.acted.stage is Stage.FOSSILIZED]
    return 2.0 * sum(slot.contribution >= terms.CONTRIBUTES for slot in fossils) if tick.last else 0.0


def progress(slot: SlotTick, accuracy: float) -> float:
    """Return the accuracy points gained since the seed was germinated."""
    return MOST_POINTS * (accuracy - slot.account.start)


def attribution(tick: Tick, config: RewardConfig) -> float:
    """Return the accuracy points attributed to blended seeds; a culled seed's last payment is taken back."""
    clean, clean_before = (
        MOST_POINTS * (whole - bare)
        for whole, bare in ((tick.accuracy, tick.bare), (tick.accuracy_before, tick.bare_before))
    )
    paid = 0.0
    for slot in tick.slots:
        if slot.acted.stage in BLENDED and not (slot.left and slot.acted.fading):
            paid += terms.attribution(slot.contribution, progress(slot, tick.accuracy), clean)
        if slot.culled and slot.before.stage in BLENDED:
            paid -= terms.attribution(slot.contribution_before, progress(slot, tick.accuracy_before), clean_before)
    return paid


def ransom(tick: Tick, config: RewardConfig) -> float:
    clean = MOST_POINTS * (tick.accuracy - tick.bare)
    live = [slot for slot in tick.slots if slot.acted.stage in LIVE]
    return -RANSOM_COST * sum(terms.is_ransom(slot.contribution, clean) for slot in live)


def warnings(tick: Tick, config: RewardConfig) -> float:
    cost = 0.0
    for slot in tick.slots:
        if slot.acted.stage is Stage.BLENDING and progress(slot, tick.accuracy) < 0.0:
            cost += terms.blending_warning(slot.acted.ticks_in_stage)
        good = slot.before.stage is Stage.PROBATIONARY and slot.contribution_before >= terms.CONTRIBUTES
        if good and tick.op == "WAIT":
            cost += terms.waiting_warning(slot.before.ticks_in_stage)
    return -cost


def rent_of_all(tick: Tick, config: RewardConfig) -> float:
    return -terms.log_rent(sum(slot.growth for slot in tick.slots), config.rent, config.rent_cap)


def rent_after_grace(tick: Tick, config: RewardConfig) -> float:
    growth = sum(slot.growth for slot in tick.slots if slot.acted.age >= GRACE)
    return -terms.log_rent(growth, config.rent, config.rent_cap)


def rent_of_effective(tick: Tick, config: RewardConfig) -> float:
    effective = sum(slot.alpha * slot.growth for slot in tick.slots)
    return -min(0.1 * effective / config.budget, config.rent_cap)


def drip(tick: Tick, config: RewardConfig) -> float:
    fossils = [slot for slot in tick.slots if slot.acted.stage is Stage.FOSSILIZED]
    known = [slot for slot in fossils if slot.account.rest]  # 0 in checkpoints from before accounts existed
    return sum(terms.drip(slot.contribution, config.fossilize_bonus, slot.account.rest) for slot in known)


def credit_now(slot: SlotTick, tick: Tick) -> float:
    """Return a seed's credit in accuracy points after the step.

    It is frozen once the seed is fossilized, and 0 if the seed was removed or not fossilized in time.
    """
    if slot.acted.stage is Stage.FOSSILIZED:
        return slot.account.credit
    if tick.diverged or tick.last or slot.acted.stage not in LIVE or slot.left:
        return 0.0
    due = terms.credit_due(slot.contribution, progress(slot, tick.accuracy))
    return terms.credit_after(slot.account.credit, due)


def settled(slot: SlotTick, tick: Tick) -> Account:
    """Return the slot's account after the step."""
    return slot.account._replace(credit=credit_now(slot, tick))


def credit_change(tick: Tick, config: RewardConfig) -> float:
    return sum(credit_now(slot, tick) - slot.account.credit for slot in tick.slots)


def loss_change(tick: Tick, config: RewardConfig) -> float:
    return terms.loss_change(tick.loss_before, tick.loss, config.loss_deviation)


def loss_at_end(tick: Tick, config: RewardConfig) -> float:
    return terms.loss_left(tick.kept_loss, tick.chance) if tick.last else 0.0


def fixed(bound: float) -> Callable[[RewardConfig, int], float]:
    return lambda config, slots: bound


def per_slot(bound: float) -> Callable[[RewardConfig, int], float]:
    return lambda config, slots: bound * slots


def accuracy_at_end(weight: float) -> Term:
    return Term(lambda tick, config: weight * tick.kept_accuracy if tick.last else 0.0, fixed(weight))


def bonus_of(share: float) -> Term:
    """Return a term that pays `share` of the bonus for a seed in the step in which it is fossilized."""

    def paid(tick: Tick, config: RewardConfig) -> float:
        kept = [slot for slot in tick.slots if slot.kept]
        return share * sum(terms.fossil_bonus(slot.contribution, config.fossilize_bonus) for slot in kept)

    return Term(paid, lambda config, slots: share * config.fossilize_bonus * slots)


def of_rent(config: RewardConfig, slots: int) -> float:
    return config.rent_cap


AT_END = Term(objective_at_end, fixed(1.0))
SHAPING = Term(shaping, lambda config, slots: config.shaping * MOST_POTENTIAL * slots, closes=True)
RENT = Term(rent_of_effective, of_rent)
GAIN = Term(gain_at_end, fixed(5.0))

MODES: Mapping[ModeName, Mapping[str, Term]] = {
    "objective": {"objective": Term(objective_change, fixed(2.0))},
    "kept": {"kept": Term(kept_objective_change, fixed(2.0))},
    "sparse": {"end": AT_END},
    "minimal": {"end": AT_END, "early_cull": Term(early_cull, fixed(0.1))},
    "simplified": {
        "shaping": SHAPING,
        "op": Term(any_op, fixed(0.01)),
        "end": accuracy_at_end(3.0),
        "fossils": Term(good_fossils, per_slot(2.0)),
    },
    "shaped": {
        "attribution": Term(attribution, per_slot(2.0 * MOST_POINTS)),
        "ransom": Term(ransom, per_slot(RANSOM_COST)),
        "shaping": SHAPING,
        "rent": Term(rent_of_all, of_rent),
        "warnings": Term(warnings, per_slot(0.4)),
        "op": Term(op_cost, fixed(max(OP_COSTS.values()))),
        "auto_cull": Term(auto_cull, per_slot(AUTO_CULL_COST)),
        "end": accuracy_at_end(0.05 * MOST_POINTS),
    },
    "basic": {
        "shaping": SHAPING,
        "rent": RENT,
        "bonus": bonus_of(1.0),
        "end": GAIN,
    },
    "basic_plus": {
        "shaping": SHAPING,
        "rent": RENT,
        "bonus": bonus_of(terms.AT_ONCE),
        "drip": Term(drip, per_slot(max(terms.MOST_DRIP, -terms.LEAST_DRIP))),
        "end": GAIN,
    },
    "escrow": {"credit": Term(credit_change, per_slot(MOST_POINTS), closes=True)},
    "loss": {
        "loss": Term(loss_change, fixed(terms.MOST_LOSS_CHANGE)),
        "rent": Term(rent_after_grace, of_rent),
        "end": Term(loss_at_end, fixed(1.0)),
    },
}
"""Terms by mode and name. The names appear in plots as `reward/<name>`."""

assert set(MODES) == set(get_args(ModeName))


def pay(tick: Tick, config: RewardConfig) -> dict[str, float]:
    """Return every term of the config's mode for one step; their sum is the reward.

    In a step that ends with a rollback only terms with `paid_after_rollback` are paid.
    """

    def counts(term: Term) -> bool:
        return not tick.over and (term.closes or not tick.diverged)

    return {name: term.pay(tick, config) if counts(term) else 0.0 for name, term in MODES[config.mode].items()}


def bound(config: RewardConfig, slots: int) -> float:
    """Return an upper bound of the absolute reward of one step, without the penalty of a rollback.

    In the modes `objective` and `kept` it holds if `objective.rent_cap` is at most 1, so that J lies in [-1, 1].
    """
    return sum(term.bound(config, slots) for term in MODES[config.mode].values())
