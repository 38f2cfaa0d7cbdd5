"""The module under a plain Lightning trainer, on environments outside of this project."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from esper_lightning.callbacks import RolloutState
from esper_lightning.controllers.learned import LearnedController
from esper_lightning.datamodules import VectorData
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import Anneal, PPOConfig
from esper_lightning.ppo.policy import PolicyConfig
from tests.cue import CueMemory
from tests.runs import differences

PPO = PPOConfig(
    lr=Anneal(start=3e-3, end=3e-3),
    minibatches=2,
    gamma=0.9,
    entropy=Anneal(start=0.01, end=0.0),
    target_kl=None,
)


def trainer(epochs: int, *callbacks: Any, root: Path | None = None) -> Trainer:
    return Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        callbacks=[RolloutState(), *callbacks],
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )


def train(epochs: int, policy: PolicyConfig, delay: int = 3, **changes: Any) -> tuple[TamiyoModule, VectorData]:
    torch.manual_seed(0)
    data = VectorData(CueMemory, {"n_envs": 32, "horizon": 20, "delay": delay})
    module = TamiyoModule(policy, PPO, **changes)
    trainer(epochs).fit(module, datamodule=data)
    return module, data


def right_answers(module: TamiyoModule, delay: int, games: int = 64) -> float:
    """Return the share of games that the greedy policy wins."""
    pool = CueMemory(games, 1, delay)
    pool.reset(range(1000, 1000 + games))
    controller = LearnedController(module.policy, module.observation_norm)
    controller.reset(pool)
    for _ in range(delay + 2):
        pool.step(controller.act(pool))
    assert len(pool.recent) == games
    return sum(pool.recent) / games


@pytest.mark.slow
@pytest.mark.parametrize("asymmetric", [False, True])
def test_a_cue_is_remembered_by_an_lstm_through_masks_and_two_heads(asymmetric: bool) -> None:
    module, _ = train(40, PolicyConfig(width=32, asymmetric=asymmetric))

    assert module.report.metrics["first_ratio_error"] < 1e-5
    assert right_answers(module, delay=3) > 0.8
    assert set(module.report.metrics) >= {"entropy.row", "entropy.column", "kl", "explained_variance"}
    assert module.trainer.callback_metrics["rollout/right"] == module.collector.last_step.log["right"]


@pytest.mark.slow
def test_without_memory_it_cannot_be_done() -> None:
    module, _ = train(40, PolicyConfig(width=32, memory="none"))

    assert right_answers(module, delay=3) < 0.4


@pytest.mark.parametrize(
    ("settings", "privileged", "message"),
    [
        ({"ppo": PPOConfig(minibatches=9, sequence=4)}, True, "minibatches is 9, more than the 8 environments"),
        ({"ppo": PPOConfig(minibatches=5)}, True, "minibatches is 5, more than the 4 environments"),
        ({"ppo": PPOConfig(sequence=3)}, True, r"ppo\.sequence is 3, but a rollout has 8 ticks"),
        ({"policy": PolicyConfig(asymmetric=True)}, False, "these environments keep nothing from the policy"),
    ],
)
def test_settings_that_do_not_fit_the_environments_are_refused(
    settings: dict[str, Any], privileged: bool, message: str
) -> None:
    data = VectorData(CueMemory, {"n_envs": 4, "horizon": 8})
    data.pool.privileged = data.pool.privileged if privileged else None

    with pytest.raises(ValueError, match=message):
        trainer(1).fit(TamiyoModule(**settings), datamodule=data)


def test_a_run_goes_on_from_its_checkpoint_with_new_episodes(tmp_path: Path) -> None:
    def run(epochs: int, checkpoint: str | None = None) -> TamiyoModule:
        data = VectorData(CueMemory, {"n_envs": 4, "horizon": 20, "delay": 3})
        module = TamiyoModule(PolicyConfig(width=8, asymmetric=True), PPO)
        saving = ModelCheckpoint(tmp_path, "last", save_on_train_epoch_end=True, enable_version_counter=False)
        trainer(epochs, saving, root=tmp_path).fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True)
        return module

    before = run(2)
    state = {name: value.clone() for name, value in before.state_dict().items()}
    after = run(2, str(tmp_path / "last.ckpt"))
    assert differences(state, dict(after.state_dict())) == [], "nothing was left to train"
    loaded = TamiyoModule.load_from_checkpoint(tmp_path / "last.ckpt")
    assert differences(state, dict(loaded.state_dict())) == [], "a critic with features of its own included"
    assert loaded.policy_shape == before.policy_shape and loaded.ppo == PPO

    further = run(3, str(tmp_path / "last.ckpt"))
    assert further.collector.ticks == 60 and further.collector.episode == 3
    assert further.report.metrics["first_ratio_error"] < 1e-5
    assert {"privileged_norm.mean", "observation_norm.mean"} <= set(further.state_dict())
