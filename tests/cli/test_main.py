"""Command line: every config runs, a run writes its files, and bad input ends in one line."""

import os
import re
from pathlib import Path

import pytest
import yaml

from tests.runs import CONFIGS, EPOCHS, TINY, Run, cli, command, fit, load, only_run, refusal
from tests.tasks.stored import write_cifar10
from tests.tiers import rest_is_slow

ONE_ROLLOUT = ("--trainer.max_epochs=1", "--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false")


@pytest.mark.parametrize(
    "config",
    rest_is_slow(sorted(CONFIGS.glob("*.yaml")), lambda path: path.stem in ("cifar10", "digits", "text")),
    ids=lambda path: path.stem,
)
def test_every_config_trains(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ("--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.accelerator=cpu")
    tiny = ("--data.n_envs=2", "--model.ppo.minibatches=2")
    training = yaml.safe_load(config.read_text())["data"].get("env", {}).get("training", {})
    tiny += () if "flops" in training else ("--data.env.training.batches=1",)
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
    assert built.model.report.metrics["first_ratio_error"] < 1e-4


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_short_says_what_it_is_for_and_is_understood(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = config.read_text()
    lines = text.splitlines()
    further_tasks = yaml.safe_load(text).get("data", {}).get("also", {})
    assert len(lines) <= 40 + 20 * len(further_tasks)
    assert [line.partition(":")[0] for line in lines[:3]] == ["# Purpose", "# Run time", "# Result"]
    with pytest.raises(SystemExit) as ended:
        cli("--config", str(config), "--print_config")
    assert ended.value.code == 0, capsys.readouterr().err


def test_configs_lists_them_with_their_purpose_and_init_copies_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command("configs")
    said = capsys.readouterr().out
    assert all(re.search(rf"^{path.stem} +\w", said, re.MULTILINE) for path in CONFIGS.glob("*.yaml"))

    command("init", "digits")
    assert (tmp_path / "digits.yaml").read_text() == (CONFIGS / "digits.yaml").read_text()
    for name, answer in (("digits", "exists already"), ("digitz", "did you mean 'digits'?")):
        assert answer in refusal(capsys, lambda name=name: command("init", name))


@pytest.mark.parametrize("args", [[], ["fit"], ["test"], ["grow"], ["export"]], ids=lambda args: "-".join(args))
def test_every_command_has_a_help(args: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command(*args, "--help")

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


@pytest.mark.slow
def test_validate_repeats_what_fit_has_logged(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")
    run = only_run(tmp_path)
    logged = [value for _, value in run.scalars()["val/objective"]]

    other = ("--trainer.logger=CSVLogger", f"--trainer.logger.save_dir={tmp_path / 'other'}")
    command("validate", *TINY, "--ckpt_path", str(run.checkpoints / "best.ckpt"), *other)

    (table,) = (tmp_path / "other").rglob("metrics.csv")
    header, values = (line.split(",") for line in table.read_text().splitlines()[:2])
    found = float(dict(zip(header, values, strict=True))["val/objective"])
    assert found == pytest.approx(max(logged), abs=1e-6)
