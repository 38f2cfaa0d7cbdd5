"""Metrics for plots, by tag. N hosts, T ticks of a rollout."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.events import SeedCredited

if TYPE_CHECKING:
    from esper_lightning.envs import HostPool, PoolMetrics, StepResult
    from esper_lightning.envs.host_env import HostEnv

RETURN_QUANTILES = (0.1, 0.5, 0.9)
"""Quantiles over hosts at which the returns are reported, to show their spread."""

LSTM_SATURATION = 0.95
"""Absolute value of an LSTM's hidden unit (at most 1) beyond which it counts as saturated: it hardly changes."""


def tick_metrics(step: "StepResult") -> dict[str, float]:
    """Return means over hosts of one environment step; all inputs are on the CPU already."""
    metrics = step.metrics
    return {
        "hosts/accuracy": metrics.accuracy.mean().item(),
        "hosts/loss": metrics.loss.mean().item(),
        "hosts/objective": metrics.objective.mean().item(),
        "hosts/parameters": metrics.parameters.float().mean().item(),
        "hosts/reward": metrics.reward.mean().item(),
        **{f"reward/{name}": paid.mean().item() for name, paid in step.terms.items()},
    }


def task_metrics(final: "PoolMetrics", tasks: Mapping[str, slice]) -> dict[str, float]:
    """Return means over the hosts of each task, at the end of the episode."""
    return {
        f"tasks/{task}/{name}": getattr(final, name)[span].float().mean().item()
        for task, span in tasks.items()
        for name in ("objective", "accuracy", "parameters")
    }


def growth_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Return, for each slot and stage, the share of hosts whose slot is in that stage."""
    return {
        f"growth/{slot.name}/{stage.name}": sum(env.slots[k].stage is stage for env in envs) / len(envs)
        for k, slot in enumerate(envs[0].slots)
        for stage in Stage
    }


def gradient_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Return mean norm and health of the last minibatch's gradients, of hosts and of live seeds."""
    hosts = [env.host_gradient for env in envs if env.host_gradient is not None and not env.ended]
    seeds = [
        record.gradient
        for env in envs
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.live and record.gradient is not None and not env.ended
    ]
    found = {}
    for name, stats in (("host", hosts), ("seed", seeds)):
        norms = [gradient.norm for gradient in stats if math.isfinite(gradient.norm)]
        if norms:
            found[f"gradients/{name}_norm"] = sum(norms) / len(norms)
            found[f"gradients/{name}_health"] = sum(gradient.health for gradient in stats) / len(stats)
    return found


def contribution_values(envs: Sequence["HostEnv"]) -> list[float]:
    """Return the contributions (accuracy points) of all blended seeds whose contribution was measured."""
    points = [
        record.contribution
        for env in envs
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.blended and record.contribution is not None
    ]
    return [point for point in points if math.isfinite(point)]


def potential_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Return the mean potential of all seeds that are not blended yet, in accuracy points; empty if none is known."""
    points = [
        record.potential
        for env in envs
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.isolated and record.potential is not None and math.isfinite(record.potential) and not env.ended
    ]
    return {"growth/potential": sum(points) / len(points)} if points else {}


def layer_metrics(hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return means over hosts of the layers' gradient norms, by name. Hosts need not have the same layers."""
    norms: dict[str, list[float]] = {}
    for layers in hosts:
        for name, norm in layers.items():
            if math.isfinite(norm):
                norms.setdefault(name, []).append(norm)
    return {f"layers/{name}": sum(values) / len(values) for name, values in norms.items()}


def credit_metrics(credit_events: Sequence[SeedCredited]) -> dict[str, float]:
    """Return the mean Shapley value by blueprint, and the mean interaction of pairs of fossilized seeds."""
    shares: dict[str, list[float]] = {}
    for event in credit_events:
        shares.setdefault(event.blueprint, []).append(event.shapley)
    found = {f"credit/{name}": sum(values) / len(values) for name, values in shares.items()}
    seeds_per_host = Counter(event.host for event in credit_events)
    # Each pair of seeds in a host counts twice: in the sums of both seeds.
    pairs = sum(seeds * (seeds - 1) for seeds in seeds_per_host.values())
    if pairs:
        found["credit/interaction"] = sum(event.interaction for event in credit_events) / pairs
    return found


def return_metrics(returns: Tensor) -> dict[str, float]:  # [N]
    """Return mean and quantiles over hosts of the episodes' returns."""
    quantiles = returns.double().quantile(torch.tensor(RETURN_QUANTILES, dtype=torch.float64)).tolist()
    by_quantile = {
        f"rollout/return.p{100 * q:.0f}": value for q, value in zip(RETURN_QUANTILES, quantiles, strict=True)
    }
    return {"rollout/return": returns.mean().item(), **by_quantile}


def lstm_metrics(state: Iterable[Tensor]) -> dict[str, float]:
    """Return statistics of a recurrent state, hidden and cell [N, width]; nothing for a policy without memory.

    All of them take one transfer from the device.
    """
    hidden, cell = (part.float() for part in state)
    if not hidden.numel():
        return {}
    numbers = (
        hidden.square().mean().sqrt(),
        cell.square().mean().sqrt(),
        (hidden.abs() > LSTM_SATURATION).float().mean(),
    )
    names = ("hidden_rms", "cell_rms", "saturated")
    return {f"lstm/{name}": value for name, value in zip(names, torch.stack(numbers).tolist(), strict=True)}


def choice_metrics(action: Any, masks: Any, space: Any, *, relevant: Tensor) -> dict[str, float]:
    """Return the frequency of each choice of each head where the head mattered, and of each op being possible.

    Args:
        action: Actions of a rollout, [T, N] for each head.
        masks: Masks of the same rollout.
        space: Names of the choices, by head.
        relevant: [ops, heads] bool: the head matters for the op.
    """
    free = ~masks.forced
    matters = relevant.to(action.op.device)[action.op].bool() & free[..., None]  # [T, N, heads]
    found = {}
    for head, (name, choices) in enumerate(zip(space._fields, space, strict=True)):
        if name == "op" or len(choices) < 2:
            continue
        counts = torch.bincount(action[head][matters[..., head]], minlength=len(choices)).tolist()
        found |= {f"heads/{name}.{c}": n / max(1, sum(counts)) for c, n in zip(choices, counts, strict=True)}
    possible = masks.op.float().mean((0, 1)).tolist()  # [ops]
    found |= {f"masks/{op}": share for op, share in zip(space.op, possible, strict=True)}
    return found | {"masks/forced": 1.0 - free.float().mean().item()}


def skipped_step_metrics(envs: Sequence["HostEnv"], indices: Sequence[int]) -> dict[str, float]:
    """Return the optimizer steps skipped since the episode began.

    The total and one number per host; an empty dict if no host uses a GradScaler.

    Args:
        envs: The hosts.
        indices: Index of each host among those of all processes.
    """
    skipped = {i: float(env.skipped_steps) for i, env in zip(indices, envs, strict=True) if env.loss_scale is not None}
    each = {f"skipped_steps/host{i}": steps for i, steps in skipped.items()}
    return {"hosts/skipped_steps": sum(skipped.values()), **each} if skipped else {}


def governor_metrics(step: "StepResult", envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Return counts of hosts that are suspicious or ended, of rollbacks in this episode, and of vetoes in this step."""
    monitors = [env.monitor for env in envs if env.monitor is not None]
    return {
        "governor/suspicious": float(sum(monitor.governor_state.consecutive_anomalies > 0 for monitor in monitors)),
        "governor/rollbacks": float(sum(monitor.governor_state.rollbacks for monitor in monitors)),
        "governor/ended": float(sum(env.stopped for env in envs)),
        "governor/vetoes": float(len(step.vetoes)),
    }


def phase_seconds(seconds: Mapping[str, float], ticks: int, clock: str) -> dict[str, float]:
    """Return the seconds per tick by phase, under the name of the clock that measured them."""
    return {f"time/{clock}.{phase}": spent / ticks for phase, spent in seconds.items()}


def phase_shares(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Return the seconds by phase as shares of the `elapsed` seconds; `other` is the rest."""
    shares = {phase: spent / elapsed for phase, spent in seconds.items()}
    return shares | {"other": 1.0 - sum(shares.values())}


def throughput(pool: "HostPool", *, seconds: Mapping[str, float], trained: int, validated: int) -> dict[str, float]:
    """Return the samples of all hosts per second in the phases `train` and `validate`; nothing for one that took none.

    Args:
        pool: The hosts.
        seconds: Time spent, by phase.
        trained, validated: Numbers of host epochs and of validations in that time.
    """
    trained_samples, validated_samples = pool.samples_per_epoch
    samples = {"train": trained * trained_samples, "validate": validated * validated_samples}
    return {
        f"time/samples_per_second.{phase}": number / seconds[phase]
        for phase, number in samples.items()
        if seconds.get(phase, 0.0) > 0.0
    }
