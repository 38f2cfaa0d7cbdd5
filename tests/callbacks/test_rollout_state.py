"""RolloutState: every global random state is saved in a checkpoint and restored."""

import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from lightning import Trainer

from esper_lightning.callbacks.resume import RolloutState, random_states, set_random_states
from esper_lightning.ppo.collector import RolloutCollector
from tests.runs import differences, fit, load, only_run


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
    assert set(state) == {"loop", "random"}
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
