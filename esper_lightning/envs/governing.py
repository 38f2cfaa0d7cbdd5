"""The overseer of a pool, which applies the Governor's rules to its hosts."""

from collections.abc import Iterable, Sequence

import torch

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.spaces.actions import Op
from esper_lightning.envs.step_result import HostEvent, HostVerdict, HostVeto, Transition
from esper_lightning.governor.judge import GovernorConfig, Judgement, Verdict
from esper_lightning.governor.monitor import HostMonitor
from esper_lightning.growth.lifecycle import SeedEvent


class Overseer:
    """Watches hosts by the Governor's rules: vetoes actions, judges epochs, takes snapshots, rolls diverged hosts back.

    A pool asks its overseer within the step, so that a rollback takes effect before the policy learns from the step.
    One overseer may watch several pools. The callback `Governor` is the overseer of a run.

    Args:
        config: Thresholds and limits.
    """

    def __init__(self, config: GovernorConfig) -> None:
        self.config = config

    def make_monitor(self, *, chance_loss: float, steps_per_epoch: int, device: torch.device) -> HostMonitor:
        """Return a monitor for one host, which holds the host's loss statistics and snapshot; see `HostMonitor`."""
        return HostMonitor(self.config, chance_loss=chance_loss, steps_per_epoch=steps_per_epoch, device=device)

    def find_veto(self, host: int, env: HostEnv, action: Sequence[int]) -> HostVeto | None:
        """Return the veto of an action, an index per head; None if the action may be executed."""
        if action[0] == Op.WAIT or not (reasons := env.refusal_reasons(action)):
            return None
        return HostVeto(host, env.tick + 1, env.space.describe(action), reasons)

    def judge(self, transition: Transition) -> Judgement:
        """Judge the epoch of one host. The transition receives any verdict other than healthy."""
        env = transition.env
        judgement = env.judge_epoch(transition.result)
        if judgement.outcome is not Verdict.HEALTHY:
            assert env.monitor is not None, "it gave the verdict"
            restored_tick = env.monitor.snapshot.view()["tick"] if judgement.diverged else None
            transition.verdict = HostVerdict(transition.host, env.tick + 1, env.rng_seed, judgement, restored_tick)
        return judgement

    def roll_back(self, env: HostEnv, judgement: Judgement) -> list[SeedEvent]:
        """Restore the last snapshot of a diverged host, and end its episode if the judgement says so.

        The host must then be validated again. Returns the stage changes of its seeds.
        """
        return env.roll_back(judgement.outcome is Verdict.END, judgement.outcome.value)

    def take_snapshots(self, envs: Iterable[HostEnv]) -> None:
        """Take a snapshot of each host."""
        for env in envs:
            env.take_snapshot()

    def take_due_snapshots(self, envs: Iterable[HostEnv]) -> None:
        """Take a snapshot of each host that has been healthy for long enough and whose episode goes on."""
        self.take_snapshots(
            env for env in envs if env.monitor is not None and env.monitor.snapshot_due and not env.ended
        )


def finish_epoch(transition: Transition, overseer: Overseer | None) -> None:
    """Finish the epoch of one host: roll it back, or record its results and advance the lifecycle of its seeds.

    The caller must validate a host again after a rollback. Tick counts move on in every case.

    Args:
        transition: Record of the step, which receives the seed events and any verdict other than healthy.
        overseer: Overseer that judges the epoch. None: the host is not judged.
    """
    env = transition.env
    if env.ended:
        env.tick += 1
        return
    judgement = overseer.judge(transition) if overseer is not None else None
    if overseer is not None and judgement is not None and judgement.diverged:
        changes = overseer.roll_back(env, judgement)
    else:
        hold = judgement is not None and judgement.outcome is Verdict.SUSPICIOUS
        assert transition.result is not None, "the host has trained"
        changes = env.record_epoch(transition.result, hold)
    transition.events_of_epoch = [HostEvent(transition.host, env.tick, change) for change in changes]
