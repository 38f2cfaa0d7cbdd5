"""Measurements of hosts as Python numbers, their layout in packed tensors, and transfers between CPU and device.

N environments, K slots, V = K + 2 validated combinations of seeds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.growth.gates import GradientStats

POINTS_PER_UNIT = 100.0
"""Points in a score of 1: contributions and gains of scores are in points."""

NUM_GRADIENT_STATS = len(GradientStats._fields)


class LossAndScore(NamedTuple):
    """Mean loss and score over one split of the data."""

    loss: float
    score: float


class Validation(NamedTuple):
    """Scores of one host in one validation pass, by the active seeds."""

    all_seeds: LossAndScore  # all blended ones
    without: list[LossAndScore]  # leave-one-out, [K]: all seeds except the one in this slot
    fossilized: LossAndScore  # fossilized seeds only, which are the ones that remain at the horizon

    @property
    def contributions(self) -> list[float]:
        """Points (of 100) lost without the seed in each slot, [K]; 0 for a seed that is not blended."""
        return [POINTS_PER_UNIT * (self.all_seeds.score - rest.score) for rest in self.without]

    def pairs(self) -> list[list[float]]:  # [V][2]
        """Return losses and scores as plain data, in the order of `HostEnv.variants`."""
        return [list(pair) for pair in (self.all_seeds, *self.without, self.fossilized)]

    @classmethod
    def from_pairs(cls, pairs: Iterable[Iterable[float]]) -> "Validation":
        """Return the validation with these losses and scores; see `pairs`."""
        all_seeds, *without, fossilized = (LossAndScore(*pair) for pair in pairs)
        return cls(all_seeds, without, fossilized)


class TrainingStats(NamedTuple):
    """Statistics of one epoch of host training. Gradients are those of the last minibatch, before clipping."""

    loss: float  # mean over minibatches
    score: float  # mean over minibatches
    skipped_steps: int  # because gradients overflowed fp16
    host_gradient: GradientStats
    seed_gradients: list[GradientStats]  # [K]


class EpochResult(NamedTuple):
    """Results of one host epoch: training, then validation."""

    training: TrainingStats
    validation: Validation


@dataclass(kw_only=True)
class History:
    """Metrics of each epoch of the episode; validation loss and score also have an entry before the first epoch."""

    train_loss: list[float] = field(default_factory=list)
    train_score: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    score: list[float] = field(default_factory=list)


def upload(
    numbers: Sequence[float] | Sequence[Sequence[float]],
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


def pack_epochs(trained: Tensor, validated: Tensor) -> Tensor:  # [N, 3 + 4·(1 + K)], [N, 2, V] -> [N, …]
    """Join the results of training and validation in one tensor, for a single transfer to the CPU."""
    return torch.cat([trained, validated.flatten(1)], 1)


def unpack_epochs(packed: Tensor, slots: int) -> list[EpochResult]:  # [N, …], on the CPU
    """Unpack the tensor of `pack_epochs` for hosts with K = `slots` slots."""
    size = 3 + NUM_GRADIENT_STATS * (1 + slots)
    results, validations = [], unpack_validations(packed[:, size:].unflatten(1, (2, -1)))
    for row, validated in zip(packed[:, :size].tolist(), validations, strict=True):
        loss, score, skipped_steps = row[:3]
        host, *seeds = (GradientStats(*row[i : i + NUM_GRADIENT_STATS]) for i in range(3, size, NUM_GRADIENT_STATS))
        results.append(EpochResult(TrainingStats(loss, score, int(skipped_steps), host, seeds), validated))
    return results


def unpack_validations(validated: Tensor) -> list[Validation]:  # [N, 2, V], on the CPU
    """Unpack losses and scores of all variants, in the order of `HostEnv.variants`."""
    return [Validation.from_pairs(pairs) for pairs in validated.transpose(1, 2).tolist()]
