"""One epoch of training of batched hosts, minibatch by minibatch, and their optimizer. N hosts, K slots."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.executors.fused.flat import STEP, Arena
from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining, next_scale
from esper_lightning.envs.measurements import pack_training, upload
from esper_lightning.growth.gates import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.param_groups import HOST_GROUP, find_group, seed_group_name
from esper_lightning.tasks import Batches, Split, Task, fetch

CLIP_EPS = 1e-6
"""Constant added to a gradient norm before division, as in `torch.nn.utils.clip_grad_norm_`."""

STATE_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq", STEP),
    "adamw": ("exp_avg", "exp_avg_sq", STEP),
    "sgd": ("momentum_buffer",),
}
"""State keys of each optimizer in torch.optim: the moments, then the step count if the rule needs one."""


class FusedEpoch:
    """One epoch of training of N batched hosts in progress."""

    def __init__(self, batched: BatchedHosts, envs: Sequence[HostEnv], task: Task, *, data: Split) -> None:
        self.batched, self.envs, self.task, self.data = batched, envs, task, data
        self.training = envs[0].training
        networks, optimizers = [env.network for env in envs], [env.optimizer for env in envs]
        # From here on the hosts' parameters and optimizer states are views of one flat memory.
        self.weights = batched.move_into_arena(networks, optimizers, STATE_NAMES[self.training.optimizer])
        self.weights.bind(requires_grad=True)
        # Parameter groups in the arena's order: all hosts first, then the seeds.
        groups = [(i, HOST_GROUP) for i in range(len(envs))]
        groups += [(host, seed_group_name(slot)) for owners in batched.seed_slots for host, slot in owners]
        param_groups = [find_group(envs[host].optimizer, name) for host, name in groups]
        self.optimizer = BatchedOptimizer(self.weights, self.training, [host for host, _ in groups], param_groups)
        # Loss scales of the hosts in fp16, [N] each; at the end of the epoch they are written back.
        self.scales = [env.loss_scale for env in envs if env.loss_scale is not None]
        self.scale = torch.stack([one.scale for one in self.scales]) if self.scales else None
        self.good_steps = torch.stack([one.good_steps for one in self.scales]) if self.scales else None
        # Hosts whose gradients are finite in this step, [N] bool; None without fp16: all.
        self.healthy: Tensor | None = None
        failing = {(i, seed_group_name(slot.name)) for i, env in enumerate(envs) for slot in env.failing_slots}
        # Mask of the weights of seeds that fail on purpose and get zero gradients, see `HostEnv.failing_slots`.
        # None, the usual case: no seed fails.
        is_failing = upload([group in failing for group in groups], self.weights.values.device) if failing else None
        self.failing_mask = None if is_failing is None else self.optimizer.per_weight(is_failing)
        self.micro_batches = self.training.micro_batches
        self.batches = Batches.concatenate([env.draw_batches(data.samples).split(self.micro_batches) for env in envs])
        self.totals = torch.zeros(2, len(envs), device=envs[0].device, dtype=envs[0].score_dtype)  # loss, score
        self.skipped_steps = torch.zeros_like(self.totals[0])

    def __len__(self) -> int:
        """Return the number of minibatches."""
        return len(self.batches.indices) // self.micro_batches

    def step(self, i: int) -> None:
        """Train every host on its i-th minibatch, in `micro_batches` parts.

        On the last one also keep the gradient statistics, before clipping.
        """
        self.weights.grads.zero_()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(part)
        if self.failing_mask is not None:  # of seeds that are made to fail: they do not learn
            self.weights.grads.masked_fill_(self.failing_mask, 0.0)
        if self.scale is not None:
            self.healthy = self.optimizer.unscale(self.scale)
            self.skipped_steps += ~self.healthy
        if i == len(self) - 1:
            self.gradients = self._gradient_tensors()
        self.optimizer.step(self.healthy)
        if self.scale is not None and self.good_steps is not None and self.healthy is not None:
            self.scale, self.good_steps = next_scale(self.scale, self.good_steps, self.healthy)

    def _accumulate_gradients(self, part: int) -> None:
        """Add the gradients, losses and scores of one micro-batch, for all hosts."""
        inputs, targets = fetch(self.data, self.batches.minibatch(part), self.training.augment)
        with self.training.autocast(inputs.device):
            measures = self.task.measure(self.batched.train(inputs), targets)
            losses = measures.loss.view(len(self.envs), -1).mean(1) / self.micro_batches  # [N]
        (losses if self.scale is None else losses * self.scale).sum().backward()
        with torch.no_grad():
            scores = measures.score.view(len(self.envs), -1).mean(1) / self.micro_batches
            self.totals += torch.stack([losses, scores])

    def result(self) -> Tensor:  # [N, …], rows as `pack_training` makes them
        """Write loss scales back to the environments. Returns the row of `HostEpoch.result` for each host."""
        if self.scale is not None and self.good_steps is not None:
            for i, own in enumerate(self.scales):
                own.set(self.scale[i], self.good_steps[i])
        self.batched.release()
        return pack_training((self.totals / len(self)).T, self.skipped_steps, self.gradients)

    def _gradient_tensors(self) -> Tensor:  # [N, 1 + K, 4]
        """Return the gradient statistics of each host, [:, 0], and of the seed in each slot, [:, 1:]."""
        device = self.weights.values.device
        column_of_slot = {slot.name: k for k, slot in enumerate(self.envs[0].slots, 1)}
        stats = upload(NO_GRADIENT, device, self.totals.dtype).repeat(len(self.envs), 1 + len(column_of_slot), 1)
        owners_by_module = [[(host, None) for host in range(len(self.envs))], *self.batched.seed_slots]
        for owners, grads in zip(owners_by_module, self.weights.views(self.weights.grads), strict=True):
            rows = [grad.reshape(len(owners), -1) for grad in grads]
            norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], 1)
            hosts = upload([host for host, _ in owners], device)
            module_stats = stats_of_norms(norms, sum(row.shape[1] for row in rows))
            stats[hosts, column_of_slot.get(owners[0][1], 0)] = module_stats.to(stats.dtype)
        return stats


class BatchedOptimizer:
    """Optimizer of all hosts and seeds in the coming epoch: Adam, AdamW or SGD on flat weights.

    It applies the rules of torch.optim; each of the G parameter groups, hosts, then seeds, has its own learning rate,
    weight decay and step count. The state lies in the arena, of which the environments' own optimizers hold views:
    checkpoints, germination and rollbacks find it there.

    Args:
        hosts: Index of the host of each group, [G]: all hosts first, then all seeds, as in the arena.
        param_groups: Parameter groups of the environments' optimizers, [G].
    """

    @torch.no_grad()
    def __init__(
        self, arena: Arena, training: HostTraining, hosts: Sequence[int], param_groups: Sequence[Mapping[str, Any]]
    ) -> None:
        self.arena, self.training = arena, training
        device, dtype = arena.values.device, arena.values.dtype
        self.host_of_group = upload(hosts, device)  # [G] int64
        self.learning_rates = upload([group["lr"] for group in param_groups], device, dtype)
        self.weight_decays = upload([group["weight_decay"] for group in param_groups], device, dtype)
        self.has_weight_decay = any(group["weight_decay"] for group in param_groups)
        self.options = param_groups[0]
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
