"""Metrics for plots, by the tags of docs/reference/telemetry.md, and charts. N hosts, K slots, T ticks of a rollout."""

from collections.abc import Iterable, Mapping, Sequence
from math import isnan
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
    is_training = ~hosts["ended"]
    live_seeds = seeds[is_training[:, None] & seeds["live"]]
    for name, table in (("host", hosts[is_training]), ("seed", live_seeds)):
        norms, healths = table["norm"], table["health"]
        if np.isfinite(norms).any():
            metrics[f"gradients/{name}_norm"] = norms[np.isfinite(norms)].mean()
            metrics[f"gradients/{name}_health"] = np.nanmean(healths)
    skipped_steps = {host: steps for host, steps in enumerate(hosts["skipped_steps"].tolist()) if not isnan(steps)}
    if skipped_steps:
        metrics |= {f"skipped_steps/host{host}": steps for host, steps in skipped_steps.items()}
        metrics["hosts/skipped_steps"] = sum(skipped_steps.values())
    if not np.isnan(hosts["suspicious"]).any():
        metrics |= {f"governor/{name}": hosts[name].sum() for name in ("suspicious", "rollbacks")}
        metrics["governor/ended"] = hosts["stopped"].sum()
        metrics["governor/vetoes"] = sum(isinstance(event, HostVeto) for event in tick.events)
    return {tag: float(value) for tag, value in metrics.items()}


def episode_metrics(last: Tick, tasks: Mapping[str, slice]) -> dict[str, float]:
    """Return metrics of the last step of an episode: means over all hosts, and over the hosts of each task."""
    hosts, seeds = last.hosts, last.slots
    metrics = {}
    for name in ("objective", "score", "parameters"):
        metrics[f"rollout/{name}"] = hosts[name].mean()
        metrics |= {f"tasks/{task}/{name}": hosts[name][of_task].mean() for task, of_task in tasks.items()}
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
    metrics = {"rollout/return": returns.mean().item()}
    for share, value in zip(RETURN_QUANTILES, quantiles, strict=True):
        metrics[f"rollout/return.p{100 * share:.0f}"] = value
    return metrics


def lstm_metrics(state: Iterable[Tensor]) -> dict[str, float]:
    """Return statistics of a recurrent state, hidden and cell [N, width]; nothing for a policy without memory."""
    hidden, cell = (part.float() for part in state)
    if not hidden.numel():
        return {}
    squares = torch.stack([hidden.square().mean(), cell.square().mean()])
    saturated = (hidden.abs() > LSTM_SATURATION).float().mean()
    numbers = torch.cat([squares.sqrt(), saturated[None], squares.mean().sqrt()[None]]).tolist()  # one transfer
    tags = ("lstm/hidden_rms", "lstm/cell_rms", "lstm/saturated", "rollout/state_rms")
    return dict(zip(tags, numbers, strict=True))


def choice_metrics(action: Any, masks: Any, space: Any, *, relevant: Tensor) -> dict[str, float]:
    """Return how often each op, and each choice of the other heads, was taken, and how often each op was possible.

    Only steps count in which the action was not forced and the head mattered. Actions and masks are those of a rollout,
    [T, N]; `relevant` [ops, heads] is 1 where a head matters for an op.
    """
    unforced = ~masks.forced
    matters = relevant.to(action.op.device)[action.op].bool() & unforced[..., None]  # [T, N, heads]
    metrics = {}
    for head, (name, choices) in enumerate(zip(space._fields, space, strict=True)):
        if len(choices) < 2 and name != "op":
            continue
        chosen = action[head][unforced if name == "op" else matters[..., head]]
        counts = torch.bincount(chosen, minlength=len(choices)).tolist()
        group, total = "rollout/op" if name == "op" else f"heads/{name}", max(1, sum(counts))
        metrics |= {f"{group}.{choice}": count / total for choice, count in zip(choices, counts, strict=True)}
    possible = masks.op.float().mean((0, 1)).tolist()  # [ops]
    metrics |= {f"masks/{op}": share for op, share in zip(space.op, possible, strict=True)}
    return metrics | {"masks/forced": 1.0 - unforced.float().mean().item()}


def phase_shares(seconds: Mapping[str, float], elapsed: float) -> dict[str, float]:
    """Return the seconds by phase as shares of the `elapsed` seconds; `other` is the rest."""
    shares = {f"time/share.{phase}": spent / elapsed for phase, spent in seconds.items()}
    return shares | {"time/share.other": 1.0 - sum(shares.values())}


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return the memory of the process and of tensors on the GPU in MiB, and the used share of the device's memory.

    On a GPU the share is that of the peak so far. Numbers that the system does not give are missing.
    """
    metrics, used_mib = {}, resident_memory()
    if used_mib is not None:
        metrics["memory/process"] = used_mib
    if device.type == "cuda":
        metrics["memory/cuda"] = torch.cuda.memory_allocated(device) / 2**20
        used_mib = torch.cuda.max_memory_allocated(device) / 2**20
    if used_mib is not None:
        metrics["memory/share"] = used_mib * 2**20 / total_memory(device)
    return metrics


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
