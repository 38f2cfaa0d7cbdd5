"""Transfers between CPU and device, and the layout of measurements in packed tensors.

N environments, K slots, V validated combinations of seeds: K + 2, or K + 3 if one without seeds is included.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from esper_lightning.envs.measurements import EpochResult, LossAndScore, TrainingStats, Validation
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.gates import GradientStats
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage

NUM_GRADIENT_STATS = len(GradientStats._fields)


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]] | np.ndarray,
    device: torch.device,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return a tensor of `numbers` on `device`."""
    return copy_to_device(torch.tensor(numbers, dtype=dtype), device)


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to `device`; on CUDA without synchronization, since later work queues behind the copy."""
    if device.type != "cuda":
        return tensor.to(device)
    # torch does not reuse this pinned memory before the copy has finished.
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """Copy a tensor to the CPU. Only here does an environment step wait for the current stream of its device."""
    if tensor.device.type != "cuda":
        return tensor.cpu()
    numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    numbers.copy_(tensor, non_blocking=True)
    # The copy is asynchronous; this event marks its end.
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return numbers


def pack_training(
    means: Tensor,  # [..., 2] mean loss and score
    skipped_steps: Tensor,  # [...]
    gradients: Tensor,  # [..., 1 + K, 4] GradientStats of the host, then of the seed in each slot
) -> Tensor:  # [..., 3 + 4·(1 + K)]
    """Pack the statistics of a training epoch into rows on their device; `unpack_epochs` unpacks them."""
    return torch.cat([means, skipped_steps.unsqueeze(-1), gradients.flatten(-2)], -1)


def variants_to_validate(slots: Sequence[SeedSlot], *, host_only: bool) -> list[SeedVariant]:
    """Return the combinations of seeds [V] to validate a host with, in the order that `unpack_validations` expects.

    Equal combinations are computed once; that without a seed that is not judged is the whole one. `host_only`: with
    every seed that is judged switched off, too.
    """
    blended = frozenset(slot.name for slot in slots if slot.blended)
    judged = frozenset(slot.name for slot in slots if slot.is_judged)
    without = [blended - ({slot.name} & judged) for slot in slots]
    without_seeds = [blended - judged] if host_only else []
    fossilized = frozenset(slot.name for slot in slots if slot.stage is Stage.FOSSILIZED)
    return [blended, *without, *without_seeds, fossilized]


def pack_epochs(trained: Tensor, validated: Tensor) -> Tensor:  # [N, 3 + 4·(1 + K)], [N, 2, V] -> [N, …]
    """Join the results of training and validation in one tensor, for a single transfer to the CPU."""
    return torch.cat([trained, validated.flatten(1)], 1)


def unpack_epochs(packed: Tensor, slots: int) -> list[EpochResult]:  # [N, …], on the CPU
    """Unpack the tensor of `pack_epochs` for hosts with K = `slots` slots."""
    size = 3 + NUM_GRADIENT_STATS * (1 + slots)
    validations = unpack_validations(packed[:, size:].unflatten(1, (2, -1)), slots)
    rows = packed[:, :size].tolist()
    return [EpochResult(_training_stats(*row), validated) for row, validated in zip(rows, validations, strict=True)]


def _training_stats(loss: float, score: float, skipped_steps: float, *numbers: float) -> TrainingStats:
    host, *seeds = (
        GradientStats(*numbers[i : i + NUM_GRADIENT_STATS]) for i in range(0, len(numbers), NUM_GRADIENT_STATS)
    )
    return TrainingStats(loss, score, int(skipped_steps), host, seeds)


def unpack_validations(validated: Tensor, slots: int) -> list[Validation]:  # [N, 2, V], on the CPU
    """Unpack losses and scores of all variants (see `variants_to_validate`) for hosts with K = `slots` slots."""
    validations = []
    for losses, scores in validated.tolist():
        all_seeds, *scores = (LossAndScore(*pair) for pair in zip(losses, scores, strict=True))
        without, (*host_only, fossilized) = scores[:slots], scores[slots:]
        validations.append(Validation(all_seeds, without, fossilized, *host_only))
    return validations
