"""Grounds: the tasks and hosts that Tamiyo practises on, one or several, each made into pools."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs import ActionSpace, EnvConfig, HostFactory, HostPool
from esper_lightning.envs.bench import Bench
from esper_lightning.envs.execution import other_devices
from esper_lightning.envs.places import Common
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Task, TaskData, check_data, fingerprint


@dataclass(frozen=True, kw_only=True)
class Ground:
    """Hosts of one task among several."""

    task: Task
    """What they learn."""

    host: HostFactory
    """The network that grows."""

    n_envs: int = 16
    """Hosts trained side by side."""

    executor: Literal["loop", "threads", "streams", "fused", "auto"] | None = None
    """How they are trained. None: as data.env says."""

    training: HostTraining | None = None
    """How they learn. None: as data.env says."""

    blueprints: list[str] | None = None
    """Seeds on offer on them. None: all that can grow there."""

    def settings(self, env: EnvConfig) -> EnvConfig:
        """Of these hosts, where `env` are those of all."""
        changes = {"executor": self.executor, "training": self.training}
        known = {name: value for name, value in changes.items() if value is not None}
        return replace(env, actions=replace(env.actions, blueprints=self.blueprints), **known)


def make_grounds(first: Ground, others: Mapping[str, Ground], env: EnvConfig) -> dict[str, Ground]:
    """All of them by name, the first by that of its task's class. Raises ValueError if they cannot go together."""
    own = type(first.task).__name__
    if own in others:
        raise ValueError(f"data.also: {own!r} is the name of data.task; choose another one")
    if others and (env.family.train or env.family.held_out):
        raise ValueError("data.also and data.env.family: hosts of several tasks cannot be a family; leave one out")
    for name, ground in {"": first, **others}.items():
        where = f"data.also.{name}.n_envs" if name else "data.n_envs"
        if ground.n_envs < 1:
            raise ValueError(f"{where} must be at least 1, got {ground.n_envs}")
    return {own: replace(first, blueprints=env.actions.blueprints), **others}


class Prepared(NamedTuple):
    """A ground whose data are there."""

    ground: Ground
    settings: EnvConfig
    data: TaskData
    """One copy on each device for every pool."""
    devices: list[torch.device]
    fingerprint: str
    """Of the data."""

    def make_pool(
        self, n_envs: int, held_out: bool = False, like: HostPool | None = None, common: Common | None = None
    ) -> HostPool:
        """A pool of these hosts.

        Args:
            n_envs: Number of hosts.
            held_out: Of the members of the family that training never meets.
            like: Another pool of them that has chosen how hosts are executed, and has a `common`.
            common: What hosts of other tasks share with these.
        """
        settings = self.settings
        if like is not None:
            executor, onednn = like.choice
            settings = replace(settings, executor=executor, training=replace(settings.training, onednn=onednn))
            common = like.bench.common
        device, *others = self.devices
        task, host = self.ground.task, self.ground.host
        return HostPool(task, self.data, host, settings, n_envs, device, others, held_out, common)

    def offer(self) -> tuple[ActionSpace, Tensor]:
        """The choices there are on these hosts by themselves. Raises ValueError if there are useless ones."""
        bench = Bench(self.ground.task, self.data, self.ground.host, self.settings, self.devices)
        return bench.space, bench.growable


def prepare(ground: Ground, env: EnvConfig, device: torch.device) -> Prepared:
    """Loads a ground's data. Raises ValueError if hosts cannot learn from them."""
    settings = ground.settings(env)
    data = ground.task.load()
    check_data(data, type(ground.task).__name__)
    devices = [device, *other_devices(settings.executor, device)]
    return Prepared(ground, settings, data.spread(devices), devices, fingerprint(data))
