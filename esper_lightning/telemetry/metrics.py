"""Numbers for plots, by the names that plots show."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from esper_lightning.growth.stages import Stage

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv


def tick_metrics(step: "StepResult") -> dict[str, float]:
    """Means over hosts of one tick, of numbers that are on the CPU already."""
    metrics = step.metrics
    return {
        "hosts/accuracy": metrics.accuracy.mean().item(),
        "hosts/loss": metrics.loss.mean().item(),
        "hosts/objective": metrics.objective.mean().item(),
        "hosts/parameters": metrics.parameters.float().mean().item(),
        "hosts/reward": metrics.reward.mean().item(),
        **{f"reward/{name}": paid.mean().item() for name, paid in step.terms.items()},
    }


def growth_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """For each slot, the share of hosts whose seed is in each stage."""
    return {
        f"growth/{slot.name}/{stage.name}": sum(env.slots[k].stage is stage for env in envs) / len(envs)
        for k, slot in enumerate(envs[0].slots)
        for stage in Stage
    }


def skipped_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Steps that hosts skipped since their episodes began, of all and of each; nothing where no loss is scaled."""
    skipped = {i: float(env.skipped_steps) for i, env in enumerate(envs) if env.scaler.is_enabled()}
    each = {f"skipped_steps/host{i}": steps for i, steps in skipped.items()}
    return {"hosts/skipped_steps": sum(skipped.values()), **each} if skipped else {}


def governor_metrics(step: "StepResult", envs: Sequence["HostEnv"]) -> dict[str, float]:
    """What the Governor thinks of the hosts now, and did since their episodes began."""
    guards = [env.guard for env in envs if env.guard is not None]
    return {
        "governor/suspicious": float(sum(guard.watch.panic > 0 for guard in guards)),
        "governor/rollbacks": float(sum(guard.watch.rollbacks for guard in guards)),
        "governor/ended": float(sum(env.ended for env in envs)),
        "governor/vetoes": float(len(step.vetoes)),
    }


def phase_seconds(seconds: Mapping[str, float], ticks: int, clock: str) -> dict[str, float]:
    """Seconds by phase as seconds per tick, under the name of the clock that they were measured by."""
    return {f"time/{clock}.{phase}": spent / ticks for phase, spent in seconds.items()}


def phase_shares(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Seconds by phase as shares of the `elapsed` time by the clock; `other` is what no phase accounts for."""
    shares = {phase: spent / elapsed for phase, spent in seconds.items()}
    return shares | {"other": 1.0 - sum(shares.values())}
