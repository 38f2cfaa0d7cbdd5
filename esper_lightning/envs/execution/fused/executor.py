"""Fused executor: the same kernels train and validate all hosts at once. N hosts, K slots, V combinations of seeds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper_lightning.envs.device_transfer import pack_training, upload
from esper_lightning.envs.execution.fused.equivalence import check_stack
from esper_lightning.envs.execution.fused.optimizer import ParameterGroup, StackedOptimizer, StackedScaler, state_names
from esper_lightning.envs.execution.fused.stacked_host import HostStack
from esper_lightning.envs.execution.loop import LoopExecutor
from esper_lightning.envs.execution.out_of_memory import raise_oom
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.gradient_stats import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.param_groups import HOST_GROUP, seed_group_name
from esper_lightning.tasks import Batches, Split, Task, fetch

MAX_INPUT_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Most input elements of one stacked validation pass, by type of device.

More exceed the caches of a CPU. A GPU is kept busy by large passes, and its memory is the limit: 64 hosts take 341
images of 3×32×32 at a time, of which a feature of 8 channels has 0.7 GB."""


class FusedExecutor(LoopExecutor):
    """`LoopExecutor` with the hosts of each kind stacked into one network.

    Hosts live in the arena of their stack from their first epoch on: the weights, running statistics and optimizer
    states of the environments are views of its rows, which an epoch changes in place. Loss scales are copied from the
    environments at the beginning of an epoch, and back at its end.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.stacks: dict[tuple[str, torch.device], HostStack] = {}  # by kind of host and device

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        for env in envs:
            self._stack_of([env], data)

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels(envs[0].device), raise_oom(envs):
            return map_by_kind(lambda groups: self._train_all(groups, data), envs)

    def _train_all(self, groups: Sequence[Sequence[HostEnv]], data: Split) -> list[Tensor]:
        """Train hosts of one kind, one group for each device, minibatch by minibatch, so that all devices work."""
        epochs = []
        for envs in groups:
            own_data = data.to(envs[0].device)
            epochs.append(FusedEpoch(self._stack_of(envs, own_data), envs, self.task, data=own_data))
        for i in range(len(epochs[0])):
            for epoch in epochs:
                epoch.step(i)
        return [epoch.result() for epoch in epochs]

    def _stack_of(self, envs: Sequence[HostEnv], data: Split) -> HostStack:
        kind, device = envs[0].architecture, envs[0].device
        if (kind, device) not in self.stacks:
            if not any(kind == checked for checked, _ in self.stacks):
                check_stack(envs[0], data.inputs)
            self.stacks[kind, device] = HostStack(envs[0].network)
        return self.stacks[kind, device]

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels(envs[0].device), raise_oom(envs):
            return map_by_kind(
                lambda groups: [self._measure_all(alike, data, [env.variants() for env in alike]) for alike in groups],
                envs,
            )

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[SeedVariant]) -> Tensor:  # [2, V]
        with raise_oom([env]):
            return self._measure_all([env], data, [variants])[0]

    def _measure_all(
        self, envs: Sequence[HostEnv], data: Split, variants: Sequence[Sequence[SeedVariant]]
    ) -> Tensor:  # [N, 2, V]
        data = data.to(envs[0].device)
        stack = self._stack_of(envs, data)
        stack.load_resident([env.network for env in envs]).bind(requires_grad=False)
        most_elements = MAX_INPUT_ELEMENTS[data.inputs.device.type]
        samples_per_pass = max(self.training.batch_size, most_elements // (len(envs) * data.inputs[0].numel()))
        has_data_variants = data.variants > 1
        inputs, targets = (part.unflatten(0, (data.variants, -1)) if has_data_variants else part for part in data)
        data_variants = [env.context.variant_index for env in envs] if has_data_variants else None
        totals: Tensor | float = 0.0
        host_timer = envs[0].timer
        host_timer.start()

        def record_interval(n_entries: int) -> None:
            host_share = len(envs) / n_entries  # share of the work that one entry per host would take
            host_timer.record(validate=host_share, counterfactual=1.0 - host_share)

        stack.entries.on_split = record_interval
        for inputs_part, targets_part in zip(
            *(part.split(samples_per_pass, int(has_data_variants)) for part in (inputs, targets)), strict=True
        ):
            with self.training.autocast(inputs_part.device):
                outputs = stack.evaluate(inputs_part, variants, data_variants)
            n_entries = stack.entries.count
            if data_variants is None:
                targets_part = targets_part.repeat(n_entries, *[1] * (targets_part.ndim - 1))
            else:
                targets_part = targets_part[
                    upload([data_variants[host] for host in stack.entries.hosts], targets_part.device)
                ].flatten(0, 1)
            measures = self.task.measure(outputs, targets_part)
            sums = [values.view(n_entries, -1).sum(1) for values in (measures.loss, measures.correct)]
            totals = totals + torch.stack(sums)  # [2, entries]
            record_interval(n_entries)
        assert isinstance(totals, Tensor), "there is something to measure on"
        stack.release()
        entry_index = upload(stack.entries.entry_of_variant(), inputs.device)
        return (totals / data.samples)[:, entry_index].transpose(0, 1)


def map_by_kind(work: Callable[[Sequence[Sequence[HostEnv]]], list[Tensor]], envs: Sequence[HostEnv]) -> Tensor:
    """Run `work` on the hosts of each kind, in groups by device. Returns its rows in the order of `envs`.

    `work` returns one tensor for each group, with a row for each host. The result is on the first host's device.
    """
    groups_by_kind: dict[str, dict[torch.device, list[int]]] = {}
    for i, env in enumerate(envs):
        groups_by_kind.setdefault(env.architecture, {}).setdefault(env.device, []).append(i)
    rows, order = [], []
    for groups in groups_by_kind.values():
        rows += work([[envs[i] for i in indices] for indices in groups.values()])
        order += [i for indices in groups.values() for i in indices]
    joined = torch.cat([part.to(envs[0].device, non_blocking=True) for part in rows])
    if order == list(range(len(envs))):
        return joined
    return joined[upload(sorted(range(len(order)), key=order.__getitem__), joined.device)]


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
        self.weights.grads.zero_()
        for part in range(i * self.micro_batches, (i + 1) * self.micro_batches):
            self._accumulate_gradients(self.batches.minibatch(part))
        if self.frozen_mask is not None:
            self.weights.grads.masked_fill_(self.frozen_mask, 0.0)
        healthy = None
        if self.scaler is not None:
            healthy = self.scaler.unscale(self.optimizer)
            self.skipped_steps += ~healthy
        if i == len(self) - 1:
            self.gradients = self._gradient_tensors()
        self.optimizer.step(healthy)
        if self.scaler is not None and healthy is not None:
            self.scaler.update(healthy)
        self.host_timer.record(train=1.0)

    def _accumulate_gradients(self, batch: Batches) -> None:
        """Add the gradients, losses and accuracies of one micro-batch, for all hosts."""
        self.host_timer.record(train=1.0)  # the time up to here belongs to training
        inputs, targets = fetch(self.data, batch, self.training.augment)
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
