"""Hosts on CUDA streams: one per environment, batches outside and environments inside, and nobody waits."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.execution.loop import LoopExecutor, stack_rows
from esper_lightning.envs.execution.step import HostEpoch, nothing_learned
from esper_lightning.envs.execution.timing import PhaseClock
from esper_lightning.envs.failure import alone
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Split, Task


def other_devices(executor: str, device: torch.device) -> list[torch.device]:
    """Where hosts live beside `device`: with streams on every GPU that is visible, else nowhere."""
    gpus = torch.cuda.device_count() if executor == "streams" else 0
    if gpus < 2:
        return []
    here = torch.cuda.current_device() if device.index is None else device.index
    return [torch.device(device.type, i) for i in range(gpus) if i != here]


class StreamsExecutor(LoopExecutor):
    """As LoopExecutor, with the work of every environment queued in a CUDA stream of its own: kernels of several hosts
    run at the same time. Environments may be on several GPUs.

    Why this is right although nobody waits: from one event to another, what belongs to a host is touched in its own
    stream alone. At first the environments' streams wait for what the current streams hold: resets, new seeds, alpha.
    In the end the current streams wait for them. The data are shared, and only read. That makes memory safe, too: torch
    keeps a freed block for the stream that it was made for, and what other streams did with it lies beyond an event.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self._streams: WeakKeyDictionary[HostEnv, torch.cuda.Stream] = WeakKeyDictionary()

    def tick(
        self, envs: Sequence[HostEnv], train: Split, validation: Split, clock: PhaseClock
    ) -> tuple[Tensor, Tensor]:
        """As ever, but one host is validated while others still train."""
        measured: list[Tensor] = []
        with clock.measure("train", [env.laps for env in envs]):
            trained = self._train_all(envs, train, lambda env: measured.append(self._validate(env, validation)))
            return self._bring_home(envs, trained), self._bring_home(envs, measured)

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        return self._bring_home(envs, self._train_all(envs, data, lambda env: None))

    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        rows = []
        with self._apart(envs):
            for env in envs:
                with torch.cuda.stream(self._stream(env)):
                    rows.append(self._validate(env, data))
        return self._bring_home(envs, rows)

    def _train_all(self, envs: Sequence[HostEnv], data: Split, behind: Callable[[HostEnv], None]) -> list[Tensor]:
        """An epoch's result of every environment, to be brought home; what `behind` does comes behind its epoch."""
        epochs: dict[HostEnv, HostEpoch] = {}
        with self._apart(envs):
            for env in envs:
                with torch.cuda.stream(self._stream(env)), alone(env):
                    epochs[env] = HostEpoch(env, self.task, data.to(env.device))
            last = envs[0].training.steps(data.samples) - 1  # of all of them: they have the same data and settings
            for i in range(last):
                for env, epoch in epochs.items():
                    # One context from fetching the batch to adding up its loss. Backward runs on the stream of its
                    # forward, and so do the nodes that add up gradients: every forward makes them anew, on its own
                    # stream, wherever the parameters were made.
                    with torch.cuda.stream(self._stream(env)), alone(env):
                        if env.failure is None:
                            epoch.step(i)
            results = []
            for env in envs:
                with torch.cuda.stream(self._stream(env)):
                    result = nothing_learned(env)
                    with alone(env):
                        if env.failure is None:
                            epochs[env].step(last)
                            result = epochs[env].result()
                    results.append(result)
                    behind(env)
        return results

    @torch.inference_mode()
    def _validate(self, env: HostEnv, data: Split) -> Tensor:  # [2, V]
        return self._measure(env, data, env.variants())

    def _stream(self, env: HostEnv) -> torch.cuda.Stream:
        # Made once. Torch has 32 for each GPU and hands them out in turn: beyond that, hosts share one and take turns.
        if env not in self._streams:
            self._streams[env] = torch.cuda.Stream(env.device)
        return self._streams[env]

    @contextmanager
    def _apart(self, envs: Sequence[HostEnv]) -> Iterator[None]:
        """What is queued in the environments' streams meanwhile comes after all that the current streams hold now, and
        before all that they get afterwards."""
        devices = dict.fromkeys(env.device for env in envs)
        before = {device: torch.cuda.current_stream(device).record_event() for device in devices}
        for env in envs:
            self._stream(env).wait_event(before[env.device])
        try:
            yield
        finally:  # after an error, too: whoever takes it finds the hosts at rest
            for env in envs:
                done = self._stream(env).record_event()
                # The first environment's device is where all results are put together.
                for device in dict.fromkeys((env.device, envs[0].device)):
                    torch.cuda.current_stream(device).wait_event(done)

    def _bring_home(self, envs: Sequence[HostEnv], rows: Sequence[Tensor]) -> Tensor:
        """Rows from the environments' streams as one tensor of the current stream."""
        for env, row in zip(envs, rows, strict=True):
            row.record_stream(torch.cuda.current_stream(env.device))
        return stack_rows(rows)
