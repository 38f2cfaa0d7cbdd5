"""Resuming with another number of environments, or on another type of device: the run continues with a new rollout.

Hosts cannot be divided, and the state of a random generator cannot move to another type of device.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_lightning.serialization import generator_device


def resize_environments(checkpoint: dict[str, Any], n_envs: int) -> None:
    """Change `checkpoint` in place so that it resumes at the start of a rollout with `n_envs` environments.

    An unfinished rollout is discarded; the policy, its optimizer and its normalisers do not change.
    """
    fit, loop = checkpoint["loops"]["fit_loop"], checkpoint["callbacks"]["RolloutState"]["loop"]
    batches, epochs = fit["epoch_loop.batch_progress"], fit["epoch_progress"]
    played = 0 if batches["is_last_batch"] else batches["current"]["ready"]
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] -= 0 if played == 0 else batches["current"]["completed"]
    for count in batches["current"]:
        batches["total"][count] -= batches["current"][count] if played else 0
        batches["current"][count] = 0
    batches["is_last_batch"] = False
    for progress in epochs.values():
        progress["ready"] = progress["started"] = progress["completed"] = progress["processed"]
    for loader in fit["state_dict"]["combined_loader"]:
        loader["position"] = 0
    loop["ticks"] -= played
    loop["episode"] -= played > 0
    saved = loop["buffer"]
    loop |= map_rows(loop, lambda part, axis: part.new_zeros(*[0] * axis, n_envs, *part.shape[axis + 1 :]))
    loop["starts"] = torch.ones(n_envs, dtype=torch.bool)
    if "sequence_states" in saved:
        states = saved["sequence_states"]
        loop["buffer"]["sequence_states"] = [part.new_zeros(len(part), n_envs, *part.shape[2:]) for part in states]


def map_rows(loop: dict[str, Any], change: Callable[[Tensor, int], Tensor]) -> dict[str, Any]:
    """Return the parts of a saved rollout that have a row per environment, each tensor changed by a function.

    Args:
        loop: State of a `RolloutCollector`.
        change: Function of a tensor and the axis of its environments: 0, or 1 behind the ticks.
    """
    buffer = loop["buffer"]
    changed = {
        "state": [change(part, 0) for part in loop["state"]],
        "starts": change(loop["starts"], 0),
        **{name: change(loop[name], 1) for name in ("raw_features", "raw_privileged", "final_values") if name in loop},
        "buffer": {"ticks": [change(part, 1) for part in buffer["ticks"]]},
    }
    changed["buffer"]["state"] = [change(part, 0) for part in buffer["state"]]
    if "sequence_states" in buffer:
        changed["buffer"]["sequence_states"] = [change(part, 1) for part in buffer["sequence_states"]]
    return changed


def saved_on_another_device(checkpoint: dict[str, Any], device: torch.device) -> bool:
    """Return whether the run that wrote `checkpoint` was on another type of device than `device`."""
    saved = checkpoint["callbacks"]["RolloutState"]["loop"]["generator"]
    return generator_device(saved) not in (None, device.type)


def move_environments(
    checkpoint: dict[str, Any], pool: dict[str, Any], n_envs: int, *, device: torch.device, rng_seed: int
) -> None:
    """Change `checkpoint` in place so that it resumes on another type of device, at the start of a rollout.

    Args:
        checkpoint: Checkpoint of a run on another type of device.
        pool: State of the pool in it.
        n_envs: Number of environments from here on.
        device: Device of this run.
        rng_seed: RNG seed of the run. Exploration continues with a new generator, seeded by it and the next episode.
    """
    resize_environments(checkpoint, n_envs)
    loop = checkpoint["callbacks"]["RolloutState"]["loop"]
    new_rng_seed = int(np.random.SeedSequence([rng_seed, loop["episode"]]).generate_state(1)[0])
    loop["generator"] = torch.Generator(device).manual_seed(new_rng_seed).get_state()
    pool["envs"] = []  # their generators cannot move either
