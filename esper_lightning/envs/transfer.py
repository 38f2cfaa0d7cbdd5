"""Numbers on their way to a device and back, and the one place that knows how measurements are laid out in tensors.

N environments, K slots, V validated combinations of seeds: K + 2, or K + 3 with the host alone.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from esper_lightning.envs.measured import EpochResult, Score, TrainingStats, Validation
from esper_lightning.growth.counterfactual import Variant, leave_one_out
from esper_lightning.growth.gradients import GradientStats

GRADIENT = len(GradientStats._fields)


def upload(numbers: Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `numbers` on `device`."""
    return send(torch.tensor(numbers, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which lies on the CPU, on `device`; on CUDA nobody waits: the copy is queued before what needs it."""
    if device.type != "cuda":
        return tensor.to(device)
    # Pinned memory of torch's own, which it does not give away again before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU: a tick's one way to read what is on its device, and the one place where a tick waits for it.

    What the current stream holds is waited for, and no more than that: not the whole device.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    numbers.copy_(tensor, non_blocking=True)
    # The copy is only queued: until this event has passed, the numbers are not there.
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return numbers


def pack_training(
    means: Tensor,  # [..., 2] mean loss and accuracy
    skipped_steps: Tensor,  # [...]
    gradients: Tensor,  # [..., 1 + K, 4] GradientStats of the host, then of the seed in each slot
) -> Tensor:  # [..., 3 + 4·(1 + K)]
    """Packs the statistics of a training epoch into rows, on their device; `unpack_epochs` reads them."""
    return torch.cat([means, skipped_steps.unsqueeze(-1), gradients.flatten(-2)], -1)


def variants_to_validate(slots: Iterable[str], fossilized: Variant, host_only: bool) -> list[Variant]:
    """Combinations of seeds [V] that a host is validated with, in the order in which `unpack_validations` expects them.

    Args:
        slots: Names of the host's slots.
        fossilized: Names of those whose seed is fossilized.
        host_only: Validate the host with every seed switched off, too.
    """
    none = [frozenset[str]()] if host_only else []
    return [*leave_one_out(slots), *none, fossilized]


def pack_epochs(trained: Tensor, validated: Tensor) -> Tensor:  # [N, 3 + 4·(1 + K)], [N, 2, V] -> [N, …]
    """Joins an executor's results to one tensor, so that one transfer brings them to the CPU."""
    return torch.cat([trained, validated.flatten(1)], 1)


def unpack_epochs(packed: Tensor, slots: int) -> list[EpochResult]:  # [N, …], on the CPU
    """Reads what `pack_epochs` has joined, for hosts of K = `slots` slots."""
    size = 3 + GRADIENT * (1 + slots)
    validations = unpack_validations(packed[:, size:].unflatten(1, (2, -1)), slots)
    rows = packed[:, :size].tolist()
    return [EpochResult(_training_stats(*row), validated) for row, validated in zip(rows, validations, strict=True)]


def _training_stats(loss: float, accuracy: float, skipped_steps: float, *numbers: float) -> TrainingStats:
    host, *seeds = (GradientStats(*numbers[i : i + GRADIENT]) for i in range(0, len(numbers), GRADIENT))
    return TrainingStats(loss, accuracy, int(skipped_steps), host, seeds)


def unpack_validations(validated: Tensor, slots: int) -> list[Validation]:  # [N, 2, V], on the CPU
    """Reads losses and accuracies of every variant (see `variants_to_validate`), for hosts of K = `slots` slots."""
    validations = []
    for losses, accuracies in validated.tolist():
        everything, *scores = (Score(*pair) for pair in zip(losses, accuracies, strict=True))
        without, (*none, committed) = scores[:slots], scores[slots:]
        validations.append(Validation(everything, without, committed, *none))
    return validations
