"""RolloutState: every global random state is saved in a checkpoint and restored."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Trainer

from esper_lightning.callbacks.rollout_state import RolloutState, random_states, set_random_states
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.tasks import Digits
from tests.runs import differences, fit, load, only_run, tiny_host


def draw_random_numbers() -> list[float]:
    """Draw from every global generator; the Gaussian ones keep half of a pair for the next call."""
    numbers = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    return [float(number) for number in numbers]


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    draw_random_numbers()  # leaves half a pair in the Gaussian generators
    torch.save(random_states(), tmp_path / "states.ckpt")
    expected = [draw_random_numbers(), draw_random_numbers()]

    set_random_states(load(tmp_path / "states.ckpt"))

    assert [draw_random_numbers(), draw_random_numbers()] == expected


def test_restoring_random_states_changes_the_saved_ones_not(tmp_path: Path) -> None:
    states = random_states()
    expected = draw_random_numbers()
    for _ in range(2):
        set_random_states(states)
        assert draw_random_numbers() == expected


def test_a_checkpoint_holds_the_rollout_in_flight(tmp_path: Path) -> None:
    built = fit(tmp_path, "--trainer.max_epochs=1")

    state = load(only_run(tmp_path).last)["callbacks"]["RolloutState"]
    loop = built.model.collector
    assert set(state) == {"loop", "normalisers", "random"}
    assert state["normalisers"]["observation_norm.count"] == len(built.model.collector.raw_features) * 2
    assert state["loop"]["ticks"] == loop.ticks == loop.buffer.length
    assert state["loop"]["episode"] == 1
    assert torch.equal(state["loop"]["raw_features"], loop.raw_features)
    assert all(torch.equal(saved, now) for saved, now in zip(state["loop"]["state"], loop.state, strict=True))


def test_a_loop_that_was_elsewhere_goes_on_from_the_state_of_another(
    make_loop: Callable[..., RolloutCollector], play_rollout: Callable[[RolloutCollector], None]
) -> None:
    """F6: when training starts, the callback restores the recurrent state, the unfinished rollout and random states."""
    loop, other = make_loop(2), make_loop(2)
    loop.reset()
    for _ in range(3):
        loop.step()
    other.run_rng_seed = 8
    play_rollout(other)
    saving, restoring = RolloutState(), RolloutState()
    saving.setup(Trainer(), SimpleNamespace(collector=loop), "fit")
    saved = saving.state_dict()
    expected = draw_random_numbers()
    assert saved["loop"]["state"][0].any() and saved["loop"]["state"][1].any(), "there is a recurrent state to lose"

    restoring.load_state_dict(saved)
    restoring.on_train_start(Trainer(), SimpleNamespace(collector=other))

    assert draw_random_numbers() == expected
    assert differences(saved["loop"], other.state_dict()) == []
    play_rollout(other)
    restoring.on_train_start(Trainer(), SimpleNamespace(collector=other))
    assert other.ticks == 3 + 6, "it is restored once"


@pytest.mark.parametrize("name", ["state_dict", "callbacks"])
@pytest.mark.parametrize("statistic", ["observation_norm.mean", "reward_norm.var"])
def test_a_file_whose_normalisers_are_not_those_of_its_rollout_is_refused_in_one_line(
    statistic: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A half-restored file: the statistics of the module are of another moment than its rollout, or the reverse."""
    fit(tmp_path, "--trainer.max_epochs=1", "--model.normalize.rewards=true")
    run = only_run(tmp_path)
    checkpoint = load(run.last)
    parts = {
        "state_dict": checkpoint["state_dict"],
        "callbacks": checkpoint["callbacks"]["RolloutState"]["normalisers"],
    }
    parts[name][statistic] += 1e-6
    torch.save(checkpoint, run.checkpoints / "half.ckpt")
    capsys.readouterr()

    with pytest.raises(SystemExit) as refused:
        fit(
            tmp_path,
            "--trainer.max_epochs=2",
            "--model.normalize.rewards=true",
            *("--ckpt_path", str(run.checkpoints / "half.ckpt")),
        )

    assert refused.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"half.ckpt' cannot be continued: {statistic} of the module is not that of the rollout" in line


def test_a_module_does_not_train_without_it(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, accelerator="cpu")

    with pytest.raises(ValueError, match="RolloutState is missing"):
        trainer.fit(TamiyoModule(), datamodule=HostPoolData(Digits(), tiny_host, n_envs=4))
    assert not list(tmp_path.rglob("*.ckpt"))
