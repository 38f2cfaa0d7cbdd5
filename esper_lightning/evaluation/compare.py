"""The same hosts under several controllers. H hosts, T ticks, K slots."""

from collections.abc import Sequence
from time import perf_counter
from typing import NamedTuple

import numpy as np

from esper_lightning.envs import HostPool
from esper_lightning.envs.transfer import download
from esper_lightning.evaluation.intervals import Interval, mean_interval
from esper_lightning.evaluation.meter import Meter
from esper_lightning.growth.blend import Style
from esper_lightning.growth.stages import Stage
from esper_lightning.tamiyo.controller import Controller


class Kept(NamedTuple):
    """A fossil: what it is, without its weights."""

    slot: str
    blueprint: str
    style: Style


Topology = tuple[Kept, ...]
"""What a host has kept, in the order of its slots."""


class Trace(NamedTuple):
    """What happened, tick by tick, within the horizon."""

    accuracy: np.ndarray  # [T, H] on validation images after each host epoch; at the end of what is kept alone
    ops: np.ndarray  # [T, H] int: Op that was carried out before it
    stages: np.ndarray  # [T, H, K] int: Stage of each slot after it


class Outcome(NamedTuple):
    """How one controller's hosts ended, [H] each; accuracy, loss and objective are on the test split, of each host with
    what it has fossilized."""

    controller: str
    accuracy: np.ndarray  # 0 … 1
    loss: np.ndarray
    parameters: np.ndarray
    objective: np.ndarray
    flops: np.ndarray  # of training: see Meter
    ticks: np.ndarray  # host epochs in which the host trained
    fossils: np.ndarray
    rollbacks: np.ndarray
    seconds: float  # that the whole pool's episode took
    kept: list[Topology]
    trace: Trace
    members: list[str]  # of each host, its facts


def play(
    pool: HostPool, name: str, controller: Controller, seeds: Sequence[int], ticks: Sequence[int] | None = None
) -> Outcome:
    """One episode of `controller` on hosts that depend on `seeds` alone; the pool is used up.

    Args:
        pool: The hosts.
        name: Of the controller, in reports.
        controller: Decides.
        seeds: One per host. The order of a host's data follows from its seed and the tick alone, too.
        ticks: Host epochs after which each host stops learning, beyond the horizon if need be, where nothing is decided
            any more. None: the horizon for all.
    """
    started = perf_counter()
    pool.reset(seeds)
    with Meter(pool) as meter:
        controller.reset(pool)
        trace, rollbacks = _episode(pool, controller, ticks)
    seconds = perf_counter() - started
    loss, right = pool.test_scores()
    kept = [
        tuple(Kept(s.name, s.blueprint, s.style) for s in env.slots if s.stage is Stage.FOSSILIZED) for env in pool.envs
    ]
    return Outcome(
        controller=name,
        accuracy=right.double().numpy(),
        loss=loss.double().numpy(),
        parameters=pool.parameters.numpy(),
        objective=np.array([env.objective_with(share) for env, share in zip(pool.envs, right.tolist(), strict=True)]),
        flops=np.array(meter.flops),
        ticks=np.array(meter.ticks),
        fossils=np.array([len(topology) for topology in kept]),
        rollbacks=rollbacks,
        seconds=seconds,
        kept=kept,
        trace=trace,
        members=[str(env.habitat.member) for env in pool.envs],
    )


def _episode(
    pool: HostPool, controller: Controller, ticks: Sequence[int] | None
) -> tuple[Trace, np.ndarray]:  # rollbacks [H]
    horizon = pool.config.horizon
    accuracy, ops, stages = [], [], []
    rollbacks = np.zeros(pool.n_envs, dtype=np.int64)
    for tick in range(horizon if ticks is None else max(horizon, *ticks)):
        for env, last in zip(pool.envs, ticks or (), strict=ticks is not None):
            if tick >= last:
                env.end()
        if tick >= horizon:
            pool.carry_on(1)
            continue
        step = pool.step(controller.act(pool))
        for word in step.verdicts:
            rollbacks[word.host] += word.verdict.diverged
        accuracy.append(step.metrics.accuracy.double().numpy())
        ops.append(download(step.action.op).numpy().copy())
        stages.append([[int(slot.stage) for slot in env.slots] for env in pool.envs])
    return Trace(np.array(accuracy), np.array(ops), np.array(stages)), rollbacks


def paired_difference(ours: Outcome, other: Outcome) -> Interval:
    """Objective of `ours` minus that of `other`, host by host: what hosts have in common cancels."""
    return mean_interval(ours.objective - other.objective)
