"""Executors that run several hosts at the same time, in worker threads or CUDA streams, with the results of `loop`.

Hosts with dropout are an exception in worker threads, which share one generator of random numbers.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.executors.loop import HostEpoch, LoopExecutor, isolate_oom, nan_training_row, stack_rows
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.machine import PhaseClock
from esper_lightning.runtime.nested import copy_module
from esper_lightning.runtime.ranks import local_world
from esper_lightning.tasks import Split, Task


def usable_cores() -> int:
    """Return the number of processor cores for this process; processes of one run on one machine share its cores."""
    # Not every system tells which cores a process may use.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // local_world())


def _init_worker() -> None:
    # One thread per operator: operators on tiny hosts are too small to split, and other hosts use the other cores.
    torch.set_num_threads(1)
    torch.get_num_threads()  # pins the value: until then another thread's set_num_threads would change it


class ThreadsExecutor(LoopExecutor):
    """`LoopExecutor` with one worker thread per processor core: each free worker takes the next environment.

    Python runs one thread at a time, but torch releases its lock in kernels and in the backward pass. Environments
    share no written state but torch's generator, so neither the number of workers nor their order affects results of
    hosts without dropout. The threads end with the executor.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.workers = ThreadPoolExecutor(usable_cores(), "host", _init_worker)

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        super().prepare(envs, data)
        for env in envs:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                before = torch.get_rng_state()
                copy_module(env.network).train()(data.batch(slice(self.training.batch_size)).inputs)
                if not torch.equal(torch.get_rng_state(), before):
                    print_status(
                        "executor threads: hosts draw random numbers in training (dropout), in an order that depends "
                        "on the threads, so runs differ by chance; env.executor loop repeats them bit for bit"
                    )
                    return

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        # While torch compiles, no other thread may run compiled code: one host of each new structure trains alone.
        new = {env.structure: env for env in envs if not self.compiled.has_code(env.structure)}
        rows: dict[HostEnv, Tensor] = {}
        for group in filter(None, (*([env] for env in new.values()), [env for env in envs if env not in new.values()])):
            rows |= zip(group, self._run_in_workers(lambda env: self._train(env, data), group), strict=True)
        return torch.stack([rows[env] for env in envs])

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        return self._run_in_workers(lambda env: self._measure(env, data), envs)

    def _run_in_workers(self, work: Callable[[HostEnv], Tensor], envs: Sequence[HostEnv]) -> Tensor:
        """Run `work` on all environments in the worker threads. Returns its rows in the order of `envs`."""
        # So that no worker starts a long one when the others are done.
        largest_first = sorted(envs, key=lambda env: -count_parameters(env.network))
        num_threads = torch.get_num_threads()
        try:
            with self.kernels_of_settings(envs[0].device):
                rows = dict(zip(largest_first, self.workers.map(work, largest_first), strict=True))
        finally:
            torch.set_num_threads(num_threads)  # a worker sets it to 1 for the whole process
        return torch.stack([rows[env] for env in envs])


class StreamsExecutor(LoopExecutor):
    """`LoopExecutor` with one CUDA stream per environment. Batches are the outer loop, environments the inner one.

    Environments may be on several GPUs. The CPU never waits, and there are no races: between two events all tensors of
    a host are touched in its own stream only. First the environments' streams wait for the work in the current streams:
    resets, new seeds, alpha. At the end the current streams wait for the environments' streams. The data are shared and
    only read. The same order makes memory reuse safe: torch gives a freed block back to the stream that allocated it,
    and uses of the block in other streams lie behind an event.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self._streams: WeakKeyDictionary[HostEnv, torch.cuda.Stream] = WeakKeyDictionary()

    def train_and_validate(
        self, envs: Sequence[HostEnv], train: Split, validation: Split, *, clock: PhaseClock
    ) -> tuple[Tensor, Tensor]:
        """Queue the epoch of every host minibatch by minibatch, and each host's validation behind its last minibatch.

        A validation overlaps with the last minibatches of other hosts, so that it counts as phase "train".
        """
        epochs: dict[HostEnv, HostEpoch] = {}
        trained, validated = [], []
        with clock.measure("train"), self.kernels_of_settings(envs[0].device):
            with self._ordered_streams(envs):
                for env in envs:
                    with torch.cuda.stream(self._stream(env)), isolate_oom(env):
                        epochs[env] = HostEpoch(env, self.task, train.to(env.device), compiled=self.compiled)
                for i in range(max(map(len, epochs.values()), default=1) - 1):
                    for env, epoch in epochs.items():
                        # One context from fetching the batch to summing its loss. The backward pass runs on the stream
                        # of the forward pass. So do the nodes that accumulate gradients: each forward pass creates new
                        # ones on its own stream, whatever stream created the parameters.
                        with torch.cuda.stream(self._stream(env)), isolate_oom(env):
                            if env.failure is None and i < len(epoch) - 1:
                                epoch.step(i)
                for env in envs:
                    with torch.cuda.stream(self._stream(env)):
                        row = nan_training_row(env)
                        with isolate_oom(env):
                            if env.failure is None:
                                epochs[env].step(len(epochs[env]) - 1)
                                row = epochs[env].result()
                        trained.append(row)
                        validated.append(self._measure(env, validation))
            return self._gather_rows(envs, trained), self._gather_rows(envs, validated)

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        rows = []
        with self.kernels_of_settings(envs[0].device), self._ordered_streams(envs):
            for env in envs:
                with torch.cuda.stream(self._stream(env)):
                    rows.append(self._measure(env, data))
        return self._gather_rows(envs, rows)

    def _stream(self, env: HostEnv) -> torch.cuda.Stream:
        # Created once per host. Torch cycles through 32 streams per GPU: with more hosts, several share a stream.
        if env not in self._streams:
            self._streams[env] = torch.cuda.Stream(env.device)
        return self._streams[env]

    @contextmanager
    def _ordered_streams(self, envs: Sequence[HostEnv]) -> Iterator[None]:
        """Order the environments' streams: after all work already in the current streams, before all later work."""
        devices = dict.fromkeys(env.device for env in envs)
        ready = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        for env in envs:
            self._stream(env).wait_event(ready[env.device])
        try:
            yield
        finally:  # after an error too, so that an error handler finds the streams ordered
            for env in envs:
                finished = self._stream(env).record_event()
                # All results are stacked on the first environment's device.
                for device in dict.fromkeys((env.device, envs[0].device)):
                    torch.cuda.current_stream(device).wait_event(finished)

    def _gather_rows(self, envs: Sequence[HostEnv], rows: Sequence[Tensor]) -> Tensor:
        """Stack rows from the environments' streams into one tensor of the current stream."""
        for env, row in zip(envs, rows, strict=True):
            row.record_stream(torch.cuda.current_stream(env.device))
        return stack_rows(rows)
