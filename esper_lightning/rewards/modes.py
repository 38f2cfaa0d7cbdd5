"""Reward modes: each is a named sum of terms, and each term is a function of one environment step of one host.

Scale: `objective`, `kept` and `sparse` are in accuracy 0 … 1, as J is. `shaped` and `escrow` are in accuracy points of
100. In `basic` and `basic_plus` a seed's next stage earns about 1 of shaping, times the setting `shaping`, and
accuracies are 0 … 1 times the factor named. The Governor's penalty is the same in every mode.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple, get_args

from esper_lightning.growth.stages import BLENDED, LIVE, Stage
from esper_lightning.rewards import terms
from esper_lightning.rewards.config import REWARDS, ModeName, Reward, RewardConfig
from esper_lightning.rewards.terms import MAX_POINTS
from esper_lightning.rewards.tick import HostStep, SeedAccount, SlotStep

OP_COSTS = {"GERMINATE": 0.02, "FOSSILIZE": 0.01, "CULL": 0.005}
"""Cost of an op by its name (shaped)."""

AUTO_CULL_COST = 0.2
RANSOM_COST = 0.3


class Term(NamedTuple):
    """Term of a reward."""

    compute: Callable[[HostStep, RewardConfig], float]
    """Function that returns the term for one step."""
    paid_after_rollback: bool = False
    """Also paid where a rollback ends the trajectory, because the term takes back what earlier steps lent."""


def objective_change(step: HostStep, config: RewardConfig) -> float:
    return step.objective - step.objective_before


def fossilized_objective_change(step: HostStep, config: RewardConfig) -> float:
    return step.fossilized_objective - step.fossilized_objective_before


def objective_at_end(step: HostStep, config: RewardConfig) -> float:
    return terms.clip(step.objective, -1.0, 1.0) if step.at_horizon else 0.0


def stage_shaping(step: HostStep, config: RewardConfig) -> float:
    before = sum(terms.potential(slot.before.stage, slot.before.ticks_in_stage) for slot in step.slots)
    after = sum(terms.potential(slot.after.stage, slot.after.ticks_in_stage) for slot in step.slots)
    ended = step.diverged or (step.at_horizon and config.horizon_is_end)
    return config.shaping * terms.shaping(before, 0.0 if ended else after, config.gamma)


def op_cost(step: HostStep, config: RewardConfig) -> float:
    return -OP_COSTS.get(step.op, 0.0)


def auto_cull_cost(step: HostStep, config: RewardConfig) -> float:
    return -AUTO_CULL_COST * sum(slot.removed_after_training and not slot.after_action.fading for slot in step.slots)


def accuracy_gain_at_end(step: HostStep, config: RewardConfig) -> float:
    return 5.0 * (step.fossilized_accuracy - step.accuracy_at_start) if step.at_horizon else 0.0


def points_since_germination(slot: SlotStep, accuracy: float) -> float:
    """Return the accuracy points gained since the seed was germinated."""
    return MAX_POINTS * (accuracy - slot.account.accuracy_at_germination)


def seed_attribution(step: HostStep, config: RewardConfig) -> float:
    """Return the accuracy points attributed to blended seeds; a culled seed's last payment is taken back."""
    clean, clean_before = (
        MAX_POINTS * (whole - bare)
        for whole, bare in (
            (step.accuracy, step.host_only_accuracy),
            (step.accuracy_before, step.host_only_accuracy_before),
        )
    )
    paid = 0.0
    for slot in step.slots:
        # A seed whose slow cull ends in this step is not paid; one that is culled automatically is paid a last time.
        if slot.after_action.stage in BLENDED and not (slot.removed_after_training and slot.after_action.fading):
            paid += terms.attribution(slot.contribution, points_since_germination(slot, step.accuracy), clean)
        # True after a cull at once, and at the end of a slow cull.
        if slot.culled_by_action and slot.before.stage in BLENDED:
            paid -= terms.attribution(
                slot.contribution_before, points_since_germination(slot, step.accuracy_before), clean_before
            )
    return paid


def ransom_cost(step: HostStep, config: RewardConfig) -> float:
    clean = MAX_POINTS * (step.accuracy - step.host_only_accuracy)
    live = [slot for slot in step.slots if slot.after_action.stage in LIVE]
    return -RANSOM_COST * sum(terms.is_ransom(slot.contribution, clean) for slot in live)


def warning_costs(step: HostStep, config: RewardConfig) -> float:
    cost = 0.0
    for slot in step.slots:
        if slot.after_action.stage is Stage.BLENDING and points_since_germination(slot, step.accuracy) < 0.0:
            cost += terms.blending_warning(slot.after_action.ticks_in_stage)
        contributes = (
            slot.before.stage is Stage.PROBATIONARY and slot.contribution_before >= terms.MIN_CONTRIBUTION_POINTS
        )
        if contributes and step.op == "WAIT":
            cost += terms.waiting_warning(slot.before.ticks_in_stage)
    return -cost


def total_rent(step: HostStep, config: RewardConfig) -> float:
    return -terms.log_rent(sum(slot.growth for slot in step.slots), config.rent, config.rent_cap)


def alpha_weighted_rent(step: HostStep, config: RewardConfig) -> float:
    weighted_growth = sum(slot.alpha * slot.growth for slot in step.slots)
    return -min(0.1 * weighted_growth / config.budget, config.rent_cap)


def delayed_bonus(step: HostStep, config: RewardConfig) -> float:
    fossilized = [slot for slot in step.slots if slot.after_action.stage is Stage.FOSSILIZED]
    with_account = [
        slot for slot in fossilized if slot.account.ticks_left
    ]  # 0 in checkpoints from before accounts existed
    return sum(
        terms.delayed_bonus_per_tick(slot.contribution, config.fossilize_bonus, slot.account.ticks_left)
        for slot in with_account
    )


def credit_of_slot(slot: SlotStep, step: HostStep) -> float:
    """Return a seed's credit in accuracy points after the step (mode `escrow`).

    Credit is reward paid in advance for a seed's contribution. It is taken back if the seed is removed, or not
    fossilized by the horizon; once the seed is fossilized, it stays as it is.
    """
    if slot.after_action.stage is Stage.FOSSILIZED:
        return slot.account.credit
    if step.diverged or step.at_horizon or slot.after_action.stage not in LIVE or slot.removed_after_training:
        return 0.0
    due = terms.credit_due(slot.contribution, points_since_germination(slot, step.accuracy))
    return terms.credit_after(slot.account.credit, due)


def account_after(slot: SlotStep, step: HostStep) -> SeedAccount:
    """Return the slot's account after the step."""
    return slot.account._replace(credit=credit_of_slot(slot, step))


def credit_change(step: HostStep, config: RewardConfig) -> float:
    return sum(credit_of_slot(slot, step) - slot.account.credit for slot in step.slots)


def accuracy_at_end_term(weight: float) -> Term:
    return Term(lambda step, config: weight * step.fossilized_accuracy if step.at_horizon else 0.0)


def fossilize_bonus_term(share: float) -> Term:
    """Return a term that pays `share` of the bonus for a seed in the step in which it is fossilized."""

    def compute(step: HostStep, config: RewardConfig) -> float:
        kept = [slot for slot in step.slots if slot.newly_fossilized]
        return share * sum(terms.fossilize_bonus(slot.contribution, config.fossilize_bonus) for slot in kept)

    return Term(compute)


SHAPING = Term(stage_shaping, paid_after_rollback=True)
RENT = Term(alpha_weighted_rent)
ACCURACY_GAIN = Term(accuracy_gain_at_end)

MODES: Mapping[ModeName, Mapping[str, Term]] = {
    "objective": {"objective": Term(objective_change)},
    "kept": {"kept": Term(fossilized_objective_change)},
    "sparse": {"end": Term(objective_at_end)},
    "shaped": {
        "attribution": Term(seed_attribution),
        "ransom": Term(ransom_cost),
        "shaping": SHAPING,
        "rent": Term(total_rent),
        "warnings": Term(warning_costs),
        "op": Term(op_cost),
        "auto_cull": Term(auto_cull_cost),
        "end": accuracy_at_end_term(0.05 * MAX_POINTS),
    },
    "basic": {
        "shaping": SHAPING,
        "rent": RENT,
        "bonus": fossilize_bonus_term(1.0),
        "end": ACCURACY_GAIN,
    },
    "basic_plus": {
        "shaping": SHAPING,
        "rent": RENT,
        "bonus": fossilize_bonus_term(terms.FOSSILIZE_BONUS_IMMEDIATE_SHARE),
        "drip": Term(delayed_bonus),
        "end": ACCURACY_GAIN,
    },
    "escrow": {"credit": Term(credit_change, paid_after_rollback=True)},
}
"""Terms of this package's rewards by name of the reward and of the term."""

assert set(MODES) == set(get_args(ModeName))


def compute_mode(step: HostStep, config: RewardConfig, mode: ModeName) -> dict[str, float]:
    """Return every term of a mode for one step; after a rollback only those with `paid_after_rollback` are paid."""
    return {
        name: term.compute(step, config) if term.paid_after_rollback or not step.diverged else 0.0
        for name, term in MODES[mode].items()
    }


REWARDS.update(
    {
        mode: Reward(
            tuple(MODES[mode]),
            partial(compute_mode, mode=mode),
            depends_on_seeds=mode not in ("objective", "kept", "sparse"),
            needs_host_only=mode == "shaped",
        )
        for mode in MODES
    }
)


def compute_terms(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Return every term of the config's reward for one step by name; their sum is the reward.

    In a step that ends with a rollback, terms are 0 unless they take back what earlier steps lent.
    Raises ValueError, if a reward of the user returns something else than a finite number for each term
    that it has declared.
    """
    reward = REWARDS.find(config.mode)
    if step.already_ended or (step.diverged and config.mode not in MODES):
        return dict.fromkeys(reward.terms, 0.0)
    terms = reward.compute(step, config)
    return dict(terms) if config.mode in MODES else check_terms(terms, reward.terms, step, f"reward {config.mode!r}")


def check_terms(terms: Any, declared: Sequence[str], step: HostStep, what: str) -> dict[str, float]:
    """Return the terms of a reward of the user as numbers, in the order in which they are declared.

    A term may be NaN or infinite only if the host's own measurements are. Raises ValueError, which begins with `what`,
    for terms that are none.
    """
    if not isinstance(terms, Mapping):
        example = ", ".join(f"{name!r}: …" for name in declared)
        raise ValueError(f"{what} returned {_describe(terms)}, not its terms; return a dictionary {{{example}}}")
    if set(terms) != set(declared):
        raise ValueError(
            f"{what} returned the terms {list(terms)}, not those declared, {list(declared)}; name them alike"
        )
    numbers = {name: _as_number(terms[name]) for name in declared}
    for name, number in numbers.items():
        if number is None:
            raise ValueError(f"{what} returned {_describe(terms[name])} as its term {name!r}; return a number")
        if not isfinite(number) and all(isfinite(part) for part in step if isinstance(part, float)):
            raise ValueError(f"{what} returned {number} as its term {name!r}; return a finite number")
    return {name: number for name, number in numbers.items() if number is not None}


def _as_number(value: Any) -> float | None:
    """Return a number, also that of a tensor or array of one element; None for another object."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, RuntimeError):  # RuntimeError: a tensor of several elements
        return None


def _describe(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"a {type(value).__name__}" + (f" of shape {tuple(shape)}" if shape is not None else f", {value!r:.50}")
