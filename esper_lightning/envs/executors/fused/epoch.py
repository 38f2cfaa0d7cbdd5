"""One epoch of training of stacked hosts, minibatch by minibatch. N hosts, K slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import pack_training, upload
from esper_lightning.envs.executors.fused.optimizer import ParameterGroup, StackedOptimizer, StackedScaler, state_names
from esper_lightning.envs.executors.fused.stacked_host import HostStack
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gradient_stats import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.param_groups import HOST_GROUP, seed_group_name
from esper_lightning.tasks import Batches, Split, Task, fetch


class FusedEpoch:
    """One epoch of training of N stacked hosts in progress."""

    def __init__(self, stack: HostStack, envs: Sequence[HostEnv], task: Task, *, data: Split) -> None:
        self.stack, self.envs, self.task, self.data = stack, envs, task, data
        self.training = envs[0].training
        networks, optimizers = [env.network for env in envs], [env.optimizer for env in envs]
        self.weights = stack.settle(networks, optimizers, state_names(self.training))
        self.weights.bind(requires_grad=True)
        host_groups = [ParameterGroup(i, env, HOST_GROUP) for i, env in enumerate(envs)]
        seed_groups = [
            ParameterGroup(host, envs[host], seed_group_name(slot))
            for owners in stack.seed_slots
            for host, slot in owners
        ]
        self.optimizer = StackedOptimizer(self.weights, host_groups + seed_groups)
        self.scaler = StackedScaler(envs) if envs[0].scaler.is_enabled() else None
        self.healthy: Tensor | None = None  # hosts that take the present step, [N] bool; None: all
        # The first host's timer records the time of all hosts together.
        self.host_timer = envs[0].timer
        self.host_timer.start()
        failing = {(i, seed_group_name(slot.name)) for i, env in enumerate(envs) for slot in env.failing_slots}
        is_frozen = [(group.host, group.name) in failing for group in host_groups + seed_groups]
        # Mask of the weights of failing seeds, which get no gradient. None, the usual case: no seed fails.
        self.frozen_mask = self.optimizer.per_weight(upload(is_frozen, self.weights.values.device)) if failing else None
        self.micro_batches = self.training.micro_batches
        self.batches = Batches.concatenate([env.draw_batches(data.samples).split(self.micro_batches) for env in envs])
        self.host_timer.record(data=1.0)
        # In the hosts' precision, but at least float32.
        dtype = torch.promote_types(self.weights.values.dtype, torch.float32)
        self.totals = torch.zeros(2, len(envs), device=envs[0].device, dtype=dtype)  # loss, accuracy
        self.skipped_steps = torch.zeros_like(self.totals[0])

    def __len__(self) -> int:
        """Return the number of minibatches."""
        return len(self.batches.indices) // self.micro_batches

    def step(self, i: int) -> None:
        """Train every host on its i-th minibatch. The last one also stores the gradient statistics."""
        self.host_timer.start()
        self.compute_gradients(i)
        if i == len(self) - 1:
            self.gradients = self._gradient_tensors()
        self.update_weights()
        self.host_timer.record(train=1.0)

    def compute_gradients(self, i: int) -> None:
        """Compute the gradients of the i-th minibatch, with loss scales divided out."""
        self.weights.grads.zero_()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(part)
        if self.frozen_mask is not None:
            self.weights.grads.masked_fill_(self.frozen_mask, 0.0)
        if self.scaler is not None:
            self.healthy = self.scaler.unscale(self.optimizer)
            self.skipped_steps += ~self.healthy

    def update_weights(self) -> None:
        """Take the optimizer step of all hosts with finite gradients, and adapt the loss scales."""
        self.optimizer.step(self.healthy)
        if self.scaler is not None and self.healthy is not None:
            self.scaler.update(self.healthy)

    def _accumulate_gradients(self, part: int) -> None:
        """Add the gradients, losses and accuracies of one micro-batch, for all hosts."""
        self.host_timer.record(train=1.0)  # the time up to here belongs to training
        inputs, targets = fetch(self.data, self.batches.minibatch(part), self.training.augment)
        self.host_timer.record(data=1.0)
        with self.training.autocast(inputs.device):
            measures = self.task.measure(self.stack.train(inputs), targets)
            losses = measures.loss.view(len(self.envs), -1).mean(1) / self.micro_batches  # [N]
        (losses if self.scaler is None else losses * self.scaler.scales).sum().backward()
        with torch.no_grad():
            correct = measures.correct.view(len(self.envs), -1).mean(1) / self.micro_batches
            self.totals += torch.stack([losses, correct])

    def result(self) -> Tensor:  # [N, …], rows as `pack_training` makes them
        """Write loss scales back to the environments. Returns the row of `HostEpoch.result` for each host."""
        self.weights.restore_formats()
        if self.scaler is not None:
            self.scaler.write_back()
        self.stack.release()
        return pack_training((self.totals / len(self)).T, self.skipped_steps, self.gradients)

    def _gradient_tensors(self) -> Tensor:  # [N, 1 + K, 4]
        """Return the gradient statistics of each host, [:, 0], and of the seed in each slot, [:, 1:]."""
        device = self.weights.values.device
        stats = upload(NO_GRADIENT, device, self.totals.dtype).repeat(len(self.envs), 1 + len(self.stack.slots), 1)
        column_of_slot = {name: k for k, name in enumerate(self.stack.slots, 1)}
        owners_by_module = [[(host, None) for host in range(len(self.envs))], *self.stack.seed_slots]
        for owners, grads in zip(owners_by_module, self.weights.views(self.weights.grads), strict=True):
            rows = [grad.reshape(len(owners), -1) for grad in grads]
            norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], 1)
            hosts = upload([host for host, _ in owners], device)
            module_stats = stats_of_norms(norms, sum(row.shape[1] for row in rows))
            stats[hosts, column_of_slot.get(owners[0][1], 0)] = module_stats.to(stats.dtype)
        return stats
