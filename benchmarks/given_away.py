"""What an observation gives away of a family's hidden facts: how often a linear classifier tells them.

    python -m benchmarks.given_away --config configs/digits_family.yaml

Hosts are equally many of each member, drawn as those of training are, and nothing grows on them. The classifier is
scikit-learn's logistic regression on all features that the policy is shown at one moment; the shares are of hosts that
it was not fitted to (five folds). A fact that it tells before any training need not be found out.
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
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.publish import wide_console
from esper_lightning.evaluation.race import draw_hosts
from esper_lightning.tamiyo.baselines import WaitOnly

FOLDS = 5

EACH, TICKS = 30, 3


def watch(pool: HostPool, seeds: Sequence[int], ticks: int) -> list[np.ndarray]:
    """What is shown of these hosts before training and after each of so many host epochs, [N, F] each."""
    controller, shown = WaitOnly(), []
    pool.reset(seeds)
    controller.reset(pool)
    for tick in range(ticks + 1):
        if tick:
            pool.step(controller.act(pool))
        shown.append(torch.cat([part.flatten(1).float() for part in pool.observation], dim=1).cpu().numpy())
    return shown


def told(features: np.ndarray, labels: Sequence[str]) -> float:
    """The share of hosts whose label a linear classifier of the others' features tells."""
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=2000))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
    return float(cross_val_score(classifier, features, np.array(labels), cv=folds).mean())


def table(pool: HostPool, each: int, ticks: int) -> Table:
    """A row for each fact that differs between members, in Markdown."""
    family = pool.bench.family
    seeds = draw_hosts(pool, each, Random("given away")).ravel().tolist()
    shown = watch(pool, seeds, ticks)
    result = Table(box=box.MARKDOWN)
    for heading in ("fact", "guessing", "before training", *(f"after {tick}" for tick in range(1, ticks + 1))):
        result.add_column(heading)
    for name in family.known:
        labels = [str(dict(family.draw(seed).facts).get(name)) for seed in seeds]
        guessing = max(Counter(labels).values()) / len(labels)
        result.add_row(name, *(f"{share:.0%}" for share in (guessing, *(told(features, labels) for features in shown))))
    return result


def main(args: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--each", type=int, default=EACH, help=f"hosts of each member, {FOLDS} or more")
    parser.add_argument("--ticks", type=int, default=TICKS, help="host epochs that are watched")
    given = parser.parse_args(args)
    if given.each < FOLDS:
        parser.error(f"--each {given.each} is too few for {FOLDS} folds; {FOLDS} or more")
    torch.set_num_threads(1)
    data = open_data(given.config)
    if len(data.pools) > 1:
        parser.error(f"{given.config} has hosts of several tasks; ask of each in a config of its own")
    if not data.pool.bench.family.known:
        parser.error(f"{given.config} has one member alone; name facts that differ in data.env.family.train")
    pool = data.make_pool(given.each * len(data.pool.bench.family.members))
    wide_console().print(table(pool, given.each, given.ticks))


if __name__ == "__main__":
    main()
