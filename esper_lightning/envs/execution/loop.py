"""The readable reference executor: one environment after the other. N environments, K slots, V = K + 2 variants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from esper_lightning.envs.execution.step import HostEpoch
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.counterfactual import Variant, forward_variants
from esper_lightning.tasks import Split, Task


@contextmanager
def convolutions(onednn: bool) -> Iterator[None]:
    """Chooses who runs convolutions on the CPU meanwhile; torch keeps one such switch for the whole process."""
    before = torch.backends.mkldnn.enabled
    torch.backends.mkldnn.enabled = onednn
    try:
        yield
    finally:
        torch.backends.mkldnn.enabled = before


class LoopExecutor:
    """Trains and validates hosts on data that lies on their device. Numbers stay there: nothing is read back.

    Args:
        task: Judges outputs.
        training: How hosts learn.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        self.task = task
        self.training = training

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """One host epoch of every environment: [N, 3 + 4·(1 + K)], a HostEpoch's result each."""
        with convolutions(self.training.onednn):
            return torch.stack([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # [3 + 4·(1 + K)]
        epoch = HostEpoch(env, self.task, data)
        for i in range(len(epoch)):
            epoch.step(i)
        return epoch.result()

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Loss and accuracy [N, 2, V] on `data` of every environment's variants (see HostEnv.variants)."""
        with convolutions(self.training.onednn):
            return torch.stack([self._measure(env, data, env.variants()) for env in envs])

    @torch.inference_mode()
    def measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:
        """Loss and accuracy [2, V] on `data` of one environment with each of these combinations of seeds."""
        with convolutions(self.training.onednn):
            return self._measure(env, data, variants)

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:  # [2, V]
        env.network.eval()
        with self.training.autocast(env.device):
            outputs, places = forward_variants(env.network, variants, data.inputs)
        distinct = max(places) + 1
        targets = data.targets.repeat(distinct, *[1] * (data.targets.ndim - 1))
        measures = self.task.measure(outputs, targets)
        means = torch.stack([measures.loss.view(distinct, -1).mean(1), measures.correct.view(distinct, -1).mean(1)])
        return means[:, places]
