"""Pools in float64, by which executors are compared within rounding errors."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT, MLP
from esper_lightning.tasks import Digits, Split, Task, TaskData

FAST_CONFIG = EnvConfig(
    horizon=20,
    training=HostTraining(batches=2, batch_size=16, lr=0.02),
    # Within 20 environment steps seeds reach every stage, and slots germinate repeatedly.
    lifecycle=LifecycleConfig(training_ticks=1, min_contribution=None, auto_cull=False, embargo_ticks=1),
    actions=ActionConfig(tempos={"FAST": 2}),
)

CPU = torch.device("cpu")


class ShortcutHost(nn.Module):
    """Host with a shortcut around one slot, and with layers that no built-in host has."""

    def __init__(self, input_shape: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(input_shape[0], 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.aside = SeedSlot("aside", "image", 8, on_single_path=False)
        self.last = SeedSlot("last", "image", 8)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 12), nn.LayerNorm(12), nn.ReLU())
        self.tail = SeedSlot("tail", "vector", 12)
        self.out = nn.Linear(12, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.out(self.tail(self.head(self.last(x + self.aside(x)))))


HOSTS: dict[str, Callable[[Sequence[int], int], nn.Module]] = {
    "cnn": partial(CNN, base=4, pools=2, slots=["block1", "block2.pool", "block3"]),
    "cnn, gradients through seeds": partial(CNN, base=4, pools=1, slots=["block1.pool", "block2"], isolate=False),
    "cnn, recomputed": partial(CNN, base=4, pools=1, blocks=2, checkpoint_activations=True),
    "cnn, depth": partial(CNN, widths=[3, 4], pools=1, slots=["block2"], depth=1, most=3),
    "gpt": partial(GPT, width=16, blocks=3, heads=2, context=8, slots=["layer1", "layer2"]),
    "gpt, rotary": partial(
        GPT, width=16, blocks=2, heads=2, context=8, slots=["layer1"], rotary=True, rms_norm=True, bias=False
    ),
    "gpt, likelihood": partial(GPT, width=16, blocks=2, heads=2, context=8, slots=["layer1", "layer2"]),
    "gpt, depth": partial(GPT, width=16, blocks=2, heads=2, context=8, slots=["layer2"], most=6),
    "mlp": partial(MLP, width=16),
    "mlp, quantities": partial(MLP, width=16),
    "residual": ShortcutHost,
}
"""Host constructors by name."""


class TokenTask(Task):
    """Task of token sequences in which every token is a function of the previous one."""

    def load(self) -> TaskData:
        generator = torch.Generator().manual_seed(0)

        def split(samples: int) -> Split:
            first = torch.randint(9, (samples, 1), generator=generator)
            line = (first + torch.arange(9) * (1 + first % 3)) % 9
            return Split(line[:, :-1], line[:, 1:])

        return TaskData(split(64), split(24), split(24), 9)


class NoisyDigits(Digits):
    """Small digits task in torch's default dtype, with noise added to the images.

    Without noise neighbouring pixels and features are often equal, and rounding decides where the gradient of a
    max-pool goes.
    """

    def load(self) -> TaskData:
        data = super().load()
        noise = torch.Generator().manual_seed(0)

        def some(split: Split, samples: int) -> Split:
            inputs = split.inputs[:samples] + 0.1 * torch.randn(samples, 1, 8, 8, generator=noise, dtype=torch.float32)
            return Split(inputs.to(torch.get_default_dtype()), split.targets[:samples])

        return TaskData(some(data.train, 200), some(data.validation, 50), some(data.test, 20), data.outputs)


class Quantities(NoisyDigits):
    """Regression on the same images: two scaled quantities of each."""

    score = "r2"

    def load(self) -> TaskData:
        data = super().load()
        sums = [split.inputs.unflatten(-1, (2, 4)).sum((1, 2, 4)) for split in data[:3]]
        mean, deviation = sums[0].mean(0), sums[0].std(0)
        splits = (Split(old.inputs, (new - mean) / deviation) for old, new in zip(data[:3], sums, strict=True))
        return TaskData(*splits, outputs=2)


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """Set torch's default dtype within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def make(
    executor: str,
    host: str,
    n_envs: int = 4,
    dtype: torch.dtype = torch.float64,
    *,
    governor: GovernorConfig = GovernorConfig(),
    device: torch.device = CPU,
    host_devices: Sequence[torch.device] | None = None,
    **changes: Any,
) -> HostPool:
    """Make a pool of one of HOSTS with the config FAST_CONFIG and `changes` to it, watched by the rules `governor`."""
    task = TokenTask() if host.startswith("gpt") else Quantities() if host == "mlp, quantities" else NoisyDigits()
    if host == "gpt, likelihood":
        task.score = "likelihood"
    with precision(dtype):
        config = replace(FAST_CONFIG, executor=executor, **changes)
        return HostPool(
            task,
            task.load(),
            HOSTS[host],
            config=config,
            n_envs=n_envs,
            device=device,
            host_devices=host_devices,
            governor=governor,
        )


class EpisodeRecord:
    """Recorded results of an episode."""

    def __init__(self) -> None:
        self.numbers: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.stages: set[Stage] = set()


def play(pool: HostPool, ticks: int = 20, seeds: Sequence[int] | None = None, reset: bool = True) -> EpisodeRecord:
    """Play an episode of random actions, the same for pools with equal masks, and return its record."""
    seen, random_policy = EpisodeRecord(), RandomValid(5)
    dtype = next(pool.envs[0].network.parameters()).dtype
    with precision(dtype):
        if reset:
            pool.reset(seeds or range(pool.n_envs))
        for _ in range(ticks):
            step = pool.step(random_policy.act(pool))
            seen.numbers += [part.clone() for part in (step.reward, *step.metrics, pool.observation.features)]
            seen.losses.append(step.metrics.loss)
            seen.stages |= {event.after for event in step.events}
    return seen


def distance(ours: HostPool, theirs: HostPool) -> float:
    """Return the largest difference of any weight or running statistic, relative to the host's largest weight."""
    worst = 0.0
    for one, other in zip(ours.envs, theirs.envs, strict=True):
        assert one.network.state_dict().keys() == other.network.state_dict().keys(), "the same has grown"
        scale = max(p.abs().max().item() for p in other.network.parameters())
        for a, b in zip(one.network.state_dict().values(), other.network.state_dict().values(), strict=True):
            worst = max(worst, ((a - b).abs().max() / scale).item())
    return worst
