"""Factory of environments, which creates one per host index and architecture when first needed and reuses it."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from esper_lightning.envs.config import EnvConfig, HostFactory
from esper_lightning.envs.family import TRAINING, Context, ContextDistribution, HostContext, select_offer
from esper_lightning.envs.flops import measure_flops
from esper_lightning.envs.governor.judge import GovernorConfig, HostMonitor
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import MAX_BATCHES
from esper_lightning.envs.spaces.action_discovery import (
    SharedSpace,
    describe_host,
    discover_action_space,
    pad_slots,
    union_of_slots,
)
from esper_lightning.envs.spaces.actions import ActionSpace
from esper_lightning.growth.blueprints import build_on
from esper_lightning.tasks import Task, TaskData, check_transform, make_variants


def build_host(
    host: HostFactory, data: TaskData, context: Context, device: torch.device, shared_space: SharedSpace | None
) -> nn.Module:
    """Return a host with empty slots. Raises ValueError if it cannot be made with the arguments of the context."""
    try:
        generator = torch.Generator(device).manual_seed(0)
        built = build_on(device, lambda: host(data.input_shape, data.outputs, **context.architecture), generator)
    except TypeError as error:
        if context.architecture:
            raise ValueError(f"family: the host cannot be made with {context.architecture}: {error}") from error
        raise ValueError(
            f"data.host cannot be made with its arguments behind the shape of an input, {list(data.input_shape)}, "
            f"and the number of outputs, {data.outputs}: {error}; for a network with other arguments use "
            f"esper_lightning.hosts.Attached"
        ) from error
    return built if shared_space is None else pad_slots(built, shared_space.slots, device)


def discover_spaces(
    task: Task,
    data: TaskData,
    host: HostFactory,
    config: EnvConfig,
    device: torch.device,
    shared_space: SharedSpace | None = None,
) -> tuple[SharedSpace | None, ActionSpace, dict[str, Tensor]]:
    """Return the action space that hosts of every architecture of a family have in common.

    Returns the slots and blueprints that are shared with other hosts (None: the architectures are alike), the action
    space, and where a blueprint can grow in a slot of each architecture, [K, blueprints] bool.
    """
    contexts = [*config.family.contexts(), *config.family.contexts(held_out=True)]
    found = {
        architecture: discover_action_space(
            build_host(host, data, context, device, shared_space),
            task,
            data.train.to(device).batch(slice(config.training.batch_size)),
            outputs=data.outputs,
            actions=config.actions,
            birth=config.lifecycle.birth,
            shared_space=shared_space,
        )
        for architecture, context in {context.architecture_name: context for context in contexts}.items()
    }
    space, growable = next(iter(found.values()))
    differ = any(other != space or not torch.equal(where, growable) for other, where in found.values())
    if differ and shared_space is None:
        return discover_spaces(task, data, host, config, device, union_of_slots(list(found.values())))
    return shared_space, space, {architecture: where for architecture, (_, where) in found.items()}


class EnvFactory:
    """Creates and keeps environments; `make` returns the one for a host index and the RNG seed of an episode.

    Arguments are those of `HostPool`.

    Attributes:
        data: The data in all transforms that the contexts need, on the devices.
        space: Action space, the same for hosts of every architecture.
        samples_per_epoch: Most training samples of a host epoch, those of a host without seeds.
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
        self.config, self.host, self.devices = config, host, devices
        family = config.family
        self.context_distribution = ContextDistribution(family, held_out)
        contexts = self.context_distribution.contexts
        # Held-out contexts are checked even if they are not drawn here, because evaluation will use them.
        all_contexts = [*family.contexts(), *family.contexts(held_out=True)]
        for context in all_contexts:
            check_transform(context.transform, data)
        transforms = list(dict.fromkeys(context.transform for context in contexts))
        self.data = data if transforms == ["none"] else make_variants(data, transforms).copy_to(devices)
        self.steps_per_epoch = config.training.steps_per_epoch(data.train.samples)
        self.shared_space, self.space, self.growable = discover_spaces(
            task, data, host, config, devices[0], shared_space
        )
        architectures = {context.architecture_name: context for context in all_contexts}
        built = {name: self._build_host(context, devices[0]) for name, context in architectures.items()}
        kinds = {name: describe_host(network) for name, network in built.items()}
        sample = self.data.train.batch(slice(1)).inputs
        self.host_flops = {name: measure_flops(network, sample) for name, network in built.items()}
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
        self.samples_per_epoch = 0
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

    def _build_host(self, context: Context, device: torch.device) -> nn.Module:
        return build_host(self.host, self.data, context, device, self.shared_space)

    def set_governor(self, governor: GovernorConfig | None) -> None:
        """Let the Governor watch every environment, those created later too. None: stop watching."""
        self.governor = governor
        for env in self.envs.values():
            self._attach_monitor(env)

    def _attach_monitor(self, env: HostEnv) -> None:
        env.monitor = None
        if self.governor is not None:
            env.monitor = HostMonitor(
                self.governor,
                chance_loss=self.data.chance_loss,
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
            env = self.envs[index, architecture] = HostEnv(
                self._build_host(host_context.context, device),
                self.space,
                host_context,
                config=self.config,
                device=device,
                flops=self.host_flops[architecture],
                architecture=architecture,
            )
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
