"""Kinds of hosts on which the Governor is tested, small networks on real data, and the tables of what it finds."""

import argparse
import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table

from esper_lightning.envs import ActionConfig, EnvConfig, HostFactory, HostPool
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN, GPT, MLP
from esper_lightning.tasks import Digits, Split, Task, TaskData

CPU = torch.device("cpu")


class Text(Task):
    """Next-character prediction on a Python source file, in sequences of 32."""

    LENGTH = 32

    def load(self) -> TaskData:
        letters = inspect.getsource(argparse)  # real text in every installation of Python
        alphabet = sorted(set(letters))
        codes = torch.tensor([alphabet.index(letter) for letter in letters])
        rows = codes[: (len(codes) - 1) // self.LENGTH * self.LENGTH].view(-1, self.LENGTH)
        following = codes[1 : rows.numel() + 1].view(-1, self.LENGTH)
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
        parts = order[:128], order[128:256], order[256:]
        test, validation, train = (Split(rows[part], following[part]) for part in parts)
        return TaskData(train, validation, test, len(alphabet))


class HostKind(NamedTuple):
    """Task, host and training settings of one kind of hosts."""

    task: Task
    host: HostFactory
    training: dict[str, Any]


tiny = partial(CNN, base=4, kernel=1, pools=2, isolate=False, channels_last=False)
"""The host of configs/digits.yaml."""
small = partial(CNN, base=8, channels_last=False)
mlp = partial(MLP, width=64)
gpt = partial(GPT, width=32, blocks=2, heads=2, context=Text.LENGTH)

FEW_IMAGES = Digits(validation=500, test=1100)
"""Digits with 197 training images, which hosts overfit."""

KINDS = {
    "CNN 1×1, 390 parameters, Adam .005": HostKind(Digits(), tiny, {"lr": 0.005}),
    "CNN 1×1, 390 parameters, Adam .02": HostKind(Digits(), tiny, {"lr": 0.02}),
    "CNN 1×1, 390 parameters, Adam .05": HostKind(Digits(), tiny, {"lr": 0.05}),
    "CNN 1×1, 390 parameters, Adam .02, batches of 8": HostKind(Digits(), tiny, {"lr": 0.02, "batch_size": 8}),
    "CNN 1×1, 390 parameters, Adam .02, 24 batches a tick": HostKind(Digits(), tiny, {"lr": 0.02, "batches": 24}),
    "CNN 3×3, base 8, Adam .002": HostKind(Digits(), small, {"lr": 0.002}),
    "CNN 3×3, base 8, Adam .02": HostKind(Digits(), small, {"lr": 0.02}),
    "CNN 3×3, base 8, Adam .02, 24 batches a tick": HostKind(Digits(), small, {"lr": 0.02, "batches": 24}),
    "CNN 3×3, base 8, SGD .05": HostKind(Digits(), small, {"lr": 0.05, "optimizer": "sgd"}),
    "CNN 3×3, base 8, Adam .02, 197 images": HostKind(FEW_IMAGES, small, {"lr": 0.02}),
    "MLP of width 64, Adam .002": HostKind(Digits(), mlp, {"lr": 0.002}),
    "MLP of width 64, Adam .02": HostKind(Digits(), mlp, {"lr": 0.02}),
    "MLP of width 64, Adam .01, 197 images": HostKind(FEW_IMAGES, mlp, {"lr": 0.01}),
    "GPT of width 32 on text, Adam .003": HostKind(Text(), gpt, {"lr": 0.003}),
}

ACTIONS = ActionConfig(
    tempos={"FAST": 2, "SLOW": 5},
)
"""Action space with choices in every head."""

QUICK = LifecycleConfig(
    isolation="straight_through", training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0
)
"""Lifecycle of configs/digits.yaml: short episodes, and no automatic judgement of seeds."""


def open_pool(kind: HostKind, horizon: int, hosts: int, lifecycle: LifecycleConfig, executor: str) -> HostPool:
    """Return a pool of hosts of one kind, watched by the default rules."""
    training = HostTraining(**{"batches": 8, "lr": 0.02, "max_grad_norm": None, "onednn": False} | kind.training)
    config = EnvConfig(horizon=horizon, executor=executor, training=training, lifecycle=lifecycle, actions=ACTIONS)
    governor = GovernorConfig()
    return HostPool(kind.task, kind.task.load(), kind.host, config=config, n_envs=hosts, device=CPU, governor=governor)


DETECTION_TICKS = 3
"""Number of ticks within which a fault should be detected."""


class DetectionCount(NamedTuple):
    """Counts of a fault: detected in time, and injected."""

    found: int
    injected: int

    def __str__(self) -> str:
        return f"{self.found:,} of {self.injected:,} ({self.found / self.injected:.1%})" if self.injected else "–"

    def add(self, found: bool) -> "DetectionCount":
        return DetectionCount(self.found + found, self.injected + 1)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], markdown: bool) -> None:
    """Print a table, in Markdown on request."""
    cells = [[str(cell) for cell in row] for row in rows]
    if markdown:
        lines = [columns, ["---"] * len(columns), *cells]
        print(f"\n{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines))
        return
    table = Table(*columns, title=title)
    for row in cells:
        table.add_row(*row)
    Console(width=140).print(table)
