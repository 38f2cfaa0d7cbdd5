"""The same hosts under several controllers. H hosts."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats

from esper_lightning.envs import HostPool
from esper_lightning.tamiyo.controller import Controller

CONFIDENCE = 0.95


class Outcome(NamedTuple):
    """How one controller's hosts ended, [H] each, on the test split."""

    controller: str
    accuracy: np.ndarray  # 0 … 1, of the host with what it has fossilized
    parameters: np.ndarray
    objective: np.ndarray


class Interval(NamedTuple):
    """A mean and its confidence interval by Student's t over hosts."""

    mean: float
    low: float
    high: float


def play(pool: HostPool, name: str, controller: Controller, seeds: Sequence[int]) -> Outcome:
    """One episode of `controller` on hosts that depend on `seeds` alone; the pool is used up."""
    pool.reset(seeds)
    controller.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(controller.act(pool))
    accuracy, parameters = pool.test(), pool.parameters
    worth = pool.payroll.worth(accuracy).double().numpy()
    return Outcome(name, accuracy.double().numpy(), parameters.numpy(), worth)


def mean_interval(values: np.ndarray) -> Interval:
    """Mean of independent values [H]; with one value or no spread the interval is the mean itself."""
    mean = float(values.mean())
    if len(values) < 2 or np.ptp(values) == 0.0:
        return Interval(mean, mean, mean)
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, mean, stats.sem(values))
    return Interval(mean, float(low), float(high))


def paired_difference(ours: Outcome, other: Outcome) -> Interval:
    """Objective of `ours` minus that of `other`, host by host: what hosts have in common cancels."""
    return mean_interval(ours.objective - other.objective)
