"""A run that is resumed on another type of device begins a new rollout and prints a note."""

from pathlib import Path

import pytest
import torch

from tests.runs import EPOCHS, HORIZON, Run, fit, fit_saving_ticks, load
from tests.tiers import rest_is_slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit_saving_ticks(tmp_path_factory.mktemp("saved"))


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:the checkpoint has the random states")
@pytest.mark.parametrize(
    "tick", rest_is_slow([1, HORIZON, HORIZON + 1, 2 * HORIZON - 1, EPOCHS * HORIZON], {HORIZON, HORIZON + 1})
)
def test_it_goes_on_from_the_beginning_of_the_rollout(
    tick: int, saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = load(saved.checkpoints / f"tick{tick}.ckpt")
    content["callbacks"]["RolloutState"]["loop"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    run = Run(tmp_path / "version_0")
    run.checkpoints.mkdir(parents=True)
    torch.save(content, run.checkpoints / "gpu.ckpt")

    built = fit(tmp_path, "--ckpt_path", str(run.checkpoints / "gpu.ckpt"))

    assert "this run is on cpu, the run so far was on another type of device" in capsys.readouterr().out
    assert built.trainer.current_epoch == EPOCHS
    if tick == EPOCHS * HORIZON:  # nothing is left to train
        ours, theirs = built.model.state_dict(), content["state_dict"]
        assert ours.keys() == theirs.keys()
        assert all((ours[name] == theirs[name]).all() for name in ours)
        return
    whole_rollouts = tick // HORIZON
    ticks = [step for step, _ in run.scalars()["hosts/score"]]
    assert ticks == list(range(whole_rollouts * HORIZON + 1, EPOCHS * HORIZON + 1)), "every rollout is whole"
    assert [step for step, _ in run.scalars()["train/kl"]] == [
        HORIZON * (rollout + 1) for rollout in range(whole_rollouts, EPOCHS)
    ]
