"""Fused executor: the same kernels train and validate all hosts at once. N hosts, K slots, V combinations of seeds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import methodcaller

import torch
from torch import Tensor

from esper_lightning.envs.executors.fused.epoch import FusedEpoch
from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.envs.executors.fused.proof import N_HOSTS, N_SAMPLES, check_batched
from esper_lightning.envs.executors.loop import LoopExecutor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.measurements import upload
from esper_lightning.runtime.machine import first_line, is_out_of_memory
from esper_lightning.tasks import Split, Task

MAX_INPUT_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Most input elements of one batched validation pass, by type of device.

More exceed the caches of a CPU. A GPU is kept busy by large passes, and its memory is the limit: 64 hosts take 341
images of 3×32×32 at a time, of which a feature of 8 channels has 0.7 GB."""


@contextmanager
def raise_oom(envs: Sequence[HostEnv]) -> Iterator[None]:
    """Raise MemoryError if memory runs out in this block, in which all hosts run as one network and fail together."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"{len(envs)} hosts as one network: {first_line(error)}; use env.executor loop, or lower data.n_envs or "
            f"training.batch_size"
        ) from error


class FusedExecutor(LoopExecutor):
    """`LoopExecutor` with the hosts of each kind as one network.

    Hosts live in the arena of their kind from their first epoch on: the weights, running statistics and optimizer
    states of the environments are views of its rows, which an epoch changes in place. A host that has become deeper
    moves to the arena of that depth at its next epoch. Loss scales are copied from the environments at the beginning of
    an epoch, and back at its end.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        self.batched: dict[tuple[str, torch.device], BatchedHosts] = {}  # by kind of host and device
        self.checked: set[str] = set()  # architectures

    def prepare(self, envs: Sequence[HostEnv], data: Split) -> None:
        for env in envs:
            self._batched_of([env], data)

    def _batched_of(self, envs: Sequence[HostEnv], data: Split) -> BatchedHosts:
        kind, device = envs[0].kind, envs[0].device
        if (kind, device) not in self.batched:
            if envs[0].architecture not in self.checked:
                check_batched(envs[0], data.batch(slice(N_HOSTS * N_SAMPLES)).inputs)
                self.checked.add(envs[0].architecture)
            self.batched[kind, device] = BatchedHosts(envs[0].network)
        return self.batched[kind, device]

    def train_epoch(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels(envs[0].device), raise_oom(envs):
            # Hosts with other numbers of minibatches are trained after one another.
            count = methodcaller("num_batches", data.samples)
            return map_by_kind(lambda groups: self._train_all(groups, data), envs, count)

    def _train_all(self, groups: Sequence[Sequence[HostEnv]], data: Split) -> list[Tensor]:
        """Train hosts of one kind, one group for each device, minibatch by minibatch, so that all devices work."""
        epochs = []
        for envs in groups:
            local = data.to(envs[0].device)
            epochs.append(FusedEpoch(self._batched_of(envs, local), envs, self.task, data=local))
        for i in range(len(epochs[0])):
            for epoch in epochs:
                epoch.step(i)
        return [epoch.result() for epoch in epochs]

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels(envs[0].device), raise_oom(envs):
            return map_by_kind(lambda groups: [self._validate_alike(alike, data) for alike in groups], envs)

    def _validate_alike(self, envs: Sequence[HostEnv], data: Split) -> Tensor:  # [N, 2, V]
        data, variants = data.to(envs[0].device), [env.variants() for env in envs]
        batched = self._batched_of(envs, data)
        batched.load([env.network for env in envs]).bind(requires_grad=False)
        inputs, targets, data_variants = data.inputs, data.targets, None
        if data.variants > 1:  # [M, B, …]: each host has its own variant
            inputs, targets = (part.unflatten(0, (data.variants, -1)) for part in data)
            data_variants = [env.context.variant_index for env in envs]
        most_elements = MAX_INPUT_ELEMENTS[inputs.device.type]
        samples_per_pass = max(self.training.batch_size, most_elements // (len(envs) * data.elements))
        sums = []  # of each pass: loss and score, [2, entries]
        axis = 0 if data_variants is None else 1
        for part in zip(inputs.split(samples_per_pass, axis), targets.split(samples_per_pass, axis), strict=True):
            own_inputs, own_targets = Split(*part, scale=data.scale).batch()
            with self.training.autocast(inputs.device):
                outputs = batched.evaluate(own_inputs, variants, data_variants)
            n_entries = len(batched.entries.hosts)
            if data_variants is None:
                own_targets = own_targets.repeat(n_entries, *[1] * (own_targets.ndim - 1))
            else:
                entry_variants = upload([data_variants[host] for host in batched.entries.hosts], inputs.device)
                own_targets = own_targets[entry_variants].flatten(0, 1)
            measures = self.task.measure(outputs, own_targets)
            sums.append(torch.stack([one.view(n_entries, -1).sum(1) for one in (measures.loss, measures.score)]))
        batched.release()
        entry_index = upload(batched.entries.entry_of_variant(), inputs.device)
        return (sum(sums[1:], sums[0]) / data.samples)[:, entry_index].transpose(0, 1)


def map_by_kind(
    work: Callable[[Sequence[Sequence[HostEnv]]], list[Tensor]],
    envs: Sequence[HostEnv],
    key: Callable[[HostEnv], int] = lambda env: 0,
) -> Tensor:
    """Run `work` on the hosts of each kind and `key`, in groups by device. Returns its rows in the order of `envs`.

    `work` returns one tensor for each group, with a row for each host. The result is on the first host's device.
    """
    groups_by_kind: dict[tuple[str, int], dict[torch.device, list[int]]] = {}
    for i, env in enumerate(envs):
        groups_by_kind.setdefault((env.kind, key(env)), {}).setdefault(env.device, []).append(i)
    rows, order = [], []
    for groups in groups_by_kind.values():
        rows += work([[envs[i] for i in indices] for indices in groups.values()])
        order += [i for indices in groups.values() for i in indices]
    joined = torch.cat([part.to(envs[0].device, non_blocking=True) for part in rows])
    if order == list(range(len(envs))):
        return joined
    return joined[upload(sorted(range(len(order)), key=order.__getitem__), joined.device)]
