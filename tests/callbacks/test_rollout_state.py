"""RolloutState: every global random state goes into a checkpoint and comes back."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning import Trainer

from callbacks.rollout_state import random_states, set_random_states
from esper_lightning.data import HostPoolData
from esper_lightning.module import TamiyoModule
from esper_lightning.tasks import Digits
from tests.runs import fit, load, only_run, tiny_host


def draw() -> list[float]:
    """From every global generator; the Gaussian ones keep half of a pair for the next call."""
    numbers = [random.random(), random.gauss(0.0, 1.0), np.random.rand(), np.random.randn(), torch.rand(()).item()]
    return [float(number) for number in numbers]


def test_random_states_survive_a_checkpoint(tmp_path: Path) -> None:
    draw()  # leaves half a pair behind
    torch.save(random_states(), tmp_path / "states.ckpt")
    expected = [draw(), draw()]

    set_random_states(load(tmp_path / "states.ckpt"))

    assert [draw(), draw()] == expected


def test_restoring_random_states_changes_the_saved_ones_not(tmp_path: Path) -> None:
    states = random_states()
    expected = draw()
    for _ in range(2):
        set_random_states(states)
        assert draw() == expected


def test_a_checkpoint_holds_the_rollout_in_flight(tmp_path: Path) -> None:
    built = fit(tmp_path, "--trainer.max_epochs=1")

    state = load(only_run(tmp_path).latest)["callbacks"]["RolloutState"]
    loop = built.model.loop
    assert set(state) == {"loop", "random"}
    assert state["loop"]["ticks"] == loop.ticks == loop.buffer.length
    assert state["loop"]["episode"] == 1
    assert torch.equal(state["loop"]["raw"], loop.raw)
    assert all(torch.equal(saved, now) for saved, now in zip(state["loop"]["state"], loop.state, strict=True))


def test_a_module_does_not_train_without_it(tmp_path: Path) -> None:
    trainer = Trainer(max_epochs=1, default_root_dir=tmp_path, logger=False, accelerator="cpu")

    with pytest.raises(ValueError, match="RolloutState is missing"):
        trainer.fit(TamiyoModule(), datamodule=HostPoolData(Digits(), tiny_host, n_envs=4))
    assert not list(tmp_path.rglob("*.ckpt"))
