"""Fused executor: the same kernels train and validate all hosts at once. N hosts, K slots, V combinations of seeds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from esper_lightning.envs.executors.fused.flat import STEP
from esper_lightning.envs.executors.fused.hosts import BatchedHosts
from esper_lightning.envs.executors.fused.proof import N_HOSTS, N_SAMPLES, check_batched
from esper_lightning.envs.executors.loop import LoopExecutor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining, next_scale
from esper_lightning.envs.measurements import pack_training, upload
from esper_lightning.growth.gates import NO_GRADIENT, stats_of_norms
from esper_lightning.growth.param_groups import HOST_GROUP, find_group, seed_group_name
from esper_lightning.runtime.machine import first_line, is_out_of_memory
from esper_lightning.tasks import Batches, Split, Task, fetch

MAX_INPUT_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
"""Most input elements of one batched validation pass, by type of device.

More exceed the caches of a CPU. A GPU is kept busy by large passes, and its memory is the limit: 64 hosts take 341
images of 3×32×32 at a time, of which a feature of 8 channels has 0.7 GB."""

CLIP_EPS = 1e-6
"""Constant added to a gradient norm before division, as in `torch.nn.utils.clip_grad_norm_`."""

STATE_NAMES = {
    "adam": ("exp_avg", "exp_avg_sq", STEP),
    "adamw": ("exp_avg", "exp_avg_sq", STEP),
    "sgd": ("momentum_buffer",),
}
"""State keys of each optimizer in torch.optim: the moments, then the step count if the rule needs one."""


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
    a `FusedEpoch`, and back at its end.
    """

    def __init__(self, task: Task, training: HostTraining) -> None:
        super().__init__(task, training)
        if training.compile:
            raise ValueError("executor fused cannot compile hosts; use env.executor loop, threads or streams")
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
        with self.kernels_of_settings(envs[0].device), raise_oom(envs):
            return map_by_kind(lambda groups: self._train_all(groups, data), envs)

    def _train_all(self, groups: Sequence[Sequence[HostEnv]], data: Split) -> list[Tensor]:
        """Train hosts of one kind, one group for each device, minibatch by minibatch, so that all devices work.

        Hosts may have different numbers of minibatches: those that have seen their last one leave, the others go on.
        """
        drawn = {env: env.draw_batches(data.samples) for envs in groups for env in envs}
        counts = {env: len(batches.indices) for env, batches in drawn.items()}
        rows: dict[HostEnv, Tensor] = {}
        sums: dict[torch.device, Tensor] = {}  # of the hosts that go on, [N, 3]
        begin = 0
        for end in sorted(set(counts.values())):
            epochs = []
            for envs in groups:
                if active := [env for env in envs if counts[env] >= end]:
                    local, batches = data.to(envs[0].device), [drawn[env].section(begin, end) for env in active]
                    batched = self._batched_of(active, local)
                    epochs.append(FusedEpoch(batched, active, self.task, data=local, batches=batches))
            for i in range(end - begin):
                for epoch in epochs:
                    epoch.step(i)
            for epoch in epochs:
                device = epoch.envs[0].device
                total = epoch.finish() + sums.get(device, 0.0)
                packed = pack_training(total[:, :2] / end, total[:, 2], epoch.gradients)
                rows.update((env, row) for env, row in zip(epoch.envs, packed, strict=True) if counts[env] == end)
                if staying := [i for i, env in enumerate(epoch.envs) if counts[env] > end]:
                    sums[device] = total[upload(staying, device)]
            begin = end
        return [torch.stack([rows[env] for env in envs]) for envs in groups]

    @torch.inference_mode()
    def validate(self, envs: Sequence[HostEnv], data: Split) -> Tensor:
        with self.kernels_of_settings(envs[0].device), raise_oom(envs):
            return map_by_kind(lambda groups: [self._validate_alike(alike, data) for alike in groups], envs)

    def _validate_alike(self, envs: Sequence[HostEnv], data: Split) -> Tensor:  # [N, 2, V]
        data, variants = data.to(envs[0].device), [env.variants() for env in envs]
        batched = self._batched_of(envs, data)
        batched.load([env.network for env in envs]).bind(requires_grad=False)
        inputs, targets, data_variants, axis = data.inputs, data.targets, None, 0
        if data.variants > 1:  # [M, B, …]: each host has its own variant
            inputs, targets = (part.unflatten(0, (data.variants, -1)) for part in data)
            data_variants, axis = [env.context.variant_index for env in envs], 1
        most_elements = MAX_INPUT_ELEMENTS[inputs.device.type]
        samples_per_pass = max(self.training.batch_size, most_elements // (len(envs) * data.elements))
        sums = []  # of each pass: loss and score, [2, entries]
        for part in zip(inputs.split(samples_per_pass, axis), targets.split(samples_per_pass, axis), strict=True):
            part_inputs, part_targets = Split(*part, scale=data.scale).batch()
            with self.training.autocast(inputs.device):
                outputs = batched.evaluate(part_inputs, variants, data_variants)
            hosts = batched.entries.hosts
            if data_variants is None:
                part_targets = part_targets.repeat(len(hosts), *[1] * (part_targets.ndim - 1))
            else:
                entry_variants = upload([data_variants[host] for host in hosts], inputs.device)
                part_targets = part_targets[entry_variants].flatten(0, 1)
            measures = self.task.measure(outputs, part_targets)
            sums.append(torch.stack([values.view(len(hosts), -1).sum(1) for values in measures]))
        batched.release()
        entry_index = upload(batched.entries.entry_of_variant(), inputs.device)
        return (sum(sums[1:], sums[0]) / data.samples)[:, entry_index].transpose(0, 1)


class FusedEpoch:
    """Training of N batched hosts on `batches`, equally many minibatches of an epoch each, with one optimizer for all.

    The optimizer applies the rules of torch.optim to flat weights. Its G groups are all hosts, then all seeds: each has
    its own learning rate, weight decay and step count. Its state lies in the arena, of which the environments' own
    optimizers hold views: checkpoints, germination and rollbacks find it there.
    """

    scale: Tensor  # [N] loss scales, and the steps since they last changed: in fp16 only
    good_steps: Tensor

    def __init__(
        self, batched: BatchedHosts, envs: Sequence[HostEnv], task: Task, *, data: Split, batches: Sequence[Batches]
    ) -> None:
        self.batched, self.envs, self.task, self.data = batched, envs, task, data
        training = self.training = envs[0].training
        networks, optimizers = [env.network for env in envs], [env.optimizer for env in envs]
        batched.assign(networks)
        # From here on the hosts' parameters and optimizer states are views of one flat memory.
        self.weights = batched.arena
        self.weights.assign(batched.assignments, optimizers, STATE_NAMES[training.optimizer])
        self.weights.bind(requires_grad=True)
        device, dtype = self.weights.values.device, self.weights.values.dtype
        groups = [(i, HOST_GROUP) for i in range(len(envs))]
        groups += [(host, seed_group_name(slot)) for owners in batched.seed_slots for host, slot in owners]
        options = [find_group(optimizers[host], name) for host, name in groups]
        self.host_of_group = upload([host for host, _ in groups], device)  # [G] int64
        self.learning_rates = upload([group["lr"] for group in options], device, dtype)
        self.weight_decays = upload([group["weight_decay"] for group in options], device, dtype)
        self.has_weight_decay = any(group["weight_decay"] for group in options)
        self.options = options[0]
        self.moments = [numbers for name, numbers in self.weights.states.items() if name != STEP]
        self.loss_scales = [env.loss_scale for env in envs if env.loss_scale is not None]
        if self.loss_scales:
            self.scale = torch.stack([own.scale for own in self.loss_scales])
            self.good_steps = torch.stack([own.good_steps for own in self.loss_scales])
        # Weights of seeds that fail on purpose and get zero gradients, see `HostEnv.failing_slots`. None: no seed does.
        failing = {(i, seed_group_name(slot.name)) for i, env in enumerate(envs) for slot in env.failing_slots}
        is_failing = [group in failing for group in groups]
        self.failing_mask = self._per_weight(upload(is_failing, device)) if failing else None
        self.micro_batches = training.micro_batches
        self.batches = Batches.concatenate([own.split(self.micro_batches) for own in batches])
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
        if self.failing_mask is not None:
            self.weights.grads.masked_fill_(self.failing_mask, 0.0)
        finite = self._unscale_gradients() if self.loss_scales else None
        if i == len(self) - 1:
            self.gradients = self._gradient_stats()
        self.update_weights(finite)

    def _accumulate_gradients(self, part: int) -> None:
        """Add the gradients, losses and scores of one micro-batch, for all hosts."""
        inputs, targets = fetch(self.data, self.batches.minibatch(part), self.training.augment)
        with self.training.autocast(inputs.device):
            measures = self.task.measure(self.batched.train(inputs), targets)
            losses = measures.loss.view(len(self.envs), -1).mean(1) / self.micro_batches  # [N]
        (losses * self.scale if self.loss_scales else losses).sum().backward()
        with torch.no_grad():
            scores = measures.score.view(len(self.envs), -1).mean(1) / self.micro_batches
            self.totals += torch.stack([losses, scores])

    @torch.no_grad()
    def _unscale_gradients(self) -> Tensor:  # [N] bool
        """Divide gradients by the loss scales, which change. Returns which hosts and their seeds have finite ones."""
        grads = self.weights.grads
        grads /= self._per_weight(self.scale[self.host_of_group])
        nonfinite = torch.zeros_like(self.scale)
        nonfinite.index_add_(0, self.host_of_group, self._group_sums((~grads.isfinite()).to(self.scale.dtype)))
        finite = nonfinite == 0
        self.skipped_steps += ~finite
        self.scale, self.good_steps = next_scale(self.scale, self.good_steps, finite)
        return finite

    def _gradient_stats(self) -> Tensor:  # [N, 1 + K, 4]
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

    @torch.no_grad()
    def update_weights(self, finite: Tensor | None = None) -> None:
        """Clip the gradients of each group and update the weights.

        Args:
            finite: Hosts that take the step together with their seeds, [N] bool. None: all hosts.
        """
        values, grads, limit = self.weights.values, self.weights.grads, self.training.max_grad_norm
        steps = self.weights.states.get(STEP)  # [parameters]; of Adam only
        previous = []  # each tensor that changes, a copy of it, and which of its elements may change
        if finite is not None:
            takes_step = finite[self.host_of_group]
            weight_takes_step = self._per_weight(takes_step)
            previous = [(one, one.clone(), weight_takes_step) for one in (values, *self.moments)]
            if steps is not None:
                previous.append((steps, steps.clone(), takes_step.index_select(0, self.weights.group_of_parameter)))
        if limit is not None:
            norms = self._group_sums(grads.square()).sqrt()
            grads *= self._per_weight((limit / (norms + CLIP_EPS)).clamp(max=1.0))
        if self.has_weight_decay and self.training.optimizer == "adamw":
            values *= self._per_weight(1.0 - self.learning_rates * self.weight_decays)
        elif self.has_weight_decay:
            grads = grads + self._per_weight(self.weight_decays) * values
        if steps is None:
            momentum = self.moments[0].mul_(self.options["momentum"]).add_(grads)
            values -= self._per_weight(self.learning_rates) * momentum
        else:  # Adam (https://arxiv.org/abs/1412.6980)
            first, second = self.moments
            beta1, beta2 = self.options["betas"]
            steps += 1
            # In float64, because powers of beta2 are too close to 1 for float32.
            group_steps = steps.index_select(0, self.weights.first_parameters).double()
            bias1, bias2 = (1.0 - beta**group_steps for beta in (beta1, beta2))  # [G]
            first.lerp_(grads, 1.0 - beta1)
            second.mul_(beta2).addcmul_(grads, grads, value=1.0 - beta2)
            root = second.sqrt().div_(self._per_weight(bias2.sqrt().to(grads.dtype))).add_(self.options["eps"])
            values -= self._per_weight((self.learning_rates / bias1).to(grads.dtype)) * first / root
        for tensor, old, may_change in previous:
            tensor.copy_(torch.where(may_change, tensor, old))

    def _per_weight(self, coefficients: Tensor) -> Tensor:  # [G] -> [numbers]
        """Repeat one coefficient per group for each weight of the group."""
        return coefficients.index_select(0, self.weights.group_of_weight)

    def _group_sums(self, numbers: Tensor) -> Tensor:  # [numbers] -> [G]
        """Return the sum over the weights of each group."""
        tensors_by_module = self.weights.views(numbers)
        rows = [torch.stack([t.reshape(len(t), -1).sum(1) for t in tensors]) for tensors in tensors_by_module]
        return torch.cat([row.sum(0) for row in rows])

    def finish(self) -> Tensor:  # [N, 3]
        """Write loss scales back to the environments. Returns sums over minibatches: loss, score, skipped steps."""
        for i, own in enumerate(self.loss_scales):
            own.set(self.scale[i], self.good_steps[i])
        self.batched.release()
        return torch.cat([self.totals, self.skipped_steps[None]]).T


def map_by_kind(work: Callable[[Sequence[Sequence[HostEnv]]], list[Tensor]], envs: Sequence[HostEnv]) -> Tensor:
    """Run `work` on the hosts of each kind, in groups by device. Returns its rows in the order of `envs`.

    `work` returns one tensor for each group, with a row for each host. The result is on the first host's device.
    """
    groups_by_kind: dict[str, dict[torch.device, list[int]]] = {}
    for i, env in enumerate(envs):
        groups_by_kind.setdefault(env.kind, {}).setdefault(env.device, []).append(i)
    rows: dict[int, Tensor] = {}
    for groups in groups_by_kind.values():
        results = work([[envs[i] for i in indices] for indices in groups.values()])
        for indices, result in zip(groups.values(), results, strict=True):
            rows.update(zip(indices, result.to(envs[0].device, non_blocking=True), strict=True))
    return torch.stack([rows[i] for i in range(len(envs))])
