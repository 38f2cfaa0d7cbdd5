"""Optimizer of all hosts and seeds together. G parameter groups: hosts, then seeds.

It applies the update rules of torch.optim to flat weights; each group has its own learning rate, weight decay and step
count. Its state lies in the arena, of which the environments' own optimizers hold views: checkpoints, germination and
rollbacks find it there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import upload
from esper_lightning.envs.executors.fused.flat import STEP, Arena
from esper_lightning.envs.host_training import HostTraining

CLIP_EPS = 1e-6
"""Constant added to a gradient norm before division, as in `torch.nn.utils.clip_grad_norm_`."""

STATE_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq", STEP),
    "adamw": ("exp_avg", "exp_avg_sq", STEP),
    "sgd": ("momentum_buffer",),
}
"""State keys of each optimizer in torch.optim: the moments, then the step count if the rule needs one."""


class StackedOptimizer:
    """Optimizer of all hosts and seeds in the coming epoch: Adam, AdamW or SGD.

    Args:
        arena: Weights, gradients and state.
        training: Settings of host training.
        hosts: Index of the host of each group, [G]: all hosts first, then all seeds, as in the arena.
        options: Parameter groups of the environments' optimizers, [G].
    """

    @torch.no_grad()
    def __init__(
        self, arena: Arena, training: HostTraining, hosts: Sequence[int], options: Sequence[Mapping[str, Any]]
    ) -> None:
        self.arena, self.training = arena, training
        device, dtype = arena.values.device, arena.values.dtype
        self.host_of_group = upload(hosts, device)  # [G] int64
        self.learning_rates = upload([group["lr"] for group in options], device, dtype)
        self.weight_decays = upload([group["weight_decay"] for group in options], device, dtype)
        self.has_weight_decay = any(group["weight_decay"] for group in options)
        self.options = options[0]
        self.moments = [numbers for name, numbers in arena.states.items() if name != STEP]

    def per_weight(self, coefficients: Tensor) -> Tensor:  # [G] -> [numbers]
        """Repeat one coefficient per group for each weight of the group."""
        return coefficients.index_select(0, self.arena.group_of_weight)

    def group_sums(self, numbers: Tensor) -> Tensor:  # [numbers] -> [G]
        """Return the sum over the weights of each group."""
        tensors_by_module = self.arena.views(numbers)
        rows = [torch.stack([t.reshape(len(t), -1).sum(1) for t in tensors]) for tensors in tensors_by_module]
        return torch.cat([row.sum(0) for row in rows])

    @torch.no_grad()
    def unscale(self, scales: Tensor) -> Tensor:  # [N] -> [N] bool
        """Divide gradients by the loss scales. Returns which hosts, with their seeds, have finite gradients only."""
        grads = self.arena.grads
        grads /= self.per_weight(scales[self.host_of_group])
        nonfinite = torch.zeros_like(scales)
        nonfinite.index_add_(0, self.host_of_group, self.group_sums((~grads.isfinite()).to(scales.dtype)))
        return nonfinite == 0

    @torch.no_grad()
    def step(self, healthy: Tensor | None = None) -> None:
        """Clip the gradients of each group and update the weights.

        Args:
            healthy: Hosts that take the step together with their seeds, [N] bool. None: all hosts.
        """
        arena, limit = self.arena, self.training.max_grad_norm
        previous = []  # each tensor that changes, a copy of it, and which of its elements may change
        if healthy is not None:
            takes_step = healthy[self.host_of_group]
            per_weight = self.per_weight(takes_step)
            previous = [(one, one.clone(), per_weight) for one in (arena.values, *self.moments)]
            if (steps := arena.states.get(STEP)) is not None:
                previous.append((steps, steps.clone(), takes_step.index_select(0, arena.group_of_parameter)))
        if limit is not None:
            norms = self.group_sums(arena.grads.square()).sqrt()
            arena.grads *= self.per_weight((limit / (norms + CLIP_EPS)).clamp(max=1.0))
        self._update(arena.values, arena.grads)
        for tensor, old, may_change in previous:
            tensor.copy_(torch.where(may_change, tensor, old))

    def _update(self, values: Tensor, grads: Tensor) -> None:
        if self.has_weight_decay and self.training.optimizer == "adamw":
            values *= self.per_weight(1.0 - self.learning_rates * self.weight_decays)
        elif self.has_weight_decay:
            grads = grads + self.per_weight(self.weight_decays) * values
        if self.training.optimizer == "sgd":
            step = self.moments[0].mul_(self.options["momentum"]).add_(grads)
            values -= self.per_weight(self.learning_rates) * step
            return
        # Adam (https://arxiv.org/abs/1412.6980)
        first, second = self.moments
        beta1, beta2 = self.options["betas"]
        steps = self.arena.states[STEP]
        steps += 1
        # In float64, because powers of beta2 are too close to 1 for float32.
        group_steps = steps.index_select(0, self.arena.first_parameters).double()
        bias1, bias2 = (1.0 - beta**group_steps for beta in (beta1, beta2))  # [G]
        first.lerp_(grads, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
        root = second.sqrt().div_(self.per_weight(bias2.sqrt().to(grads.dtype))).add_(self.options["eps"])
        values -= self.per_weight((self.learning_rates / bias1).to(grads.dtype)) * first / root
