"""Ablations: trainings with one change each, with three RNG seeds.

    python -m benchmarks.ablations --csv benchmarks/results/ablations.csv [--only "no masks"] [--seeds 0 1 2]

Every run is a separate `fit`. Runs whose row is already in the CSV are skipped.
"""

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from esper_lightning.console import wide_console
from esper_lightning.parallel import processes

SINGLE, FAMILY = "configs/digits.yaml", "configs/digits_family.yaml"
"""Configs with one kind of host, and with a family of hosts."""

SHORT_TRAINING = ("--trainer.max_epochs", "60")
"""A quarter of the family's training, after which the policy is better than fixed schedules. Full trainings of all
ablations would take most of a day on one core."""

SIZES = ("*parameters*", "*.flops", "*.size", "*.width", "*.widest", "*.narrowest", "*rent", "*.gain", "slot.depth")
"""Features that tell how large a host is, which the family's config hides."""

ABLATIONS: dict[str, tuple[str, Sequence[str]]] = {
    "one kind of host, as configured": (SINGLE, ()),
    "no memory": (SINGLE, ("--model.policy.memory", "none")),
    "time alone is seen": (SINGLE, ("--data.env.sight.shown", "[progress]")),
    "no counterfactuals": (SINGLE, ("--data.env.sight.hidden", "['*.contribution*']")),
    "no masks": (SINGLE, ("--data.env.sight.masks", "false")),
    "1 update epoch": (SINGLE, ("--model.ppo.epochs", "1")),
    "3 update epochs": (SINGLE, ("--model.ppo.epochs", "3")),
    "12 update epochs": (SINGLE, ("--model.ppo.epochs", "12")),
    "seeds born at random": (SINGLE, ("--data.env.lifecycle.birth", "random")),
    "reward sparse": (SINGLE, ("--data.env.reward.mode", "sparse")),
    "reward shaped": (SINGLE, ("--data.env.reward.mode", "shaped")),
    "family, shorter": (FAMILY, SHORT_TRAINING),
    "family, no memory": (FAMILY, (*SHORT_TRAINING, "--model.policy.memory", "none")),
    "family, critic sees no more": (FAMILY, (*SHORT_TRAINING, "--model.policy.asymmetric", "false")),
    "family, time alone is seen": (FAMILY, (*SHORT_TRAINING, "--data.env.sight.shown", "[progress]")),
    "family, no counterfactuals": (
        FAMILY,
        (*SHORT_TRAINING, "--data.env.sight.hidden", f"[{', '.join(map(repr, (*SIZES, '*.contribution*')))}]"),
    ),
    "family, sizes are seen": (FAMILY, (*SHORT_TRAINING, "--data.env.sight.hidden", "[]")),
}
"""Config and changed options of each ablation, by name."""

HOSTS = 96
"""Number of hosts for the evaluation after each run, on test images; the same hosts in all runs of a config."""

COLUMNS = ("ablation", "seed", "objective", "accuracy", "parameters", "fossils")
"""Columns of the CSV."""


class Run(NamedTuple):
    """Name and RNG seed of one training."""

    name: str
    rng_seed: int


def train(run: Run) -> dict[str, str]:
    """Train with the changed options and return a row of the table: mean results of the greedy policy."""
    config, changes = ABLATIONS[run.name]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper_lightning", "fit", "--config", config, *changes]
        command += ["--seed_everything", str(run.rng_seed), "--trainer.default_root_dir", folder]
        command += ["--model.evaluation.hosts", str(HOSTS)]
        command += ["--model.evaluation.against", "[]", "--model.evaluation.controls", "false"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{run.name}, seed {run.rng_seed}: exit {done.returncode}: {done.stderr[-2000:]}")
        (found,) = Path(folder).rglob("evaluation.json")
        summary = json.loads(found.read_text())
    policy_results = summary["controllers"]["tamiyo"]
    means = {name: f"{policy_results[name]['mean']:.6g}" for name in ("objective", "accuracy", "parameters", "fossils")}
    return {"ablation": run.name, "seed": str(run.rng_seed)} | means


def table(rows: Sequence[dict[str, str]]) -> Table:
    """Return a Markdown table of means over RNG seeds, with the objective of each."""
    result = Table(box=box.MARKDOWN)
    for heading in (f"objective, {HOSTS} hosts", "mean", "each seed", "seeds kept"):
        result.add_column(heading)
    for name in ABLATIONS:
        own = [row for row in rows if row["ablation"] == name]
        if own:
            scores = [float(row["objective"]) for row in own]
            fossilized = np.mean([float(row["fossils"]) for row in own])
            result.add_row(name, f"{np.mean(scores):.3f}", " ".join(f"{s:.3f}" for s in scores), f"{fossilized:.2f}")
    return result


def main() -> None:
    """Run the missing trainings, write each row to the CSV, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", type=Path, required=True, help="rows are added here")
    parser.add_argument("--only", nargs="*", choices=list(ABLATIONS), default=list(ABLATIONS), metavar="NAME")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side, a core each")
    args = parser.parse_args()
    rows = list(csv.DictReader(args.csv.open())) if args.csv.exists() else []
    known = {Run(row["ablation"], int(row["seed"])) for row in rows}
    wanted = [run for name in args.only for seed in args.seeds if (run := Run(name, seed)) not in known]
    args.csv.parent.mkdir(parents=True, exist_ok=True)
    for row in processes(args.jobs).map(train, wanted):
        rows.append(row)
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        Console().print(f"{row['ablation']}, seed {row['seed']}: {row['objective']}")
    wide_console().print(table(rows))  # Markdown rows must not be wrapped


if __name__ == "__main__":
    main()
