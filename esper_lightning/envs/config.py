"""Settings of environments, and checks that they fit together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from esper_lightning.envs.actions import ActionConfig
from esper_lightning.envs.executors import AUTO, EXECUTORS
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.envs.rewards import ObjectiveConfig, RewardConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.tasks import TaskData

DEVICE_TYPES = ("cpu", "cuda")
"""Types of device of hosts. Apple's mps lacks float64, in which scores and statistics are summed."""

REQUIRED_DEVICE_TYPE: dict[str, str] = {"threads": "cpu", "streams": "cuda"}
"""Device type required by each executor that supports only one."""

MAX_HOSTS = 10_000
"""Largest number of hosts side by side. Published comparisons have at most 224; a mistaken power of ten is refused."""

HostFactory = Callable[[Sequence[int], int], nn.Module]
"""Factory of host networks: shape of one input and number of outputs -> a host with slots."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """Settings of an environment: host training, seed lifecycle, actions, objective, reward and observation."""

    horizon: int = 12
    """Length T of an episode in environment steps (host epochs); contexts of a family may have shorter ones."""

    executor: str = "loop"
    """Name or import path of the executor of host training: loop, threads, streams, fused or auto. See
    docs/reference/executors.md."""

    devices: list[str] | None = None
    """Devices of hosts, in turn, as [cuda:0, cuda:1]. None: that of the policy; with streams all visible GPUs."""

    training: HostTraining = field(default_factory=HostTraining)
    """Training of hosts."""

    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    """Lifecycle of seeds."""

    actions: ActionConfig = field(default_factory=ActionConfig)
    """Actions on offer."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Objective J of a grown network: its score minus the price of growth."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """Reward of a step."""

    family: FamilyConfig = field(default_factory=FamilyConfig)
    """Distribution over contexts, the hidden variables that differ between episodes."""

    observation: ObservationConfig = field(default_factory=ObservationConfig)
    """Features that a policy observes."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"env.horizon must be at least 1 tick, got {self.horizon}")
        if self.executor != AUTO:
            EXECUTORS.find(self.executor)
        for context in self.family.all_contexts:
            if (horizon := context.horizon or 1) > self.horizon:
                raise ValueError(
                    f"family: horizon {horizon} is longer than env.horizon, {self.horizon}; raise env.horizon"
                )


def check_host_count(setting: str, hosts: int, least: int = 1) -> None:
    """Raise ValueError, naming the setting, unless a number of hosts is possible."""
    if hosts < least:
        raise ValueError(f"{setting} must be at least {least}, got {hosts}")
    if hosts > MAX_HOSTS:
        raise ValueError(f"{setting} must be at most {MAX_HOSTS}, got {hosts}")


def check_compatible(config: EnvConfig, data: TaskData, n_envs: int, *, device: torch.device) -> None:
    """Raise ValueError if the settings do not fit each other, the task's data or the device."""
    check_host_count("n_envs", n_envs)
    if data.stream is not None and config.training.batches is None and config.training.flops is None:
        raise ValueError(
            "training.batches must say how many minibatches a host epoch has, because the training data are a stream"
        )
    if config.training.batch_size > data.train.samples and data.stream is None:
        raise ValueError(
            f"training.batch_size is {config.training.batch_size}, more than the task's {data.train.samples} "
            f"training samples"
        )
    if device.type not in DEVICE_TYPES:
        raise ValueError(f"hosts run on the CPU and on CUDA, not on {device}; set trainer.accelerator to cpu")
    config.training.augment.check(data.input_shape)
    if config.training.precision == "tf32" and device.type != "cuda":
        raise ValueError(f"training.precision tf32 needs a GPU, hosts are on {device}; use fp32, bf16 or auto")
    required_device = REQUIRED_DEVICE_TYPE.get(config.executor, device.type)
    if device.type != required_device:
        device_name = {"cpu": "the CPU", "cuda": "CUDA"}[required_device]
        raise ValueError(f"executor {config.executor!r} runs on {device_name}, not on {device}; use env.executor loop")
