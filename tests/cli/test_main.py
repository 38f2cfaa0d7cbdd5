"""Command line: every config runs, a run writes its files, and bad input ends in one line."""

import csv
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from esper_lightning.checkpointing.validate import SCHEMA
from esper_lightning.cli import check_monitor
from esper_lightning.envs import HEADS, Op
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.profiling import PHASES
from tests.runs import (
    CONFIGS,
    EPOCHS,
    FREE_CHOICE,
    ROOT,
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
RULES = ["random", "small static", "heuristic", "periodic", "climbing", "climbing, zero"]
CONTROLLERS = ["tamiyo", "sampled", *RULES, "replayed", "yoked", "static tamiyo", "static tamiyo, equal FLOPs"]
SMOKE_TICKS = range(1, 25)  # 2 rollouts of 12
ROLLOUT_ENDS = [12, 24]
ROLLOUT_TAGS = {
    *("rollout/objective", "rollout/return", "rollout/accuracy", "rollout/parameters"),
    *(f"rollout/op.{op}" for op in ("WAIT", "GERMINATE", "CULL", "FOSSILIZE")),
    *(f"train/entropy.{head}" for head in ("op", "slot", "blueprint")),
    *("train/kl", "train/clip_fraction", "train/explained_variance", "train/loss.policy", "train/loss.value"),
    *("train/lr", "train/entropy_coefficient", "train/grad_norm", "time/ticks_per_second"),
}
TICK_TAGS = {
    *("hosts/accuracy", "hosts/loss", "hosts/objective", "hosts/parameters", "hosts/reward"),
    *("reward/objective", "reward/rollback"),
    *(f"growth/{slot}/{stage.name}" for slot in ("block1.pool", "block2.pool", "block3") for stage in Stage),
    *(f"time/perf_counter.{phase}" for phase in PHASES),
}
SOMETIMES = ("blueprint/", "credit/", "gradients/seed", "growth/ticks.")
ONCE = ("test/",)
PER_TICK = ("hosts/", "reward/", "growth/", "governor/", "gradients/", "time/perf_counter.")


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Run configs/smoke.yaml to its end, as a user does."""
    root = tmp_path_factory.mktemp("smoke")
    done = process("--config", str(CONFIGS / "smoke.yaml"), "--trainer.default_root_dir", str(root))
    assert done.returncode == 0, done.stderr
    assert all(f" {controller} " in done.stdout for controller in CONTROLLERS)
    return only_run(root)


@pytest.mark.slow
def test_the_smoke_run_leaves_checkpoints_that_load_strictly(smoke: Run) -> None:
    names = sorted(path.name for path in smoke.checkpoints.iterdir())

    assert names == ["best.ckpt", "last.ckpt"]
    assert all(load(smoke.checkpoints / name)["esper_schema"] == SCHEMA for name in names)


@pytest.mark.slow
def test_the_smoke_run_compares_all_controllers_with_intervals(smoke: Run) -> None:
    with (smoke.folder / "evaluation" / "evaluation.csv").open() as file:
        rows = list(csv.DictReader(file))
    summary = json.loads((smoke.folder / "evaluation" / "evaluation.json").read_text())["controllers"]

    assert list(summary)[: len(CONTROLLERS)] == CONTROLLERS
    assert len(summary) == len(CONTROLLERS) + 2, "and static twins of the best rule"
    for controller, found in summary.items():
        worth = [float(row["objective"]) for row in rows if row["controller"] == controller]
        assert len(worth) == 4
        assert found["objective"]["mean"] == pytest.approx(sum(worth) / 4, rel=1e-5)
        for column in ("accuracy", "parameters", "objective", "ahead"):
            low, mean, high = (found[column][end] for end in ("low", "mean", "high"))
            assert low <= mean <= high
    assert summary["tamiyo"]["ahead"]["mean"] == summary["tamiyo"]["ahead"]["low"] == 0.0  # of the policy


@pytest.mark.slow
def test_the_smoke_run_writes_finite_points_over_ticks(smoke: Run) -> None:
    scalars = smoke.scalars()

    assert set(scalars) >= TICK_TAGS | ROLLOUT_TAGS
    assert not {"train/entropy.tempo", "train/choice_share.tempo"} & set(scalars), "one tempo is no choice"
    for tag, points in scalars.items():
        if tag.startswith(SOMETIMES):
            continue  # only where a seed lived or was fossilized: tests/telemetry/test_tensorboard.py
        steps = list(SMOKE_TICKS) if tag.startswith(PER_TICK) else ROLLOUT_ENDS
        if tag == "anomaly/grad_norm_high" or tag == "anomaly/grad_norm_low":
            steps = steps[1:]  # only after an earlier norm for comparison
        if tag.startswith(ONCE):
            steps = steps[-1:]  # measured when training has ended
        assert [step for step, _ in points] == steps, tag
        assert all(math.isfinite(value) for _, value in points), tag


@pytest.mark.slow
def test_the_saved_config_repeats_the_run(smoke: Run, tmp_path: Path) -> None:
    config = str(smoke.folder / "config.yaml")

    cli("--config", config, "--trainer.default_root_dir", str(tmp_path), *ONE_ROLLOUT)

    first = {tag: points[0] for tag, points in smoke.scalars().items() if tag in ROLLOUT_TAGS and "time/" not in tag}
    again = {tag: points[0] for tag, points in only_run(tmp_path).scalars().items() if tag in first}
    assert again == first


@pytest.mark.parametrize(
    "config",
    rest_is_slow(sorted(CONFIGS.glob("*.yaml")), lambda path: path.stem in ("digits", "text")),
    ids=lambda path: path.stem,
)
def test_every_config_trains(config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = ("--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.accelerator=cpu")
    tiny = ("--data.n_envs=2", "--model.ppo.minibatches=2", "--data.env.training.batches=1")
    tiny += () if config.stem == "general" else ("--data.env.horizon=2",)  # it has horizons of its own
    if config.stem.startswith("cifar10"):
        stored = write_cifar10(tmp_path, monkeypatch, each=40)
        tiny += (f"--data.task.init_args.root={stored}", "--data.task.init_args.validation=20")
        tiny += ("--data.env.executor=loop", "--data.env.training.batch_size=8")

    built = cli("--config", str(config), *root, *ONE_ROLLOUT, *tiny)

    wanted = yaml.safe_load(config.read_text())["data"]["host"]
    slots = wanted["init_args"].get("slots") if isinstance(wanted, dict) else None
    first, *others = built.datamodule.loaded_tasks.values()
    assert slots in (None, first.discover_action_space()[0].slot)
    assert bool(others) == (config.stem in ("general", "mixed"))
    assert only_run(tmp_path / "runs").last.is_file()


@pytest.mark.parametrize(
    ("name", "parameters", "slots"),
    [
        ("cifar10", 6_418, 3),
        ("cifar10_minimal", 164, 3),
        ("cifar10_impaired", 77, 3),
        ("cifar10_scale", 99_922, 5),
        ("cifar10_six_slots", 6_418, 6),
        ("cifar10_ten_slots", 99_922, 10),
        ("cifar10_streams", 94_762, 3),
    ],
)
def test_a_cifar_config_has_the_host_of_its_purpose(name: str, parameters: int, slots: int) -> None:
    data = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())["data"]
    host = CNN((3, 32, 32), 10, **(data["host"]["init_args"] if isinstance(data["host"], dict) else {}))

    assert (count_parameters(host), len(slots_of(host))) == (parameters, slots)
    by_name = name == "cifar10_streams"
    assert data["env"]["executor"] == ("streams" if by_name else "auto")
    assert data["env"]["training"]["precision"] == ("fp16" if by_name else "auto")


@pytest.mark.parametrize("config", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_short_and_begins_with_what_it_is_for(config: Path) -> None:
    text = config.read_text()
    lines = text.splitlines()
    further_tasks = yaml.safe_load(text).get("data", {}).get("also", {})

    assert len(lines) < 40 + 20 * len(further_tasks)
    assert [line.partition(":")[0] for line in lines[:3]] == ["# Purpose", "# Run time", "# Result"]


@pytest.mark.slow
def test_a_run_may_choose_in_all_heads(tmp_path: Path) -> None:
    built = fit(tmp_path, *FREE_CHOICE, "--model.evaluation.hosts=2")

    assert list(built.model.policy.heads.tables) == list(HEADS)
    assert built.datamodule.pool.space.speed == [0, 2]
    scalars = only_run(tmp_path).scalars()
    choosing = [head for head, choices in built.datamodule.pool.space.sizes.items() if choices > 1]
    assert len(choosing) > 6
    for tag in (*(f"train/entropy.{head}" for head in choosing), *(f"rollout/op.{op.name}" for op in Op)):
        assert len(scalars[tag]) == EPOCHS
        assert all(math.isfinite(value) for _, value in scalars[tag]), tag
    assert max(value for _, value in scalars["train/first_ratio_error"]) < 1e-5
    assert load(only_run(tmp_path).last)["esper_schema"] == SCHEMA


def test_a_checkpoint_with_other_heads_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, *FREE_CHOICE, "--ckpt_path", str(only_run(tmp_path).last))

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, "choices of the op head")


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
        assert understood.get(path, understood.get((*path, "class_path"))) == value, path


UNWANTED: dict[str, tuple[str, str]] = {
    "unknown key": ("--model.policy.widht=3", "widht"),
    "wrong type": ("--data.n_envs=two", "data.n_envs"),
    "unknown slot": ("--data.host.init_args.slots=[block1.pol]", "did you mean 'block1.pool'?"),
    "duplicate slot": ("--data.host.init_args.slots=[block3,block3]", "'block3' is named twice"),
    "no slot": ("--data.host.init_args.slots=[]", "slots"),
    "no environments": ("--data.n_envs=0", "data.n_envs"),
    "no ticks": ("--data.env.horizon=0", "env.horizon"),
    "no epochs": ("--model.ppo.epochs=0", "ppo.epochs"),
    "more minibatches than environments": ("--model.ppo.minibatches=3", "model.ppo.minibatches"),
    "unknown style": ("--data.env.actions.styles=[linear_ad]", "did you mean 'linear_add'?"),
    "unknown curve": ("--data.env.actions.curves=[cosin]", "curves"),
    "a target of nothing": ("--data.env.actions.targets=[0.0]", "actions.targets"),
    "a change of alpha that is never at once": ("--data.env.actions.speeds=[3]", "actions.speeds"),
    "nothing to advance": ("--data.env.actions.advance=true", "actions.advance"),
    "no way to advance": ("--data.env.lifecycle.auto_blend=false", "actions.advance"),
    "unknown birth": ("--data.env.lifecycle.birth=blank", "birth"),
    "parts of unequal size": ("--data.env.training.micro_batches=5", "training.micro_batches"),
    "unknown blueprint": ("--data.env.actions.blueprints=[conv_lite]", "did you mean 'conv_light'?"),
    "streams without a GPU": ("--data.env.executor=streams", "executor 'streams' runs on CUDA, not on cpu"),
    "negative learning rate of hosts": ("--data.env.training.lr=-1", "training.lr"),
    "negative learning rate of Tamiyo": ("--model.ppo.lr.start=-1", "lr"),
    "batch larger than the data": ("--data.env.training.batch_size=5000", "batch_size"),
    "images shifted out of sight": ("--data.env.training.augment.pad=8", "augment.pad must be less than the image's 8"),
    "a hole of less than nothing": ("--data.env.training.augment.cutout=-1", "augment.cutout must not be negative"),
    "unknown host class": ("--data.host=esper_lightning.hosts.CNNN", "CNNN"),
    "unknown task class": ("--data.task=nonsense.Task", "nonsense.Task"),
    "missing config": ("--config=nowhere.yaml", "nowhere.yaml"),
    "missing checkpoint": ("--ckpt_path=nowhere.ckpt", "nowhere.ckpt"),
    "Lightning's last checkpoint": ("--ckpt_path=last", "ckpt_path 'last' is not known here; give latest"),
    "Lightning's best checkpoint": ("--ckpt_path=best", "ckpt_path 'best' is not known here; give latest"),
    "Lightning's registry": ("--ckpt_path=registry:model", "ckpt_path 'registry:model' is not known here"),
    "the latest checkpoint of no run": ("--ckpt_path=last", "there is no run with a last.ckpt below"),
    "a checkpoint that may run code": ("--weights_only=false", "weights_only"),
    "no number": ("--data.env.training.lr=.nan", "data.env.training.lr is not a number"),
    "a policy larger than memory": ("--model.policy.width=1000000000000", "more memory than there is"),
    "a policy larger than any tensor": ("--model.policy.width=1000000000000000000", "more memory than there is"),
    "an episode longer than any tensor": ("--data.env.horizon=1000000000000000000", "more memory than there is"),
    "no rollouts": ("--trainer.max_epochs=0", "trainer.max_epochs"),
    "rollouts without end": ("--trainer.max_epochs=-1", "trainer.max_epochs"),
    "a latest that is not the last": ("--latest.monitor=rollout/return", "latest.monitor"),
    "mistyped host setting": ("--data.host.init_args.bse=4", "bse"),
    "time limit": ("--trainer.max_time=00:00:01:00", "trainer.max_time"),
    "step limit": ("--trainer.max_steps=5", "trainer.max_steps"),
    "Lightning's gradient clipping": ("--trainer.gradient_clip_val=1", "trainer.gradient_clip_val"),
    "gradient accumulation": ("--trainer.accumulate_grad_batches=2", "trainer.accumulate_grad_batches"),
    "part of the ticks": ("--trainer.limit_train_batches=3", "trainer.limit_train_batches"),
    "no machine": ("--trainer.num_nodes=0", "trainer.num_nodes"),
    "another strategy": ("--trainer.strategy=fsdp", "trainer.strategy"),
    "an accelerator that is not there": ("--trainer.accelerator=tpu", "torch_xla"),
    "all devices": ("--trainer.devices=auto", "trainer.devices"),
    "hosts that no three processes can share": ("--trainer.devices=3", "set their number to 3"),
    "half precision": ("--trainer.precision=16-true", "trainer.precision"),
    "mixed precision": ("--trainer.precision=bf16-mixed", "trainer.precision"),
    "a seed that is no number": ("--seed_everything=true", "seed"),
    "a seed out of range": ("--seed_everything=-1", "-1"),
    "a seed that numpy cannot take": ("--seed_everything=99999999999999999999", "must be at most 4294967295, got"),
    "more hosts than any machine has": ("--data.n_envs=1000000000", "data.n_envs must be at most 10000, got"),
    "more evaluation hosts": ("--model.evaluation.hosts=1000000000", "evaluation.hosts must be at most 10000, got"),
    "an evaluation seed out of range": (
        "--model.evaluation.seed=4294967296",
        "evaluation.seed must be at most 4294967295",
    ),
    "brackets without end": (f"--data.host={'[' * 3000}", "data.host"),
    "escapes for a terminal": ("--best.monitor=\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
    "one evaluation host": ("--model.evaluation.hosts=1", "evaluation.hosts"),
    "telemetry of no ticks": ("--telemetry.every_n_ticks=0", "telemetry.every_n_ticks"),
    "a metric that does not exist": ("--best.monitor=rollout/objectiv", "did you mean 'rollout/objective'?"),
    "a part of an option": ("--data.n_env=3", "did you mean '--data.n_envs'?"),
    "a part of a short option": ("--seed=3", "did you mean '--seed_everything'?"),
    "a part of a setting of the trainer": ("--trainer.max_ep=3", "did you mean '--trainer.max_epochs'?"),
    "a part of the name of a config": ("--conf=smoke.yaml", "did you mean '--config'?"),
    "a key given twice": ("--data.also={a: {n_envs: 1, n_envs: 2}}", "data.also"),
}


def assert_one_line(stderr: str, named: str) -> None:
    (line,) = stderr.splitlines()
    assert line.startswith("error: ")
    assert named in line


@pytest.mark.parametrize(("flag", "named"), UNWANTED.values(), ids=list(UNWANTED))
def test_bad_input_ends_in_one_line_that_names_it(
    flag: str,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr("torch.distributed.init_process_group")  # it would wait for the second machine forever
    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs", flag)

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, named)
    assert not (tmp_path / "runs").exists()


def test_malformed_yaml_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "broken.yaml"
    config.write_text("model: {policy: {width: 3\n")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs", "--config", str(config))

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, "config")
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "text",
    [
        "data: {n_envs: 2}\ndata: {n_envs: 3}\n",
        "data:\n  n_envs: 2\n  env: {horizon: 3}\n  n_envs: 3\n",
        "data: {env: {horizon: 3, 'horizon': 4}}\n",
        "trainer: {callbacks: [{class_path: a, class_path: b}]}\n",
        "model: {ppo: {lr: {start: 1, start: 1}}}\n",
    ],
)
def test_a_key_that_is_given_twice_is_refused_with_its_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "twice.yaml"
    config.write_text("seed_everything: 1\n" + text)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs", "--config", str(config))

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, "is given twice, first in line ")


def test_a_metric_that_only_a_callback_of_the_user_can_log_is_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    check_monitor("my/metric", own_callbacks=True)
    assert "best.ckpt is written only if one of your callbacks logs" in capsys.readouterr().out
    check_monitor("rollout/return", own_callbacks=False)
    check_monitor(None, own_callbacks=False)
    assert capsys.readouterr().out == ""


def test_a_run_folder_that_cannot_be_made_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("not a folder")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "file" / "runs")

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, str(tmp_path / "file"))


def test_a_config_that_is_no_text_ends_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_bytes(b"model: \xff\xfe")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs", "--config", str(tmp_path / "config.yaml"))

    assert ended.value.code == 2
    assert_one_line(capsys.readouterr().err, "decode")


@pytest.mark.slow
def test_latest_is_the_checkpoint_that_was_written_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit(tmp_path, "--trainer.max_epochs=2")
    fit(tmp_path, "--trainer.max_epochs=1")
    first, second = (Run(tmp_path / f"version_{n}") for n in (0, 1))
    os.utime(second.last, (1, 1))
    capsys.readouterr()

    fit(tmp_path, "--ckpt_path=last")

    assert f"going on from {first.last}" in capsys.readouterr().out
    assert load(first.last)["callbacks"]["RolloutState"]["loop"]["episode"] == EPOCHS
    assert load(second.last)["callbacks"]["RolloutState"]["loop"]["episode"] == 1


def test_settings_that_changed_since_the_run_began_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    latest = str(only_run(tmp_path).last)
    capsys.readouterr()
    changes = ("--data.env.objective.price=0.25", "--model.ppo.adam_eps=0.01", "--data.env.actions.max_seeds=2")

    built = fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", latest, *changes)

    said = [line for line in capsys.readouterr().out.splitlines() if " before, " in line]
    assert sorted(said) == [
        "data.env.actions.max_seeds: None before, 2 now",
        "data.env.objective.price: 0.05 before, 0.25 now",
        "model.ppo.adam_eps: 1e-05 before, 0.01 now",
        "trainer.max_epochs: 1 before, 2 now",
    ]
    assert built.trainer.optimizers[0].param_groups[0]["eps"] == 0.01  # this command's, not the checkpoint's


@pytest.mark.parametrize(
    "where", ["esper_lightning.cli.EsperCLI.parse_arguments", "esper_lightning.datamodules.tasks.HostPool"]
)
def test_ctrl_c_before_training_ends_in_one_line(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(where, interrupted)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs")

    assert ended.value.code == 130
    assert_one_line(capsys.readouterr().err, "interrupted before training began")
    assert not (tmp_path / "runs").exists()


def test_ctrl_c_while_modules_are_imported_ends_a_real_process_in_one_line() -> None:
    started = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "esper_lightning", "fit", "--config", "smoke"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    seen = next(line for line in started.stderr if "torch._C" in line)  # during the import
    started.send_signal(signal.SIGINT)
    out, err = started.communicate(timeout=100)

    assert started.returncode == 130, seen
    assert [line for line in err.splitlines() if "import time:" not in line] == [
        "error: stopped by SIGINT before training began"
    ]
    assert out == ""


def test_ctrl_c_while_lightning_prepares_ends_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("esper_lightning.module.TamiyoModule.on_fit_start", interrupted)
    before = signal.getsignal(signal.SIGINT)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path)

    signal.signal(signal.SIGINT, before)  # Lightning lets no further interrupt through
    assert ended.value.code == 130
    assert_one_line(capsys.readouterr().err, "interrupted before training began")


@pytest.mark.slow
def test_bad_input_ends_a_real_process_in_one_line(tmp_path: Path) -> None:
    flag, named = UNWANTED["unknown slot"]
    config = str(CONFIGS / "smoke.yaml")

    ended = process("--config", config, "--trainer.default_root_dir", str(tmp_path / "runs"), flag)

    assert ended.returncode == 2
    assert_one_line(ended.stderr, named)
    assert ended.stdout == ""
    assert not (tmp_path / "runs").exists()
