"""One host epoch, minibatch by minibatch: shared by all executors that train hosts one by one."""

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_, get_total_norm

from esper_lightning.envs.device_transfer import pack_training
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gradient_stats import NO_GRADIENT
from esper_lightning.tasks import Batches, Split, Task, fetch


def nan_training_row(env: HostEnv) -> Tensor:  # a row as `pack_training` makes it
    """Return a row of NaN in place of `HostEpoch.result` for a host that did not train."""
    reference = next(env.network.parameters())
    gradients = reference.new_full((1 + len(env.slots), len(NO_GRADIENT)), torch.nan)
    return pack_training(reference.new_full((2,), torch.nan), reference.new_zeros(()), gradients)


class HostEpoch:
    """One epoch of host training in progress. Its results stay on the host's device: nothing is read back.

    Args:
        env: Environment of the host to train.
        task: Task that computes loss and accuracy from outputs.
        data: Training data, on the host's device.
    """

    def __init__(self, env: HostEnv, task: Task, data: Split) -> None:
        self.env, self.task, self.data = env, task, data
        self.micro_batches = env.training.micro_batches
        self.frozen_parameters = [parameter for slot in env.failing_slots for parameter in slot.seed.parameters()]
        env.timer.start()
        self.batches = env.draw_batches(data.samples).split(self.micro_batches)  # [batches · parts, B / parts]
        env.timer.record(data=1.0)
        dtype = next(env.network.parameters()).dtype
        self.totals = torch.zeros(2, device=env.device, dtype=dtype)  # loss, accuracy
        self.skipped_steps = torch.zeros((), device=env.device, dtype=dtype)  # steps with non-finite gradients
        env.network.train()
        if env.loss_scale is not None:
            init_momentum_buffers(env.optimizer)

    def __len__(self) -> int:
        return len(self.batches.indices) // self.micro_batches

    def step(self, i: int) -> None:
        """Train on the i-th minibatch. The last one also stores the gradient statistics."""
        env, optimizer = self.env, self.env.optimizer
        env.timer.start()
        optimizer.zero_grad()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(self.batches.minibatch(part))
        for parameter in self.frozen_parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        finite = None
        if env.loss_scale is not None:
            env.loss_scale.unscale(optimizer)
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            finite = get_total_norm([p.grad for p in parameters if p.grad is not None], float("inf")).isfinite()
            self.skipped_steps += ~finite
        if i == len(self) - 1:
            self.gradients = env.growing.gradient_stats_tensor()
        if env.training.max_grad_norm is not None:
            for group in optimizer.param_groups:
                clip_grad_norm_(group["params"], env.training.max_grad_norm)
        if env.loss_scale is None or finite is None:
            optimizer.step()
        else:
            env.loss_scale.step(optimizer, finite)
        env.timer.record(train=1.0)

    def _accumulate_gradients(self, batch: Batches) -> None:
        env = self.env
        env.timer.record(train=1.0)
        inputs, targets = fetch(self.data, batch, env.training.augment)
        env.timer.record(data=1.0)
        with env.training.autocast(env.device):
            measures = self.task.measure(env.network(inputs), targets)
            loss = measures.loss.mean() / self.micro_batches
        (loss if env.loss_scale is None else loss * env.loss_scale.scale).backward()
        self.totals += torch.stack([loss.detach(), measures.correct.mean() / self.micro_batches])

    def result(self) -> Tensor:  # a row as `pack_training` makes it
        """Return the packed `TrainingStats` of the epoch, on the host's device."""
        return pack_training(self.totals / len(self), self.skipped_steps, self.gradients)


def init_momentum_buffers(optimizer: torch.optim.Optimizer) -> None:
    """Initialise missing momentum buffers with zeros: if its first step is skipped, fused sgd leaves them undefined."""
    if isinstance(optimizer, torch.optim.SGD):
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            if "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
