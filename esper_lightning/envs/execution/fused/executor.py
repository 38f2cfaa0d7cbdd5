"""Fused executor: the same kernels train and validate all hosts at once. N hosts, K slots, V combinations of seeds."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from esper_lightning.envs.execution.fused.optimizer import Group, StackedOptimizer
from esper_lightning.envs.execution.fused.proof import check_stack
from esper_lightning.envs.execution.fused.scaling import StackedScaler
from esper_lightning.envs.execution.fused.stack import HostStack
from esper_lightning.envs.execution.loop import LoopExecutor, convolutions
from esper_lightning.envs.failure import together
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.envs.transfer import pack_training, upload
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.gradients import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.optimizer import HOST_GROUP, group_of
from esper_lightning.tasks import Batches, Split, Task, fetch

MAX_NUMBERS = 2**22
"""Most input elements of one stacked validation pass: more exceed the caches and fill the memory."""


class FusedExecutor(LoopExecutor):
    """`LoopExecutor` with the hosts of each kind stacked into one network.

    Between epochs weights, optimizer state and loss scales are in the environments, as with every other executor. An
    epoch begins by collecting them and ends by writing them back.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.stacks: dict[str, HostStack] = {}  # by kind of host

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        for env in envs:
            self._stack([env], data)

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with convolutions(self.training.onednn), together(envs):
            return by_kind(lambda alike: self._train_all(alike, data), envs)

    def _train_all(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        epoch = FusedEpoch(self._stack(envs, data), envs, self.task, data)
        for i in range(len(epoch)):
            epoch.step(i)
        return epoch.result()

    def _stack(self, envs: Sequence[HostEnv], data: Split) -> HostStack:
        kind = envs[0].kind
        if kind not in self.stacks:
            check_stack(envs[0], data.inputs)
            self.stacks[kind] = HostStack(envs[0].network)
        return self.stacks[kind]

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with convolutions(self.training.onednn), together(envs):
            return by_kind(lambda alike: self._measure_all(alike, data, [env.variants() for env in alike]), envs)

    def _measure(self, env: HostEnv, data: Split, variants: Sequence[Variant]) -> Tensor:  # [2, V]
        with together([env]):
            return self._measure_all([env], data, [variants])[0]

    def _measure_all(
        self, envs: Sequence[HostEnv], data: Split, variants: Sequence[Sequence[Variant]]
    ) -> Tensor:  # [N, 2, V]
        stack = self._stack(envs, data)
        stack.load([env.network for env in envs]).give(learn=False)
        rows = max(self.training.batch_size, MAX_NUMBERS // (len(envs) * data.inputs[0].numel()))
        several = data.variants > 1
        inputs, targets = (part.unflatten(0, (data.variants, -1)) if several else part for part in data)
        own = [env.habitat.variant for env in envs] if several else None
        totals, laps = 0.0, envs[0].laps
        laps.start()

        def watch(entries: int) -> None:
            base = len(envs) / entries  # share of the work that one entry per host would take
            laps.lap(validate=base, counterfactual=1.0 - base)

        stack.views.watch = watch
        for some, right in zip(*(part.split(rows, int(several)) for part in (inputs, targets)), strict=True):
            with self.training.autocast(some.device):
                outputs = stack.evaluate(some, variants, own)
            entries = stack.views.count
            if own is None:
                right = right.repeat(entries, *[1] * (right.ndim - 1))
            else:
                right = right[upload([own[host] for host in stack.views.hosts], right.device)].flatten(0, 1)
            measures = self.task.measure(outputs, right)
            sums = [values.view(entries, -1).sum(1) for values in (measures.loss, measures.correct)]
            totals = totals + torch.stack(sums)  # [2, entries]
            watch(entries)
        stack.release()
        places = upload(stack.views.places(), inputs.device)
        return (totals / data.samples)[:, places].transpose(0, 1)


def by_kind(work: Callable[[Sequence[HostEnv]], Tensor], envs: Sequence[HostEnv]) -> Tensor:
    """Run `work` on the hosts of each kind. Returns its rows in the order of `envs`."""
    kinds: dict[str, list[int]] = {}
    for i, env in enumerate(envs):
        kinds.setdefault(env.kind, []).append(i)
    rows = torch.cat([work([envs[i] for i in alike]) for alike in kinds.values()])
    order = [i for alike in kinds.values() for i in alike]
    if order == list(range(len(envs))):
        return rows
    return rows[upload(sorted(range(len(order)), key=order.__getitem__), rows.device)]


class FusedEpoch:
    """One epoch of training of N stacked hosts in progress."""

    def __init__(self, stack: HostStack, envs: Sequence[HostEnv], task: Task, data: Split) -> None:
        self.stack, self.envs, self.task, self.data = stack, envs, task, data
        self.training = envs[0].training
        self.arena = stack.load([env.network for env in envs])
        self.arena.give(learn=True)
        hosts = [Group(i, env, HOST_GROUP) for i, env in enumerate(envs)]
        seeds = [Group(host, envs[host], group_of(slot)) for members in stack.grown for host, slot in members]
        self.optimizer = StackedOptimizer(self.arena, hosts + seeds)
        self.scaler = StackedScaler(envs) if envs[0].scaler.is_enabled() else None
        # The first host's timer records the time of all hosts together.
        self.laps = envs[0].laps
        self.laps.start()
        failing = {(i, group_of(slot.name)) for i, env in enumerate(envs) for slot in env.failing}
        idle = [(group.host, group.name) in failing for group in hosts + seeds]
        # Mask of the weights of failing seeds, which get no gradient. None, the usual case: no seed fails.
        self.idle = self.optimizer.spread(upload(idle, self.arena.values.device)) if failing else None
        self.parts = self.training.micro_batches
        self.batches = Batches.concatenate([env.draw_batches(data.samples).in_parts(self.parts) for env in envs])
        self.laps.lap(data=1.0)
        # In the hosts' precision, but at least float32.
        dtype = torch.promote_types(self.arena.values.dtype, torch.float32)
        self.totals = torch.zeros(2, len(envs), device=envs[0].device, dtype=dtype)  # loss, accuracy
        self.skipped_steps = torch.zeros_like(self.totals[0])

    def __len__(self) -> int:
        """Return the number of minibatches."""
        return len(self.batches.indices) // self.parts

    def step(self, i: int) -> None:
        """Train every host on its i-th minibatch. The last one also stores the gradient statistics."""
        self.laps.start()
        self.arena.grads.zero_()
        for part in range(i * self.parts, (i + 1) * self.parts):
            self._learn(self.batches.at(part))
        if self.idle is not None:
            self.arena.grads.masked_fill_(self.idle, 0.0)
        healthy = None
        if self.scaler is not None:
            healthy = self.scaler.unscale(self.optimizer)
            self.skipped_steps += ~healthy
        if i == len(self) - 1:
            self.gradients = self._gradient_tensors()
        self.optimizer.step(healthy)
        if self.scaler is not None:
            self.scaler.update(healthy)
        self.laps.lap(train=1.0)

    def _learn(self, batch: Batches) -> None:
        self.laps.lap(train=1.0)
        inputs, targets = fetch(self.data, batch, self.training.augment)
        self.laps.lap(data=1.0)
        with self.training.autocast(inputs.device):
            measures = self.task.measure(self.stack.train(inputs), targets)
            losses = measures.loss.view(len(self.envs), -1).mean(1) / self.parts  # [N]
        (losses if self.scaler is None else losses * self.scaler.scales).sum().backward()
        with torch.no_grad():
            correct = measures.correct.view(len(self.envs), -1).mean(1) / self.parts
            self.totals += torch.stack([losses, correct])

    def result(self) -> Tensor:  # [N, …], rows as `pack_training` makes them
        """Write all state back to the environments. Returns the row of `HostEpoch.result` for each host."""
        self.arena.take_back()
        self.optimizer.take_back()
        if self.scaler is not None:
            self.scaler.take_back()
        self.stack.release()
        return pack_training((self.totals / len(self)).T, self.skipped_steps, self.gradients)

    def _gradient_tensors(self) -> Tensor:  # [N, 1 + K, 4]
        """Return what `GrowingNetwork.gradient_tensors` returns, for all hosts."""
        device = self.arena.values.device
        stats = upload(NO_GRADIENT, device, self.totals.dtype).repeat(len(self.envs), 1 + len(self.stack.slots), 1)
        places = {name: k for k, name in enumerate(self.stack.slots, 1)}
        staff = [[(host, None) for host in range(len(self.envs))], *self.stack.grown]
        for members, grads in zip(staff, self.arena.views(self.arena.grads), strict=True):
            rows = [grad.reshape(len(members), -1) for grad in grads]
            norms = torch.stack([torch.linalg.vector_norm(row, dim=1) for row in rows], 1)
            hosts = upload([host for host, _ in members], device)
            of_one = stats_of_norms(norms, sum(row.shape[1] for row in rows))
            stats[hosts, places.get(members[0][1], 0)] = of_one.to(stats.dtype)
        return stats
