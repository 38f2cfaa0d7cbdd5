"""One epoch of training of stacked hosts, minibatch by minibatch. N hosts, K slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import pack_training, upload
from esper_lightning.envs.executors.fused.host import HostStack
from esper_lightning.envs.executors.fused.optimizer import STATE_NAMES, StackedOptimizer
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import next_scale
from esper_lightning.growth.gradient_stats import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.param_groups import HOST_GROUP, find_group, seed_group_name
from esper_lightning.tasks import Batches, Split, Task, fetch


class FusedEpoch:
    """One epoch of training of N stacked hosts in progress."""

    def __init__(self, stack: HostStack, envs: Sequence[HostEnv], task: Task, *, data: Split) -> None:
        self.stack, self.envs, self.task, self.data = stack, envs, task, data
        self.training = envs[0].training
        networks, optimizers = [env.network for env in envs], [env.optimizer for env in envs]
        self.weights = stack.settle(networks, optimizers, STATE_NAMES[self.training.optimizer])
        self.weights.bind(requires_grad=True)
        groups = [(i, HOST_GROUP) for i in range(len(envs))]
        groups += [(host, seed_group_name(slot)) for owners in stack.seed_slots for host, slot in owners]
        options = [find_group(envs[host].optimizer, name) for host, name in groups]
        self.optimizer = StackedOptimizer(self.weights, self.training, [host for host, _ in groups], options)
        # Loss scales of the hosts in fp16, [N] each; at the end of the epoch they are written back.
        self.scales = [env.loss_scale for env in envs if env.loss_scale is not None]
        self.scale = torch.stack([one.scale for one in self.scales]) if self.scales else None
        self.good_steps = torch.stack([one.good_steps for one in self.scales]) if self.scales else None
        self.healthy: Tensor | None = None  # hosts that take the present step, [N] bool; None: all
        # The first host's timer records the time of all hosts together.
        self.host_timer = envs[0].timer
        self.host_timer.start()
        failing = {(i, seed_group_name(slot.name)) for i, env in enumerate(envs) for slot in env.failing_slots}
        # Mask of the weights of failing seeds, which get no gradient. None, the usual case: no seed fails.
        is_frozen = upload([group in failing for group in groups], self.weights.values.device) if failing else None
        self.frozen_mask = None if is_frozen is None else self.optimizer.per_weight(is_frozen)
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
        self.weights.grads.zero_()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(part)
        if self.frozen_mask is not None:
            self.weights.grads.masked_fill_(self.frozen_mask, 0.0)
        if self.scale is not None:
            self.healthy = self.optimizer.unscale(self.scale)
            self.skipped_steps += ~self.healthy
        if i == len(self) - 1:
            self.gradients = self._gradient_tensors()
        self.optimizer.step(self.healthy)
        if self.scale is not None and self.good_steps is not None and self.healthy is not None:
            self.scale, self.good_steps = next_scale(self.scale, self.good_steps, self.healthy)
        self.host_timer.record(train=1.0)

    def _accumulate_gradients(self, part: int) -> None:
        """Add the gradients, losses and accuracies of one micro-batch, for all hosts."""
        self.host_timer.record(train=1.0)  # the time up to here belongs to training
        inputs, targets = fetch(self.data, self.batches.minibatch(part), self.training.augment)
        self.host_timer.record(data=1.0)
        with self.training.autocast(inputs.device):
            measures = self.task.measure(self.stack.train(inputs), targets)
            losses = measures.loss.view(len(self.envs), -1).mean(1) / self.micro_batches  # [N]
        (losses if self.scale is None else losses * self.scale).sum().backward()
        with torch.no_grad():
            correct = measures.correct.view(len(self.envs), -1).mean(1) / self.micro_batches
            self.totals += torch.stack([losses, correct])

    def result(self) -> Tensor:  # [N, …], rows as `pack_training` makes them
        """Write loss scales back to the environments. Returns the row of `HostEpoch.result` for each host."""
        if self.scale is not None and self.good_steps is not None:
            for i, own in enumerate(self.scales):
                own.set(self.scale[i], self.good_steps[i])
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
