"""Policies trained where seeds learn behind the host for some ticks, beside those where they are blended at once."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.rows import appended_rows, read_rows
from esper_lightning.evaluation.search.search import BEST_FILE
from esper_lightning.growth.blend import Isolation


class Training(NamedTuple):
    """Config of a training with its options; shortened where the whole takes more than a few minutes."""

    config: str
    options: Sequence[str]


TRAININGS = {
    "digits": Training(
        "configs/digits.yaml",
        (
            *("--model.evaluation.climbing.blueprints", "[conv_light, depthwise]"),
            *("--model.evaluation.climbing.last_slot_first", "true", "--model.evaluation.climbing.patience", "5"),
        ),
    ),
    "family": Training(
        "configs/digits_family.yaml",
        (
            *("--trainer.max_epochs", "60", "--model.evaluation.climbing.blueprints", "[depthwise]"),
            *("--model.evaluation.climbing.order", "listed", "--model.evaluation.climbing.last_slot_first", "false"),
            *("--model.evaluation.climbing.at_once", "1", "--model.evaluation.climbing.patience", "1"),
        ),
    ),
    "failing": Training("configs/digits_failing.yaml", ("--trainer.max_epochs", "60")),
}
"""Trainings by name; hill climbing has its tuned settings where there are some."""

CONTROLLERS = {
    "learned": "tamiyo",
    "waiting": "small static",
    "climbing": "climbing",
    "best_fixed": "best fixed",
    "yoked": "yoked",
}
"""Names of the controllers in a comparison by column."""

SEARCH_STEPS = 17_280
"""Host epochs of the search for the best fixed schedule."""

HOSTS = 96
"""Fresh hosts on which all controllers are compared, on test images; the same in all rows of a config."""


class Setting(NamedTuple):
    """How seeds learn before they are blended, and for how many ticks."""

    isolation: Isolation
    training_ticks: int


SETTINGS = {
    f"{setting.isolation}-{setting.training_ticks}": setting
    for setting in (
        Setting("straight_through", 0),
        Setting("proximal", 1),
        Setting("proximal", 3),
        Setting("straight_through", 1),
        Setting("straight_through", 3),
        Setting("proximal", 0),
    )
}
"""Settings by name; the first is that of the configs. A seed also learns in the tick of its germination."""


class Run(NamedTuple):
    """One training of a policy."""

    config: str
    isolation: str
    training_ticks: int
    rng_seed: int


class Row(NamedTuple):
    """Comparison of a policy: mean objectives by controller, and what became of its own hosts."""

    config: str
    isolation: str
    training_ticks: int
    rng_seed: int
    learned: float
    waiting: float
    climbing: float
    best_fixed: float
    yoked: float
    yoked_low: float  # interval of the policy's lead over yoked
    yoked_high: float
    accuracy: float
    fossils: float


def train(run: Run, schedules: Path) -> Row:
    """Train a policy, compare it, and return a row. The best schedule is searched once for all RNG seeds."""
    training = TRAININGS[run.config]
    found = schedules / f"{run.config}_{run.isolation}_{run.training_ticks}"
    best_schedule = found / f"{BEST_FILE}.json"
    searched = best_schedule.exists()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "esper_lightning", "fit", "--config", training.config, *training.options]
        command += ["--data.env.lifecycle.isolation", run.isolation]
        command += ["--data.env.lifecycle.training_ticks", str(run.training_ticks)]
        command += ["--seed_everything", str(run.rng_seed), "--trainer.default_root_dir", folder]
        command += ["--model.evaluation.hosts", str(HOSTS)]
        command += ["--model.evaluation.controls", "false"]
        command += ["--model.evaluation.against", "['small static', climbing, 'best fixed', yoked]"]
        command += ["--model.evaluation.search.steps", str(SEARCH_STEPS)]
        command += ["--model.evaluation.search.found", str(found)] if searched else []
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr[-2000:]}")
        (file,) = Path(folder).rglob("evaluation.json")
        controllers = json.loads(file.read_text())["controllers"]
        if not searched:
            found.mkdir(parents=True, exist_ok=True)
            shutil.copy(file.with_name(best_schedule.name), best_schedule)
    numbers = {column: controllers[name]["objective"]["mean"] for column, name in CONTROLLERS.items()}
    lead = controllers[CONTROLLERS["yoked"]]["ahead"]
    numbers |= {"yoked_low": lead["low"], "yoked_high": lead["high"]}
    numbers |= {name: controllers[CONTROLLERS["learned"]][name]["mean"] for name in ("accuracy", "fossils")}
    return Row(*run, **{name: float(f"{number:.6g}") for name, number in numbers.items()})


def train_all(
    path: Path,
    schedules: Path,
    *,
    configs: Sequence[str],
    settings: Sequence[str],
    rng_seeds: Sequence[int],
    jobs: int,
) -> None:
    """Train all policies that the file has not got yet; each row is appended when its training ends."""
    known = {Run(row.config, row.isolation, row.training_ticks, row.rng_seed) for row in read_rows(path, Row)}
    runs = [
        Run(config, SETTINGS[name].isolation, SETTINGS[name].training_ticks, seed)
        for config, seed, name in product(configs, rng_seeds, settings)
    ]
    wanted = [run for run in runs if run not in known]
    with ThreadPoolExecutor(jobs) as workers, appended_rows(path, Row) as append:
        for row in workers.map(lambda run: train(run, schedules), wanted):
            append([row])
            print(*row, flush=True)


def table(rows: Sequence[Row]) -> list[str]:
    """Return a Markdown table of mean objectives over RNG seeds, and of the policy's lead over `yoked` in each."""
    lines = ["| config | isolation | ticks | learned | each seed | waiting | climbing | best fixed | ahead of yoked |"]
    lines += ["|---|---|---|---|---|---|---|---|---|"]
    for config, setting in product(TRAININGS, SETTINGS.values()):
        own = [row for row in rows if (row.config, row.isolation, row.training_ticks) == (config, *setting)]
        if own:
            each = " ".join(f"{row.learned:.3f}" for row in own)
            leads = ", ".join(
                f"{row.learned - row.yoked:+.3f} [{row.yoked_low:+.3f}, {row.yoked_high:+.3f}]" for row in own
            )
            learned, *others = (
                f"{np.mean([getattr(row, column) for row in own]):.3f}"
                for column in ("learned", "waiting", "climbing", "best_fixed")
            )
            cells = (config, setting.isolation, str(setting.training_ticks), learned, each, *others, leads)
            lines.append(f"| {' | '.join(cells)} |")
    return lines
