"""A run resumed with another number of environments begins a new rollout and prints a note."""

import shutil
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.runs import EPOCHS, HORIZON, Run, fit, fit_saving_ticks, load
from tests.tiers import rest_is_slow

MORE, FEWER = 3, 1


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return fit_saving_ticks(tmp_path_factory.mktemp("saved"))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(
    ("tick", "envs"),
    rest_is_slow(
        product([1, HORIZON, HORIZON + 1, 2 * HORIZON - 1], [FEWER, MORE]), {(HORIZON, FEWER), (HORIZON + 1, MORE)}
    ),
)
def test_it_goes_on_from_the_beginning_of_the_rollout(
    tick: int, envs: int, saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path / "version_0")
    run.checkpoints.mkdir(parents=True)
    checkpoint = Path(shutil.copy(saved.checkpoints / f"tick{tick}.ckpt", run.checkpoints))
    flags = (f"--data.n_envs={envs}", "--model.ppo.minibatches=1", "--ckpt_path", str(checkpoint))

    built = fit(tmp_path, *flags)

    assert (
        f"{envs} environments, the run so far had 2: it resumes at the next rollout; results differ"
        in capsys.readouterr().out
    )
    whole_rollouts = tick // HORIZON
    ticks = [step for step, _ in run.scalars()["hosts/score"]]
    assert ticks == list(range(whole_rollouts * HORIZON + 1, EPOCHS * HORIZON + 1)), "every rollout is whole"
    assert [step for step, _ in run.scalars()["train/kl"]] == [
        HORIZON * (rollout + 1) for rollout in range(whole_rollouts, EPOCHS)
    ]
    assert built.trainer.current_epoch == EPOCHS
    assert len(load(run.last)["HostPoolData"]["pool"]["envs"]) == envs


@pytest.mark.filterwarnings("ignore:The dirpath has changed", "ignore:the checkpoint has the random states")
def test_a_run_of_another_type_of_device_goes_on_from_the_beginning_of_the_rollout(
    saved: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = load(saved.checkpoints / f"tick{HORIZON + 1}.ckpt")
    content["callbacks"]["RolloutState"]["loop"]["generator"] = torch.zeros(16, dtype=torch.uint8)  # as on CUDA
    run = Run(tmp_path / "version_0")
    run.checkpoints.mkdir(parents=True)
    torch.save(content, run.checkpoints / "gpu.ckpt")

    fit(tmp_path, "--trainer.max_epochs=2", "--ckpt_path", str(run.checkpoints / "gpu.ckpt"))

    assert "this run is on cpu, the run so far was on another type of device" in capsys.readouterr().out
    ticks = [step for step, _ in run.scalars()["hosts/score"]]
    assert ticks == list(range(HORIZON + 1, 2 * HORIZON + 1)), "the rollout is whole"


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_the_policy_and_its_normalisers_are_those_of_the_checkpoint(saved: Run, tmp_path: Path) -> None:
    last = saved.checkpoints / f"tick{EPOCHS * HORIZON}.ckpt"

    built = fit(tmp_path, f"--data.n_envs={MORE}", "--ckpt_path", str(last))  # nothing is left to train

    ours, theirs = built.model.state_dict(), load(last)["state_dict"]
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
