"""Families on the command line: training, and evaluation on held-out contexts."""

import json
from pathlib import Path

import pytest

from esper_lightning.evaluation import comparison
from tests.runs import CONFIGS, command

SMALL = (
    *("--config", str(CONFIGS / "digits_budget.yaml"), "--data.n_envs", "4", "--data.env.horizon", "5"),
    *("--data.env.training.flops", "null", "--data.env.training.batches", "2", "--model.ppo.minibatches", "2"),
)


def fit(root: Path, *args: str) -> Path:
    quiet = ("--trainer.enable_progress_bar", "false", "--model.evaluation.hosts", "0", "--trainer.max_epochs", "1")
    command("fit", *SMALL, "--trainer.default_root_dir", str(root), *quiet, *args)
    return root / "version_0"


def compare(folder: Path, run: Path, *args: str) -> Path:
    """Run `test` on a family with the policy of a run, and move its results to `folder`."""
    command("test", *SMALL, "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), *args)
    return (run / "evaluation").rename(folder)


@pytest.mark.slow
def test_held_out_contexts_are_evaluated_against_chosen_controllers(tmp_path: Path) -> None:
    family = "--data.env.family={train: [{host.kernel: [1, 3]}], held_out: [{host.kernel: [5]}]}"
    trained = fit(tmp_path / "runs", family)
    asked = ("hosts=4", "against=[climbing]", "held_out=true")
    folder = compare(tmp_path / "results", trained, family, *(f"--model.evaluation.{one}" for one in asked))
    summary = json.loads((folder / "evaluation.json").read_text())
    twins = {f"static {name}{end}" for name in ("tamiyo", "climbing") for end in ("", ", equal FLOPs")}
    assert set(summary["controllers"]) == {"tamiyo", "climbing", *twins}


@pytest.mark.slow
def test_what_can_be_done_blindly_is_compared_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SEARCH_ENVS", 8)
    family = "--data.env.family={train: [{objective.price: [0.0, 1.0]}], held_out: []}"
    run = fit(tmp_path / "runs", family)
    names = "[replayed, best fixed, yoked]"
    asked = (family, *(f"--model.evaluation.{one}" for one in ("controls=false", f"against={names}", "hosts=6")))
    folder = compare(tmp_path / "first", run, *asked, "--model.evaluation.search.steps=160")

    summary = json.loads((folder / "evaluation.json").read_text())
    assert set(summary["controllers"]) == {"tamiyo", "replayed", "best fixed", "yoked"}

    # Evaluate again from the file, without a search.
    found = f"{{best fixed: {folder / 'best_schedule.json'}}}"
    folder = compare(tmp_path / "again", run, *asked, f"--model.evaluation.schedules={found}")
    again = json.loads((folder / "evaluation.json").read_text())["controllers"]
    for name, row in summary["controllers"].items():
        assert again[name]["objective"] == row["objective"]
