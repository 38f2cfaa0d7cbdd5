"""Numbers for plots, by the names that plots show."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from esper_lightning.growth.stages import Stage

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv


def tick_metrics(step: "StepResult") -> dict[str, float]:
    """Means over hosts of one tick."""
    metrics = step.metrics
    return {
        "hosts/accuracy": metrics.accuracy.mean().item(),
        "hosts/loss": metrics.loss.mean().item(),
        "hosts/objective": metrics.objective.mean().item(),
        "hosts/parameters": metrics.parameters.float().mean().item(),
        "hosts/reward": step.reward.mean().item(),
    }


def growth_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """For each slot, the share of hosts whose seed is in each stage."""
    return {
        f"growth/{slot.name}/{stage.name}": sum(env.slots[k].stage is stage for env in envs) / len(envs)
        for k, slot in enumerate(envs[0].slots)
        for stage in Stage
    }


def phase_shares(seconds: dict[str, float], elapsed: float) -> dict[str, float]:
    """Seconds by phase as shares of the `elapsed` time by the clock; `other` is what no phase accounts for."""
    shares = {phase: spent / elapsed for phase, spent in seconds.items()}
    return shares | {"other": 1.0 - sum(shares.values())}
