"""Runs on hosts of several tasks, or with another score than accuracy: training, resuming, comparison, refusals."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_test_command import lone, rows_of
from tests.runs import CONFIGS, Run, cli, command, continuation, differences, only_run, refusal

TABLE = {
    "task": {"class_path": "esper_lightning.tasks.Tabular", "init_args": {"source": "wine"}},
    "host": {"class_path": "esper_lightning.hosts.MLP", "init_args": {"width": 4, "layers": 2}},
    "n_envs": 2,
    "training": {"batches": 2, "batch_size": 16},
}


@pytest.fixture
def mixed(tmp_path: Path) -> tuple[str, ...]:
    """Return the settings of a small run on two tasks, with its folder below `tmp_path / runs`."""
    config = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    config["data"]["also"] = {"table": TABLE}
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(config))
    return (
        *("--config", str(tmp_path / "mixed.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--data.env.horizon=4", "--data.env.training.batches=2", "--model.policy.asymmetric=true"),
        *("--model.evaluation.hosts=2", "--trainer.enable_progress_bar=false", "--model.evaluation.controls=false"),
    )


@pytest.mark.slow
def test_a_run_on_two_tasks_is_resumed_bit_for_bit_and_compared_on_each(
    mixed: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = cli(*mixed, "--trainer.max_epochs=2")
    run = only_run(tmp_path / "runs")
    run.folder.rename(tmp_path / "whole")

    cli(*mixed, "--trainer.max_epochs=1", "--model.evaluation.hosts=0")
    cli(*mixed, "--trainer.max_epochs=2", "--ckpt_path=last")

    assert differences(continuation(run.last), continuation(Run(tmp_path / "whole").last)) == []
    pool = whole.datamodule.pool
    assert pool.n_envs == 4 and pool.space.slot == ["place1", "place2", "place3"]
    assert "tasks/table/objective" in run.scalars() and "tasks/Digits/score" in run.scalars()
    for task in ("Digits", "table"):
        assert {row["controller"] for row in rows_of(run.folder / "evaluation" / task)} >= {"tamiyo", "climbing"}

    capsys.readouterr()
    root = ("--trainer.default_root_dir", str(tmp_path / "again"))
    command("test", *mixed, "--ckpt_path", lone(run, tmp_path), *root)
    (again,) = {path.parents[1] for path in (tmp_path / "again").rglob("evaluation.csv")}

    said = capsys.readouterr().out
    assert "hosts of Digits" in said and "hosts of table" in said
    for task in ("Digits", "table"):
        theirs = [[row["objective"] for row in rows_of(at / task)] for at in (run.folder / "evaluation", again)]
        assert theirs[0] == theirs[1]
    more_hosts = (*mixed, "--trainer.max_epochs=3", "--ckpt_path=last", "--data.n_envs=3")
    assert "Digits: 2 hosts" in refusal(capsys, lambda: cli(*more_hosts))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"also": {"Digits": TABLE}}, "data.also: 'Digits' is the name of data.task; choose another one"),
        ({"also": {"table": TABLE | {"n_envs": 0}}}, "data.also.table.n_envs must be at least 1, got 0"),
        ({"also": {"table": TABLE | {"blueprints": ["conv_light"]}}}, "nothing can grow there"),
        ({"also": {"table": TABLE | {"hosts": 3}}}, "hosts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tasks_that_cannot_go_together_end_in_one_line(
    mixed: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], said: str
) -> None:
    config = yaml.safe_load((tmp_path / "mixed.yaml").read_text())
    config["data"] |= changes
    (tmp_path / "mixed.yaml").write_text(yaml.safe_dump(config))

    assert said in refusal(capsys, lambda: cli(*mixed))
    assert not (tmp_path / "runs").exists()


QUANTITY = {
    "task": {"class_path": "esper_lightning.tasks.Tabular", "init_args": {"source": "diabetes", "score": "r2"}},
    "host": {"class_path": "esper_lightning.hosts.MLP", "init_args": {"width": 8}},
}


def test_hosts_are_trained_and_compared_by_the_score_of_their_task(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    config["data"] |= QUANTITY
    config["data"]["env"]["actions"].pop("blueprints", None)
    (tmp_path / "scores.yaml").write_text(yaml.safe_dump(config))

    cli(
        *("--config", str(tmp_path / "scores.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--data.n_envs=2", "--data.env.horizon=4", "--data.env.training.batches=2", "--trainer.max_epochs=1"),
        *("--model.evaluation.hosts=2", "--model.evaluation.controls=false", "--trainer.enable_progress_bar=false"),
    )

    run = only_run(tmp_path / "runs")
    rows = rows_of(run.folder / "evaluation")
    assert {row["controller"] for row in rows} >= {"tamiyo", "climbing"}
    for row in rows:
        assert float(row["score"]) == pytest.approx(1.0 - float(row["loss"]), abs=1e-5)
        assert float(row["r2"]) <= 1.0
    assert "test r2" in capsys.readouterr().out
    assert run.scalars()["hosts/score"]
