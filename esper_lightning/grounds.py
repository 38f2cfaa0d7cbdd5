"""Configuration and loading of the tasks and hosts that the policy is trained on."""

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
    """Settings of one task and its hosts."""

    task: Task
    """The task that these hosts learn."""

    host: HostFactory
    """Class of the network that grows."""

    n_envs: int = 16
    """Number of hosts trained side by side."""

    executor: Literal["loop", "threads", "streams", "fused", "auto"] | None = None
    """Executor that trains these hosts. None: data.env.executor."""

    training: HostTraining | None = None
    """Optimizer and batch settings of these hosts. None: data.env.training."""

    blueprints: list[str] | None = None
    """Blueprints available on these hosts. None: all that can grow there."""

    def settings(self, env: EnvConfig) -> EnvConfig:
        """Return the environment settings of these hosts: `env` with the changes of this task."""
        changes = {"executor": self.executor, "training": self.training}
        known = {name: value for name, value in changes.items() if value is not None}
        return replace(env, actions=replace(env.actions, blueprints=self.blueprints), **known)


def make_grounds(first: Ground, others: Mapping[str, Ground], env: EnvConfig) -> dict[str, Ground]:
    """Return all task configs by name. Raises ValueError if they cannot be combined.

    Args:
        first: Config of data.task; its name is that of the task's class.
        others: Configs of data.also, by name.
        env: Environment settings of the run.
    """
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
    """A task with its data loaded."""

    ground: Ground
    settings: EnvConfig
    """Environment settings of these hosts."""
    data: TaskData
    """The data set, with one copy per device that all pools share."""
    devices: list[torch.device]
    """Devices on which hosts train; the first is the main one."""
    fingerprint: str
    """Fingerprint of the data."""

    def make_pool(
        self, n_envs: int, held_out: bool = False, like: HostPool | None = None, common: Common | None = None
    ) -> HostPool:
        """Return a pool of these hosts.

        Args:
            n_envs: Number of hosts.
            held_out: Draw hosts from the held-out contexts of the family instead of the training contexts.
            like: An existing pool whose executor and shared action space the new one takes over.
            common: Action space that is shared with the hosts of other tasks.
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
        """Return the action space of these hosts alone, and which blueprint can grow in which slot.

        Raises ValueError if the action space contains useless choices.
        """
        bench = Bench(self.ground.task, self.data, self.ground.host, self.settings, self.devices)
        return bench.space, bench.growable


def prepare(ground: Ground, env: EnvConfig, device: torch.device) -> Prepared:
    """Load the data of a task config onto its devices. Raises ValueError if hosts cannot learn from them."""
    settings = ground.settings(env)
    data = ground.task.load()
    check_data(data, type(ground.task).__name__)
    devices = [device, *other_devices(settings.executor, device)]
    return Prepared(ground, settings, data.spread(devices), devices, fingerprint(data))
