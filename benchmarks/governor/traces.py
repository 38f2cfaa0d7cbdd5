"""Recordings of the Governor's inputs for hosts that train without it."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.governor.kinds import KINDS, QUICK, open_pool
from esper_lightning.controllers.rules import Heuristic, RandomValid, WaitOnly
from esper_lightning.envs.governor import EpochStats, HostMonitor, Judgement, Verdict
from esper_lightning.growth.gates import LifecycleConfig

CONTROLLERS: dict[str, tuple[Callable[[], Any], LifecycleConfig]] = {
    "random": (lambda: RandomValid(0), QUICK),
    "random, born at random": (lambda: RandomValid(1), replace(QUICK, birth="random")),
    "heuristic": (Heuristic, LifecycleConfig()),
    "wait": (WaitOnly, QUICK),
}
"""Controllers of the recorded hosts, with the lifecycle of their seeds."""

EPISODES = {12: (20, 14, 8, 8), 40: (12, 8, 5, 5)}
"""Number of hosts of each kind under each controller, by horizon."""


class GovernorInput(NamedTuple):
    """Inputs of the Governor after one tick."""

    reading: EpochStats
    skipped_steps: int
    alphas: list[float]

    @property
    def loss(self) -> float:
        return self.reading.loss


class Trace(NamedTuple):
    """Recording of one episode of one host."""

    kind: str
    controller: str
    horizon: int
    chance: float
    steps: int  # optimizer steps per tick
    ticks: list[GovernorInput]

    @property
    def healthy(self) -> bool:
        """True unless the loss exceeds 1.5 times that of guessing in three consecutive ticks, or is not finite.

        This standard is independent of the Governor's rules.
        """
        limit = 1.5 * self.chance
        losses = [seen.loss for seen in self.ticks]
        return all(map(math.isfinite, losses)) and not any(
            min(losses[i : i + 3]) > limit for i in range(len(losses) - 2)
        )

    @property
    def weight_lost(self) -> list[bool]:
        """For each tick, True if the alpha of a seed was lower than in the tick before."""
        alphas = [self.ticks[0].alphas, *(seen.alphas for seen in self.ticks)]
        return [
            any(now < before for now, before in zip(alphas[i + 1], alphas[i], strict=True))
            for i in range(len(self.ticks))
        ]


class Recorder(HostMonitor):
    """A `HostMonitor` that records its inputs, judges every host healthy, and takes no snapshots."""

    def reset(self) -> None:
        super().reset()
        self.ticks: list[GovernorInput] = []

    def judge(self, stats: EpochStats, skipped_steps: int, alphas: list[float]) -> Judgement:
        self.ticks.append(GovernorInput(stats, skipped_steps, alphas))
        return Judgement(Verdict.HEALTHY)

    def take_snapshot(self, state: dict[str, Any]) -> None:
        pass


def record(kind: str, controller: str, horizon: int, hosts: int) -> list[Trace]:
    """Record one episode of each of `hosts` hosts without a Governor."""
    make, lifecycle = CONTROLLERS[controller]
    pool, acting = open_pool(KINDS[kind], horizon, hosts, lifecycle, "fused"), make()
    for env in pool.envs:
        env.monitor = Recorder(
            env.monitor.config, chance_loss=env.monitor.chance_loss, steps_per_epoch=env.monitor.steps_per_epoch
        )
    first = 1000 * list(CONTROLLERS).index(controller) + 100 * horizon
    pool.reset(range(first, first + hosts))
    acting.reset(pool)
    for _ in range(horizon):
        pool.step(acting.act(pool))
    return [
        Trace(kind, controller, horizon, env.monitor.chance_loss, env.monitor.steps_per_epoch, env.monitor.ticks)
        for env in pool.envs
    ]


def record_all() -> Iterator[Trace]:
    """Record hosts of every kind under every controller, over short and long episodes."""
    for (horizon, numbers), kind in product(EPISODES.items(), KINDS):
        for controller, hosts in zip(CONTROLLERS, numbers, strict=True):
            yield from record(kind, controller, horizon, hosts)
        print(f"recorded: {horizon} ticks, {kind}", flush=True)


def save(traces: Sequence[Trace], path: Path) -> None:
    """Write traces as JSON."""
    path.write_text(json.dumps(traces))


def load(path: Path) -> list[Trace]:
    """Read traces from JSON."""

    def seen(reading: list, skipped_steps: int, alphas: list[float]) -> GovernorInput:
        loss, train_loss, gradients, *flags = reading
        return GovernorInput(EpochStats(loss, train_loss, tuple(gradients), *flags), skipped_steps, alphas)

    return [Trace(*rest, [seen(*tick) for tick in ticks]) for *rest, ticks in json.loads(path.read_text())]
