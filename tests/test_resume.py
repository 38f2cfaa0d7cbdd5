"""A run that is stopped and resumed equals an uninterrupted one bit for bit, however it was stopped."""

import itertools
import shutil
from pathlib import Path

import pytest
import yaml

from tests.runs import (
    EPOCHS,
    FREE_CHOICE,
    HORIZON,
    Run,
    continuation,
    differences,
    fit,
    fit_saving_ticks,
    load,
    measured,
    only_run,
    points_after,
    saved_stages,
)
from tests.tiers import rest_is_slow

OPTIONS = ("--model.ppo.normalize_rewards=true", "--model.ppo.value_clip=0.5")
"""Settings with every option of PPO that is off by default."""

END = EPOCHS * HORIZON
MID_ROLLOUT = HORIZON + 3


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("uninterrupted")
    fit(root)
    return only_run(root)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The same run with a checkpoint of every tick."""
    return fit_saving_ticks(tmp_path_factory.mktemp("saved"))


def assert_same_end(run: Run, reference: Run) -> None:
    """Check policy, normalisers, optimizer, hosts, rollout, random states and Lightning's loops."""
    assert differences(continuation(run.last), continuation(reference.last)) == []


def test_the_checkpoints_to_resume_from_are_worth_the_test(saved: Run) -> None:
    ticks = [saved.checkpoints / f"tick{tick}.ckpt" for tick in range(1, END + 1)]

    assert {"DORMANT", "BLENDING", "PROBATIONARY"} <= set.union(*map(saved_stages, ticks))  # hosts have living seeds
    assert all(differences(continuation(a), continuation(b)) for a, b in itertools.pairwise(ticks))


def test_saving_in_mid_rollout_leaves_no_trace_in_the_run(saved: Run, uninterrupted: Run) -> None:
    assert_same_end(saved, uninterrupted)
    assert measured(saved) == measured(uninterrupted)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")  # so that tests do not share a folder
@pytest.mark.parametrize(
    "tick",
    rest_is_slow([1, HORIZON - 1, HORIZON, HORIZON + 1, MID_ROLLOUT, 2 * HORIZON, END - 1], {MID_ROLLOUT, 2 * HORIZON}),
)
def test_a_run_resumed_from_any_tick_equals_the_uninterrupted_one(
    tick: int, saved: Run, uninterrupted: Run, tmp_path: Path
) -> None:
    run = Run(tmp_path / "version_0")
    run.checkpoints.mkdir(parents=True)
    checkpoint = shutil.copy(saved.checkpoints / f"tick{tick}.ckpt", run.checkpoints)

    fit(tmp_path, "--ckpt_path", str(checkpoint))

    assert_same_end(run, uninterrupted)
    expected = points_after(tick, measured(uninterrupted))
    assert measured(run) == expected


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.slow
def test_a_run_that_chooses_in_all_heads_with_all_options_resumes_too(tmp_path: Path) -> None:
    flags = (
        *FREE_CHOICE,
        *OPTIONS,
        "--trainer.max_epochs=2",
        "--seed_everything=1",
    )  # after which hosts have living seeds
    whole, run = fit_saving_ticks(tmp_path / "whole", *flags), Run(tmp_path / "part" / "version_0")
    run.checkpoints.mkdir(parents=True)
    checkpoint = Path(shutil.copy(whole.checkpoints / f"tick{MID_ROLLOUT}.ckpt", run.checkpoints))
    assert saved_stages(checkpoint) != {"DORMANT"}
    assert load(checkpoint)["state_dict"]["reward_norm.count"] == 2 * HORIZON, "one rollout of two hosts"

    fit(tmp_path / "part", *flags, "--ckpt_path", str(checkpoint))

    assert_same_end(run, whole)


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_points_written_after_the_checkpoint_are_not_doubled(saved: Run, uninterrupted: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(saved.folder, tmp_path / "version_0")))  # all its ticks are in TensorBoard
    run.last.unlink()

    fit(tmp_path, "--ckpt_path", str(run.checkpoints / f"tick{MID_ROLLOUT}.ckpt"))

    assert only_run(tmp_path).folder == run.folder
    assert measured(run) == measured(uninterrupted)
    assert_same_end(run, uninterrupted)


def test_a_run_that_goes_back_to_its_best_rollout_ends_as_it_did(uninterrupted: Run, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(uninterrupted.folder, tmp_path / "version_0")))
    run.last.unlink()

    fit(tmp_path, "--ckpt_path", str(run.checkpoints / "best.ckpt"))

    assert_same_end(run, uninterrupted)


def test_a_run_goes_on_in_its_folder_with_its_own_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    capsys.readouterr()

    resumed = fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path=last", "--model.ppo.lr.start=0.01")

    assert only_run(tmp_path).folder == run.folder
    assert "ppo.lr.start: 0.001 before, 0.01 now" in capsys.readouterr().out
    assert resumed.model.ppo.lr.start == 0.01, "this command's, not the checkpoint's"
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["trainer"]["max_epochs"] == 2
