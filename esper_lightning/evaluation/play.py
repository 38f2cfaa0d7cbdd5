"""One episode of one controller on a fixed set of hosts, or of static networks. H hosts, T ticks, K slots.

*Data order.* A host draws the weights of its seeds from the generator that also orders its data, so a germination would
change all later batches. Here every host epoch starts with random numbers that depend on the host's RNG seed and the
tick alone: all controllers see the same batches at the same tick, whatever their actions.

*Compute.* FLOPs of training are those of the forward pass * 3 * training samples, summed over ticks. The forward pass
includes the host and every seed with its gate, from germination on. The count follows PyTorch's FlopCounterMode: two
per multiply-add of matrix products, convolutions and attention, without normalisation, elementwise operations,
optimizer, validation and counterfactual passes. Input gradients that the first layer and seeds with detached input do
not need are not subtracted. Epochs that a rollback undid count.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import FossilizedSeed, StaticController, Topology
from esper_lightning.controllers.schedules import Schedule, recorded_schedules
from esper_lightning.envs import HEADS, HostPool, StepResult
from esper_lightning.envs.actions import ActionError
from esper_lightning.envs.host_env import objectives
from esper_lightning.envs.measurements import download
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.registry import is_of_this_package
from esper_lightning.tasks import Batches


class Outcome(NamedTuple):
    """Results of one controller at the end of its episode, one value per host [H].

    Score, loss, objective and metrics are measured on the test split, with the fossilized seeds of each host only.
    """

    controller: str
    score: np.ndarray  # see Task
    loss: np.ndarray
    parameters: np.ndarray
    objective: np.ndarray
    flops: np.ndarray  # floating-point operations of training
    ticks: np.ndarray  # host epochs in which the host trained
    fossils: np.ndarray
    rollbacks: np.ndarray
    seconds: float  # wall-clock time of the episode of the whole pool
    topologies: list[Topology]
    ops: np.ndarray  # [T, H] int: Op carried out before each host epoch, up to the horizon
    contexts: list[str]  # variables of each host's context, as text
    metrics: dict[str, np.ndarray]  # further test metrics by name, see Task.test_metrics; NaN where undefined
    schedules: list[Schedule]  # actions carried out
    prices: list[float]  # price of parameters in the objective of each host


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

    `tick_limits` are the host epochs after which each host stops training, possibly beyond the horizon, after which no
    actions are taken; its learning rate follows its schedule over as many. None: the horizon for all hosts. `on_step`
    is called with the result of every step.
    """
    started, horizon = perf_counter(), pool.config.horizon
    flops, ticks, rollbacks = (np.zeros(pool.n_envs, dtype=np.int64) for _ in range(3))
    actions = []  # carried out in each tick, [heads, H]
    pool.reset(rng_seeds)
    for env, limit in zip(pool.envs, tick_limits or (), strict=tick_limits is not None):
        env.epochs = limit

    def count_epoch(host: int, batches: Batches) -> None:
        flops[host] += pool.envs[host].flops.of_step(pool.envs[host].slots) * batches.indices.numel()
        ticks[host] += 1

    # All executors ask each host for its batches once per tick, after the actions and before it trains.
    for host, env in enumerate(pool.envs):
        env.data_order, env.on_batches = epoch_rng_seed, partial(count_epoch, host)
    try:
        controller.reset(pool)
        for tick in range(horizon if tick_limits is None else max(horizon, *tick_limits)):
            for env, limit in zip(pool.envs, tick_limits or (), strict=tick_limits is not None):
                if tick >= limit:
                    env.stopped = True
            if tick >= horizon:
                pool.train_without_actions(1)
                continue
            with named_controller(name, controller):
                step = pool.step(controller.act(pool))
            on_step(step)
            for verdict in step.verdicts:
                rollbacks[verdict.host] += verdict.decision.diverged
            actions.append(download(torch.stack(step.action)).numpy().copy())
    finally:
        for env in pool.envs:
            env.data_order = env.on_batches = env.epochs = None
    seconds = perf_counter() - started
    loss, score = pool.test_scores()
    topologies = [
        tuple(FossilizedSeed(s.name, str(s.blueprint)) for s in env.slots if s.stage is Stage.FOSSILIZED)
        for env in pool.envs
    ]
    return Outcome(
        controller=name,
        score=score.double().numpy(),
        loss=loss.double().numpy(),
        parameters=pool.parameter_counts.numpy(),
        objective=np.array(objectives(pool.envs, score.tolist())),
        flops=flops,
        ticks=ticks,
        fossils=np.array([len(topology) for topology in topologies]),
        rollbacks=rollbacks,
        seconds=seconds,
        topologies=topologies,
        ops=np.array(actions)[:, HEADS.index("op")],
        contexts=[str(env.context.context) for env in pool.envs],
        metrics={name: values.numpy() for name, values in pool.test_metrics().items()},
        schedules=recorded_schedules(pool.space, np.array(actions)),
        prices=[env.price for env in pool.envs],
    )


def epoch_rng_seed(host_rng_seed: int, tick: int) -> int:
    """Return the RNG seed of the data order in one host epoch."""
    return int(np.random.SeedSequence([host_rng_seed, tick]).generate_state(1, np.uint64)[0]) >> 1


@contextmanager
def named_controller(name: str, controller: Controller) -> Iterator[None]:
    """Turn the error of an action that a controller of the user has chosen into a ValueError that names it."""
    try:
        yield
    except ActionError as error:
        if is_of_this_package(type(controller)):
            raise
        raise ValueError(f"controller {name!r}: {error}") from error


def play_static(pool: HostPool, name: str, grown: Outcome, *, rng_seeds: Sequence[int]) -> list[Outcome]:
    """Play the final networks of an episode, complete from the first tick.

    Returns two outcomes: with as many host epochs as the grown hosts had, and with as much training compute. Where host
    epochs are budgets of FLOPs, both are one.
    """
    controller = StaticController(grown.topologies)
    static = play_episode(pool, name, controller, rng_seeds=rng_seeds)
    if all(env.training.flops is not None for env in pool.envs):
        return [static]
    limits = affordable_ticks(static, grown.flops)
    return [static, play_episode(pool, f"{name}, equal FLOPs", controller, rng_seeds=rng_seeds, tick_limits=limits)]


def affordable_ticks(static: Outcome, spent_flops: np.ndarray) -> list[int]:
    """Return how many whole host epochs of each static host [H] cost no more than `spent_flops` [H] of its grown twin.

    They exceed the horizon if the grown host has spent more than the static one costs. A host that could not be trained
    has an unknown cost; its budget buys nothing.
    """
    return [
        int(budget) * int(ticks) // int(flops) if flops else 0
        for budget, ticks, flops in zip(spent_flops, static.ticks, static.flops, strict=True)
    ]
