"""Ablations of the policy for any network: trainings with one change each, on hosts of the training and on others.

    python -m benchmarks.zero_shot_ablations train [--only "no memory"] [--seeds 0] [--rollouts 24] [--jobs 2]
    python -m benchmarks.zero_shot_ablations table

train: train each policy, and play it on fresh hosts of each task of `configs/general.yaml` and on the held-out settings
    of `benchmarks.zero_shot`. Results are rows of a CSV file; a training that has got rows is not repeated.
table: Markdown table of mean objectives, all tasks and all settings weighed alike, with the difference from the policy
    as configured, paired by host and RNG seed of training.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import yaml
from lightning import Callback, LightningModule, Trainer

from benchmarks.rows import appended_rows, read_rows
from benchmarks.tables import number, shown
from benchmarks.tune import open_data
from benchmarks.zero_shot import CONFIG, SETTINGS, Row, group, load_set_policy, make_pool, play, weigh
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.module import TamiyoModule
from esper_lightning.parallel import Processes
from esper_lightning.tamiyo.set_policy import SetHeads

RESULTS = Path("benchmarks/results/zero_shot_ablations.csv")

HOSTS = 24
"""Fresh hosts of each task of the training."""


class NoExchange(Callback):
    """Callback that scores a slot, and the blueprints in it, by the features of that slot alone.

    The logits of the ops still read the host as a whole. Those of slots and blueprints read no other slot, and neither
    the host nor the memory, which are one vector with the slots. The weights that read it are set to zero and stay
    there, because Adam moves no weight whose gradient is always zero.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, TamiyoModule)
        heads = pl_module.policy.heads
        assert isinstance(heads, SetHeads)
        for weight in (heads.of_core.weight, heads.tables["slot"].get_parameter("query.weight")):
            torch.nn.init.zeros_(weight)
            weight.register_hook(torch.zeros_like)


AS_CONFIGURED = "as configured"


def read_data() -> dict[str, Any]:
    """Return the data section of the config."""
    return yaml.safe_load(CONFIG.read_text())["data"]


def two_tasks() -> list[str]:
    """Return the options of a training on digits and a table alone, with as many hosts as the config has."""
    data = read_data()
    hosts = data["n_envs"] + sum(task["n_envs"] for task in data["also"].values())
    table = data["also"]["table"] | {"n_envs": hosts // 3}
    return ["--data.n_envs", str(hosts - hosts // 3), "--data.also", json.dumps({"table": table})]


def more_kinds() -> list[str]:
    """Return the options of a training on more kinds of hosts, with as many hosts as the config has.

    Added are prices of compute, CNNs of four and five blocks, without pooling and without normalisation, and letters at
    32x32 pixels. A family holds at most 2,000 contexts, so each sort of CNN meets fewer transforms of the images.
    """
    data = read_data()
    growing, grown = data["env"]["family"]["train"]
    plain, *_, transposed = grown["data.transform"]
    widths = [*growing["host.widths"][:2], [4, 6, 6, 8], [6, 6, 8, 8, 8]]
    train = [
        growing | {"host.widths": widths, "data.transform": [plain, "coarse"]},
        grown | {"host.pools": [0, 2], "data.transform": [plain]},
        grown | {"host.widths": [[6, 8, 8]], "host.norm": [False], "horizon": [8, 15], "data.transform": [transposed]},
    ]
    glyphs = data["also"]["glyphs"]
    large = {
        "task": {
            "class_path": "esper_lightning.tasks.Glyphs",
            "init_args": {"side": 32, "level": "mild", "train": 2000, "validation": 250, "test": 500},
        },
        "host": {
            "class_path": "esper_lightning.hosts.CNN",
            "init_args": {"widths": [6, 8, 12], "pools": 3, "isolate": False, "channels_last": False},
        },
        "n_envs": 4,
        "training": {"batches": 12, "batch_size": 32, "max_grad_norm": None},
        "blueprints": glyphs["blueprints"],
        "family": {"train": [glyphs["family"]["train"][0] | {"horizon": [8, 12]}]},
    }
    return [
        *("--data.n_envs", str(data["n_envs"] - large["n_envs"])),
        *("--data.env.family.train", json.dumps(train)),
        *("--data.env.objective.compute_price_to", "0.1"),
        *("--data.also", json.dumps(data["also"] | {"large": large})),
    ]


ABLATIONS: dict[str, Sequence[str]] = {
    AS_CONFIGURED: (),
    "no exchange among slots": ("--trainer.callbacks", f"[benchmarks.zero_shot_ablations.{NoExchange.__name__}]"),
    "no memory": ("--model.policy.memory", "none"),
    "names instead of descriptions": ("--data.env.sight.added", "[names, rents, trials]"),
    "two kinds of hosts alone": two_tasks(),
    "more kinds of hosts": more_kinds(),
}
"""Changed options of each ablation, by name. Descriptions are those of slots and of blueprints; names are codes of the
blueprints alone."""


class Run(NamedTuple):
    """One training."""

    name: str
    rng_seed: int


def train(run: Run, *, rollouts: int, folder: Path) -> list[Row]:
    """Train with the changed options, and return the results on hosts of the training and on held-out settings."""
    torch.set_num_threads(1)
    root = folder / f"{run.name.replace(' ', '_')}_{run.rng_seed}"
    command = [sys.executable, "-m", "esper_lightning", "fit", "--config", str(CONFIG), *ABLATIONS[run.name]]
    command += ["--seed_everything", str(run.rng_seed), "--trainer.max_epochs", str(rollouts)]
    command += ["--trainer.default_root_dir", str(root), "--trainer.enable_progress_bar", "false"]
    done = subprocess.run([*command, "--model.evaluation.hosts", "0"], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{run.name}, seed {run.rng_seed}: exit {done.returncode}: {done.stderr[-2000:]}")
    *_, checkpoint = sorted(root.glob("version_*/checkpoints/last.ckpt"), key=lambda path: path.stat().st_mtime)
    data, policy = open_data(CONFIG), load_set_policy(checkpoint)
    pools = {task: partial(data.make_pool, HOSTS, task=task, sight=policy.sight) for task in data.pools} | {
        title: partial(
            make_pool,
            setting,
            replace(data.env, sight=policy.sight),
            setting.blueprints or data.task_configs[setting.like].blueprints,
            data.governor,
        )
        for title, setting in SETTINGS.items()
    }
    return [row for title, make in pools.items() for row in play(make(), title, run.name, str(run.rng_seed), policy)]


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a Markdown table: mean objectives on both sorts of hosts, and differences.

    Only RNG seeds of training that the policy as configured has too are compared.
    """
    lines = [
        "| policy | runs | hosts of the training | difference | held out | difference |",
        "|---|--:|---|---|---|---|",
    ]
    usual = [row for row in rows if row.controller == AS_CONFIGURED]
    for name in ABLATIONS:
        seeds = {row.training_seed for row in rows if row.controller == name}
        paired = [row for row in rows if row.controller == name or (row in usual and row.training_seed in seeds)]
        if not seeds:
            continue
        cells = [name, str(len(seeds))]
        for held_out in (False, True):
            found = group([row for row in paired if (row.setting in SETTINGS) == held_out])
            cells.append(number(float(np.mean([of[name].mean() for of in found.values()]))))
            compared = name != AS_CONFIGURED and all(AS_CONFIGURED in of for of in found.values())
            leads = [of[name] - of[AS_CONFIGURED] for of in found.values()] if compared else []
            cells.append(shown(mean_interval(weigh(leads)), signed=True) if leads else "")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Run the missing trainings and append their rows, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training, showing = commands.add_parser("train"), commands.add_parser("table")
    training.add_argument("--only", nargs="*", choices=list(ABLATIONS), default=list(ABLATIONS), metavar="NAME")
    training.add_argument("--seeds", nargs="*", type=int, default=[0])
    training.add_argument("--rollouts", type=int, default=24, help="of each training; the config has 64")
    training.add_argument("--jobs", type=int, default=1, help="trainings side by side, a core each")
    training.add_argument("--runs", type=Path, default=Path("runs/zero_shot_ablations"), help="folder of the trainings")
    for command in (training, showing):
        command.add_argument("--csv", type=Path, default=RESULTS, help="rows of results")
    given = parser.parse_args()
    rows = read_rows(given.csv, Row)
    if given.command == "table":
        print("\n".join(table(rows)))
        return
    known = {(row.controller, row.training_seed) for row in rows}
    wanted = [Run(name, seed) for seed, name in product(given.seeds, given.only) if (name, str(seed)) not in known]
    with appended_rows(given.csv, Row) as append:
        work = partial(train, rollouts=given.rollouts, folder=given.runs)
        for found in Processes(given.jobs).map(work, wanted):
            append(found)


if __name__ == "__main__":
    main()
