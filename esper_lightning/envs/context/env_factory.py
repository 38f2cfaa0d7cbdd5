"""Factory of environments, which creates one per host index and architecture when first needed and reuses it."""

import inspect
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on, suggest_name
from esper_lightning.envs.config import EnvConfig, HostFactory
from esper_lightning.envs.context.distribution import (
    Context,
    ContextDistribution,
    HostContext,
    select_offer,
    training_of,
)
from esper_lightning.envs.flops import HostFlops, measure_flops
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
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.governor.monitor import HostMonitor
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
        host_kind: Description of the hosts of training, for which policies are built.

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
        self.num_classes, self.input_shape = data.classes, data.input_shape
        family = config.family
        self.context_distribution = ContextDistribution(family, held_out)
        contexts = self.context_distribution.contexts
        self.variants = list(dict.fromkeys(context.variant.without_subset for context in contexts))
        unmodified = self.variants == [Context().variant]
        self.data = data if unmodified else make_variants(data, self.variants).copy_to(devices)
        # Held-out contexts are checked even if they are not drawn here, because evaluation will use them.
        all_contexts = [*family.contexts(), *(family.contexts(held_out=True) if family.held_out else ())]
        for context in all_contexts:
            context.variant.check(data)
        self.steps_per_epoch = config.training.steps_per_epoch(data.train.samples)
        batch = Split(*(part[: config.training.batch_size] for part in self.data.train))
        architectures = {context.architecture_name: context for context in all_contexts}

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
        first_space, first_growable = next(iter(action_spaces.values()))
        if self.shared_space is None and any(
            space != first_space or not torch.equal(growable, first_growable)
            for space, growable in action_spaces.values()
        ):
            self.shared_space = union_of_slots(list(action_spaces.values()))
            action_spaces = discover()
        self.space = next(iter(action_spaces.values()))[0]
        self.growable = {architecture: growable for architecture, (_, growable) in action_spaces.items()}
        self.host_flops: dict[str, HostFlops] = {}
        kinds: dict[str, str] = {}
        for architecture, context in architectures.items():
            built = self._build_host(context, devices[0])
            self.host_flops[architecture] = measure_flops(built, batch.inputs[:1])
            kinds[architecture] = describe_host(built)
        of_training = [kinds[name] for name in dict.fromkeys(one.architecture_name for one in family.contexts())]
        self.host_kind = "; ".join([*of_training, f"family {family.checksum}"] if family.train else of_training)
        self.host_contexts = {
            repr(context): HostContext(
                context,
                training=training_of(context, config.training),
                variant_index=self.variants.index(context.variant.without_subset),
                num_classes=context.variant.classes or self.num_classes,
                horizon=context.horizon or config.horizon,
            )
            for context in contexts
        }
        self.governor: GovernorConfig | None = None
        self.envs: dict[tuple[int, str], HostEnv] = {}  # by host index and architecture

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
                unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
                known = inspect.signature(type(self.host(self.input_shape, self.num_classes))).parameters
                hint = f"; {suggest_name(unknown[1], list(known))}" if unknown else ""
                raise ValueError(
                    f"family: the host cannot be made with {context.architecture}: {error}{hint}"
                ) from error
            raise ValueError(
                f"data.host cannot be made with its arguments behind the shape of an input, {list(self.input_shape)}, "
                f"and the number of classes, {self.num_classes}: {error}; for a network with other arguments use "
                f"esper_lightning.hosts.Attached"
            ) from error

    def oversee(self, governor: GovernorConfig | None) -> None:
        """Let the Governor watch every environment, those created later too. None: stop watching."""
        self.governor = governor
        for env in self.envs.values():
            self._attach_monitor(env)

    def _attach_monitor(self, env: HostEnv) -> None:
        env.monitor = None
        if self.governor is not None:
            env.monitor = HostMonitor(
                self.governor,
                chance_loss=env.context.chance_loss,
                steps_per_epoch=self.steps_per_epoch,
                device=env.device,
            )

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
            env = HostEnv(
                self._build_host(host_context.context, device),
                self.space,
                host_context,
                config=self.config,
                device=device,
                flops=self.host_flops[architecture],
                architecture=architecture,
            )
            self.envs[index, architecture] = env
            self._attach_monitor(env)
        env.set_context(host_context)
        return env

    def growable_in(self, env: HostEnv) -> Tensor:
        """Return which blueprint may grow in which slot in the episode of an environment, [K, blueprints] bool."""
        growable, context = self.growable[env.architecture], env.context.context
        if not context.limits_offer:
            return growable
        return torch.tensor(select_offer(growable.tolist(), context, env.rng_seed))

    @property
    def num_privileged(self) -> int:
        """Number of privileged features P; 0: nothing is hidden."""
        encoded = len(self.context_distribution.encode(Context()))
        return encoded + self.context_distribution.seeds_may_fail * len(self.space.slot) * len(self.space.blueprint)

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
