"""Factory of environments, which creates one per host index and architecture when first needed and reuses it."""

from collections.abc import Sequence

import torch
from torch import nn

from esper_lightning.blueprints import build_on
from esper_lightning.envs.compute import measure_compute
from esper_lightning.envs.config import EnvConfig, HostFactory
from esper_lightning.envs.execution import Laps, make_timer
from esper_lightning.envs.family import Family, Member, fails
from esper_lightning.envs.guard import Guard
from esper_lightning.envs.habitat import Habitat
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.offer import describe_host, offer
from esper_lightning.envs.places import Common, give_places
from esper_lightning.tasks import Split, Task, TaskData, vary


class Bench:
    """Creates environments, and returns the one for a host index and an episode.

    Args:
        task: Computes loss and accuracy of outputs on `data`.
        data: Data of the task, on the hosts' devices.
        host: Factory of host networks.
        config: Settings of the environments, with the distribution over contexts.
        devices: Devices of hosts, which are assigned to them in turn.
        held_out: True to draw held-out contexts.
        common: Slots and blueprints shared with the hosts of other tasks.

    Attributes:
        data: All data variants that the contexts need, on the devices.
        space: Action space, the same for hosts of every architecture.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool, the same for every architecture.

    Raises ValueError if contexts do not fit the task, the host, or each other.
    """

    def __init__(
        self,
        task: Task,
        data: TaskData,
        host: HostFactory,
        config: EnvConfig,
        devices: Sequence[torch.device],
        held_out: bool = False,
        common: Common | None = None,
    ) -> None:
        self.common = common
        self.config = config
        self.host = host
        self.devices = devices
        self.classes = data.classes
        self.family = Family(config.family, held_out)
        self.variants = list(dict.fromkeys(member.variant.stored for member in self.family.members))
        plain = len(self.variants) == 1 and self.variants[0] == Member().variant
        self.data = data if plain else vary(data, self.variants).spread(devices)
        every = [*config.family.members(), *(config.family.members(held_out=True) if config.family.held_out else ())]
        for member in every:
            member.variant.check(data)
        self.steps = config.training.steps(data.train.samples)
        self.shape = data.input_shape
        batch = Split(*(part[: config.training.batch_size] for part in self.data.train))
        # Held-out contexts are included even if they are not drawn here, because evaluation will use them.
        architectures = {kind_of(member): member for member in every}
        if config.training.compile is not None and len(architectures) > 1:
            raise ValueError("hosts of several architectures cannot be compiled; leave training.compile out")
        offers = {
            kind: offer(self._build(member, devices[0]), task, batch, config.actions, config.lifecycle.birth, common)
            for kind, member in architectures.items()
        }
        (_, (self.space, self.growable)), *others = offers.items()
        for kind, (space, growable) in others:
            if space != self.space or not torch.equal(growable, self.growable):
                raise ValueError(
                    f"family: on hosts with {kind} other slots or seeds can grow than on the first; all members need "
                    f"the same, name slots and blueprints that fit all"
                )
        self.compute = None
        if config.objective.prices_compute:
            self.compute = {
                kind: measure_compute(self._build(member, devices[0]), batch.inputs[:1])
                for kind, member in architectures.items()
            }
        self.host_kind = self._describe()
        self.habitats = {repr(member): self._habitat(member) for member in self.family.members}
        self.kept: dict[tuple[int, str], HostEnv] = {}  # by host index and architecture

    def _describe(self) -> str:
        """Describe the hosts of training, even if held-out contexts are drawn: policies are built for the former."""
        family = self.config.family
        kinds = {kind_of(member): member for member in family.members()}
        hosts = [describe_host(self._build(member, self.devices[0])) for member in kinds.values()]
        return "; ".join([*hosts, f"family {family.checksum}"] if family.train else hosts)

    def _build(self, member: Member, on: torch.device) -> nn.Module:
        try:
            built = build_on(
                on,
                lambda: self.host(self.shape, self.classes, **member.architecture),
                torch.Generator(on).manual_seed(0),
            )
            return built if self.common is None else give_places(built, self.common.places, on)
        except TypeError as error:
            if not member.architecture:
                raise
            raise ValueError(f"family: the host cannot be made with {member.architecture}: {error}") from error

    def _habitat(self, member: Member) -> Habitat:
        variant = member.variant
        training = member.training(self.config.training)
        return Habitat(member, training, self.variants.index(variant.stored), variant.classes or self.classes)

    def seat(self, place: int, seed: int) -> HostEnv:
        """Return the environment of a host index for the episode with this RNG seed; the caller must reset it."""
        return self._take(place, self.habitats[repr(self.family.draw(seed))])

    def samples(self) -> list[HostEnv]:
        """Return one environment of each architecture that may be drawn."""
        kinds = {kind_of(habitat.member): habitat for habitat in self.habitats.values()}
        return [self._take(0, habitat) for habitat in kinds.values()]

    def _take(self, place: int, habitat: Habitat) -> HostEnv:
        kind = kind_of(habitat.member)
        if (place, kind) not in self.kept:
            self.kept[place, kind] = self._make(habitat, kind, self.devices[place % len(self.devices)])
        env = self.kept[place, kind]
        env.join(habitat)
        return env

    def _make(self, habitat: Habitat, kind: str, on: torch.device) -> HostEnv:
        config = self.config
        guard = Guard(config.governor, 0.0, self.steps, on) if config.governor.enabled else None
        return HostEnv(
            self._build(habitat.member, on),
            self.space,
            habitat,
            config.lifecycle,
            config.actions,
            config.objective,
            config.horizon,
            on,
            Laps(make_timer(on)),
            guard,
            config.reward.bare,
            self.compute[kind] if self.compute is not None else None,
            kind,
        )

    @property
    def secrets(self) -> int:
        """Number of privileged features P; 0: nothing is hidden."""
        return len(self.family.tell(self.family.members[0])) + self.family.fails * self.growable.numel()

    def tell(self, env: HostEnv) -> list[float]:
        """Return the P privileged features of an episode: encoded context, then failing pairs of slot and blueprint."""
        told = self.family.tell(env.habitat.member)
        if self.family.fails:
            told += [
                float(fails(env.seed, slot, blueprint, env.habitat.member.chance_to_fail(blueprint)))
                for slot in self.space.slot
                for blueprint in self.space.blueprint
            ]
        return told


def kind_of(member: Member) -> str:
    """Return the name of a context's host architecture."""
    return ", ".join(f"{name} {value}" for name, value in member.architecture.items())
