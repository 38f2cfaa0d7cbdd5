"""Metrics for plots, by the tags of docs/reference/telemetry.md, and charts. N hosts, K slots, T ticks of a rollout."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_lightning.envs import HostVeto
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.machine import resident_memory, total_memory
from esper_lightning.telemetry.observer import Tick

RETURN_QUANTILES = (0.1, 0.5, 0.9)
"""Quantiles over hosts at which the returns are reported, to show their spread."""

LSTM_SATURATION = 0.95
"""Absolute value of an LSTM's hidden unit (at most 1) beyond which it counts as saturated: it hardly changes."""

MIN_RELIED_POINTS, MAX_RELIANCE, MIN_GAIN = 5.0, 5.0, 1.0
"""A host relies on a seed too much that contributes at least so many points, and more than so many times the
host's gain since the seed was germinated; a smaller gain is noise and counts as so many points."""


def tick_metrics(tick: Tick, slots: Sequence[str]) -> dict[str, float]:
    """Return the metrics of one environment step; `slots` are the names of the K slots."""
    hosts, seeds = tick.hosts, tick.slots
    metrics = {f"hosts/{name}": hosts[name].mean() for name in ("score", "loss", "objective", "parameters", "reward")}
    metrics |= {f"reward/{name}": paid.mean() for name, paid in tick.terms.items()}
    for k, slot in enumerate(slots):
        metrics |= {f"growth/{slot}/{stage.name}": (seeds["stage"][:, k] == stage).mean() for stage in Stage}
    alive = ~hosts["ended"]
    for name, table in (("host", hosts[alive]), ("seed", seeds[alive][seeds[alive]["live"]])):
        norms, healths = table["norm"], table["health"]
        if np.isfinite(norms).any():
            metrics[f"gradients/{name}_norm"] = norms[np.isfinite(norms)].mean()
            metrics[f"gradients/{name}_health"] = np.nanmean(healths)
    skipped = {i: steps for i, steps in enumerate(hosts["skipped_steps"].tolist()) if steps == steps}  # not NaN
    if skipped:
        metrics |= {f"skipped_steps/host{i}": steps for i, steps in skipped.items()}
        metrics["hosts/skipped_steps"] = sum(skipped.values())
    if not np.isnan(hosts["suspicious"]).any():
        metrics |= {f"governor/{name}": hosts[name].sum() for name in ("suspicious", "rollbacks")}
        metrics["governor/ended"] = hosts["stopped"].sum()
        metrics["governor/vetoes"] = sum(isinstance(event, HostVeto) for event in tick.events)
    return {tag: float(value) for tag, value in metrics.items()}


def episode_metrics(last: Tick, tasks: Mapping[str, slice]) -> dict[str, float]:
    """Return what has become of the hosts at the last step of an episode: means over all, and over the hosts of each
    task.
    """
    hosts, seeds = last.hosts, last.slots
    parts = ("objective", "score", "parameters")
    metrics = {f"rollout/{name}": hosts[name].mean() for name in parts}
    metrics |= {f"tasks/{task}/{name}": hosts[name][span].mean() for task, span in tasks.items() for name in parts}
    metrics["rollout/fossils"] = (seeds["stage"] == Stage.FOSSILIZED).sum(1).mean()
    metrics["rollout/rolled_back"] = (hosts["stopped"] | (hosts["rollbacks"] > 0)).mean()
    blended = seeds[seeds["blended"] & np.isfinite(seeds["contribution"])]
    ratios = blended["contribution"] / np.maximum(blended["gain"], MIN_GAIN)
    relied_on = (blended["contribution"] >= MIN_RELIED_POINTS) & (ratios > MAX_RELIANCE)
    metrics["rollout/reliance"] = relied_on.mean() if relied_on.size else 0.0
    return {tag: float(value) for tag, value in metrics.items()}


def return_metrics(returns: Tensor) -> dict[str, float]:  # [N]
    """Return mean and quantiles over hosts of the episodes' returns."""
    quantiles = returns.double().quantile(torch.tensor(RETURN_QUANTILES, dtype=torch.float64)).tolist()
    of_quantile = {
        f"rollout/return.p{100 * q:.0f}": value for q, value in zip(RETURN_QUANTILES, quantiles, strict=True)
    }
    return {"rollout/return": returns.mean().item(), **of_quantile}


def lstm_metrics(state: Iterable[Tensor]) -> dict[str, float]:
    """Return statistics of a recurrent state, hidden and cell [N, width], by one transfer; nothing without a memory."""
    hidden, cell = (part.float() for part in state)
    if not hidden.numel():
        return {}
    squares = torch.stack([hidden.square().mean(), cell.square().mean()])
    saturated = (hidden.abs() > LSTM_SATURATION).float().mean()
    numbers = torch.cat([squares.sqrt(), saturated[None], squares.mean().sqrt()[None]]).tolist()
    tags = ("lstm/hidden_rms", "lstm/cell_rms", "lstm/saturated", "rollout/state_rms")
    return dict(zip(tags, numbers, strict=True))


def choice_metrics(action: Any, masks: Any, space: Any, *, relevant: Tensor) -> dict[str, float]:
    """Return the frequency of each op and of each choice of a head where there was one, and of each op being possible.

    Actions and masks are those of a rollout, [T, N]; `relevant` [ops, heads] tells which heads matter for an op.
    """
    free = ~masks.forced
    matters = relevant.to(action.op.device)[action.op].bool() & free[..., None]  # [T, N, heads]
    metrics = {}
    for head, (name, choices) in enumerate(zip(space._fields, space, strict=True)):
        if len(choices) < 2 and name != "op":
            continue
        chosen = action[head][free if name == "op" else matters[..., head]]
        counts = torch.bincount(chosen, minlength=len(choices)).tolist()
        group = "rollout/op" if name == "op" else f"heads/{name}"
        metrics |= {f"{group}.{c}": n / max(1, sum(counts)) for c, n in zip(choices, counts, strict=True)}
    possible = masks.op.float().mean((0, 1)).tolist()  # [ops]
    metrics |= {f"masks/{op}": share for op, share in zip(space.op, possible, strict=True)}
    return metrics | {"masks/forced": 1.0 - free.float().mean().item()}


def phase_shares(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Return the seconds by phase as shares of the `elapsed` seconds; `other` is the rest."""
    shares = {f"time/share.{phase}": spent / elapsed for phase, spent in seconds.items()}
    return shares | {"time/share.other": 1.0 - sum(shares.values())}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of the process and of tensors on the GPU in MiB, and the share of the device's that is used.

    On a GPU the largest number so far counts as used.
    """
    metrics, used = {}, resident_memory()
    if used is not None:
        metrics["memory/process"] = used
    if device.type == "cuda":
        metrics["memory/cuda"] = torch.cuda.memory_allocated(device) / 2**20
        used = torch.cuda.max_memory_allocated(device) / 2**20
    return metrics if used is None else metrics | {"memory/share": used * 2**20 / total_memory(device)}


CUSTOM_SCALARS = {
    "Is the policy learning?": {
        "objective": ["Multiline", ["rollout/objective"]],
        "return, p10 p50 p90": ["Margin", ["rollout/return.p50", "rollout/return.p10", "rollout/return.p90"]],
        "explained variance": ["Multiline", ["train/explained_variance"]],
        "KL, two estimators": ["Multiline", ["train/kl", "train/kl_k1"]],
        "entropy by head": ["Multiline", [r"train/entropy\..*"]],
    },
    "What does the policy grow?": {
        "ops": ["Multiline", [r"rollout/op\..*"]],
        "fossilized, by blueprint": ["Multiline", ["blueprint/.*/kept"]],
        "contribution, by blueprint": ["Multiline", ["blueprint/.*/contribution"]],
        "reward terms": ["Multiline", ["reward/.*"]],
    },
    "Is anything wrong?": {
        "anomalies": ["Multiline", ["anomaly/.*"]],
        "Governor": ["Multiline", ["governor/.*"]],
        "gradient health": ["Multiline", [".*_health"]],
    },
    "How fast is it?": {
        "host epochs per second": ["Multiline", ["time/env_steps_per_second"]],
        "where time goes": ["Multiline", [r"time/share\..*"]],
        "memory": ["Multiline", ["memory/process", "memory/cuda"]],
    },
}
"""Custom-scalar charts by category. `Multiline` takes patterns of tags; `Margin` a tag, its lower and upper bound."""
