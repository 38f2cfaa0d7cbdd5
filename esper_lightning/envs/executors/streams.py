"""Streams executor: one CUDA stream per environment. Batches are the outer loop, environments the inner one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.executors.loop import HostEpoch, LoopExecutor, isolate_oom, nan_training_row, stack_rows
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.runtime.machine import PhaseClock
from esper_lightning.tasks import Split, Task


class StreamsExecutor(LoopExecutor):
    """`LoopExecutor` with one CUDA stream per environment, so that kernels of several hosts run at the same time.

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

        A validation overlaps with the last minibatches of other hosts. Returns what `LoopExecutor.train_and_validate`
        returns; validation counts as phase "train", because the two overlap.
        """
        validated: list[Tensor] = []
        with clock.measure("train"), self.kernels(envs[0].device):
            trained = self._train_all(envs, train, lambda env: validated.append(self._validate(env, validation)))
            return self._gather_rows(envs, trained), self._gather_rows(envs, validated)

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels(envs[0].device):
            return self._gather_rows(envs, self._train_all(envs, data, lambda env: None))

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        rows = []
        with self.kernels(envs[0].device), self._ordered_streams(envs):
            for env in envs:
                with torch.cuda.stream(self._stream(env)):
                    rows.append(self._validate(env, data))
        return self._gather_rows(envs, rows)

    def _train_all(self, envs: Sequence[HostEnv], data: Split, after_epoch: Callable[[HostEnv], None]) -> list[Tensor]:
        """Return one row per environment, each still in its own stream.

        What `after_epoch` does is queued behind its host's last step; it is called in the order of `envs`.
        """
        epochs: dict[HostEnv, HostEpoch] = {}
        results = []
        with self._ordered_streams(envs):
            for env in envs:
                with torch.cuda.stream(self._stream(env)), isolate_oom(env):
                    epochs[env] = HostEpoch(env, self.task, data.to(env.device))
            for i in range(max(map(len, epochs.values()), default=1) - 1):
                for env, epoch in epochs.items():
                    if i >= len(epoch) - 1:  # a host with fewer minibatches: its last one comes below
                        continue
                    # One context from fetching the batch to summing its loss. The backward pass runs on the stream of
                    # the forward pass. So do the nodes that accumulate gradients: each forward pass creates new ones on
                    # its own stream, whatever stream created the parameters.
                    with torch.cuda.stream(self._stream(env)), isolate_oom(env):
                        if env.failure is None:
                            epoch.step(i)
            for env in envs:
                with torch.cuda.stream(self._stream(env)):
                    result = nan_training_row(env)
                    with isolate_oom(env):
                        if env.failure is None:
                            epochs[env].step(len(epochs[env]) - 1)
                            result = epochs[env].result()
                    results.append(result)
                    after_epoch(env)
        return results

    @torch.inference_mode()
    def _validate(self, env: HostEnv, data: Split) -> Tensor:  # [2, V]
        return self._measure(env, data)

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
