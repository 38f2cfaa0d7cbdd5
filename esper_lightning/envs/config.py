"""What an environment is: settings, and whether they fit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from esper_lightning.envs.actions import ActionConfig
from esper_lightning.envs.execution import COMPILED, ONLY_ON
from esper_lightning.envs.family import PRICE, FamilyConfig
from esper_lightning.envs.observation import SightConfig
from esper_lightning.envs.training import HostTraining
from esper_lightning.governor import GovernorConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.rewards import ObjectiveConfig, RewardConfig
from esper_lightning.tasks import TaskData

HostFactory = Callable[[Sequence[int], int], nn.Module]
"""Shape of one input and number of outputs -> a host with slots."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """What an environment is: how its host learns, how its seeds live, what can be done and what it is worth."""

    horizon: int = 12
    """Ticks T in an episode."""

    executor: Literal["loop", "threads", "streams", "fused", "auto"] = "loop"
    """How the hosts are trained. loop: one after the other. threads (on the CPU): one per core. streams (on CUDA): one
    per stream, dealt out to all GPUs that are visible. fused: all of them as one network, for many small hosts. With
    the first three the results are the same bit for bit, with fused but for rounding. auto: whatever is fastest on
    these hosts, measured at the start, remembered on this machine, and kept by a run that goes on."""

    training: HostTraining = field(default_factory=HostTraining)
    """How hosts learn."""

    lifecycle: LifecycleConfig = field(default_factory=LifecycleConfig)
    """How seeds live."""

    actions: ActionConfig = field(default_factory=ActionConfig)
    """What a controller can do."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What a grown network is worth."""

    reward: RewardConfig = field(default_factory=RewardConfig)
    """What a controller is paid for."""

    governor: GovernorConfig = field(default_factory=GovernorConfig)
    """When a host counts as diverged, and what follows."""

    family: FamilyConfig = field(default_factory=FamilyConfig)
    """Which facts differ between episodes, hidden until training reveals them."""

    sight: SightConfig = field(default_factory=SightConfig)
    """What a policy is shown."""

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise ValueError(f"env.horizon must be at least 1 tick, got {self.horizon}")
        if self.objective.price_to is not None and any(PRICE in facts for facts in self.family.train):
            raise ValueError(f"objective.price_to and a fact {PRICE}: the price cannot be drawn twice; leave one out")
        by_itself = self.lifecycle.auto_blend and self.lifecycle.auto_probation
        if by_itself and self.actions.advance:
            raise ValueError("actions.advance has nothing to do; switch off lifecycle.auto_blend or auto_probation")
        if not by_itself and not self.actions.advance:
            raise ValueError(
                "lifecycle.auto_blend or auto_probation is off, so no seed gets on; switch on actions.advance"
            )


def check_fits(config: EnvConfig, data: TaskData, n_envs: int, device: torch.device) -> None:
    """Raises ValueError if settings fit neither each other nor the task nor the device."""
    if n_envs < 1:
        raise ValueError(f"n_envs must be at least 1, got {n_envs}")
    if config.training.batch_size > data.train.samples:
        raise ValueError(
            f"training.batch_size is {config.training.batch_size}, more than the task's {data.train.samples} "
            f"training samples"
        )
    config.training.augment.check(data.input_shape)
    if config.training.compile is not None and config.executor not in (*COMPILED, "auto"):
        raise ValueError(
            f"executor {config.executor!r} cannot run compiled hosts; use env.executor loop, or leave training.compile "
            f"out"
        )
    only = ONLY_ON.get(config.executor, device.type)
    if device.type != only:
        there = {"cpu": "the CPU", "cuda": "CUDA"}[only]
        raise ValueError(f"executor {config.executor!r} runs on {there}, not on {device}; use env.executor loop")
