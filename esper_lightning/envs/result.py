"""What a step of the pool gives: what was measured, and everything that happened."""

from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from esper_lightning.envs.actions import Action, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.masks import Masks
from esper_lightning.envs.measured import EpochResult
from esper_lightning.envs.observation import Observation
from esper_lightning.envs.paying import AfterAction, HostStatus
from esper_lightning.governor import Verdict
from esper_lightning.growth.growing import Refusals
from esper_lightning.growth.network import SeedEvent


class HostEvent(NamedTuple):
    """A change of a seed, with the host and the tick (from 1 on) in which it happened."""

    host: int
    tick: int
    seed: SeedEvent


class HostVerdict(NamedTuple):
    """The Governor's word on a host that was not healthy."""

    host: int
    tick: int
    seed: int
    """That the host was reset with: with the same one the same would happen again."""
    verdict: Verdict
    restored: int | None
    """The tick of the snapshot that it is now, if it diverged."""

    def __str__(self) -> str:
        """`host 3 (seed 17) rolled back at tick 7, to tick 5: loss is nan`"""
        back = "" if self.restored is None else f", to tick {self.restored}"
        what = f"{self.verdict.decision.value} at tick {self.tick}{back}"
        return f"host {self.host} (seed {self.seed}) {what}: {self.verdict.cause}"


class HostVeto(NamedTuple):
    """A mutation that the Governor refused: the host waited instead."""

    host: int
    tick: int
    action: str
    reasons: list[str]

    def __str__(self) -> str:
        """`host 3: GERMINATE norm in block1 vetoed at tick 7: …`"""
        return f"host {self.host}: {self.action} vetoed at tick {self.tick}: {'; '.join(self.reasons)}"


@dataclass(slots=True)
class Transition:
    """One host's way through one step, from the action to its result; each stage of the step fills in its part."""

    host: int
    """Index of the host in its pool."""
    env: HostEnv
    action: tuple[int, ...]
    """The choice of each head as it is carried out: WAIT where the Governor refused."""
    veto: HostVeto | None = None
    before: HostStatus | None = None
    """The host before the action. None: nothing is decided in this step."""
    after_action: AfterAction | None = None
    """The host right after the action. None: rewards do not depend on seeds."""
    events_of_action: list[HostEvent] = field(default_factory=list)
    result: EpochResult | None = None
    """What the host epoch showed. None: the host did not train."""
    verdict: HostVerdict | None = None
    """None: the host was healthy, or nobody judged."""
    events_of_epoch: list[HostEvent] = field(default_factory=list)

    @property
    def op(self) -> str:
        """Name of the op that is carried out."""
        return Op(self.action[0]).name

    @property
    def diverged(self) -> bool:
        """The host was rolled back."""
        return self.verdict is not None and self.verdict.verdict.diverged


class PoolMetrics(NamedTuple):
    """What was measured in a tick, [N] each, on the CPU."""

    accuracy: Tensor  # of the host with its live seeds; on the last tick: with the fossilized ones alone
    loss: Tensor
    objective: Tensor
    parameters: Tensor  # of the host and what is kept for good
    reward: Tensor


class StepResult(NamedTuple):
    """What followed from a step. Observation and masks are the pool's own storage: the next step overwrites them."""

    action: Action  # that was carried out: WAIT where the Governor refused
    observation: Observation
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: the trajectory ends here, by a rollback; the host goes on unless it is `masks.ended`
    truncated: Tensor  # [N] bool: the horizon was reached
    masks: Masks
    events: list[HostEvent]
    verdicts: list[HostVerdict]
    vetoes: list[HostVeto]
    metrics: PoolMetrics
    terms: dict[str, Tensor]  # [N] each, on the CPU: the parts that the reward is the sum of
    refusals: list[list[Refusals]]  # [N][K]: what the gates have against changes of each seed, from now on

    @property
    def shown(self) -> dict[str, Tensor]:
        """How well it is going, in means over hosts."""
        metrics = self.metrics
        return {name: getattr(metrics, name).mean() for name in ("accuracy", "reward", "objective")}
