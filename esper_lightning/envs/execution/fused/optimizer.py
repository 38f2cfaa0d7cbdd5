"""One optimizer step for all hosts and seeds: the update rules of torch.optim on flat weights. G groups: hosts, seeds.

Each group has its own learning rate, weight decay and step count. Between epochs the state is in the environments'
optimizers, where checkpoints, germination and rollbacks find it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs.execution.fused.arena import Arena
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.transfer import upload
from esper_lightning.growth.optimizer import find_group

CLIP_EPS = 1e-6
"""Constant added to a gradient norm before division, as in `torch.nn.utils.clip_grad_norm_`."""

MOMENTS = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
"""State keys of the running means of each optimizer in torch.optim."""


class Group(NamedTuple):
    """A parameter group of one environment's optimizer: its host or one of its seeds."""

    host: int
    env: HostEnv
    name: str


class StackedOptimizer:
    """Optimizer of all hosts and seeds in the coming epoch: Adam, AdamW or SGD.

    Args:
        weights: Flat weights and gradients.
        groups: All hosts first, then all seeds, in the order of `FlatParameters.groups`.

    Attributes:
        host_of_group: Host index of each group, [G] int64.
    """

    @torch.no_grad()
    def __init__(self, arena: Arena, groups: Sequence[Group]) -> None:
        self.arena = arena
        training = groups[0].env.training
        self.kind, self.limit, self.momentum = training.optimizer, training.max_grad_norm, training.momentum
        self.counts_steps = self.kind != "sgd"
        device, dtype = arena.values.device, arena.values.dtype
        owner = np.repeat(np.asarray(arena.groups, np.int32), arena.sizes)
        self.owner = upload(owner, device)  # [numbers] int32: group of each weight
        options = [find_group(group.env.optimizer, group.name) for group in groups]
        self.rates = upload([o["lr"] for o in options], device, dtype)
        self.decays = upload([o["weight_decay"] for o in options], device, dtype)
        self.decaying = any(o["weight_decay"] for o in options)
        self.options = options[0]
        self.group_of_parameter = upload(arena.groups, device)
        self.hosts = upload([group.host for group in groups], device)
        self._collect(groups)

    def _collect(self, groups: Sequence[Group]) -> None:
        """Collect the state from the environments' optimizers."""
        arena = self.arena
        rows = zip(arena.groups, arena.parameters, strict=True)
        self.states = [groups[i].env.optimizer.state[p] for i, p in rows]
        self.names = MOMENTS[self.kind] if self.counts_steps or self.momentum else ()
        for state, p in zip(self.states, arena.parameters, strict=True):
            self._begin(state, p)
        self.moments = [arena.gather([state[name] for state in self.states]) for name in self.names]
        if self.counts_steps:
            one_of_each = dict(zip(arena.groups, self.states, strict=True))
            self.steps = torch.stack([one_of_each[i]["step"] for i in range(len(groups))])  # [G]

    def _begin(self, state: dict[str, Tensor], p: nn.Parameter) -> None:
        """Create the state that torch.optim would create at a parameter's first step."""
        for name in self.names:
            if name not in state:
                state[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
        if self.counts_steps and "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)

    def spread(self, coefficients: Tensor) -> Tensor:  # [G] -> [numbers]
        """Repeat one coefficient per group for each weight of the group."""
        return coefficients.index_select(0, self.owner)

    def sums(self, numbers: Tensor) -> Tensor:  # [numbers] -> [G]
        """Return the sum over the weights of each group."""
        programs = self.arena.views(numbers)
        rows = [torch.stack([t.reshape(len(t), -1).sum(1) for t in tensors]) for tensors in programs]
        return torch.cat([row.sum(0) for row in rows])

    @torch.no_grad()
    def step(self, healthy: Tensor | None = None) -> None:
        """Clip the gradients of each group and update the weights.

        Args:
            healthy: Hosts that take the step together with their seeds, [N] bool. None: all hosts.
        """
        changing = [self.arena.values, *self.moments, *([self.steps] if self.counts_steps else [])]
        kept = [tensor.clone() for tensor in changing] if healthy is not None else []
        if self.limit is not None:
            norms = self.sums(self.arena.grads.square()).sqrt()
            self.arena.grads *= self.spread((self.limit / (norms + CLIP_EPS)).clamp(max=1.0))
        self._update(self.arena.values, self.arena.grads)
        if healthy is not None:
            takes = healthy[self.hosts]
            every = self.spread(takes)
            for tensor, old in zip(changing, kept, strict=True):
                tensor.copy_(torch.where(takes if len(tensor) == len(takes) else every, tensor, old))

    def _update(self, values: Tensor, grads: Tensor) -> None:
        if self.decaying and self.kind == "adamw":
            values *= self.spread(1.0 - self.rates * self.decays)
        elif self.decaying:
            grads = grads + self.spread(self.decays) * values
        if self.kind == "sgd":
            self._sgd(values, grads)
        else:
            self._adam(values, grads)

    def _sgd(self, values: Tensor, grads: Tensor) -> None:
        for buffer in self.moments:  # none without momentum
            grads = buffer.mul_(self.options["momentum"]).add_(grads)
        values -= self.spread(self.rates) * grads

    def _adam(self, values: Tensor, grads: Tensor) -> None:
        """Update by Adam (https://arxiv.org/abs/1412.6980)."""
        first, second = self.moments
        beta1, beta2 = self.options["betas"]
        self.steps += 1
        # In float64, because powers of beta2 are too close to 1 for float32.
        bias1, bias2 = (1.0 - beta ** self.steps.double() for beta in (beta1, beta2))
        first.lerp_(grads, 1.0 - beta1)
        second.mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
        root = second.sqrt().div_(self.spread(bias2.sqrt().to(grads.dtype))).add_(self.options["eps"])
        values -= self.spread((self.rates / bias1).to(grads.dtype)) * first / root

    @torch.no_grad()
    def take_back(self) -> None:
        """Write the state back to the environments' optimizers."""
        for name, numbers in zip(self.names, self.moments, strict=True):
            self.arena.scatter(numbers, [state[name] for state in self.states])
        if self.counts_steps:
            # A separate tensor for each parameter, as in torch.optim, but all created by one kernel.
            every = self.steps.index_select(0, self.group_of_parameter).unbind()
            for state, step in zip(self.states, every, strict=True):
                state["step"] = step
