"""Parts from outside of the package: five kinds in one file, used from YAML and from Python."""

import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from torch import nn

from esper_lightning import plugins
from esper_lightning.__main__ import main
from esper_lightning.blueprints import blueprint_names, find_blueprint, register, registry
from esper_lightning.callbacks.grow.deciders import make_decider
from esper_lightning.controllers import CONTROLLERS, make_controller
from esper_lightning.datamodules.hosts import BLUEPRINT_CHOICES, HostPoolData
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.execution import EXECUTORS, LoopExecutor, autotune
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.play import play_episode
from esper_lightning.rewards import REWARDS, RewardConfig
from esper_lightning.rewards import register as register_reward
from tests.runs import CONFIGS, SharedParserCLI, cli, continuation, differences, fit, only_run

PARTS = """
import math

from torch import nn

from esper_lightning import blueprints, controllers, rewards
from esper_lightning.blueprints import Residual
from esper_lightning.envs import Op
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.growth import SeedSlot
from esper_lightning.tasks import Digits, Split, Task, TaskData


@blueprints.register("mixer", {"vector"}, parameters=lambda c: c * c, flops=lambda c, n: 2 * n * c * c)
def mixer(channels):
    return Residual(nn.Linear(channels, channels, bias=False))


@rewards.register("thrifty", ["gain", "size"])
def thrifty(step, config):
    return {"size": -0.01 * sum(slot.growth for slot in step.slots), "gain": step.accuracy - step.accuracy_before}


@controllers.register("first slot")
class FirstSlot:
    def reset(self, pool):
        self.waits = 0

    def act(self, pool):
        rows = [[int(op), *[0] * 7] for op in (Op.FOSSILIZE, Op.GERMINATE, Op.WAIT)]
        allows = pool.masks_on_cpu.allows
        return to_action([next(a for a in rows if allows(host, a)) for host in range(pool.n_envs)], pool.device)


class EvenDigits(Task):
    def load(self):
        data = Digits(validation=100, test=100).load()
        return TaskData(*(Split(split.inputs, 1 - split.targets % 2) for split in data[:3]), classes=2)


class OneLayer(nn.Module):
    def __init__(self, input_shape, outputs, width=8):
        super().__init__()
        self.first = nn.Linear(math.prod(input_shape), width)
        self.slot = SeedSlot("hidden", "vector", width)
        self.head = nn.Linear(width, outputs)

    def forward(self, x):
        return self.head(self.slot(self.first(x.flatten(1)).relu()))
"""

CONFIG = """
imports: [mine_parts]
trainer: {accelerator: cpu, max_epochs: 1, default_root_dir: runs, enable_progress_bar: false}
model: {policy: {width: 16}, ppo: {minibatches: 2}}
data:
  task: EvenDigits
  host: mine_parts.OneLayer
  n_envs: 2
  env:
    horizon: 4
    training: {batches: 2, lr: 0.02}
    lifecycle: {training_ticks: 0, min_contribution: null, auto_cull: false, embargo_ticks: 0}
    actions: {blueprints: [mixer], tempos: {FAST: 1}}
    reward: {mode: thrifty}
evaluation: {hosts: 2, against: [first slot, small static]}
telemetry: {figures_every: 0}
"""


@pytest.fixture
def registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what a test has registered."""
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    for parts in (REWARDS, CONTROLLERS, EXECUTORS):
        kept, registered = dict(parts), dict(parts.registered)
        monkeypatch.setattr(parts, "registered", registered)
        monkeypatch.setattr(parts, "_found", {})
        monkeypatch.setattr(plugins, "KEPT", kept, raising=False)
