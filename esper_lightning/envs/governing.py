"""Application of the Governor to one host's step: vetoes before the epoch, verdict and rollback after it."""

from collections.abc import Sequence

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.spaces.actions import Op
from esper_lightning.envs.step_result import HostEvent, HostVerdict, HostVeto, Transition
from esper_lightning.governor.judge import Verdict


def find_veto(host: int, env: HostEnv, action: Sequence[int]) -> HostVeto | None:
    """Return the Governor's veto of an action, an index per head; None if the action may be executed."""
    if action[0] == Op.WAIT or not (reasons := env.refusal_reasons(action)):
        return None
    return HostVeto(host, env.tick + 1, env.space.describe(action), reasons)


def finish_epoch(transition: Transition, governed: bool) -> None:
    """Finish the epoch of one host: roll it back, or record its results and advance the lifecycle of its seeds.

    The caller must validate a host again after a rollback. Tick counts move on in every case.

    Args:
        transition: Record of the step, which receives the seed events and any verdict other than healthy.
        governed: True if the Governor judges the epoch.
    """
    env, host = transition.env, transition.host
    if env.ended:
        env.tick += 1
        return
    verdict = env.judge_epoch(transition.result) if governed else None
    if verdict is not None and verdict.outcome is not Verdict.HEALTHY:
        assert env.monitor is not None, "it gave the verdict"
        restored_tick = env.monitor.snapshot.view()["tick"] if verdict.diverged else None
        transition.verdict = HostVerdict(host, env.tick + 1, env.rng_seed, verdict, restored_tick)
    if verdict is not None and verdict.diverged:
        changes = env.roll_back(verdict.outcome is Verdict.END, verdict.outcome.value)
    else:
        hold = verdict is not None and verdict.outcome is Verdict.SUSPICIOUS
        assert transition.result is not None, "the host has trained"
        changes = env.record_epoch(transition.result, hold)
    transition.events_of_epoch = [HostEvent(host, env.tick, change) for change in changes]
