"""Threads executor: one worker thread per processor core, single-threaded operators, same results as the loop."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from esper_lightning.envs.executors.loop import LoopExecutor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.runtime.ranks import local_world
from esper_lightning.tasks import Split, Task


def usable_cores() -> int:
    """Return the number of processor cores for this process; all cores where the system does not tell.

    Processes of one run on one machine share its cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world())


def _init_worker() -> None:
    # One thread per operator: operators on tiny hosts are too small to split, and other hosts use the other cores.
    torch.set_num_threads(1)
    # Reading it pins the value: until then another thread's set_num_threads would change it.
    torch.get_num_threads()


class ThreadsExecutor(LoopExecutor):
    """`LoopExecutor` with worker threads: each free worker takes the next environment.

    The largest hosts come first, so that no worker starts a long one when the others are done.

    Python runs one thread at a time, but torch releases its lock in kernels and in the backward pass. Environments
    share no written state, so neither the number of workers nor their order affects results. The threads end with the
    executor.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.workers = ThreadPoolExecutor(usable_cores(), "host", _init_worker)

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        return self._run_in_workers(lambda env: self._train(env, data), envs)

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        def work(env: HostEnv) -> Tensor:
            with torch.inference_mode():  # local to a thread
                return self._measure(env, data)

        return self._run_in_workers(work, envs)

    def _run_in_workers(self, work: Callable[[HostEnv], Tensor], envs: Sequence[HostEnv]) -> Tensor:
        """Run `work` on all environments in the worker threads. Returns its rows in the order of `envs`."""
        largest_first = sorted(envs, key=lambda env: -count_parameters(env.network))
        num_threads = torch.get_num_threads()
        try:
            with self.kernels(envs[0].device):
                rows = dict(zip(largest_first, self.workers.map(work, largest_first), strict=True))
        finally:
            torch.set_num_threads(num_threads)  # a worker sets it to 1 for the whole process
        return torch.stack([rows[env] for env in envs])
