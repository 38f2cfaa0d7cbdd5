"""Hosts on several processor cores: a worker thread per core, single-threaded operators, equal results."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from esper_lightning.envs.execution.loop import LoopExecutor, convolutions
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Split, Task


def usable_cores() -> int:
    """Processor cores that this process may run on; where the system does not tell, all there are."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class ThreadsExecutor(LoopExecutor):
    """As LoopExecutor, with the environments dealt out to worker threads: whoever is free takes the next.

    Python itself runs one thread at a time, but torch's kernels and the backward pass let the others run. Environments
    share nothing that is written, so neither the number of workers nor their order changes any result.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        # One thread per operator: operators on tiny hosts are too small to split, and the cores are taken by hosts.
        self.workers = ThreadPoolExecutor(usable_cores(), "host", torch.set_num_threads, (1,))

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with convolutions(self.training.onednn):
            return torch.stack(list(self.workers.map(lambda env: self._train(env, data), envs)))

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        def work(env: HostEnv) -> Tensor:
            with torch.inference_mode():  # holds for one thread
                return self._measure(env, data, env.variants())

        with convolutions(self.training.onednn):
            return torch.stack(list(self.workers.map(work, envs)))
