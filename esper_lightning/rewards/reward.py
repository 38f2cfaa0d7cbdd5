"""What a reward is: a function of one environment step of one host, in plain numbers, that returns named terms."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from esper_lightning.growth.stages import LIVE, OCCUPIED, Stage
from esper_lightning.registry import Registry, check_part_name

ROLLBACK_TERM = "rollback"
"""Name of the term that is added where hosts are watched: the penalty of a rollback by the Governor."""


class SlotStatus(NamedTuple):
    """State of a slot at one moment."""

    stage: Stage
    """Stage of the seed; DORMANT for an empty slot."""
    ticks_in_stage: int
    """Ticks that the seed has spent in its stage."""
    age: int
    """Ticks since the seed was germinated."""
    parameters: int = 0
    """Number of parameters of the seed; 0 for an empty slot."""


class SlotStep(NamedTuple):
    """One slot in one environment step. Contributions are in accuracy points of 100."""

    before: SlotStatus
    """State before the action."""
    after_action: SlotStatus
    """State right after the action, before the host trains."""
    after: SlotStatus
    """State at the end of the step."""
    accuracy_at_germination: float
    """Accuracy of the host, 0 … 1, when the slot's last seed was germinated; 0: it has had none."""
    contribution_before: float
    """Contribution as last measured before the action; 0 for a seed that is not blended."""
    contribution: float
    """Contribution at the end of the step."""
    growth: float
    """`parameters` divided by those of the host, or by `objective.smallest_host` if that is more."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the seed that trained in this step, fossilized or not; 0 if there was none."""
        return self.after_action.parameters

    @property
    def removed_after_training(self) -> bool:
        """True if the seed was removed automatically, after it trained in this step."""
        return self.after_action.stage in LIVE and self.after.stage not in OCCUPIED

    @property
    def culled_by_action(self) -> bool:
        """True if the action of this step removed the seed."""
        return self.before.stage in LIVE and self.after_action.stage is Stage.CULLED

    @property
    def newly_fossilized(self) -> bool:
        """True if the seed was fossilized in this step."""
        return self.after_action.stage is Stage.FOSSILIZED and self.before.stage is not Stage.FOSSILIZED


class HostStep(NamedTuple):
    """One environment step of one host: the action, and the measurements before and after it.

    Accuracies lie in 0 … 1. Accuracies and losses are validated with all live seeds unless stated otherwise.
    """

    op: str
    """Name of the op that was carried out, after vetoes."""
    already_ended: bool
    """The host's episode had ended before this step; nothing happens any more."""
    at_horizon: bool
    """The step reaches the horizon; seeds that are not fossilized are dropped."""
    diverged: bool
    """The host was rolled back: the trajectory ends, and the measurements do not result from the action."""
    objective_before: float
    """J before the action."""
    objective: float
    """J after the step, with all live seeds; at the horizon with fossilized seeds only."""
    fossilized_objective_before: float
    """J before the action with fossilized seeds only."""
    fossilized_objective: float
    """J after the step with fossilized seeds only, as if the episode ended here."""
    accuracy_at_start: float
    """Accuracy at the start of the episode."""
    accuracy_before: float
    """Accuracy before the action."""
    accuracy: float
    """Accuracy after the step."""
    fossilized_accuracy: float
    """Accuracy after the step with fossilized seeds only."""
    host_only_accuracy_before: float
    """Accuracy before the action with every seed switched off; with all live seeds unless `needs_host_only`."""
    host_only_accuracy: float
    """Accuracy after the step with every seed switched off; with all live seeds unless `needs_host_only`."""
    loss_before: float
    """Loss before the action."""
    loss: float
    """Loss after the step."""
    fossilized_loss: float
    """Loss after the step with fossilized seeds only."""
    slots: tuple[SlotStep, ...]
    """One record per slot, [K]; empty in modes `objective`, `kept` and `sparse`, which do not depend on seeds."""


class Reward(NamedTuple):
    """Reward of one environment step of one host, as a sum of named terms."""

    terms: tuple[str, ...]
    """Names of the terms; they appear in plots as `reward/<name>`."""
    compute: "Callable[[HostStep, RewardConfig], Mapping[str, float]]"
    """Function that returns every term by name."""
    depends_on_seeds: bool = True
    """True if the records of slots are needed; without them `HostStep.slots` is empty."""
    needs_host_only: bool = False
    """True if every host must also be validated with all seeds switched off."""
    taken_back: tuple[str, ...] = ()
    """Terms that count after a rollback too, because they take back what earlier steps lent; all others are then 0."""


REWARDS: Registry[Reward] = Registry("reward")
"""Rewards by name."""

RewardFunction = TypeVar("RewardFunction", bound="Callable[[HostStep, RewardConfig], Mapping[str, float]]")


def register(
    name: str,
    terms: Collection[str],
    *,
    needs_host_only: bool = False,
    depends_on_seeds: bool = True,
    taken_back: Collection[str] = (),
) -> Callable[[RewardFunction], RewardFunction]:
    """Return a decorator that registers a reward as `name`.

    The function takes the record of one environment step of one host and the settings, and returns every term by name.
    Their sum is the reward.

    Args:
        name: Value of `data.env.reward.mode`.
        terms: Names of the terms. `rollback` is that of the Governor's penalty, and cannot be one of them.
        needs_host_only: Validate every host with all seeds switched off, too: `HostStep.host_only_accuracy`.
        depends_on_seeds: False for a reward that does not read `HostStep.slots`, which is then left empty.
        taken_back: Terms that count in a step in which the host is rolled back. All others are then 0, and without any
            the function is not called.

    A second definition of the same function, as when a cell of a notebook runs again, replaces the first. Raises
    ValueError if the name is taken, or if the terms are no list of different names.
    """
    check_part_name(REWARDS.kind, name)

    def add(compute: RewardFunction) -> RewardFunction:
        if not terms or isinstance(terms, str):
            raise ValueError(f"reward {name!r}: terms must be a list of names, got {terms!r}")
        if len(set(terms)) < len(terms) or ROLLBACK_TERM in terms:
            raise ValueError(
                f"reward {name!r}: terms must be different names, and none may be {ROLLBACK_TERM!r}, the Governor's "
                f"penalty, got {list(terms)}"
            )
        REWARDS.add(name, Reward(tuple(terms), compute, depends_on_seeds, needs_host_only, tuple(taken_back)), compute)
        return compute

    return add


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Settings of a controller's reward. Evaluation always uses the objective, whatever the reward."""

    mode: str = "objective"
    """Name or import path of the reward. objective: the change of the objective in each tick. kept: the change of the
    objective with fossilized seeds only: the same sum, but a seed is rewarded when it is fossilized, not when it is
    blended. sparse: the objective at the end only. shaped: accuracy points attributed to seeds, shaping, rent,
    warnings, costs of ops. See docs/concepts/environment.md; docs/guides/extending.md shows how to add your own."""

    shaping: float = 0.3
    """Weight of the shaping by stages (shaped)."""

    rent: float = 0.5
    """Cost per tick of a growth by a factor of e (shaped)."""

    rent_cap: float = 1.0
    """Largest rent per tick (shaped)."""

    gamma: float = 1.0
    """Discount factor of the shaping; copied from model.ppo.gamma, so set that instead."""

    horizon_is_end: bool = True
    """Treat the horizon as the end of shaping; copied from model.ppo.horizon_is_end, so set that instead."""

    @property
    def needs_host_only(self) -> bool:
        """True if every host must also be validated with all seeds switched off."""
        return REWARDS.find(self.mode).needs_host_only

    @property
    def depends_on_seeds(self) -> bool:
        """True if the reward depends on what happens to seeds."""
        return REWARDS.find(self.mode).depends_on_seeds

    def __post_init__(self) -> None:
        REWARDS.find(self.mode)  # raises ValueError if there is none
        for name in ("shaping", "rent", "rent_cap"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"reward.{name} must be finite and not negative, got {getattr(self, name)}")


def compute_terms(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Return every term of the config's reward for one step by name; their sum is the reward.

    Raises ValueError unless the reward returns a finite number for each term that it has declared. Only
    where the host's own measurements are not finite may a term be so too.
    """
    reward = REWARDS.find(config.mode)
    if step.already_ended or (step.diverged and not reward.taken_back):
        return dict.fromkeys(reward.terms, 0.0)
    returned = reward.compute(step, config)
    what = f"reward {config.mode!r} returned"
    if not isinstance(returned, Mapping) or set(returned) != set(reward.terms):
        raise ValueError(f"{what} {returned!r:.80}, not its terms; return a dictionary of {list(reward.terms)}")
    terms = {}
    for name in reward.terms:
        try:
            terms[name] = float(returned[name])  # also a tensor or an array of one element
        except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor of several elements
            raise ValueError(f"{what} {returned[name]!r:.80} as its term {name!r}; return a number") from error
        if not math.isfinite(terms[name]) and all(math.isfinite(x) for x in step if isinstance(x, float)):
            raise ValueError(f"{what} {terms[name]} as its term {name!r}; return a finite number")
    if step.diverged:
        return {name: term if name in reward.taken_back else 0.0 for name, term in terms.items()}
    return terms
