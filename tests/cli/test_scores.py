"""Hosts that are judged by another score than accuracy: trained, resumed and compared on the command line."""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.runs import CONFIGS, cli, only_run

QUANTITY = {
    "task": {"class_path": "esper_lightning.tasks.Tabular", "init_args": {"source": "diabetes", "score": "r2"}},
    "host": {"class_path": "esper_lightning.hosts.MLP", "init_args": {"width": 8}},
}
TEXT = {
    "task": {
        "class_path": "esper_lightning.tasks.Text",
        "init_args": {"length": 16, "validation": 0.01, "test": 0.01, "score": "likelihood"},
    },
    "host": {
        "class_path": "esper_lightning.hosts.GPT",
        "init_args": {"width": 8, "blocks": 1, "heads": 2, "context": 16},
    },
}


@pytest.mark.parametrize(
    ("hosts", "expected", "metric"),
    [
        (QUANTITY, lambda row: 1.0 - row["loss"], lambda row: row["r2"] <= 1.0),
        (TEXT, lambda row: 1.0 - row["loss"] / math.log(256), lambda row: math.log(row["perplexity"]) == row["loss"]),
    ],
    ids=["r2", "likelihood"],
)
def test_hosts_are_trained_and_compared_by_the_score_of_their_task(
    hosts: dict[str, Any], expected: Any, metric: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    config["data"] |= hosts
    config["data"]["env"]["actions"].pop("blueprints", None)
    (tmp_path / "scores.yaml").write_text(yaml.safe_dump(config))

    cli(
        *("--config", str(tmp_path / "scores.yaml"), "--trainer.default_root_dir", str(tmp_path / "runs")),
        *("--data.n_envs=2", "--data.env.horizon=4", "--data.env.training.batches=2", "--trainer.max_epochs=1"),
        *("--model.evaluation.hosts=2", "--model.evaluation.controls=false", "--trainer.enable_progress_bar=false"),
    )

    run = only_run(tmp_path / "runs")
    with next(run.folder.rglob("evaluation.csv")).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["controller"] for row in rows} >= {"tamiyo", "climbing"}
    for row in rows:
        numbers = {name: float(row[name]) for name in row if name in {"score", "loss", "r2", "perplexity"}}
        assert numbers["score"] == pytest.approx(expected(numbers), abs=1e-5)
        assert metric(numbers) or math.log(numbers["perplexity"]) == pytest.approx(numbers["loss"], abs=1e-5)
    name = config["data"]["task"]["init_args"]["score"]
    assert f"test {name}" in capsys.readouterr().out
    assert run.scalars()["hosts/score"]
