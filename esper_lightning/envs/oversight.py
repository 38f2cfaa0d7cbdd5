"""The Governor's part in one host's step: it may veto the action, and judges the host epoch that follows."""

from collections.abc import Sequence

from esper_lightning.envs.actions import Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.result import HostEvent, HostVerdict, HostVeto, Transition
from esper_lightning.governor import Decision


def veto_of(host: int, env: HostEnv, action: Sequence[int]) -> HostVeto | None:
    """The Governor's veto against an action, a number per head; None: it may be carried out."""
    if action[0] == Op.WAIT or not (reasons := env.against(action)):
        return None
    return HostVeto(host, env.tick + 1, env.space.describe(action), reasons)


def finish_epoch(transition: Transition, watched: bool) -> None:
    """Ends a host's epoch: the host is rolled back, or takes in what was measured, and time passes for its seeds.

    A host that was rolled back is to be validated anew.

    Args:
        transition: Gets the verdict, unless the host was healthy, and the changes of seeds.
        watched: Is there a Governor?
    """
    env, host = transition.env, transition.host
    if env.ended:
        env.tick += 1
        return
    verdict = env.judge(transition.result) if watched else None
    if verdict is not None and verdict.decision is not Decision.HEALTHY:
        restored = env.guard.snapshot.view()["tick"] if verdict.diverged else None
        transition.verdict = HostVerdict(host, env.tick + 1, env.seed, verdict, restored)
    if verdict is not None and verdict.diverged:
        changes = env.restore(verdict.decision is Decision.END, verdict.decision.value)
    else:
        hold = verdict is not None and verdict.decision is Decision.SUSPICIOUS
        changes = env.finish_tick(transition.result, hold)
    transition.events_of_epoch = [HostEvent(host, env.tick, change) for change in changes]
