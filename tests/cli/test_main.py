"""Command line: every config runs, a run writes its files, and bad input ends in one line."""

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from esper_lightning.__main__ import main
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.machine import PHASES
from tests.runs import (
    CONFIGS,
    EPOCHS,
    TINY,
    Run,
    cli,
    fit,
    load,
    only_run,
    process,
)
from tests.tasks.stored import write_cifar10
from tests.tiers import rest_is_slow

ONE_ROLLOUT = ("--trainer.max_epochs=1", "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false")
SMOKE_TICKS = range(1, 25)  # 2 rollouts of 12
ROLLOUT_ENDS = [12, 24]
ROLLOUT_TAGS = {
    *("rollout/objective", "rollout/return", "rollout/score", "rollout/parameters"),
    *(f"rollout/op.{op}" for op in ("WAIT", "GERMINATE", "CULL", "FOSSILIZE")),
    *(f"train/entropy.{head}" for head in ("op", "slot", "blueprint")),
    *("train/kl", "train/clip_fraction", "train/explained_variance", "train/loss.policy", "train/loss.value"),
    *("train/lr", "train/entropy_coefficient", "train/grad_norm", "time/ticks_per_second"),
}
TICK_TAGS = {
    *("hosts/score", "hosts/loss", "hosts/objective", "hosts/parameters", "hosts/reward"),
    *("reward/objective", "reward/rollback"),
    *(f"growth/{slot}/{stage.name}" for slot in ("block1.pool", "block2.pool", "block3") for stage in Stage),
    *(f"time/perf_counter.{phase}" for phase in PHASES),
}
SOMETIMES = ("blueprint/", "gradients/seed", "anomaly/")
ONCE = ("test/", "epoch")
PER_TICK = ("hosts/", "reward/", "growth/", "governor/", "gradients/", "time/perf_counter.")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run configs/smoke.yaml to its end, as a user does."""
    root = tmp_path_factory.mktemp("smoke")
    done = process("--config", str(CONFIGS / "smoke.yaml"), "--trainer.default_root_dir", str(root))
    assert done.returncode == 0, done.stderr
    return only_run(root)


@pytest.mark.slow
def test_the_smoke_run_writes_finite_points_over_ticks(smoke: Run) -> None:
    scalars = smoke.scalars()

    assert set(scalars) >= TICK_TAGS | ROLLOUT_TAGS
    assert not {"train/entropy.tempo", "train/choice_share.tempo"} & set(scalars), "one tempo is no choice"
    for tag, points in scalars.items():
        if tag.startswith((*SOMETIMES, "hp_metric")):
            continue  # only where a seed lived or was fossilized: tests/telemetry/test_tensorboard.py
        steps = list(SMOKE_TICKS) if tag.startswith(PER_TICK) else ROLLOUT_ENDS
        if tag.startswith(ONCE):
            steps = steps[-1:]  # measured when training has ended
        assert [step for step, _ in points] == steps, tag
        assert all(math.isfinite(value) for _, value in points), tag


@pytest.mark.parametrize(
    "config",
    rest_is_slow(sorted(CONFIGS.glob("*.yaml")), lambda path: path.stem in ("cifar10", "digits", "text")),
    ids=lambda path: path.stem,
)
def test_every_config_trains(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ("--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.accelerator=cpu")
    tiny = ("--data.n_envs=2", "--model.ppo.minibatches=2")
    tiny += () if config.stem == "depth" else ("--data.env.training.batches=1",)  # its host epochs are budgets of FLOPs
    tiny += () if config.stem == "general" else ("--data.env.horizon=2",)  # it has horizons of its own
    if config.stem.startswith("cifar10"):
        stored = write_cifar10(tmp_path, monkeypatch, each=40)
        tiny += (f"--data.task.init_args.root={stored}", "--data.task.init_args.validation=20")
        tiny += ("--data.env.training.batch_size=8",)

    built = cli("--config", config.stem, *root, *ONE_ROLLOUT, *tiny)

    wanted = yaml.safe_load(config.read_text())["data"]["host"]
    slots = (wanted["init_args"].get("slots") or None) if isinstance(wanted, dict) else None
    _, *others = built.datamodule.loaded_tasks.values()
    assert others or slots in (None, built.datamodule.pool.space.slot)
    assert bool(others) == (config.stem in ("general", "mixed"))
    assert only_run(tmp_path / "runs").last.is_file()


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_short_and_begins_with_what_it_is_for(config: Path) -> None:
    text = config.read_text()
    lines = text.splitlines()
    further_tasks = yaml.safe_load(text).get("data", {}).get("also", {})

    assert len(lines) <= 40 + 20 * len(further_tasks)
    assert [line.partition(":")[0] for line in lines[:3]] == ["# Purpose", "# Run time", "# Result"]


def leaves(settings: Mapping[str, Any], where: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*where, key))
        else:
            yield (*where, key), value


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_setting_of_a_config_is_understood(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli("--config", str(config), "--print_config")

    assert ended.value.code == 0
    understood = dict(leaves(yaml.safe_load(capsys.readouterr().out)))
    for path, value in leaves(yaml.safe_load(config.read_text())):
        if path[-1].endswith("+"):
            continue  # it adds to a list
        assert understood.get(path, understood.get((*path, "class_path"))) == value, path


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *args: str) -> None:
    """Run the command line in a folder."""
    monkeypatch.chdir(folder)
    with patch.object(sys, "argv", sys.argv[:1]):
        main([*args])


def test_configs_lists_them_with_their_purpose_and_init_copies_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, monkeypatch, "configs")
    said = capsys.readouterr().out
    assert all(re.search(rf"^{path.stem} +\w", said, re.MULTILINE) for path in CONFIGS.glob("*.yaml"))

    run(tmp_path, monkeypatch, "init", "digits")
    assert (tmp_path / "digits.yaml").read_text() == (CONFIGS / "digits.yaml").read_text()
    for args, answer in ((("init", "digits"), "exists already"), (("init", "digitz"), "did you mean 'digits'?")):
        with pytest.raises(SystemExit) as ended:
            run(tmp_path, monkeypatch, *args)
        assert ended.value.code == 2
        assert answer in capsys.readouterr().err


@pytest.mark.parametrize("args", [[], ["fit"], ["test"], ["grow"], ["export"]], ids=lambda args: "-".join(args))
def test_every_command_has_a_help(
    args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(tmp_path, monkeypatch, *args, "--help")

    assert ended.value.code == 0
    assert "esper-lightning" in capsys.readouterr().out


@pytest.mark.slow
def test_last_is_the_checkpoint_that_was_written_last(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")
    fit(tmp_path, "--trainer.max_epochs=1")
    first, second = (Run(tmp_path / f"version_{n}") for n in (0, 1))
    os.utime(second.last, (1, 1))

    fit(tmp_path, "--ckpt_path=last")

    assert load(first.last)["callbacks"]["RolloutState"]["loop"]["episode"] == EPOCHS
    assert load(second.last)["callbacks"]["RolloutState"]["loop"]["episode"] == 1


@pytest.mark.parametrize("name", ["last", "best"])
def test_validate_repeats_what_fit_has_logged(name: str, tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")
    run = only_run(tmp_path)
    logged = [value for _, value in run.scalars()["val/objective"]]

    other = ("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'other'}")
    with patch.object(sys, "argv", sys.argv[:1]):
        main(["validate", *TINY, "--ckpt_path", str(run.checkpoints / f"{name}.ckpt"), *other])

    (table,) = (tmp_path / "other").rglob("metrics.csv")
    header, values = (line.split(",") for line in table.read_text().splitlines()[:2])
    found = float(dict(zip(header, values, strict=True))["val/objective"])
    assert found == pytest.approx(logged[-1] if name == "last" else max(logged), abs=1e-6)
