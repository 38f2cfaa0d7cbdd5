"""Measure how well a linear classifier predicts the hidden context variables of hosts from their observations.

    python -m benchmarks.given_away --config configs/digits_family.yaml

Hosts are drawn as in training, equally many of each context, and nothing grows on them. The classifier is logistic
regression (scikit-learn) on all features of one observation; accuracies are on held-out hosts (five folds). A variable
that is predicted before any training is given away by the observation.
"""

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from rich import box
from rich.table import Table
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from benchmarks.tune import open_data
from esper_lightning.console import wide_console
from esper_lightning.controllers.random import WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.search.successive_halving import sample_host_seeds

FOLDS = 5
"""Folds of the cross-validation."""

HOSTS_PER_CONTEXT, TICKS = 30, 3
"""Default number of hosts per context, and of observed ticks."""


def collect_observations(pool: HostPool, seeds: Sequence[int], ticks: int) -> list[np.ndarray]:
    """Return the observations of these hosts, [N, F] each, before training and after each of `ticks` host epochs."""
    controller, observations = WaitOnly(), []
    pool.reset(seeds)
    controller.reset(pool)
    for tick in range(ticks + 1):
        if tick:
            pool.step(controller.act(pool))
        observations.append(torch.cat([part.flatten(1).float() for part in pool.observation], dim=1).cpu().numpy())
    return observations


def cross_validated_accuracy(features: np.ndarray, labels: Sequence[str]) -> float:
    """Return the cross-validated accuracy of a linear classifier of labels [N] from features [N, F]."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    return float(cross_val_score(classifier, features, np.array(labels), cv=folds).mean())


def table(pool: HostPool, hosts_per_context: int, ticks: int) -> Table:
    """Return a Markdown table with a row for each variable that differs between contexts."""
    family = pool.env_factory.context_distribution
    seeds = sample_host_seeds(pool, hosts_per_context, Random("given away")).ravel().tolist()
    observations = collect_observations(pool, seeds, ticks)
    result = Table(box=box.MARKDOWN)
    for heading in ("variable", "guessing", "before training", *(f"after {tick}" for tick in range(1, ticks + 1))):
        result.add_column(heading)
    for name in family.encoded_variables:
        labels = [str(dict(family.draw(seed).variables).get(name)) for seed in seeds]
        guessing = max(Counter(labels).values()) / len(labels)
        result.add_row(
            name,
            *(
                f"{share:.0%}"
                for share in (guessing, *(cross_validated_accuracy(features, labels) for features in observations))
            ),
        )
    return result


def main(args: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--each", type=int, default=HOSTS_PER_CONTEXT, help=f"hosts of each context, {FOLDS} or more")
    parser.add_argument("--ticks", type=int, default=TICKS, help="number of observed host epochs")
    options = parser.parse_args(args)
    if options.each < FOLDS:
        parser.error(f"--each {options.each} is too few for {FOLDS} folds; {FOLDS} or more")
    torch.set_num_threads(1)
    data = open_data(options.config)
    if len(data.pools) > 1:
        parser.error(f"{options.config} has hosts of several tasks; give each a config of its own")
    if not data.pool.env_factory.context_distribution.encoded_variables:
        parser.error(f"{options.config} has one context only; name variables that differ in data.env.family.train")
    pool = data.make_pool(options.each * len(data.pool.env_factory.context_distribution.contexts))
    wide_console().print(table(pool, options.each, options.ticks))


if __name__ == "__main__":
    main()
