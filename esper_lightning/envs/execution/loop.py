"""The readable reference executor: one environment after the other. N environments, K slots, V = K + 2 variants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper_lightning.envs.host_env import HostEnv
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
        onednn: See HostTraining.
    """

    def __init__(self, task: Task, onednn: bool) -> None:
        self.task = task
        self.onednn = onednn

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """One host epoch of every environment.

        Returns [N, 2 + 4·(1 + K)]: mean loss, mean accuracy, then the GradientStats of the last batch, before
        clipping, of the host and of each slot's seed.
        """
        with convolutions(self.onednn):
            return torch.stack([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # [2 + 4·(1 + K)]
        env.network.train()
        limit, parts = env.training.max_grad_norm, env.training.micro_batches
        batches = env.draw_batches(data.samples)
        totals = torch.zeros(2, device=data.inputs.device)
        for last, indices in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            env.optimizer.zero_grad()
            for part in indices.chunk(parts):
                measures = self.task.measure(env.network(data.inputs[part]), data.targets[part])
                loss = measures.loss.mean() / parts
                loss.backward()
                with torch.no_grad():
                    totals += torch.stack([loss, measures.correct.mean() / parts])
            if last == 0:
                gradients = env.growing.gradient_tensors().flatten()
            if limit is not None:
                for group in env.optimizer.param_groups:
                    nn.utils.clip_grad_norm_(group["params"], limit)
            env.optimizer.step()
        return torch.cat([totals / len(batches), gradients])

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Loss and accuracy [N, 2, V] on `data` of every environment's variants (see HostEnv.variants)."""
        with convolutions(self.onednn):
            return torch.stack([self._measure(env, data, env.variants()) for env in envs])

    @torch.inference_mode()
    def measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:
        """Loss and accuracy [2, V] on `data` of one environment with each of these combinations of seeds."""
        with convolutions(self.onednn):
            return self._measure(env, data, variants)

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:  # [2, V]
        env.network.eval()
        outputs, places = forward_variants(env.network, variants, data.inputs)
        distinct = max(places) + 1
        targets = data.targets.repeat(distinct, *[1] * (data.targets.ndim - 1))
        measures = self.task.measure(outputs, targets)
        means = torch.stack([measures.loss.view(distinct, -1).mean(1), measures.correct.view(distinct, -1).mean(1)])
        return means[:, places]
