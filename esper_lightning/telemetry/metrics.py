"""Numbers for plots, by the names that plots show."""

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

QUANTILES = (0.1, 0.5, 0.9)
"""Of the hosts' returns: how unlike they are."""

SATURATED = 0.95
"""An LSTM's hidden number is at most 1 in size; beyond this it hardly moves any more."""


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


def task_metrics(final: "PoolMetrics", tasks: Mapping[str, slice]) -> dict[str, float]:
    """Means over the hosts of each task, at the end of the episode."""
    return {
        f"tasks/{task}/{name}": getattr(final, name)[span].float().mean().item()
        for task, span in tasks.items()
        for name in ("objective", "accuracy", "parameters")
    }


def growth_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """For each slot, the share of hosts whose seed is in each stage."""
    return {
        f"growth/{slot.name}/{stage.name}": sum(env.slots[k].stage is stage for env in envs) / len(envs)
        for k, slot in enumerate(envs[0].slots)
        for stage in Stage
    }


def gradient_metrics(envs: Sequence["HostEnv"]) -> dict[str, float]:
    """Mean norm and health of the last minibatch's gradients, of hosts and of the seeds that live."""
    hosts = [env.host_gradient for env in envs if env.host_gradient is not None and not env.ended]
    seeds = [
        record.gradient
        for env in envs
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.live and record.gradient is not None and not env.ended
    ]
    found = {}
    for name, stats in (("host", hosts), ("seed", seeds)):
        norms = [one.norm for one in stats if math.isfinite(one.norm)]
        if norms:
            found[f"gradients/{name}_norm"] = sum(norms) / len(norms)
            found[f"gradients/{name}_health"] = sum(one.health for one in stats) / len(stats)
    return found


def contribution_values(envs: Sequence["HostEnv"]) -> list[float]:
    """Accuracy points of all seeds that are part of a host, as far as they were measured."""
    points = [
        record.contribution
        for env in envs
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.blended and record.contribution is not None
    ]
    return [one for one in points if math.isfinite(one)]


def layer_metrics(hosts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over hosts of their layers' gradient norms, by name: hosts need not have the same layers."""
    norms: dict[str, list[float]] = {}
    for layers in hosts:
        for name, norm in layers.items():
            if math.isfinite(norm):
                norms.setdefault(name, []).append(norm)
    return {f"layers/{name}": sum(values) / len(values) for name, values in norms.items()}


def credit_metrics(credits: Sequence[SeedCredited]) -> dict[str, float]:
    """Mean Shapley value by blueprint, and mean interaction of the pairs of kept seeds."""
    shares: dict[str, list[float]] = {}
    for one in credits:
        shares.setdefault(one.blueprint, []).append(one.shapley)
    found = {f"credit/{name}": sum(values) / len(values) for name, values in shares.items()}
    together = Counter(one.host for one in credits)
    # Each pair of a host is in the sums of both of its seeds.
    pairs = sum(seeds * (seeds - 1) for seeds in together.values())
    known = [one.interaction for one in credits if one.interaction is not None]
    if pairs and len(known) == len(credits):
        found["credit/interaction"] = sum(known) / pairs
    return found


def return_metrics(returns: Tensor) -> dict[str, float]:  # [N]
    """Mean and quantiles over hosts."""
    quantiles = returns.double().quantile(torch.tensor(QUANTILES, dtype=torch.float64)).tolist()
    spread = {f"rollout/return.p{100 * q:.0f}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
    return {"rollout/return": returns.mean().item(), **spread}


def lstm_metrics(state: Iterable[Tensor]) -> dict[str, float]:
    """Of a recurrent state, hidden and cell [N, width]; nothing without memory. One transfer."""
    hidden, cell = (part.float() for part in state)
    if not hidden.numel():
        return {}
    numbers = (hidden.square().mean().sqrt(), cell.square().mean().sqrt(), (hidden.abs() > SATURATED).float().mean())
    names = ("hidden_rms", "cell_rms", "saturated")
    return {f"lstm/{name}": value for name, value in zip(names, torch.stack(numbers).tolist(), strict=True)}


def choice_metrics(action: Any, masks: Any, space: Any, relevant: Tensor) -> dict[str, float]:
    """How often each choice of each head was made where the head mattered, and how often each op was possible.

    Args:
        action: Of a rollout, [T, N] each head.
        masks: Of the same.
        space: The choices' names.
        relevant: [ops, heads]: does a head matter for an op?
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


def throughput(pool: "HostPool", seconds: Mapping[str, float], trained: int, validated: int) -> dict[str, float]:
    """Samples of all hosts per second of the phase that they were needed in; nothing where it took no time.

    Args:
        pool: The hosts.
        seconds: By phase.
        trained, validated: Host epochs and validations in them.
    """
    learned, judged = pool.samples_per_epoch
    samples = {"train": trained * learned, "validate": validated * judged}
    return {
        f"time/samples_per_second.{phase}": number / seconds[phase]
        for phase, number in samples.items()
        if seconds.get(phase, 0.0) > 0.0
    }
