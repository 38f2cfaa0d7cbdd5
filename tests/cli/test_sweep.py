"""The command `sweep`: every setting with every RNG seed, one table, and the same numbers whatever the order."""

import csv
import errno
import os
from pathlib import Path

import numpy as np
import pytest

from esper_lightning.__main__ import main
from esper_lightning.cli import run_unprepared as run_command_line
from esper_lightning.cli.sweep import (
    COLUMNS,
    DIED,
    SweepResult,
    SweepRun,
    plan,
    report_death,
    run_rows,
    run_sweep,
    split_values,
    sweep,
    table_rows,
    train_once,
    write_rows,
)
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.parallel import Processes
from tests.runs import CONFIGS

SHORT = """
trainer: {max_epochs: 1}
data: {env: {horizon: 2, executor: loop, training: {batches: 1}}}
evaluation: {hosts: 2}
telemetry: {figures_every: 0}
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def result(run: SweepRun, *objectives: float, problem: str = "") -> SweepResult:
    """Return the result of a run with these objectives on its hosts, and accuracies that are .1 higher."""
    values = {column: [1.0] * len(objectives) for column in COLUMNS}
    values |= {"objective": list(objectives), "accuracy": [objective + 0.1 for objective in objectives]}
    return SweepResult(run, {} if problem else {"": values}, problem)


def test_every_combination_of_values_meets_every_rng_seed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = plan(["a.yaml", "b.yaml"], {"x.lr": ["0.1", "[1, 2]"], "y": ["no"]}, [0, 1], tmp_path)

    assert [(dict(run.settings), run.rng_seed) for run in runs] == [
        ({"x.lr": value, "y": "no"}, seed) for value in ("0.1", "[1, 2]") for seed in (0, 1)
    ]
    assert len({run.folder for run in runs}) == 4
    assert runs[3].folder == tmp_path / "001_lr=-1-2-_y=no" / "seed1"
    arguments = runs[3].arguments
    assert arguments[:4] == ["--config", "a.yaml", "--config", "b.yaml"]
    assert arguments[-4:-1] == ["--x.lr=[1, 2]", "--y=no", "--seed_everything=1"]


def test_commas_within_brackets_separate_nothing() -> None:
    assert split_values("0.001,0.003") == ["0.001", "0.003"]
    assert split_values("[norm], [norm, attention],null") == ['["norm"]', '["norm", "attention"]', "null"]
    assert split_values("true,auto") == ["true", "auto"]


def test_the_table_has_the_means_of_each_setting_with_their_intervals(tmp_path: Path) -> None:
    runs = plan(["a.yaml"], {"lr": ["1", "2"]}, [0, 1], tmp_path)
    results = [result(runs[0], 0.1, 0.3), result(runs[1], 0.5, 0.9), result(runs[2], 0.2, 0.4)]
    results.append(result(runs[3], problem=DIED))

    first, second = table_rows(results)

    interval = mean_interval(np.array([[0.1, 0.3], [0.5, 0.9]]))
    assert (first["lr"], first["runs"], first["failed"], first["objective"]) == ("1", "2", "0", "0.45")
    assert (float(first["objective_low"]), float(first["objective_high"])) == pytest.approx(interval[1:], rel=1e-5)
    assert (first["accuracy"], first["fossils"]) == ("0.55", "1")
    assert (second["runs"], second["failed"], second["objective"]) == ("1", "1", "0.3")
    *_, last = run_rows(results)
    assert (last["problem"], last["rng_seed"], "objective" in last) == (DIED, "1", False)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "lr=1"], "config"),
        (["--config", "smoke", "--set", "lr"], "--set 'lr': give a setting and its values, as in --set"),
        (["--config", "smoke", "--set", "lr=[1"], "--set 'lr=[1': its values are no YAML"),
        (["--config", "smoke", "--set", f"lr={'[' * 3000}"], "its values are no YAML"),
        (["--config", "smoke", "--jobs", "0"], "jobs"),
        (["--config", "smoke", "--executor", "no_library.Pool"], "executor 'no_library.Pool' cannot be imported"),
        (["--config", "smoke", "--executor", "math.pi"], "executor 'math.pi' has no method map"),
        (["--config", "smoke", "--jobs", "5000"], "jobs must lie in 1 … 1024, got 5000"),
        (["--config", "smoke", "--seeds", "1000000000", "--set", "lr=1,2"], "the sweep has 2000000000 runs"),
        (["--config", "smoke", "--seed", "3"], "did you mean '--seeds'?"),
        (["--config", "smoke", "--out", "."], "folder '.' is not empty; name another one by --out"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_a_line(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    with pytest.raises(SystemExit) as ended:
        main(["sweep", *args])

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def die_or_train(args: list[str]) -> None:
    """Run the command line, but for RNG seed 1, which ends the process without a word."""
    if "--seed_everything=1" in args:
        os._exit(9)
    run_command_line(args)


@pytest.mark.slow
def test_a_sweep_has_the_same_numbers_in_any_order_and_survives_the_death_of_a_worker(tmp_path: Path) -> None:
    config = tmp_path / "short.yaml"
    config.write_text(SHORT)
    configs, varied = [str(CONFIGS / "smoke.yaml"), str(config)], {"data.env.training.lr": ["0.001", "0.02"]}
    for name in ("forward", "backward", "dying"):
        (tmp_path / name).mkdir()
    forward, backward = (plan(configs, varied, [0, 2], tmp_path / name) for name in ("forward", "backward"))

    one = sweep(run_command_line, forward, executor=Processes(1, report_death), folder=tmp_path / "forward")
    two = sweep(run_command_line, backward[::-1], executor=Processes(2, report_death), folder=tmp_path / "backward")
    runs = plan(configs, {}, [0, 1], tmp_path / "dying")
    dying = sweep(die_or_train, runs, executor=Processes(1, report_death), folder=tmp_path / "dying")

    assert [result.problem for result in (*one, *two)] == [""] * 8
    assert [result.values for result in one] == [result.values for result in two[::-1]]
    assert one[0].values != one[2].values
    assert [result.problem for result in dying] == ["", DIED]
    assert [row["problem"] for row in rows_of(tmp_path / "dying" / "runs.csv")] == ["", DIED]
    assert {path.name for path in forward[0].folder.iterdir()} == {"version_0", "output.txt"}


def test_a_run_that_is_refused_is_reported_with_its_last_line(tmp_path: Path) -> None:
    (run,) = plan([str(CONFIGS / "smoke.yaml")], {"data.n_envs": ["0"]}, [0], tmp_path)

    found = train_once(main, run)

    assert found.exit_code == 2 and found.values == {}
    assert found.problem.startswith("error: ") and "n_envs must be at least 1, got 0" in found.problem


def test_a_sweep_on_a_full_disk_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("esper_lightning.cli.sweep.sweep", full)
    with pytest.raises(SystemExit) as ended:
        run_sweep(["--config", str(CONFIGS / "smoke.yaml"), "--out", str(tmp_path)], run_command_line)

    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: No space left on device") and "--out" in line


def test_a_table_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(tmp_path / "runs.csv", [{"lr": "1"}])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(csv.DictWriter, "writerows", full)
    with pytest.raises(OSError, match="No space left"):
        write_rows(tmp_path / "runs.csv", [{"lr": "1"}, {"lr": "2"}])

    assert [path.name for path in tmp_path.iterdir()] == ["runs.csv"]
    assert rows_of(tmp_path / "runs.csv") == [{"lr": "1"}]
