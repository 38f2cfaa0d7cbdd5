"""A host epoch, minibatch by minibatch: what every executor does that trains hosts one by one."""

import torch
from torch import Tensor

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.tasks import Split, Task


class HostEpoch:
    """One pass of host training in progress. Its numbers stay on the host's device: nothing is read back.

    Args:
        env: Whose host learns.
        task: Judges outputs.
        data: Training data, on the host's device.
    """

    def __init__(self, env: HostEnv, task: Task, data: Split) -> None:
        self.env = env
        self.task = task
        self.data = data
        self.batches = env.draw_batches(data.samples)  # [batches, B]
        self.totals = torch.zeros(3, device=env.device)  # loss, accuracy, steps skipped for gradients out of range
        env.network.train()

    def __len__(self) -> int:
        return len(self.batches)

    def step(self, i: int) -> None:
        """Learns from the i-th minibatch; the last one leaves its gradients' statistics."""
        env = self.env
        env.optimizer.zero_grad()
        for part in self.batches[i].chunk(env.training.micro_batches):
            self._learn(part)
        env.scaler.unscale_(env.optimizer)
        if i == len(self) - 1:
            self.gradients = env.growing.gradient_tensors().flatten()
        if env.scaler.is_enabled():
            gradients = [p.grad for group in env.optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.totals[2] += ~torch.nn.utils.get_total_norm(gradients, float("inf")).isfinite()
        if env.training.max_grad_norm is not None:
            for group in env.optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], env.training.max_grad_norm)
        env.scaler.step(env.optimizer)
        env.scaler.update()

    def _learn(self, indices: Tensor) -> None:
        env = self.env
        with env.training.autocast(env.device):
            measures = self.task.measure(env.network(self.data.inputs[indices]), self.data.targets[indices])
            loss = measures.loss.mean() / env.training.micro_batches
        env.scaler.scale(loss).backward()
        with torch.no_grad():
            self.totals[:2] += torch.stack([loss, measures.correct.mean() / env.training.micro_batches])

    def result(self) -> Tensor:  # [3 + 4·(1 + K)]
        """Mean loss, mean accuracy, skipped steps; then the GradientStats, before clipping, of the host and each slot's
        seed in the last minibatch."""
        return torch.cat([self.totals[:2] / len(self), self.totals[2:], self.gradients])
