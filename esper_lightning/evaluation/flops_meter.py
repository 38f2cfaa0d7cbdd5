"""Fixed data order for all controllers, and a count of training compute."""

from collections.abc import Sequence
from functools import partial
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.flops import HostFlops, measure_flops
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.tasks import Batches

PASSES_PER_STEP = 3
"""Cost of a training step in forward passes: the forward pass and one backward pass each for inputs and weights.
Source: Kaplan et al., 2020, https://arxiv.org/abs/2001.08361."""


class FlopsMeter:
    """Counts training FLOPs of each host and fixes the data order, as a context manager around an episode.

    Enter it after the pool's reset.

    *Data order.* A host draws the weights of its seeds from the same random generator as the order of its data, so a
    germination would change all later batches. Here every host epoch starts with random numbers that depend on the
    host's RNG seed and the tick alone: all controllers see the same batches at the same tick, whatever their actions.

    *Compute.* Floating-point operations of training: forward pass * 3 * training samples, summed over ticks. The
    forward pass includes the host and every seed in a slot with its gate, from germination on (a seed that learns
    behind the host runs, too). The count follows PyTorch's FlopCounterMode: two per multiply-add of matrix products,
    convolutions and attention. It excludes normalisation, elementwise operations, the optimizer step, validation and
    counterfactual passes. It does not subtract the input gradients that the first layer and seeds with detached input
    do not need. Epochs that a rollback undid count.

    Attributes:
        flops: FLOPs of each host so far.
        ticks: Host epochs in which each host has trained.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.flops = [0] * pool.n_envs
        self.ticks = [0] * pool.n_envs

    def __enter__(self) -> "FlopsMeter":
        example = self.pool.data.train.inputs[:1]
        self.compute = [host_compute(env, example) for env in self.pool.envs]  # hosts may differ
        # All executors ask each host for its batches once per tick, after the actions and before it trains.
        for i, env in enumerate(self.pool.envs):
            env.data_order, env.on_batches = epoch_rng_seed, partial(self._count_epoch, i, env)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for env in self.pool.envs:
            env.data_order = env.on_batches = None

    def _count_epoch(self, i: int, env: HostEnv, batches: Batches) -> None:
        self.flops[i] += step_flops(self.compute[i], env.slots) * batches.indices.numel()
        self.ticks[i] += 1


def step_flops(compute: HostFlops, slots: Sequence[SeedSlot]) -> int:
    """Return the FLOPs of a training step for one sample, of the host and its seeds."""
    return PASSES_PER_STEP * (compute.host + sum(compute.seed_flops(slot) for slot in slots))


def epoch_rng_seed(host_rng_seed: int, tick: int) -> int:
    """Return the RNG seed of the data order in one host epoch."""
    return int(np.random.SeedSequence([host_rng_seed, tick]).generate_state(1, np.uint64)[0]) >> 1


def host_compute(env: HostEnv, example: Tensor) -> HostFlops:
    """Return the compute of the host's forward pass.

    The slots must be empty. `example` [1, …] is one sample of the host's data.
    """
    if env.flops is not None:
        return env.flops
    with torch.compiler.set_stance("force_eager"):  # FLOPs of compiled code cannot be counted
        return measure_flops(env.network, example.to(env.device))
