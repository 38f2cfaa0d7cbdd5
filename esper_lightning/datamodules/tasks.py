"""Configuration and loading of the tasks and hosts that the policy is trained on."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.console import print_status
from esper_lightning.envs import ActionSpace, EnvConfig, HostFactory, HostPool, check_host_count
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.envs.context.env_factory import EnvFactory
from esper_lightning.envs.host_devices import find_host_devices
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.spaces.action_discovery import SharedSpace
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.tasks import Task, TaskData, check_data, find_doubts, fingerprint


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Settings of one task and its hosts."""

    task: Task
    """The task that these hosts learn."""

    host: HostFactory
    """Class of the network that grows."""

    n_envs: int = 16
    """Number of hosts trained side by side."""

    executor: str | None = None
    """Name or import path of the executor that trains these hosts. None: data.env.executor."""

    training: HostTraining | None = None
    """Optimizer and batch settings of these hosts. None: data.env.training."""

    blueprints: list[str] | None = None
    """Names or import paths of the blueprints available on these hosts. None: all of this package that can grow
    there."""

    family: FamilyConfig | None = None
    """Contexts of these hosts, for observations in rows. None: all are alike."""

    def env_config(self, env: EnvConfig) -> EnvConfig:
        """Return the environment settings of these hosts: `env` with the changes of this task."""
        changes = {"executor": self.executor, "training": self.training}
        known = {name: value for name, value in changes.items() if value is not None}
        actions = replace(env.actions, blueprints=self.blueprints)
        return replace(env, actions=actions, family=self.family or FamilyConfig(), **known)


def make_task_configs(first: TaskConfig, others: Mapping[str, TaskConfig], env: EnvConfig) -> dict[str, TaskConfig]:
    """Return all task configs by name. Raises ValueError if they cannot be combined.

    Args:
        first: Config of data.task; its name is that of the task's class.
        others: Configs of data.also, by name.
        env: Environment settings of the run.
    """
    first_name = type(first.task).__name__
    if first_name in others:
        raise ValueError(f"data.also: {first_name!r} is the name of data.task; choose another one")
    families = [env.family, *(config.family for config in others.values() if config.family is not None)]
    if others and env.sight.layout == "flat" and any(family.train or family.held_out for family in families):
        raise ValueError(
            "data.also and data.env.family: hosts of several tasks cannot be a family; leave one out, or set "
            "data.env.sight.layout to rows"
        )
    for name, config in {"": first, **others}.items():
        check_host_count(f"data.also.{name}.n_envs" if name else "data.n_envs", config.n_envs)
    return {first_name: replace(first, blueprints=env.actions.blueprints, family=env.family), **others}


class LoadedTask(NamedTuple):
    """A task with its data loaded."""

    config: TaskConfig
    env_config: EnvConfig
    """Environment settings of these hosts."""
    data: TaskData
    """The data set, with one copy per device that all pools share."""
    device: torch.device
    """Device of the policy."""
    host_devices: list[torch.device]
    """Devices on which hosts train."""
    fingerprint: str
    """Fingerprint of the data."""

    def make_pool(
        self,
        n_envs: int,
        held_out: bool = False,
        template: HostPool | None = None,
        *,
        shared_space: SharedSpace | None = None,
        governor: GovernorConfig | None = None,
        sight: ObservationConfig | None = None,
    ) -> HostPool:
        """Return a pool of these hosts.

        Args:
            n_envs: Number of hosts.
            held_out: Draw hosts from the held-out contexts of the family instead of the training contexts.
            template: An existing pool whose executor and shared action space the new one takes over.
            shared_space: Action space that is shared with the hosts of other tasks.
            governor: Rules by which the hosts are watched. None: they are not watched.
            sight: Features that a policy observes. None: as configured.
        """
        env_config = self.env_config if sight is None else replace(self.env_config, sight=sight)
        if template is not None:
            env_config = replace(env_config, executor=template.executor_choice)
            shared_space = template.env_factory.shared_space
        task, host = self.config.task, self.config.host
        return HostPool(
            task,
            self.data,
            host,
            config=env_config,
            n_envs=n_envs,
            device=self.device,
            host_devices=self.host_devices,
            held_out=held_out,
            shared_space=shared_space,
            governor=governor,
        )

    def discover_action_space(self) -> tuple[ActionSpace, Tensor]:
        """Return the action space of these hosts alone, and which blueprint can grow in which slot.

        Raises ValueError if the action space contains useless choices.
        """
        factory = EnvFactory(
            self.config.task, self.data, self.config.host, config=self.env_config, devices=self.host_devices
        )
        return factory.space, torch.stack(list(factory.growable.values())).any(0)


def load_task(config: TaskConfig, env: EnvConfig, device: torch.device, *, alone: bool = True) -> LoadedTask:
    """Load the data of a task config onto its devices. Raises ValueError if hosts cannot learn from them.

    Args:
        config, env: Settings.
        device: Main device of the hosts.
        alone: Hosts may use all other devices of the machine; False: other processes use them.
    """
    env_config = config.env_config(env)
    data = config.task.load()
    if not isinstance(data, TaskData):
        raise ValueError(f"task {type(config.task).__name__}: load returned a {type(data).__name__}; return a TaskData")
    check_data(data, type(config.task).__name__)
    print_status(*find_doubts(data, type(config.task).__name__))
    host_devices = find_host_devices(env_config.devices, env_config.executor, device, alone=alone)
    return LoadedTask(config, env_config, data.copy_to(host_devices), device, host_devices, fingerprint(data))
