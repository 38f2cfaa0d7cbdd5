"""Preemption: a stopped run saves a checkpoint, and the process gets its signal handlers back."""

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from esper_lightning.callbacks import Preemption
from esper_lightning.callbacks.resume import STOP_SIGNALS
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import EnvConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.tasks import Digits
from tests.runs import SignalAt, fit, guarded_signals, load, only_run, tiny_host, with_callback

TICK = 3  # in the middle of the first rollout


@pytest.fixture(autouse=True)
def pytest_survives() -> Iterator[None]:
    with guarded_signals():
        yield


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


def stop(root: Path, number: signal.Signals, *flags: str) -> int | str | None:
    """Return the exit code of a run that sends itself a signal at the end of TICK."""
    with pytest.raises(SystemExit) as stopped:
        fit(root, "--trainer.max_epochs=1", *with_callback(SignalAt, tick=TICK, number=int(number)), *flags)
    return stopped.value.code


def test_handlers_are_restored_when_a_run_ends(tmp_path: Path) -> None:
    before = handlers()

    fit(tmp_path, "--trainer.max_epochs=1")

    assert handlers() == before


def test_a_training_in_a_thread_ends_and_leaves_the_handlers(tmp_path: Path) -> None:
    before = handlers()
    trainer = Trainer(
        max_epochs=1,
        default_root_dir=tmp_path,
        logger=False,
        accelerator="cpu",
        callbacks=[Preemption()],
        enable_progress_bar=False,
    )
    data = HostPoolData(Digits(), tiny_host, n_envs=4, val_hosts=2, env=EnvConfig(horizon=2, executor="loop"))

    with ThreadPoolExecutor(1) as threads:
        threads.submit(trainer.fit, TamiyoModule(), data).result()

    assert trainer.state.status == TrainerStatus.FINISHED
    assert handlers() == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_stopped_run_is_saved_says_how_to_go_on_and_restores_the_handlers(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = handlers()

    code = stop(tmp_path, number)

    last = only_run(tmp_path).last
    assert code == 128 + number
    assert load(last)["callbacks"]["RolloutState"]["loop"]["ticks"] == TICK
    assert f"stopped by {number.name}; go on from ckpt_path {last}" in capsys.readouterr().out
    assert handlers() == before
