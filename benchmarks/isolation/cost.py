"""Processor time of a tick with learning seeds in all slots, relative to isolation straight_through in the same run.

What `proximal` adds is the function `proximal_gradient`. Its own time is measured, too, over that of the rest of the
tick: unlike a ratio of two ticks it hardly depends on what else the machine does.
"""

import time
from collections.abc import Sequence
from statistics import median, quantiles
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from esper_lightning.envs import EnvConfig, HostPool
from esper_lightning.envs.execution.fused import stacked_slot
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth import LifecycleConfig, blend
from esper_lightning.growth.blend import Isolation, proximal_gradient
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits


class TimedPull:
    """`proximal_gradient`, with the processor seconds that were spent in it."""

    seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        begin = time.thread_time()
        gradient = proximal_gradient(*args, **kwargs)
        self.seconds += time.thread_time() - begin
        return gradient


def learning_pool(isolation: Isolation, executor: Literal["loop", "fused"], base: int) -> HostPool:
    """Return a pool of four hosts with `base` channels in the first block and a learning seed in every slot."""
    task = Digits()
    config = EnvConfig(
        executor=executor,
        training=HostTraining(batches=8, onednn=False),
        lifecycle=LifecycleConfig(isolation=isolation, training_ticks=10_000),
    )

    def host(input_shape: Sequence[int], outputs: int) -> nn.Module:
        return CNN(input_shape, outputs, base=base, slots=["block1.pool", "block2.pool", "block3.pool"])

    pool = HostPool(task, task.load(), host, config=config, n_envs=4, device=torch.device("cpu"))
    for env in pool.envs:
        for name, slot in env.growing.slots.items():
            env.growing.germinate(name, "conv_light")
            slot.move_to(Stage.TRAINING)
    return pool


def measure_cost(repeats: int, base: int) -> None:
    """Print the processor time of training and validation, relative to straight_through."""
    pull = TimedPull()
    blend.proximal_gradient = stacked_slot.proximal_gradient = pull
    print("executor isolation          median (quartiles)")
    executors: tuple[Literal["loop", "fused"], ...] = ("loop", "fused")
    for executor in executors:
        isolations = [name for name in get_args(Isolation) if executor == "loop" or name != "trial"]
        pools = {name: learning_pool(name, executor, base) for name in isolations}
        shares: list[float] = []
        seconds: dict[str, list[float]] = {name: [] for name in isolations}
        for repeat in range(repeats + 1):
            for name, pool in pools.items():
                begin, pull.seconds = time.process_time(), 0.0
                pool.executor.train_and_validate(pool.envs, pool.data.train, pool.data.validation, clock=pool.clock)
                if repeat:  # the first tick warms up
                    seconds[name].append(time.process_time() - begin)
                    if name == "proximal":
                        shares.append(pull.seconds / (seconds[name][-1] - pull.seconds))
        for name in isolations:
            ratios = [a / b for a, b in zip(seconds[name], seconds["straight_through"], strict=True)]
            low, _, high = quantiles(ratios)
            print(f"{executor:8} {name:18} {median(ratios):6.3f} ({low:.3f} … {high:.3f})", flush=True)
        low, _, high = quantiles(shares)
        print(
            f"{executor:8} {'proximal_gradient':18} {median(shares):6.3f} ({low:.3f} … {high:.3f})",
            flush=True,
        )
