"""What users of Lightning do with a Trainer, its flags, its callbacks, its loggers and LightningCLI works here, too."""

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning import Callback, LightningDataModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, LearningRateMonitor, RichProgressBar, Timer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from esper_lightning import (
    EnvConfig,
    HostPoolData,
    HostTraining,
    PolicyConfig,
    PPOConfig,
    TamiyoModule,
    default_callbacks,
)
from esper_lightning.callbacks import Governor, ProgressLines, RolloutState, Telemetry
from esper_lightning.evaluation.comparison import EvaluationConfig
from esper_lightning.runtime.checkpoint import AtomicCheckpointIO
from esper_lightning.tasks import Digits
from tests.runs import (
    Run,
    SaveEveryTick,
    continuation,
    csv_rows,
    differences,
    fit,
    load,
    make_trainer,
    only_run,
    tiny_host,
    with_callback,
)
from tests.tiers import rest_is_slow

HORIZON = 4


def hosts(kind: type[HostPoolData] = HostPoolData) -> HostPoolData:
    env = EnvConfig(horizon=HORIZON, executor="loop", training=HostTraining(batches=1, lr=0.02))
    return kind(Digits(validation=100, test=100), tiny_host, env, n_envs=2, val_hosts=2)


def module(kind: type[TamiyoModule] = TamiyoModule) -> TamiyoModule:
    few = EvaluationConfig(hosts=2, against=["small static"], controls=False)
    return kind(PolicyConfig(width=16), PPOConfig(minibatches=2, epochs=2), evaluation=few)


def fitted(made: Trainer, **resume: Any) -> Trainer:
    made.fit(module(), datamodule=hosts(), **resume)
    return made


class Recorder(Callback):
    """Callback that counts batches, ticks and validations."""

    def __init__(self) -> None:
        self.counts = [0, 0, 0]

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        self.counts[:2] = self.counts[0] + 1, pl_module.collector.ticks

    def on_validation_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self.counts[2] += 1


FLAGS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "nothing": ({}, (8, 8, 2)),
    "fast_dev_run": ({"fast_dev_run": True}, (1, 4, 1)),
    "overfit_batches": ({"overfit_batches": 1}, (2, 8, 2)),
    "limit_train_batches": ({"limit_train_batches": 2}, (4, 8, 2)),
    "limit_val_batches": ({"limit_val_batches": 0}, (8, 8, 0)),
    "max_steps": ({"max_steps": 3, "max_epochs": -1}, (4, 4, 1)),
    "val_check_interval": ({"val_check_interval": 2}, (8, 8, 4)),
    "check_val_every_n_epoch": ({"check_val_every_n_epoch": 2}, (8, 8, 1)),
    "profiler": ({"profiler": "simple"}, (8, 8, 2)),
    "deterministic": ({"deterministic": True}, (8, 8, 2)),
    "detect_anomaly": ({"detect_anomaly": True}, (8, 8, 2)),
    "barebones": ({"barebones": True, "log_every_n_steps": 0}, (8, 8, 2)),
    "sanity check": ({"num_sanity_val_steps": 1}, (8, 8, 3)),
}
"""Flags of a Trainer of two rollouts of four ticks, with its batches, ticks and validations."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", rest_is_slow(FLAGS, FLAGS.keys() - {"detect_anomaly"}))
def test_a_flag_of_the_trainer_does_what_lightning_says(name: str, tmp_path: Path) -> None:
    flags, counts = FLAGS[name]
    recorder = Recorder()
    try:
        fitted(make_trainer(tmp_path, recorder, **flags))
    finally:
        torch.use_deterministic_algorithms(False)

    assert recorder.counts == list(counts)


def test_max_time_ends_a_run_after_a_whole_number_of_ticks(tmp_path: Path) -> None:
    recorder = Recorder()
    fitted(make_trainer(tmp_path, recorder, max_epochs=100_000, max_time={"seconds": 1}))

    assert 1 <= recorder.counts[1] < 1000 * HORIZON


class Rates(Callback):
    """Callback that keeps the learning rate and the entropy bonus of each update."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        if pl_module.metrics:  # a resumed run may end the saved epoch again
            self.seen.append((pl_module.metrics["train/lr"], pl_module.metrics["train/entropy_coefficient"]))


class TickTimer(Timer):
    """Timer of a training in which every tick takes a second."""

    def on_fit_start(self, trainer: Trainer, *_: object) -> None:
        self.module = trainer.lightning_module

    def time_elapsed(self, stage: str = "train") -> float:
        return float(self.module.collector.ticks) if hasattr(self.module, "collector") else 0.0


def rates(root: Path, *callbacks: Callback, **limits: Any) -> tuple[list[tuple[float, float]], Trainer]:
    seen, limits = Rates(), {"max_epochs": -1, **limits}
    made = fitted(make_trainer(root, seen, *callbacks, logger=False, enable_checkpointing=False, **limits))
    return seen.seen, made


@pytest.mark.slow
def test_rates_fall_to_their_end_by_the_limit_that_ends_the_training_first(tmp_path: Path) -> None:
    by_epochs, made = rates(tmp_path, max_epochs=4)
    steps = made.global_step

    assert by_epochs == [(pytest.approx(1e-3 - i * 3e-4), pytest.approx(0.03 - i * 9e-3)) for i in range(4)]
    for limits in ({}, {"max_epochs": 100}, {"max_epochs": 4, "max_steps": 100 * steps}):
        assert rates(tmp_path, **{"max_steps": steps, **limits})[0] == by_epochs
    assert rates(tmp_path, TickTimer({"seconds": 4 * HORIZON}), max_steps=100 * steps)[0] == by_epochs


def test_rates_stay_as_they_are_in_a_training_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop_at_three(trainer: Trainer, *_: object) -> None:
        trainer.should_stop = trainer.current_epoch == 2

    seen, _ = rates(tmp_path, LambdaCallback(on_train_epoch_end=stop_at_three))

    assert seen == [(1e-3, 0.03)] * 3
    assert "give the Trainer max_epochs, max_steps or max_time" in capsys.readouterr().out


@pytest.mark.parametrize("tick", rest_is_slow([4, 6], {6}))
def test_a_run_that_is_limited_by_steps_is_resumed_bit_for_bit(tick: int, tmp_path: Path) -> None:
    def trained(root: Path, **resume: Any) -> tuple[Trainer, list[tuple[float, float]]]:
        seed_everything(0, verbose=False)
        seen = Rates()
        made = make_trainer(
            root, *default_callbacks(), SaveEveryTick(), seen, max_epochs=-1, max_steps=12, logger=False
        )
        return fitted(made, **resume), seen.seen

    whole, rates_of_whole = trained(tmp_path / "whole")
    (saved,) = (tmp_path / "whole").rglob(f"tick{tick}.ckpt")
    resumed, rates_of_resumed = trained(tmp_path / "resumed", ckpt_path=saved)

    assert resumed.global_step == whole.global_step == 12
    assert [lr for lr, _ in rates_of_whole] == pytest.approx([1e-3, 5.5e-4, 1e-4])
    assert rates_of_resumed == rates_of_whole[1:]
    assert differences(resumed.lightning_module.state_dict(), whole.lightning_module.state_dict()) == []


def test_a_line_tells_the_number_of_rollouts_by_the_limit_of_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates(tmp_path, ProgressLines(), max_steps=8, max_epochs=100)

    told = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if line.startswith("rollout")]
    assert told == ["rollout 1 of 2", "rollout 2 of 2"]


LOADER = DataLoader(TensorDataset(torch.zeros(8, 2)), 2)


class Foreign(LightningDataModule):
    def train_dataloader(self) -> DataLoader:
        return LOADER

    val_dataloader = test_dataloader = train_dataloader


@pytest.mark.parametrize("callbacks", [list, default_callbacks])
@pytest.mark.parametrize(
    ("loaders", "data", "reason"),
    [
        ([], None, "the Trainer has no data module"),
        ([LOADER], None, "the Trainer has no data module"),
        ([], Foreign(), "Foreign has no environments"),
    ],
    ids=["nothing", "loader", "foreign"],
)
@pytest.mark.parametrize("stage", ["fit", "validate", "test"])
def test_a_policy_without_environments_is_refused(
    stage: str, loaders: list[DataLoader], data: Any, reason: str, callbacks: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"{reason} for the policy; give datamodule="):
        getattr(make_trainer(tmp_path, *callbacks()), stage)(module(), *loaders, datamodule=data)


def test_a_loader_beside_the_hosts_of_a_training_is_refused(tmp_path: Path) -> None:
    made = fitted(make_trainer(tmp_path, max_epochs=1))

    for stage in (made.validate, made.test):
        with pytest.raises(ValueError, match="is validated and tested on hosts; give datamodule="):
            stage(made.lightning_module, LOADER)


@pytest.mark.parametrize("callbacks", [list, default_callbacks])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_a_policy_is_saved_before_its_training_and_is_no_run_to_resume(
    stage: str, callbacks: Callable[[], list[Callback]], tmp_path: Path
) -> None:
    made, policy, path = make_trainer(tmp_path, *callbacks()), module(), tmp_path / "fresh.ckpt"
    getattr(made, stage)(policy, datamodule=hosts(), verbose=False)
    made.save_checkpoint(path)

    assert differences(TamiyoModule.load_from_checkpoint(path).state_dict(), policy.state_dict()) == []
    with pytest.raises(ValueError, match="so it was not saved by a full run"):
        fitted(make_trainer(tmp_path, *callbacks()), ckpt_path=path)


def test_a_module_without_a_policy_has_no_controller() -> None:
    with pytest.raises(ValueError, match=r"use TamiyoModule\.load_from_checkpoint"):
        module().controller()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, Run]:
    """Run of two rollouts with the usual callbacks, with a logger of TensorBoard and one of CSV."""
    root = tmp_path_factory.mktemp("trained")
    seed_everything(0, verbose=False)
    loggers = [TensorBoardLogger(root, name="", version="tb"), CSVLogger(root, name="", version="csv")]
    made = make_trainer(root, *default_callbacks(), SaveEveryTick(), logger=loggers, plugins=[AtomicCheckpointIO()])
    return fitted(made), Run(root / "tb")


def rows(folder: Path) -> list[dict[str, float]]:
    return [{name: float(text) for name, text in row.items() if text} for row in csv_rows(folder / "metrics.csv")]


OURS = {"rollout/return", "rollout/objective", "train/lr", "train/kl", "train/explained_variance", "val/objective"}


def test_both_loggers_get_every_tag_once_per_tick(trained: tuple[Trainer, Run]) -> None:
    run = trained[1]
    points = run.scalars()
    assert set(points) >= OURS and "hosts/score" in points
    for tag, of_tag in points.items():
        assert max(Counter(step for step, _ in of_tag).values()) == 1, tag
    assert [step for step, _ in points["val/objective"]] == [HORIZON, 2 * HORIZON]

    written = Counter((name, row["step"]) for row in rows(run.folder.parent / "csv") for name in row if name in OURS)
    assert {name for name, _ in written} == OURS
    assert set(written.values()) == {1}


def test_without_telemetry_the_module_logs_rollouts_updates_and_validations(tmp_path: Path) -> None:
    fitted(make_trainer(tmp_path, logger=TensorBoardLogger(tmp_path, name="", version=0)))

    points = only_run(tmp_path).scalars()
    assert not any(tag.startswith("hosts/") for tag in points)
    found = {name: [step for step, _ in points[name]] for name in OURS}
    assert found == {name: [HORIZON, 2 * HORIZON] for name in OURS}


def test_settings_are_in_hparams_yaml_and_in_the_checkpoint(trained: tuple[Trainer, Run]) -> None:
    run = trained[1]
    written = yaml.safe_load((run.folder / "hparams.yaml").read_text())
    saved = load(run.last)

    assert written["policy"]["width"] == 16 and written["evaluation"]["hosts"] == 2
    assert saved["hyper_parameters"]["ppo"]["minibatches"] == 2
    assert "hp_metric" in trained[0].callback_metrics


def test_validate_and_test_read_a_checkpoint(trained: tuple[Trainer, Run], tmp_path: Path) -> None:
    run = trained[1]
    other = make_trainer(tmp_path, *default_callbacks())

    (validated,) = other.validate(module(), datamodule=hosts(), ckpt_path=run.last, verbose=False)
    (tested,) = other.test(module(), datamodule=hosts(), ckpt_path=run.last, verbose=False)

    assert validated["val/objective"] == pytest.approx(run.scalars()["val/objective"][-1][1], abs=1e-6)
    assert math.isfinite(tested["test/objective"]) and 0.0 <= tested["test/score"] <= 1.0
    assert list(tmp_path.rglob("evaluation.csv"))


class MyModule(TamiyoModule): ...


class MyHosts(HostPoolData): ...


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_subclasses_of_the_module_and_the_data_module_resume(tmp_path: Path) -> None:
    seed_everything(0, verbose=False)
    make_trainer(tmp_path / "a", *default_callbacks(), SaveEveryTick()).fit(module(MyModule), datamodule=hosts(MyHosts))
    (saved,) = (tmp_path / "a").rglob("tick6.ckpt")
    make_trainer(tmp_path / "b", *default_callbacks()).fit(module(MyModule), datamodule=hosts(MyHosts), ckpt_path=saved)

    ours, theirs = (load(next((tmp_path / name).rglob("last.ckpt"))) for name in "ab")
    for part in ("state_dict", "MyHosts"):
        assert differences(ours[part], theirs[part]) == []


def test_early_stopping_and_the_monitor_of_learning_rates_see_the_modules_metrics(tmp_path: Path) -> None:
    callbacks = EarlyStopping("val/objective", mode="max", min_delta=10.0, patience=1), LearningRateMonitor()
    made = fitted(make_trainer(tmp_path, *callbacks, max_epochs=50, logger=CSVLogger(tmp_path, name="", version=0)))

    assert made.current_epoch == 2
    assert any("lr-Adam" in row for row in rows(tmp_path / "version_0"))


def test_two_governors_of_a_plain_trainer_are_refused_and_a_missing_rollout_state_is_brought(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"two Governors in trainer\.callbacks; keep one"):
        fitted(make_trainer(tmp_path, Governor(), Governor()))
    made = fitted(make_trainer(tmp_path, max_epochs=1))
    assert any(isinstance(each, RolloutState) for each in made.callbacks)


def test_a_callback_of_ones_own_is_added_to_those_of_the_command_line(tmp_path: Path) -> None:
    added = (*with_callback(Recorder), *with_callback(RichProgressBar))
    built = fit(tmp_path, "--trainer.max_epochs=1", "--trainer.enable_progress_bar=true", *added)

    kinds = [type(each) for each in built.trainer.callbacks]
    assert {Telemetry, Governor, RolloutState, RichProgressBar} <= set(kinds)
    (recorder,) = (each for each in built.trainer.callbacks if isinstance(each, Recorder))
    assert recorder.counts == [5, 5, 1]


def test_the_command_line_resumes_the_best_checkpoint(tmp_path: Path) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", "best")

    assert only_run(tmp_path).folder == run.folder
    assert load(run.last)["callbacks"]["RolloutState"]["loop"]["episode"] == 2


def test_a_printed_config_gives_the_same_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path / "b", "--trainer.max_epochs=1", "--print_config")
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out)

    fit(tmp_path / "a", "--trainer.max_epochs=1")
    fit(tmp_path / "b", "--config", str(tmp_path / "printed.yaml"))

    ours, theirs = (continuation(only_run(tmp_path / name).last) for name in "ab")
    assert differences(ours, theirs) == []


def test_a_fit_that_fails_raises_and_does_not_end_the_interpreter(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"model\.ppo\.minibatches is 3, more than the 2 environments"):
        make_trainer(tmp_path, *default_callbacks()).fit(TamiyoModule(ppo=PPOConfig(minibatches=3)), datamodule=hosts())
