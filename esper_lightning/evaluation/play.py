"""Evaluation of one controller on a fixed set of hosts. H hosts, T ticks, K slots."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers.learned import Controller
from esper_lightning.envs import HostPool, StepResult
from esper_lightning.envs.device_transfer import download
from esper_lightning.envs.spaces.actions import ActionError
from esper_lightning.evaluation.flops_meter import FlopsMeter
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.stages import Stage
from esper_lightning.registry import is_of_this_package


class FossilizedSeed(NamedTuple):
    """One fossilized seed, described without its weights."""

    slot: str
    blueprint: str
    style: BlendStyle


Topology = tuple[FossilizedSeed, ...]
"""All fossilized seeds of one host, in the order of its slots."""


class PoolTrace(NamedTuple):
    """Validation accuracy, ops and stages at every tick of an episode, up to the horizon."""

    accuracy: np.ndarray  # [T, H] on validation samples after each host epoch; at the last tick of the fossilized seeds
    ops: np.ndarray  # [T, H] int: Op carried out before the host epoch
    stages: np.ndarray  # [T, H, K] int: Stage of each slot after the host epoch


class Outcome(NamedTuple):
    """Results of one controller at the end of its episode, one value per host [H].

    Accuracy, loss, objective and metrics are measured on the test split, with the fossilized seeds of each host only.
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
    topologies: list[Topology]
    trace: PoolTrace
    contexts: list[str]  # variables of each host's context, as text
    metrics: dict[str, np.ndarray]  # further test metrics by name, see Task.test_metrics; NaN where undefined


def play_episode(
    pool: HostPool,
    name: str,
    controller: Controller,
    *,
    rng_seeds: Sequence[int],
    tick_limits: Sequence[int] | None = None,
    on_step: Callable[[StepResult], None] = lambda step: None,
) -> Outcome:
    """Play one episode of `controller`. The hosts depend on `rng_seeds` alone. The state of the pool is overwritten.

    Args:
        pool: The hosts.
        name: Name of the controller in reports.
        controller: Controller that chooses the actions.
        rng_seeds: RNG seeds, one per host. The order of a host's data follows from its RNG seed and the tick alone.
        tick_limits: Host epochs after which each host stops training, possibly beyond the horizon. No actions are taken
            after the horizon. None: the horizon for all hosts.
        on_step: Called with the result of every step.
    """
    started = perf_counter()
    pool.reset(rng_seeds)
    with FlopsMeter(pool) as meter:
        controller.reset(pool)
        with named_controller(name, controller):
            trace, rollbacks = _run_episode(pool, controller, tick_limits, on_step=on_step)
    seconds = perf_counter() - started
    loss, accuracy = pool.test_scores()
    topologies = [
        tuple(
            FossilizedSeed(s.name, s.blueprint, s.style)
            for s in env.slots
            if s.stage is Stage.FOSSILIZED and s.blueprint is not None
        )
        for env in pool.envs
    ]
    return Outcome(
        controller=name,
        accuracy=accuracy.double().numpy(),
        loss=loss.double().numpy(),
        parameters=pool.parameter_counts.numpy(),
        objective=np.array([env.objective_at(share) for env, share in zip(pool.envs, accuracy.tolist(), strict=True)]),
        flops=np.array(meter.flops),
        ticks=np.array(meter.ticks),
        fossils=np.array([len(topology) for topology in topologies]),
        rollbacks=rollbacks,
        seconds=seconds,
        topologies=topologies,
        trace=trace,
        contexts=[str(env.context.context) for env in pool.envs],
        metrics={name: values.numpy() for name, values in pool.test_metrics().items()},
    )


@contextmanager
def named_controller(name: str, controller: Controller) -> Iterator[None]:
    """Turn the error of an action that a controller of the user has chosen into a ValueError that names it."""
    try:
        yield
    except ActionError as error:
        if is_of_this_package(type(controller)):
            raise
        raise ValueError(f"controller {name!r}: {error}") from error


def try_controller(pool: HostPool, name: str, controller: Controller) -> None:
    """Let a controller choose its first action in `pool`, whose state is overwritten.

    Raises ValueError if that is none.
    """
    pool.reset(range(pool.n_envs))
    controller.reset(pool)
    with named_controller(name, controller):
        pool.read_action(controller.act(pool))


def _run_episode(
    pool: HostPool,
    controller: Controller,
    tick_limits: Sequence[int] | None,
    *,
    on_step: Callable[[StepResult], None],
) -> tuple[PoolTrace, np.ndarray]:  # rollbacks [H]
    horizon = pool.config.horizon
    accuracy, ops, stages = [], [], []
    rollbacks = np.zeros(pool.n_envs, dtype=np.int64)
    for tick in range(horizon if tick_limits is None else max(horizon, *tick_limits)):
        for env, limit in zip(pool.envs, tick_limits or (), strict=tick_limits is not None):
            if tick >= limit:
                env.end()
        if tick >= horizon:
            pool.train_without_actions(1)
            continue
        step = pool.step(controller.act(pool))
        on_step(step)
        for host_verdict in step.verdicts:
            rollbacks[host_verdict.host] += host_verdict.verdict.diverged
        accuracy.append(step.metrics.accuracy.double().numpy())
        ops.append(download(step.action.op).numpy().copy())
        stages.append([[int(slot.stage) for slot in env.slots] for env in pool.envs])
    return PoolTrace(np.array(accuracy), np.array(ops), np.array(stages)), rollbacks


def paired_difference(ours: Outcome, other: Outcome) -> Interval:
    """Mean of the objective of `ours` minus that of `other`, with its interval.

    Differences are paired by host, so effects common to a host cancel.
    """
    return mean_interval(ours.objective - other.objective)
