"""Factory of environments, which creates one per host index and architecture when first needed and reuses it."""

import inspect
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on, suggest_name
from esper_lightning.envs.config import EnvConfig, HostFactory
from esper_lightning.envs.context.context import HostContext
from esper_lightning.envs.context.distribution import Context, ContextDistribution, seed_fails, select_offer
from esper_lightning.envs.flops import measure_flops
from esper_lightning.envs.governing import Overseer
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.memory import check_host_memory
from esper_lightning.envs.spaces.action_discovery import (
    SharedSpace,
    describe_host,
    discover_action_space,
    pad_slots,
    union_of_slots,
)
from esper_lightning.envs.spaces.actions import ActionSpace
from esper_lightning.profiling import HostTimer, make_timer
from esper_lightning.tasks import Split, Task, TaskData, make_variants


class EnvFactory:
    """Creates and keeps environments; `make` returns the one for a host index and the RNG seed of an episode.

    Args:
        task: Computes loss and accuracy of outputs on `data`.
        data: Data of the task, on the hosts' devices.
        host: Factory of host networks.
        config: Settings of the environments, with the distribution over contexts.
        devices: Devices of hosts, which are assigned to them in turn.
        held_out: True to draw held-out contexts.
        shared_space: Slots and blueprints shared with the hosts of other tasks.

    Attributes:
        data: All data variants that the contexts need, on the devices.
        space: Action space, the same for hosts of every architecture.
        growable: True where a blueprint can grow in a slot, by architecture, [K, blueprints] bool each.

    Raises ValueError if contexts do not fit the task, the host, or each other.
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
        self.shared_space = shared_space
        self.config = config
        self.host = host
        self.devices = devices
        self.num_classes = data.classes
        self.context_distribution = ContextDistribution(config.family, held_out)
        contexts = self.context_distribution.contexts
        self.variants = list(dict.fromkeys(context.variant.without_subset for context in contexts))
        unmodified = len(self.variants) == 1 and self.variants[0] == Context().variant
        self.data = data if unmodified else make_variants(data, self.variants).copy_to(devices)
        all_contexts = [
            *config.family.contexts(),
            *(config.family.contexts(held_out=True) if config.family.held_out else ()),
        ]
        for context in all_contexts:
            context.variant.check(data)
        self.steps_per_epoch = config.training.steps_per_epoch(data.train.samples)
        self.input_shape = data.input_shape
        batch = Split(*(part[: config.training.batch_size] for part in self.data.train))
        # Held-out contexts are included even if they are not drawn here, because evaluation will use them.
        architectures = {architecture_name(context): context for context in all_contexts}

        def discover() -> dict[str, tuple[ActionSpace, Tensor]]:
            return {
                architecture: discover_action_space(
                    self._build_host(context, devices[0]),
                    task,
                    batch,
                    classes=data.classes,
                    actions=config.actions,
                    birth=config.lifecycle.birth,
                    shared_space=self.shared_space,
                )
                for architecture, context in architectures.items()
            }

        action_spaces = discover()
        (_, (first_space, first_growable)), *further_spaces = action_spaces.items()
        for _, (space, growable) in further_spaces:
            if space == first_space and torch.equal(growable, first_growable):
                continue
            if self.shared_space is None:
                self.shared_space = union_of_slots(list(action_spaces.values()))
                action_spaces = discover()
            break
        self.space = next(iter(action_spaces.values()))[0]
        self.growable = {architecture: growable for architecture, (_, growable) in action_spaces.items()}
        self.host_flops = {
            architecture: measure_flops(self._build_host(context, devices[0]), batch.inputs[:1])
            for architecture, context in architectures.items()
        }
        self.host_kind = self._describe()
        self.host_contexts = {repr(context): self._make_host_context(context) for context in contexts}
        self.overseer: Overseer | None = None
        self.envs: dict[tuple[int, str], HostEnv] = {}  # by host index and architecture

    def oversee(self, overseer: Overseer | None) -> None:
        """Let an overseer watch every environment, those created later too. None: stop watching."""
        self.overseer = overseer
        for env in self.envs.values():
            self._attach_monitor(env)

    def _attach_monitor(self, env: HostEnv) -> None:
        monitor = None
        if self.overseer is not None:
            monitor = self.overseer.make_monitor(
                chance_loss=env.context.chance_loss, steps_per_epoch=self.steps_per_epoch, device=env.device
            )
        env.monitor = monitor

    def _describe(self) -> str:
        """Describe the hosts of training, even if held-out contexts are drawn: policies are built for the former."""
        family = self.config.family
        architectures = {architecture_name(context): context for context in family.contexts()}
        hosts = [describe_host(self._build_host(context, self.devices[0])) for context in architectures.values()]
        return "; ".join([*hosts, f"family {family.checksum}"] if family.train else hosts)

    def _build_host(self, context: Context, device: torch.device) -> nn.Module:
        def build() -> nn.Module:
            host = self.host(self.input_shape, self.num_classes, **context.architecture)
            if not isinstance(host, nn.Module):
                raise ValueError(f"data.host made a {type(host).__name__}, not a network")
            check_host_memory(host, 1, device)
            return host

        try:
            built = build_on(device, build, torch.Generator(device).manual_seed(0))
            return built if self.shared_space is None else pad_slots(built, self.shared_space.slots, device)
        except TypeError as error:
            if context.architecture:
                near = self._nearest_argument(error)
                raise ValueError(
                    f"family: the host cannot be made with {context.architecture}: {error}{near}"
                ) from error
            raise ValueError(
                f"data.host cannot be made with its arguments behind the shape of an input, {list(self.input_shape)}, "
                f"and the number of classes, {self.num_classes}: {error}; for a network with other arguments use "
                f"esper_lightning.hosts.Attached"
            ) from error

    def _nearest_argument(self, error: TypeError) -> str:
        """Return which argument of the host an unknown one may stand for, or an empty string for another error."""
        found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if found is None:
            return ""
        known = inspect.signature(type(self.host(self.input_shape, self.num_classes))).parameters
        return f"; {suggest_name(found[1], list(known))}"

    def _make_host_context(self, context: Context) -> HostContext:
        variant = context.variant
        training = context.training(self.config.training)
        return HostContext(
            context,
            training=training,
            variant_index=self.variants.index(variant.without_subset),
            num_classes=variant.classes or self.num_classes,
            horizon=context.horizon or self.config.horizon,
        )

    def make(self, index: int, rng_seed: int) -> HostEnv:
        """Return the environment of a host index for the episode with this RNG seed; the caller must reset it."""
        return self._get_or_create(index, self.host_contexts[repr(self.context_distribution.draw(rng_seed))])

    def one_per_architecture(self) -> list[HostEnv]:
        """Return one environment of each architecture that may be drawn."""
        by_architecture = {architecture_name(context.context): context for context in self.host_contexts.values()}
        return [self._get_or_create(0, context) for context in by_architecture.values()]

    def growable_in(self, env: HostEnv) -> Tensor:
        """Return which blueprint may grow in which slot in the episode of an environment, [K, blueprints] bool."""
        growable, context = self.growable[env.architecture], env.context.context
        if not context.limits_offer:
            return growable
        return torch.tensor(select_offer(growable.tolist(), context, env.rng_seed))

    @property
    def is_uniform(self) -> bool:
        """True if the same blueprints can grow in the same slots of all hosts in all episodes."""
        first, *others = self.growable.values()
        return all(torch.equal(first, other) for other in others) and not any(
            context.limits_offer for context in self.context_distribution.contexts
        )

    def _get_or_create(self, index: int, host_context: HostContext) -> HostEnv:
        architecture = architecture_name(host_context.context)
        if (index, architecture) not in self.envs:
            self.envs[index, architecture] = self._create(
                host_context, architecture, self.devices[index % len(self.devices)]
            )
        env = self.envs[index, architecture]
        env.set_context(host_context)
        return env

    def _create(self, context: HostContext, architecture: str, device: torch.device) -> HostEnv:
        config = self.config
        env = HostEnv(
            self._build_host(context.context, device),
            self.space,
            context,
            lifecycle=config.lifecycle,
            actions=config.actions,
            objective=config.objective,
            horizon=config.horizon,
            device=device,
            timer=HostTimer(make_timer(device)),
            measure_host_only=config.reward.needs_host_only,
            flops=self.host_flops[architecture],
            architecture=architecture,
        )
        self._attach_monitor(env)
        return env

    @property
    def num_privileged(self) -> int:
        """Number of privileged features P; 0: nothing is hidden."""
        return len(
            self.context_distribution.encode(self.context_distribution.contexts[0])
        ) + self.context_distribution.seeds_may_fail * len(self.space.slot) * len(self.space.blueprint)

    def privileged_features(self, env: HostEnv) -> list[float]:
        """Return the P privileged features of an episode: encoded context, then failing pairs of slot and blueprint."""
        values = self.context_distribution.encode(env.context.context)
        if self.context_distribution.seeds_may_fail:
            values += [
                float(
                    seed_fails(
                        env.rng_seed, slot, blueprint, probability=env.context.context.failure_probability(blueprint)
                    )
                )
                for slot in self.space.slot
                for blueprint in self.space.blueprint
            ]
        return values


def architecture_name(context: Context) -> str:
    """Return the name of a context's host architecture."""
    return ", ".join(f"{name} {value}" for name, value in context.architecture.items())
