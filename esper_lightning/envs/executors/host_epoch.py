"""One host epoch, minibatch by minibatch: shared by all executors that train hosts one by one."""

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import pack_training
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gradient_stats import NO_GRADIENT
from esper_lightning.tasks import Batches, Split, Task, fetch


def nan_training_row(env: HostEnv) -> Tensor:  # a row as `pack_training` makes it
    """Return a row of NaN in place of `HostEpoch.result` for a host that did not train."""
    reference = next(env.network.parameters())
    skipped_steps = reference.new_zeros(())
    gradients = reference.new_full((1 + len(env.slots), len(NO_GRADIENT)), torch.nan)
    return pack_training(reference.new_full((2,), torch.nan), skipped_steps, gradients)


class HostEpoch:
    """One epoch of host training in progress. Its results stay on the host's device: nothing is read back.

    Args:
        env: Environment of the host to train.
        task: Task that computes loss and accuracy from outputs.
        data: Training data, on the host's device.
    """

    def __init__(self, env: HostEnv, task: Task, data: Split) -> None:
        self.env = env
        self.task = task
        self.data = data
        self.micro_batches = env.training.micro_batches
        self.frozen_parameters = [parameter for slot in env.failing_slots for parameter in slot.seed.parameters()]
        env.timer.start()
        self.batches = env.draw_batches(data.samples).split(self.micro_batches)  # [batches · parts, B / parts]
        env.timer.record(data=1.0)
        dtype = next(env.network.parameters()).dtype
        self.totals = torch.zeros(2, device=env.device, dtype=dtype)  # loss, accuracy
        self.skipped_steps = torch.zeros((), device=env.device, dtype=dtype)  # steps with non-finite gradients
        env.network.train()
        if env.scaler.is_enabled():
            env.training.init_momentum_buffers(env.optimizer)

    def __len__(self) -> int:
        return len(self.batches.indices) // self.micro_batches

    def step(self, i: int) -> None:
        """Train on the i-th minibatch. The last one also stores the gradient statistics."""
        env = self.env
        env.timer.start()
        env.optimizer.zero_grad()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(self.batches.minibatch(part))
        for parameter in self.frozen_parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        env.scaler.unscale_(env.optimizer)
        if i == len(self) - 1:
            self.gradients = env.growing.gradient_stats_tensor()
        if env.scaler.is_enabled():
            gradients = [p.grad for group in env.optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.skipped_steps += ~torch.nn.utils.get_total_norm(gradients, float("inf")).isfinite()
        if env.training.max_grad_norm is not None:
            for group in env.optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], env.training.max_grad_norm)
        env.scaler.step(env.optimizer)
        env.scaler.update()
        env.timer.record(train=1.0)

    def _accumulate_gradients(self, batch: Batches) -> None:
        env = self.env
        env.timer.record(train=1.0)
        inputs, targets = fetch(self.data, batch, env.training.augment)
        env.timer.record(data=1.0)
        with env.training.autocast(env.device):
            measures = self.task.measure(env.network(inputs), targets)
            loss = measures.loss.mean() / self.micro_batches
        env.scaler.scale(loss).backward()
        self.totals += torch.stack([loss.detach(), measures.correct.mean() / self.micro_batches])

    def result(self) -> Tensor:  # a row as `pack_training` makes it
        """Return the packed `TrainingStats` of the epoch, on the host's device."""
        return pack_training(self.totals / len(self), self.skipped_steps, self.gradients)
