"""Intervals, compared with a complete enumeration of all resamples."""

import itertools

import numpy as np
import pytest

from esper_lightning.evaluation.statistics import Interval, mean_interval

HOSTS = np.array([0.1, 0.35, 0.4, 0.55, 0.62, 0.9])


def all_resampled_means(values: np.ndarray) -> np.ndarray:
    """Return the means of all samples with replacement, which are equally likely."""
    return values[np.array(list(itertools.product(range(len(values)), repeat=len(values))))].mean(1)


def test_an_interval_over_hosts_is_that_of_all_resamples() -> None:
    mean, low, high = mean_interval(HOSTS)

    assert mean == pytest.approx(HOSTS.mean())
    assert (low, high) == pytest.approx(np.quantile(all_resampled_means(HOSTS), [0.025, 0.975]), abs=0.008)


def test_an_interval_over_training_seeds_and_hosts_is_that_of_all_resamples_of_both() -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(3, 5)) + 2.0 * np.array([[-1.0], [0.0], [1.0]]) + random.normal(size=5)  # [S, H]
    rows = [table[list(seeds)].mean(0) for seeds in itertools.product(range(3), repeat=3)]
    every = np.concatenate([all_resampled_means(row) for row in rows])

    mean, low, high = mean_interval(table)

    assert mean == pytest.approx(table.mean())
    assert (np.mean(every < low), np.mean(every > high)) == pytest.approx((0.025, 0.025), abs=0.004)
    over_hosts = mean_interval(table.mean(0))
    assert high - low > 1.3 * (over_hosts.high - over_hosts.low), "training seeds differ, which hosts alone do not show"


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_same_values_have_the_same_interval_bit_for_bit(seeds: int) -> None:
    table = np.random.default_rng(1).normal(size=(seeds, 20))
    np.random.seed(seeds)  # the global random state must not matter

    assert mean_interval(table) == mean_interval(table.copy())


@pytest.mark.parametrize(("hosts", "share"), [(10, 0.88), (224, 0.95)])
@pytest.mark.slow
def test_an_interval_holds_the_truth_as_often_as_its_page_says(hosts: int, share: float) -> None:
    samples = 2.0 + 3.0 * np.random.default_rng(hosts).normal(size=(250, hosts))

    hits = [low <= 2.0 <= high for _, low, high in map(mean_interval, samples)]

    assert np.mean(hits) == pytest.approx(share, abs=0.045)


@pytest.mark.parametrize("values", [[0.5], [0.25, 0.25, 0.25], [[0.5, 0.5], [0.5, 0.5]]])
def test_without_spread_the_interval_is_the_mean(values: list) -> None:
    mean = float(np.mean(values))

    assert mean_interval(np.array(values)) == Interval(mean, mean, mean)
