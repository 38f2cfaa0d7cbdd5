"""Threads executor: one worker thread per processor core, single-threaded operators, same results as the loop."""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.executors.loop import LoopExecutor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.ranks import local_world
from esper_lightning.tasks import Split, Task

Costs = WeakKeyDictionary[HostEnv, float]
"""Processor seconds of the last work on each environment, divided by the number of its modules: host and seeds."""


def usable_cores() -> int:
    """Return the number of processor cores for this process; all cores where the system does not tell.

    Processes of one run on one machine share its cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world())


def count_modules(env: HostEnv) -> int:
    """Return the number of modules of a host: itself and each of its seeds."""
    return 1 + sum(slot.occupied for slot in env.slots)


def _init_worker() -> None:
    # One thread per operator: operators on tiny hosts are too small to split, and other hosts use the other cores.
    torch.set_num_threads(1)
    # Reading it pins the value: until then another thread's set_num_threads would change it.
    torch.get_num_threads()


class ThreadsExecutor(LoopExecutor):
    """`LoopExecutor` with worker threads: each free worker takes the next environment.

    The costliest environments come first, so that no worker starts a long one when the others are done. With 48 digits
    hosts that all have different seeds, an epoch is 1 % (2 cores) to 14 % (16 cores) shorter than in random order.

    Python runs one thread at a time, but torch releases its lock in kernels and in the backward pass. Environments
    share no written state, so neither the number of workers nor their order affects results. The threads end with the
    executor.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.workers = ThreadPoolExecutor(usable_cores(), "host", _init_worker)
        self.training_costs, self.validation_costs = Costs(), Costs()

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        return self._run_in_workers(lambda env: self._train(env, data), envs, self.training_costs)

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        def work(env: HostEnv) -> Tensor:
            with torch.inference_mode():  # local to a thread
                return self._measure(env, data, env.variants())

        return self._run_in_workers(work, envs, self.validation_costs)

    def _run_in_workers(self, work: Callable[[HostEnv], Tensor], envs: Sequence[HostEnv], costs: Costs) -> Tensor:
        """Run `work` on all environments in the worker threads. Returns its rows in the order of `envs`."""

        def timed_work(i: int) -> tuple[Tensor, float]:
            begin = time.thread_time()  # excludes the time spent waiting for other workers
            return work(envs[i]), time.thread_time() - begin

        order = sorted(range(len(envs)), key=lambda i: -count_modules(envs[i]) * costs.get(envs[i], 1.0))
        num_threads = torch.get_num_threads()
        try:
            with self.kernels(envs[0].device):
                results = dict(zip(order, self.workers.map(timed_work, order), strict=True))
        finally:
            torch.set_num_threads(num_threads)  # a worker sets it to 1 for the whole process
        for i, (_, seconds) in results.items():
            costs[envs[i]] = seconds / count_modules(envs[i])
        return torch.stack([results[i][0] for i in range(len(envs))])
