"""Attacks and mistakes: each ends in one line with its exit code, runs no code of a file, and harms no checkpoint."""

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer

from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.module import TamiyoModule
from tests.faults.runs import tick_of
from tests.runs import HORIZON, Run, fit, load, only_run, with_callback


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Finished run of one rollout."""
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs=1")
    return only_run(root)


def answer(root: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """Return the one line on stderr of a tiny run that must end with an exit code."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        fit(root, *flags)
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    (line,) = [line for line in said.splitlines() if "Trainer.fit" not in line]
    assert line.startswith("error: ")
    return line


class Trap:
    """Object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Run, Path], None]:
    """Return a function that writes the checkpoint of a run with a change."""

    def write(run: Run, path: Path) -> None:
        checkpoint = load(run.last)
        change(checkpoint)
        torch.save(checkpoint, path)

    return write


DAMAGED: dict[str, tuple[Callable[[Run, Path], object], str]] = {
    "code": (lambda run, path: torch.save(load(run.last) | {"a": Trap(path.with_name("sprung"))}, path), "bad.ckpt"),
    "truncated": (lambda run, path: path.write_bytes(run.last.read_bytes()[:-5000]), "is truncated, damaged"),
    "no archive": (lambda run, path: path.write_text("no checkpoint"), "is truncated, damaged"),
    "no file": (lambda run, path: None, "does not exist"),
    "NaN": (changed(lambda saved: next(iter(saved["state_dict"].values())).view(-1)[:1].fill_(math.nan)), "finite"),
    "another schema": (changed(lambda saved: saved.update(esper_schema=6)), "it has schema 6"),
    "other hosts": (changed(lambda saved: saved["esper_identity"].update(host="7 layers")), "host: the checkpoint has"),
    "another program's": (changed(lambda saved: saved.pop("esper_schema")), "it was not written by esper-lightning"),
    "no rollout": (changed(lambda saved: saved["callbacks"].pop("RolloutState")), "it lacks the state of"),
}


@pytest.mark.parametrize(("write", "said"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_checkpoint_that_is_not_of_this_run_is_refused_and_runs_no_code(
    write: Callable[[Run, Path], object], said: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(finished, tmp_path / "bad.ckpt")

    assert said in answer(tmp_path, capsys, "--trainer.max_epochs=2", "--ckpt_path", str(tmp_path / "bad.ckpt"))

    assert not (tmp_path / "sprung").exists()


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_a_rollout_of_another_moment_than_the_normalisers_is_refused(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(lambda saved: saved["state_dict"]["observation_norm.mean"].add_(1e-6))(finished, tmp_path / "bad.ckpt")
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", str(tmp_path / "bad.ckpt"))

    assert ended.value.code == 2
    assert "observation_norm.mean of the module is not that of the rollout" in capsys.readouterr().err


def test_a_half_written_draft_beside_a_checkpoint_is_ignored(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    (run.checkpoints / ".last.ckpt.99999999.tmp").write_bytes(run.last.read_bytes()[:1000])

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path=last")

    assert tick_of(run.last) == 2 * HORIZON
    assert {path.name for path in run.checkpoints.iterdir()} == {"best.ckpt", "last.ckpt"}


class FillPolicy(Callback):
    """Callback that fills the policy's weights, its optimizer or a normaliser with NaN in the second rollout."""

    def __init__(self, part: str) -> None:
        self.part = part

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks == HORIZON + 2:
            adam = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
            norm = pl_module.observation_norm.state_dict()["mean"]
            parts = {"weights": list(pl_module.policy.parameters()), "optimizer": adam, "normaliser": [norm]}
            for tensor in parts[self.part]:
                tensor.fill_(math.nan)


@pytest.mark.parametrize("part", ["weights", "optimizer", "normaliser"])
def test_a_policy_that_is_not_finite_ends_the_run_and_never_replaces_a_checkpoint(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(tmp_path, capsys, *with_callback(FillPolicy, part=part), code=3)

    assert tick_of(only_run(tmp_path).last) == HORIZON
    for path in only_run(tmp_path).checkpoints.iterdir():
        open_checkpoint(path)


TWO_GOVERNORS = [{"class_path": "esper_lightning.callbacks.Governor"}] * 2
WRONG = {
    "--model.policy.widht=3": "widht",
    "--data.n_envs=two": "data.n_envs",
    "--data.host.init_args.slots=[block1.pol]": "did you mean 'block1.pool'?",
    "--data.host.init_args.slots=[block3,block3]": "'block3' is named twice",
    "--data.env.actions.blueprints=[conv_lite]": "did you mean 'conv_light'?",
    "--data.n_envs=0": "data.n_envs",
    "--data.env.executor=streams": "executor 'streams' runs on CUDA, not on cpu",
    "--data.env.training.batch_size=5000": "batch_size",
    "--trainer.limit_train_batches=3": "which do not divide the 5 ticks of a rollout",
    "--model.ppo.minibatches=3": "model.ppo.minibatches is 3, more than the 2 environments",
    "--trainer.devices=3": "set their number to 3",
    "--ckpt_path=last": "there is no run with a last.ckpt below",
    "--config=digit": "did you mean 'digits'?",
    "--model.evaluation.hosts=2 --model.evaluation.against=[climb]": "did you mean 'climbing'?",
}
"""Settings that cannot be, with a part of the answer."""


@pytest.mark.parametrize(("flags", "said"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_setting_is_answered_in_one_line_before_anything_is_saved(
    flags: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in answer(tmp_path / "runs", capsys, *flags.split())

    assert not list(tmp_path.rglob("*.ckpt"))


def test_another_seed_or_other_heads_cannot_go_on_from_a_checkpoint(
    finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--trainer.max_epochs=2", "--ckpt_path", str(finished.last))

    assert "data.seed: the checkpoint has 0, this run 1" in answer(tmp_path, capsys, *more, "--seed_everything=1")
    assert "choices of the style head" in answer(tmp_path, capsys, *more, "--data.env.actions.styles=[linear_gate]")


class Stops(Callback):
    """Callback of a user that raises in the second rollout."""

    def __init__(self, kind: str) -> None:
        self.kind = {"LookupError": LookupError, "ValueError": ValueError}[kind]

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        if trainer.current_epoch == 1:
            raise self.kind("of the user")


@pytest.mark.parametrize("kind", [LookupError, ValueError])
def test_an_error_of_the_users_own_code_stays_a_traceback_and_leaves_the_checkpoint(
    kind: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(kind, match="of the user"):
        fit(tmp_path, *with_callback(Stops, kind=kind.__name__))

    assert tick_of(only_run(tmp_path).last) == HORIZON


def test_of_two_governors_on_the_command_line_the_last_runs(tmp_path: Path) -> None:
    built = fit(tmp_path, "--trainer.max_epochs=1", f"--trainer.callbacks={json.dumps(TWO_GOVERNORS)}")

    assert [type(one).__name__ for one in built.trainer.callbacks].count("Governor") == 1
