"""Reference executor: one environment after another. N environments, K slots, V = K + 2 variants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from esper_lightning.envs.execution.step import HostEpoch, nothing_learned
from esper_lightning.envs.execution.timing import PhaseClock
from esper_lightning.envs.failure import alone
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.counterfactual import Variant, forward_variants
from esper_lightning.tasks import Split, Task


@contextmanager
def convolutions(onednn: bool | None) -> Iterator[None]:
    """Switch oneDNN convolutions on the CPU on or off within the context; torch has one switch for the whole process.

    None means on.
    """
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn is not False
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


def stack_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack one row per environment into one tensor on the device of the first row."""
    home = rows[0].device
    return torch.stack([row.to(home, non_blocking=True) for row in rows])


class LoopExecutor:
    """Trains and validates hosts on data on their device. Results stay on the device: nothing is read back.

    Args:
        task: Task that computes loss and accuracy from outputs.
        training: Settings of host training.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        self.task = task
        self.training = training

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        """Check before training that the hosts can be executed. Raises ValueError if not.

        Args:
            envs: One environment for each kind of host.
            data: Data for a trial pass.
        """

    def tick(
        self, envs: Sequence[HostEnv], train: Split, validation: Split, clock: PhaseClock
    ) -> tuple[Tensor, Tensor]:
        """Run one host epoch of every environment, then validate: returns what `train_epoch` and `validate` return."""
        hosts = [env.laps for env in envs]
        with clock.measure("train", hosts):
            trained = self.train_epoch(envs, train)
        with clock.measure("validate", hosts):
            validated = self.validate(envs, validation)
        return trained, validated

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Train every environment for one host epoch. Returns one row of `HostEpoch.result` each, [N, …]."""
        with convolutions(self.training.onednn):
            return stack_rows([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # a row as `pack_training` makes it
        with alone(env):
            epoch = HostEpoch(env, self.task, data.to(env.device))
            for i in range(len(epoch)):
                epoch.step(i)
            return epoch.result()
        return nothing_learned(env)

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Return loss and accuracy [N, 2, V] on `data` of every environment's variants (see `HostEnv.variants`)."""
        with convolutions(self.training.onednn):
            return stack_rows([self._measure(env, data, env.variants()) for env in envs])

    @torch.inference_mode()
    def measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:
        """Return loss and accuracy [2, V] on `data` of one environment with each of these combinations of seeds."""
        with convolutions(self.training.onednn):
            return self._measure(env, data, variants)

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:  # [2, V]
        if env.failure is None:
            with alone(env):
                return self._forward(env, data, variants)
        return torch.full((2, len(variants)), torch.nan, device=env.device)

    def _forward(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:  # [2, V]
        inputs, targets = data.to(env.device).of(env.habitat.variant)
        env.network.eval()
        env.laps.start()
        # Size of the batch relative to a pass with all seeds alone: the excess is counterfactual work.
        length = 1

        def watch(now: int) -> None:
            nonlocal length
            env.laps.lap(validate=1.0 / length, counterfactual=1.0 - 1.0 / length)
            length = now

        with self.training.autocast(env.device):
            outputs, places = forward_variants(env.network, variants, inputs, watch=watch)
        distinct = max(places) + 1
        targets = targets.repeat(distinct, *[1] * (targets.ndim - 1))
        measures = self.task.measure(outputs, targets)
        means = torch.stack([measures.loss.view(distinct, -1).mean(1), measures.correct.view(distinct, -1).mean(1)])
        watch(distinct)
        # Slices, because an index list would be copied to the device synchronously.
        return torch.stack([means[:, place] for place in places], 1)
