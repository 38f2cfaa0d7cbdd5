"""Hosts on several processor cores: a worker thread per core, single-threaded operators, equal results."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.execution.loop import LoopExecutor, convolutions
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Split, Task


def usable_cores() -> int:
    """Processor cores that this process may run on; where the system does not tell, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Costs:
    """What one kind of work, training or validation, takes per environment."""

    def __init__(self) -> None:
        self._seconds_per_part: WeakKeyDictionary[HostEnv, float] = WeakKeyDictionary()

    def expected(self, env: HostEnv) -> float:
        """As last time while its topology stays; else in proportion to the host and its seeds, a part each."""
        return _parts(env) * self._seconds_per_part.get(env, 1.0)

    def record(self, env: HostEnv, seconds: float) -> None:
        self._seconds_per_part[env] = seconds / _parts(env)


def _parts(env: HostEnv) -> int:
    return 1 + sum(slot.occupied for slot in env.slots)


def _begin_worker() -> None:
    # One thread per operator: operators on tiny hosts are too small to split, and the cores are taken by hosts.
    torch.set_num_threads(1)
    torch.get_num_threads()  # makes it hold: a thread's number is what was set last, anywhere, before it first asks


class ThreadsExecutor(LoopExecutor):
    """As LoopExecutor, with the environments dealt out to worker threads: whoever is free takes the next.

    The costliest come first, so that no worker begins a long one when the others are done: by the costs of 48 hosts of
    the digits task with other seeds each, an epoch is 1 % (2 cores) to 14 % (16 cores) shorter than in random order.
    Python itself runs one thread at a time, but torch's kernels and the backward pass let the others run. Environments
    share nothing that is written, so neither the number of workers nor their order changes any result. The threads end
    with the executor.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.workers = ThreadPoolExecutor(usable_cores(), "host", _begin_worker)
        self.training_costs = Costs()
        self.validation_costs = Costs()

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        return self._deal_out(lambda env: self._train(env, data), envs, self.training_costs)

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        def work(env: HostEnv) -> Tensor:
            with torch.inference_mode():  # holds for one thread
                return self._measure(env, data, env.variants())

        return self._deal_out(work, envs, self.validation_costs)

    def _deal_out(self, work: Callable[[HostEnv], Tensor], envs: Sequence[HostEnv], costs: Costs) -> Tensor:
        """The rows of `work`, in the order of `envs`."""

        def timed(i: int) -> tuple[Tensor, float]:
            begin = time.thread_time()  # of this worker alone: waiting for the others is no cost
            return work(envs[i]), time.thread_time() - begin

        order = sorted(range(len(envs)), key=lambda i: costs.expected(envs[i]), reverse=True)
        with ExitStack() as afterwards:
            afterwards.enter_context(convolutions(self.training.onednn))
            # Threads that others begin later shall have as many per operator as if there were no workers.
            afterwards.callback(torch.set_num_threads, torch.get_num_threads())
            done = dict(zip(order, self.workers.map(timed, order), strict=True))
        for i, (_, seconds) in done.items():
            costs.record(envs[i], seconds)
        return torch.stack([done[i][0] for i in range(len(envs))])
