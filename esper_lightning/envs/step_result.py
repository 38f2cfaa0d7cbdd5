"""Records of a step of the pool: observations, rewards, metrics and events."""

from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from torch import Tensor

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measurements import EpochResult
from esper_lightning.envs.reward import AfterAction, HostStatus
from esper_lightning.envs.spaces.actions import Action, Op
from esper_lightning.envs.spaces.masks import Masks
from esper_lightning.envs.vector_env import Observation
from esper_lightning.governor.judge import Judgement
from esper_lightning.growth.growing_network import RefusalReasons
from esper_lightning.growth.lifecycle import SeedEvent

LOGGED_METRICS = ("accuracy", "reward", "objective")
"""Metrics of a step whose means over hosts are logged."""


class HostEvent(NamedTuple):
    """Stage change of a seed, with the host index and the tick (counted from 1)."""

    host: int
    tick: int
    seed_event: SeedEvent


class HostVerdict(NamedTuple):
    """Verdict of the Governor on a host that was not healthy."""

    host: int
    tick: int
    rng_seed: int
    """RNG seed of the episode, which reproduces it."""
    verdict: Judgement
    restored_tick: int | None
    """Tick of the snapshot to which the host was rolled back. None: no rollback."""

    def __str__(self) -> str:
        """Describe the verdict, as in `host 3 (seed 17) rolled back at tick 7, to tick 5: loss is nan`."""
        restored_text = "" if self.restored_tick is None else f", to tick {self.restored_tick}"
        verdict_text = f"{self.verdict.outcome.value} at tick {self.tick}{restored_text}"
        return f"host {self.host} (RNG seed {self.rng_seed}) {verdict_text}: {self.verdict.cause}"


class HostVeto(NamedTuple):
    """Action vetoed by the Governor; the host executed WAIT instead."""

    host: int
    tick: int
    action: str
    reasons: list[str]

    def __str__(self) -> str:
        """Describe the veto, as in `host 3: GERMINATE norm in block1 vetoed at tick 7: …`."""
        return f"host {self.host}: {self.action} vetoed at tick {self.tick}: {'; '.join(self.reasons)}"


@dataclass(slots=True)
class Transition:
    """Record of one host in one step, from the action to its result; each phase of the step fills in its part."""

    host: int
    """Index of the host in its pool."""
    env: HostEnv
    action: tuple[int, ...]
    """Executed action, an index per head; WAIT after a veto."""
    _: KW_ONLY
    veto: HostVeto | None = None
    before: HostStatus | None = None
    """Status of the host before the action. None: the step has no action."""
    after_action: AfterAction | None = None
    """Status of the host right after the action. None: rewards do not depend on seeds."""
    events_of_action: list[HostEvent] = field(default_factory=list)
    result: EpochResult | None = None
    """Result of the host epoch. None: the host did not train."""
    verdict: HostVerdict | None = None
    """Verdict of the Governor. None: the host was healthy, or the Governor did not judge it."""
    events_of_epoch: list[HostEvent] = field(default_factory=list)

    @property
    def op(self) -> str:
        """Name of the executed op."""
        return Op(self.action[0]).name

    @property
    def diverged(self) -> bool:
        """True if the host was rolled back."""
        return self.verdict is not None and self.verdict.verdict.diverged


class PoolMetrics(NamedTuple):
    """Measurements of a step, [N] each, on the CPU."""

    accuracy: Tensor  # with all seeds; after the last step: with the fossilized ones only
    loss: Tensor
    objective: Tensor
    parameters: Tensor  # of the host and its fossilized seeds
    reward: Tensor


class StepResult(NamedTuple):
    """Result of a step. Observation and masks are the pool's own storage, which the next step overwrites."""

    action: Action  # to learn from: the given action, with WAIT after a veto
    ops: Tensor  # [N] int64, on the CPU: op that each host executed
    observation: Observation
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: a rollback ends the trajectory; the host continues unless `masks.ended`
    truncated: Tensor  # [N] bool: the horizon was reached
    masks: Masks
    events: list[HostEvent]
    verdicts: list[HostVerdict]
    vetoes: list[HostVeto]
    metrics: PoolMetrics
    terms: dict[str, Tensor]  # [N] each, on the CPU: the reward is their sum
    refusals: list[list[RefusalReasons]]  # [N][K]: reasons of the gates against changes of each seed, after this step

    @property
    def log(self) -> dict[str, Tensor]:
        """Scalars to log: means over hosts."""
        metrics = self.metrics
        return {name: getattr(metrics, name).mean() for name in LOGGED_METRICS}
