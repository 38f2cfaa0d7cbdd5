"""Reference executor: one environment after another. N environments, K slots, V variants (see `HostEnv.variants`)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from esper_lightning.envs.executors.host_epoch import HostEpoch, nan_training_row
from esper_lightning.envs.executors.out_of_memory import isolate_oom
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.counterfactual import SeedVariant, forward_variants, fossilized_only
from esper_lightning.profiling import PhaseClock
from esper_lightning.tasks import Split, Task

PREDICTED_SAMPLES = 1024
"""Number of samples in one pass of `LoopExecutor.predict`."""

MAX_VALIDATED_ELEMENTS = 2**22
"""Most input elements of one validation pass of a host on a GPU, where many hosts may be validated at the same time.

1,365 images of 3×32×32. On the CPU a pass takes the whole split."""


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack one row per environment into one tensor on the device of the first row."""
    return torch.stack([row.to(rows[0].device, non_blocking=True) for row in rows])


class LoopExecutor:
    """Trains and validates hosts on data on their device. Results stay on the device: nothing is read back.

    Args:
        task: Task that computes loss and accuracy from outputs.
        training: Settings of host training.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        self.task = task
        self.training = training

    @contextmanager
    def kernels(self, device: torch.device) -> Iterator[None]:
        """Choose the kernels of hosts on `device` by the settings; torch has one choice for the whole process."""
        # Torch lets cuDNN round float32 to TF32 by default, and matrix products not.
        tf32 = self.training.precision == "tf32"
        settings = [(torch.backends.mkldnn, "enabled", self.training.onednn)]
        if device.type == "cuda":
            settings += [(part, "allow_tf32", tf32) for part in (torch.backends.cudnn, torch.backends.cuda.matmul)]
        previous = [getattr(part, name) for part, name, _ in settings]
        try:
            for part, name, value in settings:
                setattr(part, name, value)
            yield
        finally:
            for (part, name, _), value in zip(settings, previous, strict=True):
                setattr(part, name, value)

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        """Check before training that the hosts can be executed. Raises ValueError if not.

        Args:
            envs: One environment for each kind of host.
            data: Data for a trial pass.
        """

    def train_and_validate(
        self, envs: Sequence[HostEnv], train: Split, validation: Split, *, clock: PhaseClock
    ) -> tuple[Tensor, Tensor]:
        """Run one host epoch of every environment, then validate: returns what `train_epoch` and `validate` return."""
        host_timers = [env.timer for env in envs]
        with clock.measure("train", host_timers):
            trained = self.train_epoch(envs, train)
        with clock.measure("validate", host_timers):
            validated = self.validate(envs, validation)
        return trained, validated

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Train every environment for one host epoch. Returns one row of `HostEpoch.result` each, [N, …]."""
        with self.kernels(envs[0].device):
            return stack_rows([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # a row as `pack_training` makes it
        with isolate_oom(env):
            epoch = HostEpoch(env, self.task, data.to(env.device))
            for i in range(len(epoch)):
                epoch.step(i)
            return epoch.result()
        return nan_training_row(env)

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Return loss and accuracy [N, 2, V] on `data` of every environment's variants (see `HostEnv.variants`)."""
        with self.kernels(envs[0].device):
            return stack_rows([self._measure(env, data, env.variants()) for env in envs])

    @torch.inference_mode()
    def measure(self, env: HostEnv, data: Split, variants: Sequence[SeedVariant]) -> Tensor:
        """Return loss and accuracy [2, V] on `data` of one environment with each of these combinations of seeds."""
        with self.kernels(env.device):
            return self._measure(env, data, variants)

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[SeedVariant]) -> Tensor:  # [2, V]
        if env.failure is None:
            with isolate_oom(env):
                inputs, targets = data.to(env.device).variant(env.context.variant_index)
                env.network.eval()
                env.timer.start()
                if env.device.type != "cuda":
                    return self._forward(env, inputs, targets, variants)
                samples = max(1, MAX_VALIDATED_ELEMENTS // inputs[0].numel())
                parts = zip(inputs.split(samples), targets.split(samples), strict=True)
                means = [self._forward(env, *part, variants) * (len(part[0]) / len(inputs)) for part in parts]
                return torch.stack(means).sum(0)
        return torch.full((2, len(variants)), torch.nan, device=env.device)

    def _forward(
        self, env: HostEnv, inputs: Tensor, targets: Tensor, variants: Sequence[SeedVariant]
    ) -> Tensor:  # [2, V]
        # Size of the batch relative to a pass with all seeds alone: the excess is counterfactual work.
        length = 1

        def record_interval(new_length: int) -> None:
            nonlocal length
            env.timer.record(validate=1.0 / length, counterfactual=1.0 - 1.0 / length)
            length = new_length

        with self.training.autocast(env.device):
            outputs, output_index = forward_variants(env.network, variants, inputs, on_split=record_interval)
        n_outputs = max(output_index) + 1
        measures = self.task.measure(outputs, targets.repeat(n_outputs, *[1] * (targets.ndim - 1)))
        means = torch.stack([measures.loss.view(n_outputs, -1).mean(1), measures.correct.view(n_outputs, -1).mean(1)])
        record_interval(n_outputs)
        # Slices, because an index list would be copied to the device synchronously.
        return torch.stack([means[:, i] for i in output_index], 1)

    @torch.inference_mode()
    def predict(self, env: HostEnv, data: Split) -> tuple[Tensor, Tensor]:
        """Return outputs and targets [samples, …] of one environment on `data`, with its fossilized seeds only."""
        inputs, targets = data.to(env.device).variant(env.context.variant_index)
        env.network.eval()
        fossilized = [fossilized_only(env.network)]
        with self.kernels(env.device), self.training.autocast(env.device):
            outputs = [forward_variants(env.network, fossilized, part)[0] for part in inputs.split(PREDICTED_SAMPLES)]
        return torch.cat(outputs), targets
