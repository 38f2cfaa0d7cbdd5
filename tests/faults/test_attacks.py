"""Attacks and mistakes: each ends in one line with its exit code, runs no code of a file, and harms no checkpoint."""

import json
import math
import os
from collections.abc import Callable
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, Trainer
from safetensors.torch import save_file

from esper_lightning.envs.rewards import compute_terms
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import ppo_terms
from esper_lightning.runtime.checkpoint import METADATA_KEY, read_policy
from tests.runs import EPOCHS, HORIZON, Run, fit, load, only_run, refusal, tick_of, with_callback
from tests.tiers import rest_is_slow

TICKS = (1, HORIZON, HORIZON + 2, 2 * HORIZON)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs=1")
    return only_run(root)


def answer(root: Path, capsys: pytest.CaptureFixture[str], *flags: str, code: int = 2) -> str:
    """Return the one line on stderr of a tiny run that must end with an exit code; its checkpoints load."""
    line = refusal(capsys, lambda: fit(root, *flags), code)
    for path in root.rglob("checkpoints/*.ckpt"):
        read_policy(path)
    return line


# Files of others


class Trap:
    """Object whose pickle makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


Write = Callable[[Run, Path], object]


def changed(change: Callable[[dict[str, Any]], object]) -> Write:
    """Return a function that writes the checkpoint of a run with a change."""

    def write(run: Run, path: Path) -> None:
        checkpoint = load(run.last)
        change(checkpoint)
        torch.save(checkpoint, path)

    return write


DAMAGED: dict[str, tuple[Write, str]] = {
    "code": (lambda run, path: torch.save(load(run.last) | {"a": Trap(path.with_name("sprung"))}, path), "bad.ckpt"),
    "truncated": (lambda run, path: path.write_bytes(run.last.read_bytes()[:-5000]), "is truncated, damaged"),
    "no archive": (lambda run, path: path.write_text("no checkpoint"), "is truncated, damaged"),
    "no file": (lambda run, path: None, "does not exist"),
    "NaN": (changed(lambda saved: next(iter(saved["state_dict"].values())).view(-1)[:1].fill_(math.nan)), "finite"),
    "another schema": (changed(lambda saved: saved.update(esper_schema=6)), "it has schema 6"),
    "other hosts": (changed(lambda saved: saved["esper_identity"].update(host="7 layers")), "host: the checkpoint has"),
    "another program's": (changed(lambda saved: saved.pop("esper_schema")), "it was not written by esper-lightning"),
    "no rollout": (changed(lambda saved: saved["callbacks"].pop("RolloutState")), "or the state of"),
    "no optimizer": (changed(lambda saved: saved.pop("optimizer_states")), "lacks optimizer_states"),
    "other weights": (changed(lambda saved: saved["state_dict"].update(other=torch.zeros(1))), '"other"'),
}


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("write", "said"), DAMAGED.values(), ids=list(DAMAGED))
def test_a_checkpoint_that_is_not_of_this_run_is_refused_and_runs_no_code(
    write: Write, said: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(finished, tmp_path / "bad.ckpt")

    assert said in answer(tmp_path, capsys, "--trainer.max_epochs=2", "--ckpt_path", str(tmp_path / "bad.ckpt"))

    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("description", ["", "[]", "3", "{}", "[" * 100_000], ids=lambda text: text[:3])
def test_a_policy_file_that_does_not_describe_a_policy_is_refused(description: str, tmp_path: Path) -> None:
    file = tmp_path / "foreign.safetensors"
    save_file({"weights": torch.ones(2)}, file, metadata={METADATA_KEY: description})

    with pytest.raises(ValueError, match=r"foreign\.safetensors'"):
        read_policy(file)


# Settings that cannot be

WRONG = {
    "--model.policy.widht=3": "widht",
    "--data.n_envs=two": "data.n_envs",
    "--data.host.init_args.slots=[block1.pol]": "did you mean 'block1.pool'?",
    "--data.host.init_args.slots=[block3,block3]": "'block3' is named twice",
    "--data.env.actions.blueprints=[conv_lite]": "did you mean 'conv_light'?",
    "--data.n_envs=0": "data.n_envs must be at least 1",
    "--data.env.horizon=0": "horizon must be at least 1",
    "--model.ppo.epochs=0": "ppo.epochs must be at least 1",
    "--trainer.max_epochs=0": "trainer.max_epochs must be at least 1",
    "--data.env.executor=streams": "executor 'streams' runs on CUDA, not on cpu",
    "--data.env.training.batch_size=5000": "batch_size",
    "--trainer.limit_train_batches=3": "which do not divide the 5 ticks of a rollout",
    "--model.ppo.minibatches=3": "model.ppo.minibatches is 3, more than the 2 environments",
    "--trainer.devices=3": "set their number to 3",
    "--trainer.limit_val_batches=1.5": "trainer: You have passed invalid value 1.5 for limit_val_batches",
    "--trainer.strategy=banana": "trainer: You selected an invalid strategy name",
    "--ckpt_path=last": "there is no run with a last.ckpt below",
    "--config=digit": "did you mean 'digits'?",
    "--model.evaluation.hosts=2 --model.evaluation.against=[climb]": "did you mean 'climbing'?",
    "--ckpt_path=FINISHED --seed_everything=1": "data.seed: the checkpoint has 0, this run 1",
    '--ckpt_path=FINISHED --data.env.actions.tempos={"NOW":1}': "choices of the tempo head",
    "--ckpt_path=FINISHED --data.n_envs=3": "data.n_envs: the checkpoint has 2, this run 3",
    "--ckpt_path=FINISHED --model.policy.width=32": "model.policy.width: the checkpoint has",
    "--ckpt_path=FINISHED --data.host.init_args.slots=[block3]": "choices of the slot head",
    "--ckpt_path=FINISHED --data.env.observation.hidden=[gap]": "observed features",
    "--ckpt_path=FINISHED --data.env.training.optimizer=sgd": "data.env.training.optimizer: the checkpoint has",
    "--ckpt_path=FINISHED --data.env.family.train=[{host.kernel:[1,3]}]": "family",
    "--ckpt_path=FINISHED --data.env.horizon=4": "data.env.horizon: the checkpoint has 5, this run 4; resume it with",
}
"""Settings, with a part of the answer."""


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("flags", "said"), WRONG.items(), ids=list(WRONG))
def test_a_wrong_setting_is_answered_in_one_line_before_anything_is_saved(
    flags: str, said: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """F18: horizon, environments, epochs and rollouts must be positive."""
    files = [finished.folder / name for name in ("config.yaml", "run.json", "checkpoints/last.ckpt")]
    before = [file.read_bytes() for file in files]

    assert said in answer(tmp_path / "runs", capsys, *flags.replace("FINISHED", str(finished.last)).split())

    assert not list(tmp_path.rglob("*.ckpt"))
    assert [file.read_bytes() for file in files] == before


def test_of_two_governors_on_the_command_line_the_last_runs(tmp_path: Path) -> None:
    governors = json.dumps([{"class_path": "esper_lightning.callbacks.Governor"}] * 2)
    built = fit(tmp_path, "--trainer.max_epochs=1", f"--trainer.callbacks={governors}")

    assert [type(one).__name__ for one in built.trainer.callbacks].count("Governor") == 1


# Code of the user, and numbers that are none


class Raises(Callback):
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
        fit(tmp_path, *with_callback(Raises, kind=kind.__name__))

    assert tick_of(only_run(tmp_path).last) == HORIZON


class FillWithNaN(Callback):
    """Callback that fills the policy's weights, its optimizer or the mean of a normaliser with NaN after a tick."""

    def __init__(self, part: str, tick: int) -> None:
        self.part = part
        self.tick = tick

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks != self.tick:
            return
        if self.part.endswith("norm"):
            state = pl_module.get_submodule(self.part).state_dict()
            tensors = [value for name, value in state.items() if name.endswith("mean")][:1]
        else:
            adam = [state["exp_avg"] for state in trainer.optimizers[0].state.values()]
            tensors = adam if self.part == "optimizer" else list(pl_module.policy.parameters())
        for tensor in tensors:
            tensor.fill_(math.nan)


PARTS = [*product(["weights", "optimizer"], TICKS[2:3]), *product(["value_norm", "observation_norm"], TICKS)]


@pytest.mark.parametrize(("part", "tick"), rest_is_slow(PARTS, {("weights", 7)}))
def test_a_policy_that_is_not_finite_ends_the_run_and_never_replaces_a_checkpoint(
    part: str, tick: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(tmp_path, capsys, *with_callback(FillWithNaN, part=part, tick=tick), code=3)

    if tick > HORIZON:
        assert tick_of(only_run(tmp_path).last) == HORIZON


def break_rewards(monkeypatch: pytest.MonkeyPatch, tick: int, value: float) -> None:
    """Replace the reward of the second of two hosts at one tick, counted from 1.

    Behind every rollout as many rewards are those of its validation.
    """
    calls, at_call = 0, tick + (tick - 1) // HORIZON * HORIZON

    def broken(*args: Any) -> dict[str, float]:
        nonlocal calls
        at, host = divmod(calls, 2)
        calls += 1
        terms = compute_terms(*args)
        return terms | {"objective": value} if at + 1 == at_call and host == 1 else terms

    monkeypatch.setattr("esper_lightning.envs.host_pool.compute_terms", broken)


@pytest.mark.parametrize(
    ("tick", "value"), rest_is_slow(product(TICKS, [math.nan, math.inf, 1e38]), {(HORIZON + 2, math.nan)})
)
def test_a_host_whose_reward_is_none_is_left_out_of_one_update_and_the_run_goes_on(
    tick: int, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    break_rewards(monkeypatch, tick, value)

    fit(tmp_path)

    run, update = only_run(tmp_path), (tick - 1) // HORIZON + 1
    place = f"in environment 1 at step {tick - HORIZON * (update - 1)} the reward term objective is {value:g}"
    assert f"1 of 2 environments are left out of update {update}: {place}" in " ".join(capsys.readouterr().out.split())
    left_out = [count for _, count in run.scalars()["train/left_out"]]
    assert left_out == [float(number == update) for number in range(1, EPOCHS + 1)]
    assert tick_of(run.last) == EPOCHS * HORIZON


@pytest.mark.slow
def test_three_minibatches_in_a_row_that_are_not_finite_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second of three updates of 12 minibatches fails in its fourth to sixth."""
    seen = count()

    def broken(*args: Any) -> Any:
        terms = ppo_terms(*args)
        return terms._replace(policy=terms.policy * math.nan) if next(seen) in (15, 16, 17) else terms

    monkeypatch.setattr("esper_lightning.module.ppo_terms", broken)
    said = "3 minibatches in a row is not finite; lower model.ppo.lr, or set a lower model.ppo.target_kl"
    assert said in answer(tmp_path, capsys, "--model.ppo.target_kl=null", code=3)
    assert tick_of(only_run(tmp_path).last) == HORIZON


LRS = [*product(["1e30", "1e20"], ["null", "0.02"]), ("0.1", "null"), ("100", "null")]


@pytest.mark.parametrize(("lr", "target_kl"), rest_is_slow(LRS, {("1e30", "null")}))
def test_a_huge_learning_rate_ends_in_one_line_that_says_to_lower_it_and_a_large_one_breaks_nothing(
    lr: str, target_kl: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = (f"--model.ppo.lr.start={lr}", f"--model.ppo.lr.end={lr}", f"--model.ppo.target_kl={target_kl}")
    if float(lr) > 1e10:
        assert "lower model.ppo.lr" in answer(tmp_path, capsys, *flags, code=3)
    else:
        fit(tmp_path, *flags)
        read_policy(only_run(tmp_path).last)
