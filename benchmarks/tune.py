"""Tune the settings of hand-written controllers on a config's training hosts, so that they are fair baselines.

    python -m benchmarks.tune --config configs/digits.yaml --steps 17280 --out benchmarks/settings/digits.yaml
    esper-lightning test --config digits --config benchmarks/settings/digits.yaml --ckpt_path …

All settings of a controller are played on the same hosts, with equal numbers of each context of a family, and compared
by the objective on validation images. The best few are compared again on twice as many other hosts. Each controller has
at most `--steps` host epochs: for a fair comparison as many as the training of the policy. No host or image of an
evaluation is used.
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import yaml

from esper_lightning.cli.commands import governor_of, load_config
from esper_lightning.controllers.rules import ClimbingConfig, HillClimbing, Periodic, PeriodicConfig
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.search import final_objectives, sample_host_seeds

FINALISTS = 6
"""Number of settings that are played again."""
ROUNDS = 2
"""Rounds of as many hosts as in the first comparison, for the finalists."""

Rule = PeriodicConfig | ClimbingConfig
"""Settings of a hand-written controller."""


def open_data(config: Path) -> HostPoolData:
    """Return the data module of a config, built on the CPU and watched by the config's Governor."""
    made = load_config(config)
    made.datamodule.build(torch.device("cpu"))
    made.datamodule.set_governor(governor_of(made.trainer))
    return made.datamodule


def candidate_settings(pool: HostPool) -> dict[str, list[Rule]]:
    """Return all candidate settings by controller: blueprints alone or in turn, with several rates and patiences."""
    alone = [[name] for name in pool.space.blueprint]
    clocks = [
        PeriodicConfig(every=every, blueprints=blueprints)
        for every, blueprints in product(sorted({1, 3, 6, pool.config.horizon - 1}), [None, *alone])
    ]
    orders: list[dict[str, Any]] = [{"order": order} for order in ("listed", "cheapest", "dearest")]
    orders += [{"order": "listed", "blueprints": blueprints} for blueprints in alone]
    climbers = [
        ClimbingConfig(**order, last_slot_first=last, at_once=at_once, patience=patience)
        for order, last, at_once, patience in product(orders, (False, True), (1, 3), (1, 3, 5))
    ]
    return {"periodic": clocks, "climbing": climbers}


def mean_objective(pool: HostPool, rule: Rule, rounds: Sequence[Sequence[int]]) -> float:
    """Return the mean objective on validation images over the hosts of all rounds."""
    make = Periodic if isinstance(rule, PeriodicConfig) else HillClimbing
    return float(np.mean([final_objectives(pool, make(rule), seeds) for seeds in rounds]))


def draw_rng_seeds(pool: HostPool, rng_seed: int) -> list[int]:
    """Return RNG seeds of training hosts, one per environment of the pool, with equal numbers of each context."""
    each, rest = divmod(pool.n_envs, len(pool.env_factory.context_distribution.contexts))
    assert rest == 0
    return sample_host_seeds(pool, each, Random(f"tune {rng_seed}")).ravel().tolist()


def tune(pool: HostPool, rules: Sequence[Rule], rng_seed: int) -> tuple[Rule, float]:
    """Return the best setting, and its objective on the hosts of the finalists."""
    first, *others = (draw_rng_seeds(pool, rng_seed + i) for i in range(1 + ROUNDS))
    scores = [mean_objective(pool, rule, [first]) for rule in rules]
    finalists = [rules[i] for i in np.argsort(scores)[::-1][:FINALISTS]]
    final_scores = [mean_objective(pool, rule, others) for rule in finalists]
    best = int(np.argmax(final_scores))
    return finalists[best], final_scores[best]


def main(args: Sequence[str] | None = None) -> None:
    """Tune each controller and write the best settings as a config for `test`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="a YAML file")
    parser.add_argument("--steps", type=int, required=True, help="host epochs for each controller")
    parser.add_argument("--seed", type=int, default=0, help="of the hosts")
    options = parser.parse_args(args)
    torch.set_num_threads(1)
    data = open_data(options.config)
    if len(data.pools) > 1:
        parser.error(f"{options.config} has hosts of several tasks; tune the rules for each in a config of its own")
    contexts = len(data.pool.env_factory.context_distribution.contexts)
    how = f"--steps {options.steps} --seed {options.seed}"
    comments = [f"# Rules tuned on training hosts of {options.config.name} by benchmarks/tune.py ({how})."]
    best: dict[str, dict[str, Any]] = {}
    for name, rules in candidate_settings(data.pool).items():
        least = contexts * data.pool.config.horizon * (len(rules) + FINALISTS * ROUNDS)  # one host of each context
        if options.steps < least:
            parser.error(f"{len(rules)} settings of {name} need at least {least} host epochs; give --steps {least}")
        pool = data.make_pool(options.steps // least * contexts)
        rule, objective = tune(pool, rules, options.seed)
        best[name] = asdict(rule)
        comments.append(
            f"# {name}: {objective:.3f} on validation images, the best of {len(rules)} settings, {pool.n_envs} hosts."
        )
        print(comments[-1].removeprefix("# "), flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        "\n".join(comments) + "\n" + yaml.safe_dump({"model": {"evaluation": best}}, default_flow_style=None)
    )


if __name__ == "__main__":
    main()
