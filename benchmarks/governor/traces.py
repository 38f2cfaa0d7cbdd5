"""What the Governor would have seen of hosts that nobody watched over, recorded once."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.governor.kinds import KINDS, QUICK, open_pool
from esper_lightning.envs.guard import Guard
from esper_lightning.governor import Decision, Reading, Verdict
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.tamiyo.baselines import RandomValid, WaitOnly
from esper_lightning.tamiyo.heuristic import Heuristic

CONTROLLERS: dict[str, tuple[Callable[[], Any], LifecycleConfig]] = {
    "random": (lambda: RandomValid(0), QUICK),
    "random, born at random": (lambda: RandomValid(1), replace(QUICK, birth="random")),
    "heuristic": (Heuristic, LifecycleConfig()),
    "wait": (WaitOnly, QUICK),
}

EPISODES = {12: (20, 14, 8, 8), 40: (12, 8, 5, 5)}
"""By horizon: hosts of each kind under each controller."""


class Seen(NamedTuple):
    """What the Governor is told of a tick."""

    reading: Reading
    skipped_steps: int
    alphas: list[float]

    @property
    def loss(self) -> float:
        return self.reading.loss


class Trace(NamedTuple):
    """One episode of one host."""

    kind: str
    controller: str
    horizon: int
    chance: float
    steps: int  # in a tick
    ticks: list[Seen]

    @property
    def healthy(self) -> bool:
        """By a standard of its own: see the top of `__main__.py`."""
        limit = 1.5 * self.chance
        losses = [seen.loss for seen in self.ticks]
        return all(map(math.isfinite, losses)) and not any(
            min(losses[i : i + 3]) > limit for i in range(len(losses) - 2)
        )

    @property
    def weight_lost(self) -> list[bool]:
        """By tick: was there less of a seed in the host's output than in the tick before?"""
        alphas = [self.ticks[0].alphas, *(seen.alphas for seen in self.ticks)]
        return [
            any(now < before for now, before in zip(alphas[i + 1], alphas[i], strict=True))
            for i in range(len(self.ticks))
        ]


class Recorder(Guard):
    """Sees what a Guard sees, finds everything healthy and keeps nothing."""

    def begin(self) -> None:
        super().begin()
        self.ticks: list[Seen] = []

    def vet(self, op: str, growth: float) -> list[str]:
        return []

    def judge(self, reading: Reading, skipped_steps: int, alphas: list[float]) -> Verdict:
        self.ticks.append(Seen(reading, skipped_steps, alphas))
        return Verdict(Decision.HEALTHY, "", reading.loss, math.nan, math.nan, 0, 0)

    def keep(self, state: dict[str, Any]) -> None:
        pass


def record(kind: str, controller: str, horizon: int, hosts: int) -> list[Trace]:
    """Episodes that nobody watches over."""
    make, lifecycle = CONTROLLERS[controller]
    pool, acting = open_pool(KINDS[kind], horizon, hosts, lifecycle, "fused"), make()
    for env in pool.envs:
        env.guard = Recorder(env.guard.config, env.guard.chance, env.guard.steps)
    first = 1000 * list(CONTROLLERS).index(controller) + 100 * horizon
    pool.reset(range(first, first + hosts))
    acting.reset(pool)
    for _ in range(horizon):
        pool.step(acting.act(pool))
    return [Trace(kind, controller, horizon, env.guard.chance, env.guard.steps, env.guard.ticks) for env in pool.envs]


def record_all() -> Iterator[Trace]:
    """Of every kind, under every controller, over short and long episodes."""
    for (horizon, numbers), kind in product(EPISODES.items(), KINDS):
        for controller, hosts in zip(CONTROLLERS, numbers, strict=True):
            yield from record(kind, controller, horizon, hosts)
        print(f"recorded: {horizon} ticks, {kind}", flush=True)


def save(traces: Sequence[Trace], path: Path) -> None:
    path.write_text(json.dumps(traces))


def load(path: Path) -> list[Trace]:
    def seen(reading: list, skipped_steps: int, alphas: list[float]) -> Seen:
        loss, train_loss, gradients, *flags = reading
        return Seen(Reading(loss, train_loss, tuple(gradients), *flags), skipped_steps, alphas)

    return [Trace(*rest, [seen(*tick) for tick in ticks]) for *rest, ticks in json.loads(path.read_text())]
