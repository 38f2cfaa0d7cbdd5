"""RolloutState and Preemption: all state is in a checkpoint, also of a run that was stopped, and handlers come back."""

import random
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer
from lightning.pytorch.trainer.states import TrainerStatus

from esper_lightning.callbacks import Preemption, RolloutState
from esper_lightning.callbacks.resume import STOP_SIGNALS, map_rows, random_states, set_random_states
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import EnvConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.tasks import Digits
from tests.ppo.loops import play
from tests.runs import SignalAt, differences, fit, guarded_signals, load, only_run, tiny_host, with_callback

TICK = 3  # in the middle of the first rollout


@pytest.fixture(autouse=True)
def pytest_survives() -> Iterator[None]:
    with guarded_signals():
        yield


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in STOP_SIGNALS]


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

    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path, "--trainer.max_epochs=1", *with_callback(SignalAt, tick=TICK, number=int(number)))

    last = only_run(tmp_path).last
    assert stopped.value.code == 128 + number
    assert load(last)["callbacks"]["RolloutState"]["loop"]["ticks"] == TICK
    assert f"stopped by {number.name}; go on from ckpt_path {last}" in capsys.readouterr().out
    assert handlers() == before


def draw_random_numbers() -> list[float]:
    """Draw from every global generator; the Gaussian ones keep half of a pair for the next call."""
    numbers = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    return [float(number) for number in numbers]


def test_random_states_survive_a_checkpoint_which_stays_as_it_was(tmp_path: Path) -> None:
    draw_random_numbers()  # leaves half a pair in the Gaussian generators
    torch.save(random_states(), tmp_path / "states.ckpt")
    expected = [draw_random_numbers(), draw_random_numbers()]

    states = load(tmp_path / "states.ckpt")
    for _ in range(2):
        set_random_states(states)
        assert [draw_random_numbers(), draw_random_numbers()] == expected


def test_a_checkpoint_holds_the_rollout_in_flight_and_handlers_are_restored_when_a_run_ends(tmp_path: Path) -> None:
    before = handlers()
    built = fit(tmp_path, "--trainer.max_epochs=1")
    assert handlers() == before

    state = load(only_run(tmp_path).last)["callbacks"]["RolloutState"]
    loop = built.model.collector
    assert set(state) == {"loop", "random"}
    assert state["loop"]["ticks"] == loop.ticks == loop.buffer.length
    assert state["loop"]["episode"] == 1
    assert torch.equal(state["loop"]["raw_features"], loop.raw_features)
    assert all(torch.equal(saved, now) for saved, now in zip(state["loop"]["state"], loop.state, strict=True))


def test_a_loop_that_was_elsewhere_goes_on_from_the_state_of_another(
    make_loop: Callable[..., RolloutCollector],
) -> None:
    """F6: when training starts, the callback restores the recurrent state, the unfinished rollout and random states."""
    loop, other = make_loop(2), make_loop(2)
    loop.reset()
    for _ in range(3):
        loop.step()
    other.run_rng_seed = 8
    play(other)
    saving, restoring = RolloutState(), RolloutState()
    saving.setup(Trainer(), SimpleNamespace(collector=loop), "fit")
    saved = saving.state_dict()
    expected = draw_random_numbers()
    assert saved["loop"]["state"][0].any() and saved["loop"]["state"][1].any(), "there is a recurrent state to lose"

    restoring.load_state_dict(saved)
    restoring.on_train_start(Trainer(), SimpleNamespace(collector=other))

    assert draw_random_numbers() == expected
    assert differences(saved["loop"], other.state_dict()) == []
    play(other)
    restoring.on_train_start(Trainer(), SimpleNamespace(collector=other))
    assert other.ticks == 3 + 6, "it is restored once"


def test_parts_of_a_rollout_with_a_row_per_environment_are_known_with_its_axis(
    make_loop: Callable[..., RolloutCollector],
) -> None:
    loop = make_loop(2)
    play(loop)
    rows: list[int] = []

    state = loop.state_dict() | {"final_values": torch.zeros(6, 2)}  # of environments that begin again by themselves
    map_rows(state, lambda part, axis: rows.append(part.shape[axis]) or part)

    assert len(rows) > 6 and set(rows) == {2}
