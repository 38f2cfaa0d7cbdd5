"""Optimizer and loss scaler of all hosts and seeds together. G parameter groups: hosts, then seeds.

The optimizer applies the update rules of torch.optim to flat weights; each group has its own learning rate, weight
decay and step count. Its state lies in the arena, of which the environments' own optimizers hold views: checkpoints,
germination and rollbacks find it there. The scaler keeps one loss scale per host for fp16; between epochs its state is
in the environments' own scalers.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import copy_parts, upload
from esper_lightning.envs.executors.fused.arena import STEP, Arena
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.loss_scale import scale_tensors
from esper_lightning.growth.param_groups import find_group

CLIP_EPS = 1e-6
"""Constant added to a gradient norm before division, as in `torch.nn.utils.clip_grad_norm_`."""

MOMENT_NAMES = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""State keys of the running means of each optimizer in torch.optim."""


def state_names(training: HostTraining) -> list[str]:
    """Return the keys of the optimizer state of hosts: their moments, then the step count if the rule needs one."""
    if training.optimizer != "sgd":
        return [*MOMENT_NAMES[training.optimizer], STEP]
    return list(MOMENT_NAMES["sgd"]) if training.momentum else []


class ParameterGroup(NamedTuple):
    """A parameter group of one environment's optimizer: its host or one of its seeds."""

    host: int
    env: HostEnv
    name: str


class StackedOptimizer:
    """Optimizer of all hosts and seeds in the coming epoch: Adam, AdamW or SGD.

    Args:
        weights: Weights, gradients and state.
        groups: All hosts first, then all seeds, as in the arena.

    Attributes:
        host_of_group: Host index of each group, [G] int64.
    """

    @torch.no_grad()
    def __init__(self, weights: Arena, groups: Sequence[ParameterGroup]) -> None:
        self.weights = weights
        training = groups[0].env.training
        self.optimizer_name, self.max_grad_norm = training.optimizer, training.max_grad_norm
        device, dtype = weights.values.device, weights.values.dtype
        options = [find_group(group.env.optimizer, group.name) for group in groups]
        self.learning_rates = upload([o["lr"] for o in options], device, dtype)
        self.weight_decays = upload([o["weight_decay"] for o in options], device, dtype)
        self.has_weight_decay = any(o["weight_decay"] for o in options)
        self.options = options[0]
        self.host_of_group = upload([group.host for group in groups], device)
        self.moments = [numbers for name, numbers in weights.states.items() if name != STEP]
        self.steps = weights.states.get(STEP)  # [parameters]

    def per_weight(self, coefficients: Tensor) -> Tensor:  # [G] -> [numbers]
        """Repeat one coefficient per group for each weight of the group."""
        return coefficients.index_select(0, self.weights.group_of_weight)

    def group_sums(self, numbers: Tensor) -> Tensor:  # [numbers] -> [G]
        """Return the sum over the weights of each group."""
        tensors_by_module = self.weights.views(numbers)
        rows = [torch.stack([t.reshape(len(t), -1).sum(1) for t in tensors]) for tensors in tensors_by_module]
        return torch.cat([row.sum(0) for row in rows])

    @torch.no_grad()
    def step(self, healthy: Tensor | None = None) -> None:
        """Clip the gradients of each group and update the weights.

        Args:
            healthy: Hosts that take the step together with their seeds, [N] bool. None: all hosts.
        """
        previous = []  # each tensor that changes, a copy of it, and which of its elements may change
        if healthy is not None:
            takes_step = healthy[self.host_of_group]
            takes_step_per_weight = self.per_weight(takes_step)
            previous = [(one, one.clone(), takes_step_per_weight) for one in (self.weights.values, *self.moments)]
            if self.steps is not None:
                takes_step_per_parameter = takes_step.index_select(0, self.weights.group_of_parameter)
                previous.append((self.steps, self.steps.clone(), takes_step_per_parameter))
        if self.max_grad_norm is not None:
            norms = self.group_sums(self.weights.grads.square()).sqrt()
            self.weights.grads *= self.per_weight((self.max_grad_norm / (norms + CLIP_EPS)).clamp(max=1.0))
        self._update(self.weights.values, self.weights.grads)
        for tensor, old, may_change in previous:
            tensor.copy_(torch.where(may_change, tensor, old))

    def _update(self, values: Tensor, grads: Tensor) -> None:
        if self.has_weight_decay and self.optimizer_name == "adamw":
            values *= self.per_weight(1.0 - self.learning_rates * self.weight_decays)
        elif self.has_weight_decay:
            grads = grads + self.per_weight(self.weight_decays) * values
        if self.optimizer_name == "sgd":
            self._sgd(values, grads)
        else:
            self._adam(values, grads)

    def _sgd(self, values: Tensor, grads: Tensor) -> None:
        for buffer in self.moments:  # none without momentum
            grads = buffer.mul_(self.options["momentum"]).add_(grads)
        values -= self.per_weight(self.learning_rates) * grads

    def _adam(self, values: Tensor, grads: Tensor) -> None:
        """Update by Adam (https://arxiv.org/abs/1412.6980)."""
        assert self.steps is not None, "Adam counts steps"
        first, second = self.moments
        beta1, beta2 = self.options["betas"]
        self.steps += 1
        steps = self.steps.index_select(0, self.weights.first_parameters).double()  # [G]
        # In float64, because powers of beta2 are too close to 1 for float32.
        bias1, bias2 = (1.0 - beta**steps for beta in (beta1, beta2))
        first.lerp_(grads, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
        root = second.sqrt().div_(self.per_weight(bias2.sqrt().to(grads.dtype))).add_(self.options["eps"])
        values -= self.per_weight((self.learning_rates / bias1).to(grads.dtype)) * first / root


class StackedScaler:
    """Loss scales of N hosts in the coming epoch.

    Args:
        envs: N environments whose scalers are enabled.

    Attributes:
        scales: Loss scale of each host, [N].
        good_steps: Steps of each host since its last skipped step or increase of the scale, [N].
    """

    def __init__(self, envs: Sequence[HostEnv]) -> None:
        self.settings = envs[0].scaler
        self.tensors = [scale_tensors(env.scaler, env.device) for env in envs]
        scales, good_steps = zip(*self.tensors, strict=True)
        self.scales = torch.stack(scales)
        self.good_steps = torch.stack(good_steps).to(torch.float32)

    @torch.no_grad()
    def unscale(self, optimizer: StackedOptimizer) -> Tensor:  # [N] bool
        """Divide the gradients by the scales. Returns which hosts have finite gradients only, seeds included."""
        nonfinite = torch.zeros_like(self.scales)
        grads = optimizer.weights.grads
        grads /= optimizer.per_weight(self.scales[optimizer.host_of_group])
        nonfinite.index_add_(0, optimizer.host_of_group, optimizer.group_sums((~grads.isfinite()).float()))
        return nonfinite == 0

    def update(self, healthy: Tensor) -> None:
        """Lower, in place, the scale of hosts that skipped the step, and raise it after enough steps without a skip."""
        settings = self.settings
        good_steps = torch.where(healthy, self.good_steps + 1.0, 0.0)
        growth_due = good_steps == settings.get_growth_interval()
        higher = self.scales * settings.get_growth_factor()
        raised = torch.where(growth_due & higher.isfinite(), higher, self.scales)
        self.scales.copy_(torch.where(healthy, raised, self.scales * settings.get_backoff_factor()))
        self.good_steps.copy_(torch.where(growth_due, 0.0, good_steps))

    def write_back(self) -> None:
        """Write the state back to the environments' scalers."""
        scales, good_steps = zip(*self.tensors, strict=True)
        copy_parts(self.scales, scales)
        copy_parts(self.good_steps.to(torch.int32), good_steps)
