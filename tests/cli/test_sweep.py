"""The command `sweep`: every setting with every RNG seed, one table, and the same numbers whatever the order."""

import csv
from pathlib import Path

import numpy as np
import pytest

from esper_lightning.__main__ import main
from esper_lightning.cli.sweep import COLUMNS, SweepRun, plan, printed_table, run_rows, sweep, table_rows, train_once
from esper_lightning.evaluation.statistics import mean_interval
from tests.runs import CONFIGS

SHORT = """
trainer: {max_epochs: 1}
data: {env: {horizon: 2, executor: loop, training: {batches: 1}}}
model: {evaluation: {hosts: 2}}
"""


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def with_objectives(run: SweepRun, *objectives: float) -> SweepRun:
    """Return a run with these objectives on its hosts, and scores that are .1 higher."""
    values = {column: [1.0] * len(objectives) for column in COLUMNS}
    values |= {"objective": list(objectives), "score": [objective + 0.1 for objective in objectives]}
    return run._replace(values={"": values})


def test_every_combination_of_values_meets_every_rng_seed_in_a_folder_of_its_own(tmp_path: Path) -> None:
    runs = plan(["a.yaml", "b.yaml"], {"x.lr": [0.1, [1, 2]], "y": ["no"]}, [0, 1], tmp_path)

    assert [(run.settings, run.rng_seed) for run in runs] == [
        ({"x.lr": value, "y": "no"}, seed) for value in ("0.1", "[1, 2]") for seed in (0, 1)
    ]
    assert len({run.folder for run in runs}) == 4
    assert runs[3].folder == tmp_path / "001_lr=-1-2-_y=no" / "seed1"
    assert runs[3].arguments[:2] == ["--config=a.yaml", "--config=b.yaml"]
    assert runs[3].arguments[-4:-1] == ["--x.lr=[1, 2]", "--y=no", "--seed_everything=1"]


def test_the_table_has_the_means_of_each_setting_with_their_intervals(tmp_path: Path) -> None:
    runs = plan(["a.yaml"], {"lr": [1, 2]}, [0, 1], tmp_path)
    done = [with_objectives(runs[0], 0.1, 0.3), with_objectives(runs[1], 0.5, 0.9), with_objectives(runs[2], 0.2, 0.4)]
    failed = runs[3]._replace(problem="error: no")

    first, second = table_rows([*done, failed])

    interval = mean_interval(np.array([[0.1, 0.3], [0.5, 0.9]]))
    assert (first["lr"], first["runs"], first["failed"], first["objective"]) == ("1", "2", "0", "0.45")
    assert (float(first["objective_low"]), float(first["objective_high"])) == pytest.approx(interval[1:], rel=1e-5)
    assert (first["score"], first["fossils"]) == ("0.55", "1")
    assert (second["runs"], second["failed"], second["objective"]) == ("1", "1", "0.3")
    table = printed_table([first, second])
    assert [column.header for column in table.columns] == ["lr", "runs", "failed", *COLUMNS]
    assert next(iter(table.columns[3].cells)).startswith("0.450 ± ")
    (row,) = run_rows(failed)
    assert (row["problem"], row["rng_seed"], "objective" in row) == ("error: no", "1", False)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--set", "lr"], 'Parser key "set"'),
        (["--jobs", "0"], "jobs must be at least 1"),
        (["--out", "."], "folder '.' is not empty; name another one by --out"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_a_line(
    args: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.yaml").touch()
    with pytest.raises(SystemExit) as ended:
        main(["sweep", "smoke", *args])

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.slow
def test_a_sweep_has_the_same_numbers_whatever_the_number_of_processes(tmp_path: Path) -> None:
    (config := tmp_path / "short.yaml").write_text(SHORT)
    varied = {"data.env.training.lr": [0.001, 0.02]}
    for jobs in (1, 2):
        sweep(f"{CONFIGS / 'smoke.yaml'},{config}", seeds=2, set=varied, jobs=jobs, out=str(tmp_path / str(jobs)))

    one, two = ([{**row, "folder": ""} for row in rows_of(tmp_path / str(jobs) / "runs.csv")] for jobs in (1, 2))
    assert one == two and len(one) == 4
    assert one[0]["objective"] != one[2]["objective"]
    table = rows_of(tmp_path / "1" / "table.csv")
    assert [row["data.env.training.lr"] for row in table] == ["0.001", "0.02"]


@pytest.mark.slow
def test_a_run_that_is_refused_is_reported_with_its_last_line(tmp_path: Path) -> None:
    (run,) = plan([str(CONFIGS / "smoke.yaml")], {"data.n_envs": [0]}, [0], tmp_path)

    found = train_once(run)

    assert found.values == {}
    assert found.problem.startswith("error: ") and "n_envs must be at least 1, got 0" in found.problem
