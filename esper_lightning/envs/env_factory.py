"""Factory of environments, and the action space that its hosts have in common, discovered on throw-away hosts.

The factory creates one environment per host index and architecture when first needed, and reuses it.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.actions import ActionConfig, ActionSpace
from esper_lightning.envs.config import EnvConfig, HostFactory
from esper_lightning.envs.family import TRAINING, Context, ContextDistribution, HostContext, select_offer
from esper_lightning.envs.flops import measure_flops
from esper_lightning.envs.governor import GovernorConfig, HostMonitor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import MAX_BATCHES
from esper_lightning.growth.blueprints import STACK, Birth, build_on, default_blueprints
from esper_lightning.growth.blueprints.registry import check_parameters
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.probe import probe_seeds, reasons_of_cache
from esper_lightning.growth.slot import ABSENT, SeedSlot
from esper_lightning.hosts import CNN, GPT
from esper_lightning.runtime.console import print_status
from esper_lightning.tasks import Task, TaskData, check_measures, check_outputs, check_transform, make_variants


class SharedSpace(NamedTuple):
    """Slots and blueprints in the common action space of several tasks or architectures."""

    slots: list[str]  # every host gets this many, under these names
    blueprints: list[str]  # that can grow on the hosts of at least one task


class CommonSpace(NamedTuple):
    """Action space that hosts of every architecture of a family have in common."""

    shared: SharedSpace | None  # with hosts of other tasks or architectures. None: all are alike
    space: ActionSpace
    growable: dict[str, Tensor]  # where a blueprint can grow in a slot, by architecture, [K, blueprints] bool


def union_of_slots(spaces: Sequence[ActionSpace]) -> SharedSpace:
    """Return the union of action spaces: the largest number of slots, and every blueprint."""
    num_slots = max(len(space.slot) for space in spaces)
    blueprints = dict.fromkeys(name for space in spaces for name in space.blueprint)
    return SharedSpace([f"place{i + 1}" for i in range(num_slots)], list(blueprints))


def pad_slots(network: nn.Module, names: Sequence[str], device: torch.device) -> nn.Module:
    """Rename the slots of a host to `names`, in order; missing ones are added as slots in which nothing can grow."""
    slots = list(slots_of(network).values())
    assert len(slots) <= len(names), "as many names as the host with the most slots has slots"
    for slot, name in zip(slots, names, strict=False):
        slot.name = name
    missing = names[len(slots) :]
    with device:
        network.absent_places = PaddedSlots(SeedSlot(name, ABSENT, 1, detach_input=False) for name in missing)
    return network


class PaddedSlots(nn.ModuleList):
    """Padding slots, through which no feature passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged, because an `nn.Sequential` host runs this module as its last layer."""
        return x


def build_host(
    host: HostFactory, data: TaskData, context: Context, device: torch.device, shared_space: SharedSpace | None
) -> nn.Module:
    """Return a host with empty slots. Raises ValueError if it cannot be made with the arguments of the context."""
    arguments = context.architecture
    try:
        generator = torch.Generator(device).manual_seed(0)
        built = build_on(device, lambda: host(data.input_shape, data.outputs, **arguments), generator)
    except TypeError as error:
        if arguments:
            raise ValueError(f"family: the host cannot be made with {arguments}: {error}") from error
        raise ValueError(
            f"data.host cannot be made with its arguments behind the shape of an input, {list(data.input_shape)}, "
            f"and the number of outputs, {data.outputs}: {error}; for a network with other arguments use "
            f"esper_lightning.hosts.Attached"
        ) from error
    return built if shared_space is None else pad_slots(built, shared_space.slots, device)


def probe_action_space(
    host: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    actions: ActionConfig,
    birth: Birth,
    shared_space: SharedSpace | None = None,
) -> tuple[ActionSpace, Tensor]:
    """Find the action space of a network, and which of P blueprints can grow in which slot, [K, P] bool.

    `loss_of` runs a network on a batch and returns its loss, with a graph. The host, whose slots are empty and those of
    `shared_space`, cannot be used afterwards. Raises ValueError if a slot or a blueprint cannot be used at all.
    """
    slots = slots_of(host)
    if not slots:
        raise ValueError("the host has no slots; name at least one where seeds may grow")
    layouts = {slot.layout: None for slot in slots.values()}
    available = dict.fromkeys(name for layout in layouts for name in default_blueprints(layout))
    blueprints = shared_space.blueprints if shared_space is not None else actions.blueprints or list(available)
    reasons = probe_seeds(host, blueprints, loss_of, birth=birth)
    if shared_space is None and actions.blueprints is None:
        left_out = [
            name
            for name in blueprints
            if all(reasons[slot, name] for slot in slots)
            and any(reasons_of_cache(host, slot, name) for slot in slots.values())
        ]
        blueprints = [name for name in blueprints if name not in left_out]
        if left_out:
            print_status(f"left out: {', '.join(left_out)}, because {reasons[next(iter(slots)), left_out[0]][0]}")
    growable = torch.tensor([[not reasons[slot, blueprint] for blueprint in blueprints] for slot in slots])
    if shared_space is not None:
        allowed = [name in (actions.blueprints or blueprints) for name in blueprints]
        return actions.make_space(list(slots), blueprints), growable & torch.tensor(allowed)
    for (k, slot), (p, blueprint) in product(enumerate(slots.values()), enumerate(blueprints)):
        if growable[k, p] and slot.layout != STACK:
            check_parameters(blueprint, slot.layout, slot.width)
    for k, slot in enumerate(slots):
        if not growable[k].any():
            raise ValueError(
                f"slot {slot!r}: nothing can grow there; {blueprints[0]}: {reasons[slot, blueprints[0]][0]}"
            )
    for p, blueprint in enumerate(blueprints):
        if not growable[:, p].any():
            slot = next(iter(slots))
            raise ValueError(f"blueprint {blueprint!r} can grow in no slot; {slot}: {reasons[slot, blueprint][0]}")
    return actions.make_space(list(slots), blueprints), growable


def discover_spaces(
    task: Task,
    data: TaskData,
    host: HostFactory,
    config: EnvConfig,
    device: torch.device,
    shared_space: SharedSpace | None = None,
) -> CommonSpace:
    """Find the action space of the hosts of a task. Raises ValueError if they do not fit it."""
    batch = data.train.to(device).batch(slice(config.training.batch_size))

    def loss_of(network: nn.Module) -> Tensor:
        outputs = network(batch.inputs)
        if type(task).measure is Task.measure:
            check_outputs(outputs, data.outputs, task.score)
        measures = task.measure(outputs, batch.targets)
        check_measures(measures, len(batch.targets), type(task).__name__)
        return measures.loss.mean()

    found = {}
    for architecture, context in config.family.architectures.items():
        network = build_host(host, data, context, device, shared_space)
        found[architecture] = probe_action_space(
            network, loss_of, actions=config.actions, birth=config.lifecycle.birth, shared_space=shared_space
        )
    first, growable = next(iter(found.values()))
    differ = any(space != first or not torch.equal(where, growable) for space, where in found.values())
    if differ and shared_space is None:
        shared = union_of_slots([space for space, _ in found.values()])
        return discover_spaces(task, data, host, config, device, shared)
    return CommonSpace(shared_space, first, {architecture: where for architecture, (_, where) in found.items()})


BF16_FLOPS, BF16_WIDTH = 50_000_000, 128
"""FLOPs of the forward pass of a minibatch, and width of a GPT, from which bf16 is faster on a CPU that has it.

Speed over fp32 with AVX-512, one thread. CNNs of 4 to 64 channels on 8×8 to 32×32 pixels, minibatches of 16 to 128:
.87 to 1.00 below, 1.00 to 2.32 above. GPTs of width 16 to 64: .33 to .95; of 128: 1.33 to 1.67. Of other networks some
lost."""


def gains_from_bf16(network: nn.Module, flops: float) -> bool:
    """Return True if bf16 makes a host faster on a CPU that has it; `flops` are those of a minibatch's forward pass."""
    is_measured = isinstance(network, CNN) or (isinstance(network, GPT) and network.tokens.embedding_dim >= BF16_WIDTH)
    return is_measured and flops >= BF16_FLOPS


class EnvFactory:
    """Creates and keeps environments; `make` returns the one for a host index and the RNG seed of an episode.

    Arguments are those of `HostPool`. Raises ValueError if contexts do not fit the task, the host, or each other.
    """

    def __init__(
        self,
        task: Task,
        data: TaskData,
        host: HostFactory,
        *,
        config: EnvConfig,
        devices: Sequence[torch.device],
        held_out: bool = False,
        shared_space: SharedSpace | None = None,
    ) -> None:
        self.host, self.devices = host, devices
        family = config.family
        self.context_distribution = ContextDistribution(family, held_out)
        contexts = self.context_distribution.contexts
        # Held-out contexts are checked even if they are not drawn here, because evaluation will use them.
        for context in family.all_contexts:
            check_transform(context.transform, data)
        trainings = [replace(config.training, **context.variables_in(TRAINING)) for context in family.all_contexts]
        if len({training.flops is None for training in trainings}) > 1:
            raise ValueError("family: some contexts have training.flops and others none; give it to all, or to none")
        transforms = list(dict.fromkeys(context.transform for context in contexts))
        # In all transforms that the contexts need.
        self.data = data if transforms == ["none"] else make_variants(data, transforms).copy_to(devices)
        self.steps_per_epoch = config.training.steps_per_epoch(data.train.samples)
        self.shared_space, self.space, self.growable = discover_spaces(
            task, data, host, config, devices[0], shared_space
        )
        self.host_flops, kinds = {}, {}  # `kinds`: descriptions, which differ between architectures
        gains = True
        sample = self.data.train.batch(slice(1)).inputs
        for name, context in family.architectures.items():
            network = build_host(host, self.data, context, devices[0], self.shared_space)
            self.host_flops[name] = measure_flops(network, sample)
            gains &= gains_from_bf16(network, self.host_flops[name].host * config.training.batch_size)
            shapes = repr([(parameter, tuple(p.shape)) for parameter, p in network.named_parameters()])
            kinds[name] = f"{count_parameters(network)} parameters, layout {zlib.crc32(shapes.encode()):08x}"
        config = self.config = replace(config, training=config.training.on(devices[0], gains=gains))
        of_training = [kinds[name] for name in dict.fromkeys(one.architecture_name for one in family.contexts())]
        self.host_kind = "; ".join([*of_training, f"family {family.checksum}"] if family.train else of_training)
        self.host_contexts = {
            repr(context): HostContext(
                context,
                training=replace(config.training, **context.variables_in(TRAINING)),
                variant_index=transforms.index(context.transform),
                horizon=context.horizon or config.horizon,
                price=config.objective.price if context.price is None else context.price,
            )
            for context in contexts
        }
        self.samples_per_epoch = 0  # at most, of training, by a host without seeds
        for one in self.host_contexts.values():
            budget, architecture = one.training.flops, self.host_flops[one.context.architecture_name]
            batch = architecture.of_step([]) * one.training.batch_size
            if budget is not None and not batch <= budget <= batch * MAX_BATCHES:
                raise ValueError(
                    f"training.flops is {budget:g}, but a minibatch of a host costs {batch:g}, and a host epoch has at "
                    f"least one and at most {MAX_BATCHES:,}"
                )
            batches = one.training.steps_per_epoch(data.train.samples) if budget is None else int(budget // batch)
            self.samples_per_epoch = max(self.samples_per_epoch, batches * one.training.batch_size)
        self.governor: GovernorConfig | None = None
        self.envs: dict[tuple[int, str], HostEnv] = {}  # by host index and architecture

    def set_governor(self, governor: GovernorConfig | None) -> None:
        """Let the Governor watch every environment, those created later too. None: stop watching."""
        self.governor = governor
        for env in self.envs.values():
            env.monitor = self._make_monitor(env.device)

    def _make_monitor(self, device: torch.device) -> HostMonitor | None:
        if self.governor is None:
            return None
        chance_loss, steps = self.data.chance_loss, self.steps_per_epoch
        return HostMonitor(self.governor, chance_loss=chance_loss, steps_per_epoch=steps, device=device)

    def make(self, index: int, rng_seed: int) -> HostEnv:
        """Return the environment of a host index for the episode with this RNG seed; the caller must reset it."""
        return self._get_or_create(index, self.host_contexts[repr(self.context_distribution.draw(rng_seed))])

    def one_per_architecture(self) -> list[HostEnv]:
        """Return one environment of each architecture that may be drawn."""
        by_architecture = {host.context.architecture_name: host for host in self.host_contexts.values()}
        return [self._get_or_create(0, host_context) for host_context in by_architecture.values()]

    def _get_or_create(self, index: int, host_context: HostContext) -> HostEnv:
        architecture = host_context.context.architecture_name
        if (env := self.envs.get((index, architecture))) is None:
            device = self.devices[index % len(self.devices)]
            env = self.envs[index, architecture] = HostEnv(
                build_host(self.host, self.data, host_context.context, device, self.shared_space),
                self.space,
                host_context,
                config=self.config,
                device=device,
                flops=self.host_flops[architecture],
                architecture=architecture,
            )
            env.monitor = self._make_monitor(device)
        env.context, env.training = host_context, host_context.training  # from the next reset on
        return env

    def growable_in(self, env: HostEnv) -> Tensor:
        """Return which blueprint may grow in which slot in the episode of an environment, [K, blueprints] bool."""
        growable = self.growable[env.architecture].tolist()
        return torch.tensor(select_offer(growable, env.context.context, env.rng_seed))

    def privileged_features(self, env: HostEnv) -> list[float]:
        """Return the P privileged features of an episode: encoded context, then failing pairs of slot and blueprint."""
        context = env.context.context
        values = self.context_distribution.encode(context)
        if self.context_distribution.seeds_may_fail:
            values += [
                float(context.seed_fails(env.rng_seed, slot, blueprint))
                for slot in self.space.slot
                for blueprint in self.space.blueprint
            ]
        return values
