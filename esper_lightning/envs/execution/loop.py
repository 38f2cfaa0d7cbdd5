"""The readable reference executor: one environment after the other. N environments, K slots, V = K + 2 variants."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.counterfactual import forward_variants
from esper_lightning.growth.gradients import gradient_stats
from esper_lightning.growth.optimizer import HOST_GROUP
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

        Returns [N, 4 + 2K]: mean loss, mean accuracy, then norm and health of the last batch's gradient, of the host
        and of each slot's seed (0 and 1 for an empty slot).
        """
        with convolutions(self.onednn):
            return torch.stack([self._train(env, data) for env in envs])

    def _train(self, env: HostEnv, data: Split) -> Tensor:  # [4 + 2K]
        env.network.train()
        limit = env.training.max_grad_norm
        batches = env.draw_batches(data.samples)
        totals = torch.zeros(2, device=data.inputs.device)
        for last, indices in zip(range(len(batches) - 1, -1, -1), batches, strict=True):
            outputs = env.network(data.inputs[indices])
            measures = self.task.measure(outputs, data.targets[indices])
            loss = measures.loss.mean()
            env.optimizer.zero_grad()
            loss.backward()
            if last == 0:
                gradients = self._gradients(env)
            if limit is not None:
                for group in env.optimizer.param_groups:
                    nn.utils.clip_grad_norm_(group["params"], limit)
            env.optimizer.step()
            with torch.no_grad():
                totals += torch.stack([loss, measures.correct.mean()])
        return torch.cat([totals / len(batches), gradients])

    @staticmethod
    def _gradients(env: HostEnv) -> Tensor:  # [2 + 2K], before clipping
        groups = {group["name"]: group["params"] for group in env.optimizer.param_groups}
        host = gradient_stats(groups[HOST_GROUP])
        absent = torch.tensor([0.0, 1.0], device=host.device, dtype=host.dtype)
        seeds = [gradient_stats(groups[slot.name]) if slot.name in groups else absent for slot in env.slots]
        return torch.cat([host, *seeds])

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        """Loss and accuracy [N, 2, V] on `data` of every environment's variants (see HostEnv.variants)."""
        with convolutions(self.onednn):
            return torch.stack([self._validate(env, data) for env in envs])

    def _validate(self, env: HostEnv, data: Split) -> Tensor:  # [2, V]
        env.network.eval()
        outputs, places = forward_variants(env.network, env.variants(), data.inputs)
        distinct = max(places) + 1
        targets = data.targets.repeat(distinct, *[1] * (data.targets.ndim - 1))
        measures = self.task.measure(outputs, targets)
        means = torch.stack([measures.loss.view(distinct, -1).mean(1), measures.correct.view(distinct, -1).mean(1)])
        return means[:, places]
