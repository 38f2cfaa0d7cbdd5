"""Plans: functions from the progress of a training to the number of blocks that its network should have."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.controllers.rules import Scaling
from esper_lightning.envs import ActionSpace, EnvConfig, Masks, Op
from esper_lightning.envs.observation import LOG_SIZE_SCALE, clip
from esper_lightning.envs.vector_env import Observation
from esper_lightning.evaluation.checkpoints import load_controller
from esper_lightning.growth.blueprints import STACK
from esper_lightning.runtime.checkpoint import HORIZON_KEY, IDENTITY_KEY, names_policy, read_policy
from esper_lightning.runtime.registry import import_object

DIGITS = 9  # digits of a share of the training, so that rounding does not delay a change by a batch
EPSILON = 1e-6  # part of a tick by which a plan may be asked early, so that rounding does not delay it


class Progress(NamedTuple):
    """A training between two optimizer steps, as a plan sees it."""

    share: float
    """Share of the training that is over, 0 to 1: of steps, epochs or time, whichever ends it first."""
    depth: int
    """Number of blocks now."""
    first: int
    """Number of blocks at the beginning."""
    most: int
    """Number of blocks that the class has built."""
    parameters: Mapping[int, int]
    """Parameters of the module by number of blocks, from the smallest to the largest one of the training."""
    targets_left: float | None
    """Targets of the batches to come: labels, or tokens to predict. None if the loss does not tell how many a batch
    has."""
    flops_spent: int
    """FLOPs of the training so far, forward and backward."""
    metrics: Mapping[str, float]
    """Metrics of the last validation by name; empty before the first one."""

    def targets_per_parameter(self, depth: int) -> float:
        """Return how many targets to come a network of `depth` blocks has for each of its parameters."""
        assert self.targets_left is not None, "a plan that needs them has `needs_targets`"
        return self.targets_left / self.parameters[depth]

    @property
    def deeper(self) -> int:
        """Number of blocks after the next step of a rule: as many more as there were at the beginning."""
        return min(self.depth + self.first, self.most)


Plan = Callable[[Progress], int]
"""Function that returns how many blocks a network should have now. A number up to the present one changes nothing.

A plan with `state_dict` and `load_state_dict` goes on where a resumed training does. Its attribute `reason` says why
the network is not deeper. If `needs_targets` is true, a training whose targets are not known is refused."""


class Shares:
    """Plan that grows to full depth after a share of the training `at`, or to a number of blocks after each share.

    With None it doubles the blocks until all are there; each number of blocks has an equal share of the training.
    """

    def __init__(self, at: float | Mapping[float, int] | None = None) -> None:
        self.at = at
        self.reason = "no batch was due for the next change" if at is None else f"no batch was due after at={at}"

    def changes(self, first: int, most: int) -> Mapping[float, int]:
        """Return the number of blocks from each share of the training on, for a network of `first` to `most` blocks."""
        if self.at is None:
            doublings = math.ceil(math.log2(most / first))
            return {k / (doublings + 1): min(first * 2**k, most) for k in range(1, doublings + 1)}
        return self.at if isinstance(self.at, Mapping) else {self.at: most}

    def __call__(self, progress: Progress) -> int:
        changes = self.changes(progress.first, progress.most)
        return max((depth for share, depth in changes.items() if progress.share >= round(share, DIGITS)), default=0)


class AtTicks(ABC):
    """Plan that decides at equal shares of the training, its ticks, as controllers do in their environments."""

    needs_targets = True
    ticks = 6
    reason = "it was not asked"

    def __init__(self) -> None:
        self.tick = -1  # the last one at which it was asked

    def __call__(self, progress: Progress) -> int:
        tick = int(progress.share * self.ticks + EPSILON)
        if tick <= self.tick:
            return progress.depth
        self.tick = tick
        return self.decide(progress)

    @abstractmethod
    def decide(self, progress: Progress) -> int:
        """Return the number of blocks from this tick on."""

    def state_dict(self) -> dict[str, Any]:
        return {"tick": self.tick}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.tick = state["tick"]


class ScalingPlan(AtTicks):
    """The rule `scaling` as a plan: it grows as long as the targets to come suffice for the deeper network."""

    def decide(self, progress: Progress) -> int:
        targets = progress.targets_per_parameter(progress.deeper)
        self.reason = (
            f"{progress.deeper} blocks would have {targets:.2g} targets to come for each parameter, and the rule asks "
            f"for {Scaling.targets:g}"
        )
        is_due = self.tick >= Scaling.begin * self.ticks
        return progress.deeper if is_due and targets >= Scaling.targets else progress.depth


class DepthPool(NamedTuple):
    """A network in training with its depth slots, in the form in which controllers read a pool of one host."""

    config: EnvConfig
    space: ActionSpace
    feature_names: list[str]
    observation: Observation
    masks: Masks
    episode_starts: Tensor
    n_envs: int = 1


FEATURES: dict[str, Callable[[Progress], float]] = {
    "progress": lambda progress: progress.share,
    "parameters.committed": lambda progress: clip(
        math.log(progress.parameters[progress.depth] / progress.parameters[progress.first]) / LOG_SIZE_SCALE
    ),
    "budget": lambda progress: clip(math.log(progress.targets_per_parameter(progress.depth)) / LOG_SIZE_SCALE),
    "slot.present": lambda progress: 1.0,
    "slot.DORMANT": lambda progress: 1.0,
    "blueprint.present": lambda progress: 1.0,
}
"""Features of a network and of its depth slots, as in the observation of hosts, each as a function of the progress."""


class PolicyPlan(AtTicks):
    """A policy that was trained on hosts which grow in depth: one of the package by its `name`, or a file by its path.

    Raises ValueError if it is a policy of something else, or reads what a training of one's own does not know.
    """

    reason = "the policy chose to wait"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.controller = load_controller(name)
        assert self.controller.training is not None, "the controller of a file knows its training"
        self.training = self.controller.training
        self.ticks = read_policy(name)[IDENTITY_KEY][HORIZON_KEY]
        if self.training.space.blueprint != [STACK]:
            raise ValueError(f"Stack: the policy {name!r} grows seeds and not blocks; give tamiyo_depth, or train one")
        unknown = set(self.training.features) - FEATURES.keys()
        if unknown:
            raise ValueError(
                f"Stack: the policy {name!r} reads {', '.join(sorted(unknown))}, which a training of your own does not "
                f"have; train it with data.env.observation as in configs/depth.yaml"
            )
        self._saved: Mapping[str, Any] | None = None  # state of a checkpoint, until the policy is asked
        self._begun = False

    def decide(self, progress: Progress) -> int:
        pool: Any = self._as_pool(
            progress._replace(share=self.tick / self.ticks)
        )  # as in its training, without rounding
        if self._saved is not None:
            self.controller.load_state_dict(pool, self._saved)
        elif not self._begun:
            self.controller.reset(pool)
        self._saved, self._begun = None, True
        action = self.controller.act(pool)
        return progress.deeper if int(action.op) == Op.GERMINATE else progress.depth

    def _as_pool(self, progress: Progress) -> DepthPool:
        """Return a training as the policy sees it: with a depth slot for each growth, of which the next one is open."""
        num_slots = math.ceil((progress.most - progress.first) / progress.first)
        num_taken = math.ceil((progress.depth - progress.first) / progress.first)
        names = self.training.features
        features = [FEATURES[name](progress) for name in names]
        rows = torch.tensor([[features] * num_slots])  # [1, K, features]
        if "slot.DORMANT" in names:
            rows[0, :num_taken, names.index("slot.DORMANT")] = 0.0
        possible = torch.zeros(1, len(Op), num_slots, dtype=torch.bool)
        possible[0, Op.WAIT] = True
        possible[0, Op.GERMINATE, num_taken : num_taken + 1] = True
        masks = Masks(possible, torch.ones(1, num_slots, 1, dtype=torch.bool), torch.zeros(1, dtype=torch.bool))
        space = self.training.space._replace(slot=[f"stack{i + 1}" for i in range(num_slots)])
        config, starts = EnvConfig(actions=self.training.rules.actions), torch.zeros(1, dtype=torch.bool)
        return DepthPool(config, space, names, Observation(rows), masks, episode_starts=starts)

    def state_dict(self) -> dict[str, Any]:
        policy_state = self.controller.state_dict() if self._begun else self._saved
        return super().state_dict() | {"policy": policy_state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._saved, self._begun = state["policy"], False


def make_plan(plan: str | Plan) -> Plan:
    """Return the plan with a name, an import path, or the file of a policy; a function is returned as it is."""
    if isinstance(plan, str):
        if plan == "scaling":
            return ScalingPlan()
        if names_policy(plan):
            return PolicyPlan(plan)
        if "." not in plan:
            raise ValueError(
                f"Stack: there is no plan {plan!r}; give scaling, tamiyo_depth, the file of a policy, an import path, "
                f"or a function"
            )
        plan = import_object(plan, "Stack: plan")
    if isinstance(plan, type):
        plan = plan()
    if not callable(plan):
        raise ValueError(f"Stack: plan must be a function of the progress, got {type(plan).__name__}")
    return plan
