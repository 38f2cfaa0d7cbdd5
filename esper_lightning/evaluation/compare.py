"""Evaluation of one controller on a fixed set of hosts. H hosts, T ticks, K slots."""

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
    """One fossilized seed, described without its weights."""

    slot: str
    blueprint: str
    style: Style


Topology = tuple[Kept, ...]
"""All fossilized seeds of one host, in the order of its slots."""


class Trace(NamedTuple):
    """Validation accuracy, ops and stages at every tick of an episode, up to the horizon."""

    accuracy: np.ndarray  # [T, H] on validation samples after each host epoch; at the last tick of the fossilized seeds
    ops: np.ndarray  # [T, H] int: Op carried out before the host epoch
    stages: np.ndarray  # [T, H, K] int: Stage of each slot after the host epoch


class Outcome(NamedTuple):
    """Results of one controller at the end of its episode, one value per host [H].

    Accuracy, loss and objective are measured on the test split, with the fossilized seeds of each host only.
    """

    controller: str
    accuracy: np.ndarray  # in [0, 1]
    loss: np.ndarray
    parameters: np.ndarray
    objective: np.ndarray
    flops: np.ndarray  # floating-point operations of training, see FlopsMeter
    ticks: np.ndarray  # host epochs in which the host trained
    fossils: np.ndarray
    rollbacks: np.ndarray
    seconds: float  # wall-clock time of the episode of the whole pool
    kept: list[Topology]
    trace: Trace
    members: list[str]  # variables of each host's context, as text


def play(
    pool: HostPool, name: str, controller: Controller, seeds: Sequence[int], ticks: Sequence[int] | None = None
) -> Outcome:
    """Play one episode of `controller`. The hosts depend on `rng_seeds` alone. The state of the pool is overwritten.

    Args:
        pool: The hosts.
        name: Name of the controller in reports.
        controller: Controller that chooses the actions.
        rng_seeds: RNG seeds, one per host. The order of a host's data follows from its RNG seed and the tick alone.
        tick_limits: Host epochs after which each host stops training, possibly beyond the horizon. No actions are taken
            after the horizon. None: the horizon for all hosts.
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
    """Mean of the objective of `ours` minus that of `other`, with its interval.

    Differences are paired by host, so effects common to a host cancel.
    """
    return mean_interval(ours.objective - other.objective)
