"""Hosts, tasks and optimizers on which the ways to learn behind a host are compared, and their training."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth import GrowingNetwork, LifecycleConfig, forward_variants, slots_of
from esper_lightning.growth.blend import PROXIMAL_STEP, Isolation
from esper_lightning.hosts import CNN, MLP
from esper_lightning.tasks import Digits, Glyphs, Tabular, TaskData

HORIZON = 100
"""Horizon of the growing networks, which nothing here depends on."""

TEST_BATCH = 500
"""Test samples in one pass."""


class Learning(NamedTuple):
    """How seeds learn before they are blended."""

    name: str
    isolation: Isolation
    proximal_step: float = PROXIMAL_STEP


LEARNINGS = (
    Learning("straight_through", "straight_through"),
    Learning("proximal .1", "proximal", 0.1),
    Learning("proximal .3", "proximal", 0.3),
    Learning("trial", "trial"),
)


class OptimizerChoice(NamedTuple):
    """Optimizer of host and seeds."""

    name: str
    kind: Callable[..., torch.optim.Optimizer]
    options: dict[str, float]

    def make(self, network: nn.Module) -> torch.optim.Optimizer:
        return self.kind(network.parameters(), **self.options)


OPTIMIZERS = (
    OptimizerChoice("adam .003", torch.optim.Adam, {"lr": 0.003}),
    OptimizerChoice("adam .0003", torch.optim.Adam, {"lr": 0.0003}),
    OptimizerChoice("sgd .05", torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
)


class Case(NamedTuple):
    """A task with its hosts and batches."""

    data: TaskData
    batch_size: int
    samples: int  # training samples in an epoch
    blueprints: tuple[str, ...]

    def make_host(self) -> nn.Module:
        """Return a new host with three slots."""
        shape, classes = self.data.input_shape, self.data.classes
        if len(shape) == 1:
            return MLP(shape, classes, width=32, layers=3)
        return CNN(shape, classes, slots=["block1.pool", "block2.pool", "block3.pool"])


def make_case(task: str) -> Case:
    """Return the task `glyphs`, `digits` or `table`."""
    if task == "glyphs":
        glyphs = Glyphs(train=40_000, validation=1, test=4_000).load()
        return Case(glyphs, 128, 10_000, ("conv_heavy", "conv_light", "bottleneck"))
    if task == "digits":
        return Case(Digits().load(), 32, 1_794, ("conv_heavy", "conv_light", "bottleneck"))
    table = Tabular("digits", validation=0.1, test=0.4).load()
    return Case(table, 32, 1_794, ("lora", "mlp_small", "gated"))


def draw_epochs(case: Case, rng_seed: int, count: int) -> list[list[Tensor]]:
    """Return the minibatches of indices of each epoch; samples are used once before any is used again."""

    def draw() -> Iterator[list[Tensor]]:
        generator, left = torch.Generator().manual_seed(rng_seed), torch.empty(0, dtype=torch.int64)
        while True:
            while len(left) < case.samples:
                left = torch.cat([left, torch.randperm(case.data.train.samples, generator=generator)])
            chosen, left = left[: case.samples], left[case.samples :]
            yield [part for part in chosen.split(case.batch_size) if len(part) == case.batch_size]

    return list(islice(draw(), count))


def train(growing: GrowingNetwork, case: Case, batches: Sequence[Tensor]) -> None:
    """Train network and seeds for one epoch."""
    growing.module.train()
    inputs, targets = case.data.train
    for indices in batches:
        growing.optimizer.zero_grad()
        growing.backward(lambda network, indices=indices: F.cross_entropy(network(inputs[indices]), targets[indices]))
        growing.optimizer.step()


@torch.no_grad()
def correct_predictions(network: nn.Module, case: Case) -> Tensor:  # [1 + K, samples] bool
    """Return which test samples are classified correctly with no isolated seed, then with each one alone fully on."""
    network.eval()
    variants = [frozenset[str](), *(frozenset({slot}) for slot in slots_of(network))]
    rows = []
    test = case.data.test
    for inputs, targets in zip(test.inputs.split(TEST_BATCH), test.targets.split(TEST_BATCH), strict=True):
        outputs, groups = forward_variants(network, variants, inputs)
        rows.append((outputs.argmax(1).view(-1, len(targets)) == targets)[groups])
    return torch.cat(rows, 1)


class TrainedHost(NamedTuple):
    """A host that has learned alone."""

    network: nn.Module
    optimizer_state: dict[str, Any]


def train_host(
    case: Case, optimizer: OptimizerChoice, rng_seed: int, epochs: Sequence[Sequence[Tensor]]
) -> TrainedHost:
    """Train a new host on these epochs."""
    torch.manual_seed(rng_seed)
    host = case.make_host()
    growing = GrowingNetwork(host, optimizer.make(host), horizon=HORIZON)
    for batches in epochs:
        train(growing, case, batches)
    return TrainedHost(host, growing.optimizer.state_dict())


def grow_in_all_slots(
    host: TrainedHost, optimizer: OptimizerChoice, blueprint: str, *, isolation: Isolation, rng_seed: int
) -> GrowingNetwork:
    """Return a copy of a host, with its optimizer's state and a new seed in every slot, which is never blended."""
    network = deepcopy(host.network)
    copied_optimizer = optimizer.make(network)
    copied_optimizer.load_state_dict(deepcopy(host.optimizer_state))
    lifecycle = LifecycleConfig(isolation=isolation, auto_blend=False)
    generator = torch.Generator().manual_seed(rng_seed)
    growing = GrowingNetwork(network, copied_optimizer, horizon=HORIZON, lifecycle=lifecycle, generator=generator)
    for slot in growing.slots:
        growing.germinate(slot, blueprint)
    return growing
