"""What a comparison needs beside the pool: the same data order for every controller, and training compute counted."""

from functools import partial
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.envs.compute import Compute, measure_compute
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.tasks import Batches

PASSES = 3
"""Forward passes that a training step costs: itself, and backward one each for the inputs' and the weights' gradients
(Kaplan et al., 2020, https://arxiv.org/abs/2001.08361)."""


class Meter:
    """Watches the hosts of a pool train, as a context manager around an episode, entered after the pool's reset.

    *Data order.* A host draws the weights of its seeds from the same generator as the order of its data, so that a
    germination would change all batches after it. Here every host epoch begins with random numbers that depend on the
    host's seed and the tick alone: all controllers see the same batches at the same tick, whatever they do.

    *Compute.* Floating-point operations of training: forward pass × 3 × samples that were trained on, tick by tick with
    what was attached in that tick: the host, and every seed in a slot, its gate included, from germination on (a seed
    behind the straight-through estimator runs, too). As PyTorch's FlopCounterMode counts, two per multiply-add of
    matrix products, convolutions and attention; normalisation, elementwise work, the optimizer's step, validation and
    counterfactual passes are not part of it. That the first layer needs no gradient of its input, nor a seed whose
    input is detached, is not taken off. Epochs that a rollback undid were paid for, and count.

    Attributes:
        flops: Of each host so far.
        ticks: Host epochs in which each host has trained.
    """

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.flops = [0] * pool.n_envs
        self.ticks = [0] * pool.n_envs

    def __enter__(self) -> "Meter":
        example = self.pool.data.train.inputs[:1]
        self.compute = [compute_of(env, example) for env in self.pool.envs]  # hosts may differ
        # All executors ask each host for its batches once a tick, after the actions and before it trains.
        for i, env in enumerate(self.pool.envs):
            env.follow_batches(data_seed, partial(self._count, i, env))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for env in self.pool.envs:
            env.follow_batches()

    def _count(self, i: int, env: HostEnv, batches: Batches) -> None:
        compute = self.compute[i]
        forward = compute.host + sum(compute.of(slot) for slot in env.slots)
        self.flops[i] += PASSES * forward * batches.indices.numel()
        self.ticks[i] += 1


def data_seed(seed: int, tick: int) -> int:
    """Decides the order of data in one host epoch."""
    return int(np.random.SeedSequence([seed, tick]).generate_state(1, np.uint64)[0]) >> 1


def compute_of(env: HostEnv, example: Tensor) -> Compute:
    """What the host's forward pass costs; its slots must be empty. `example` [1, …] is a sample of its data."""
    if env.compute is not None:
        return env.compute
    with torch.compiler.set_stance("force_eager"):  # what is compiled cannot be counted
        return measure_compute(env.network, example.to(env.device))
