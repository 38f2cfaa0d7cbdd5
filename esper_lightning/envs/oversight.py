"""The Governor among N environments: what it refuses before a tick, and what it makes of one afterwards."""

from collections.abc import Mapping, Sequence

from esper_lightning.envs.actions import Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measured import EpochResult
from esper_lightning.envs.result import HostEvent, HostVerdict, HostVeto
from esper_lightning.governor import Decision


def refuse(envs: Sequence[HostEnv], decisions: Sequence[Sequence[int]]) -> list[HostVeto]:
    """The mutations that there are reasons against."""
    vetoes = []
    for i, (env, decision) in enumerate(zip(envs, decisions, strict=True)):
        if decision[0] != Op.WAIT and (reasons := env.against(decision)):
            vetoes.append(HostVeto(i, env.tick + 1, env.space.describe(decision), reasons))
    return vetoes


def conclude(
    envs: Sequence[HostEnv], measured: Mapping[int, EpochResult], watched: bool
) -> tuple[list[HostEvent], list[HostVerdict]]:
    """Ends a tick in every environment: a host is rolled back, or takes in what was measured.

    Args:
        envs: All of them.
        measured: What the host epoch showed, of those that trained.
        watched: Is there a Governor?

    Returns:
        What happened to seeds, and the verdicts on hosts that were not healthy. Those that diverged have been restored,
        and are to be validated anew.
    """
    events, verdicts = [], []
    for i, env in enumerate(envs):
        if env.ended:
            env.tick += 1
            continue
        verdict = env.judge(measured.get(i)) if watched else None
        if verdict is not None and verdict.decision is not Decision.HEALTHY:
            restored = env.guard.snapshot.view()["tick"] if verdict.diverged else None
            verdicts.append(HostVerdict(i, env.tick + 1, env.seed, verdict, restored))
        if verdict is not None and verdict.diverged:
            happened = env.restore(verdict.decision is Decision.END, verdict.decision.value)
        else:
            hold = verdict is not None and verdict.decision is Decision.SUSPICIOUS
            happened = env.finish_tick(measured[i], hold)
        events += [HostEvent(i, env.tick, event) for event in happened]
    return events, verdicts
