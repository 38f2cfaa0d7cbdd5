"""Resuming with another number of environments, or on another type of device: the run continues with a new rollout.

Hosts cannot be divided, and the state of a random generator cannot move to another type of device.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from esper_lightning.serialization.checks import generator_device


def count_saved_envs(checkpoint: dict[str, Any]) -> int:
    """Return the number of environments of the run that wrote `checkpoint`."""
    return len(checkpoint["HostPoolData"]["pool"]["envs"])


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
    loop["state"] = [_zero_rows(part, n_envs) for part in loop["state"]]
    loop["starts"] = torch.ones(n_envs, dtype=torch.bool)
    loop["raw_features"] = _zero_ticks(loop["raw_features"], n_envs)
    if "raw_privileged" in loop:
        loop["raw_privileged"] = _zero_ticks(loop["raw_privileged"], n_envs)
    loop["buffer"] = {
        "ticks": [_zero_ticks(part, n_envs) for part in loop["buffer"]["ticks"]],
        "state": [_zero_rows(part, n_envs) for part in loop["buffer"]["state"]],
    }


def saved_on_another_device(checkpoint: dict[str, Any], device: torch.device) -> bool:
    """Return whether the run that wrote `checkpoint` was on another type of device than `device`."""
    saved = checkpoint["callbacks"]["RolloutState"]["loop"]["generator"]
    return generator_device(saved) not in (None, device.type)


def move_environments(checkpoint: dict[str, Any], n_envs: int, *, device: torch.device, rng_seed: int) -> None:
    """Change `checkpoint` in place so that it resumes on another type of device, at the start of a rollout.

    Args:
        checkpoint: Checkpoint of a run on another type of device.
        n_envs: Number of environments from here on.
        device: Device of this run.
        rng_seed: RNG seed of the run. Exploration continues with a new generator, seeded by it and the next episode.
    """
    resize_environments(checkpoint, n_envs)
    loop = checkpoint["callbacks"]["RolloutState"]["loop"]
    new_rng_seed = int(np.random.SeedSequence([rng_seed, loop["episode"]]).generate_state(1)[0])
    loop["generator"] = torch.Generator(device).manual_seed(new_rng_seed).get_state()
    checkpoint["HostPoolData"]["pool"]["envs"] = []  # their generators cannot move either


def _zero_rows(part: Tensor, n_envs: int) -> Tensor:  # [saved N, …] -> [N, …], zeros
    return part.new_zeros(n_envs, *part.shape[1:])


def _zero_ticks(part: Tensor, n_envs: int) -> Tensor:  # [ticks, saved N, …] -> [0, N, …]
    return part.new_zeros(0, n_envs, *part.shape[2:])
