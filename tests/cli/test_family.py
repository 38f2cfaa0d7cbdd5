"""Families on the command line: training, and evaluation on held-out contexts."""

import json
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from esper_lightning.evaluation import comparison
from tests.runs import CONFIGS

SMALL = (
    *("--config", str(CONFIGS / "digits_family.yaml"), "--data.n_envs", "4", "--data.env.horizon", "5"),
    *("--data.env.training.batches", "2", "--model.ppo.minibatches", "2"),
)


def call(verb: str, *args: str) -> None:
    """Run `esper-lightning verb` in this process."""
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process
        main([verb, *SMALL, *args])


def fit(root: Path, *args: str) -> None:
    quiet = ("--trainer.enable_progress_bar", "false", "--model.evaluation.hosts", "0")
    call("fit", "--trainer.default_root_dir", str(root), *quiet, *args)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    fit(root, "--trainer.max_epochs", "2")
    return root / "version_0"


@pytest.mark.slow
def test_another_family_cannot_continue_a_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = trained / "checkpoints" / "last.ckpt"
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, "--data.env.family.train", "[{host.kernel: [1, 3]}]", "--ckpt_path", str(checkpoint))
    assert ended.value.code == 2
    assert "; family " in capsys.readouterr().err


def compare(folder: Path, run: Path, *args: str) -> Path:
    """Run `test` on a family with the policy of a run, and move its results to `folder`."""
    call("test", "--ckpt_path", str(run / "checkpoints" / "last.ckpt"), *args)
    return (run / "evaluation").rename(folder)


@pytest.mark.slow
def test_held_out_contexts_are_evaluated_against_chosen_controllers(trained: Path, tmp_path: Path) -> None:
    asked = ("hosts=4", "against=[climbing]", "held_out=true")
    folder = compare(tmp_path / "results", trained, *(f"--model.evaluation.{one}" for one in asked))
    summary = json.loads((folder / "evaluation.json").read_text())
    twins = {f"static {name}{end}" for name in ("tamiyo", "climbing") for end in ("", ", equal FLOPs")}
    assert set(summary["controllers"]) == {"tamiyo", "climbing", *twins}


@pytest.mark.slow
def test_what_can_be_done_blindly_is_compared_step_by_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "SEARCH_ENVS", 8)
    family = "--data.env.family={train: [{objective.price: [0.0, 1.0]}], held_out: []}"
    fit(tmp_path / "runs", family, "--trainer.max_epochs", "1")
    run = tmp_path / "runs" / "version_0"
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


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model.evaluation.against", "[climbin]"), "unknown controller 'climbin'; did you mean 'climbing'"),
        (
            ("--model.evaluation.against", "[best fixed]"),
            "'best fixed' must be searched first; set search.steps, or name its file in schedules",
        ),
        (
            ("--model.evaluation.search.steps", "479"),
            "search.steps is 479; to see one schedule on a host of each context",
        ),
        (("--model.evaluation.schedules", "{best fixed: nowhere.json}"), "schedule nowhere.json cannot be read"),
        (("--data.env.family.held_out", "[]", "--model.evaluation.held_out", "true"), "no held-out contexts"),
    ],
)
def test_unknown_controllers_and_contexts_are_refused(
    trained: Path, args: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        compare(tmp_path, trained, *args)
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
