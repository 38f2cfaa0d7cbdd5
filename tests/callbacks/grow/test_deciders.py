"""What decides: rules by name, a schedule from a file, a trained policy, and objects of a user."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.controllers.schedules import Schedule, ScheduledAction, write_schedule
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.checkpoint import NAMED_POLICIES, POLICIES
from tests.callbacks.grow.trainings import Classifier, Plan, classifier, grow, train
from tests.decisions import cull, germinate


def test_nothing_grows_by_wait_which_also_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plain, control = classifier(), classifier()
    train(plain, epochs=6)
    train(control, grow(decider="wait"), epochs=3).save_checkpoint(tmp_path / "half.ckpt")

    train(control, grow(decider="wait"), epochs=6, resume_from=tmp_path / "half.ckpt")

    weights = control.state_dict()
    assert all(weights[name].shape == weight.shape for name, weight in plain.state_dict().items())
    assert not any("seed." in name for name in weights)


def flops_of(network: nn.Module) -> int:
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        network.eval()(torch.zeros(1, 1, 8, 8))
    return counter.get_total_flops()


def test_the_controls_are_the_ungrown_network_and_the_grown_one_complete_from_the_first_batch(
    capsys: pytest.CaptureFixture[str],
) -> None:
    grown, callback = classifier(), grow({3: germinate(0)})
    train(grown, callback, epochs=6)
    told, controls = capsys.readouterr().out, callback.controls

    assert list(controls) == ["ungrown", "built in"] and controls["ungrown"] == "wait"
    host, whole = (flops_of(network) for network in (classifier().net, grown.net))
    batches = callback.batches_seen // 6
    spent = 3 * batches * host + 3 * batches * whole
    affordable = {"ungrown": round(spent / host), "built in": round(spent / whole)}
    assert callback.affordable_batches == affordable
    assert f"{callback.batches_seen} training batches cost the FLOPs of {affordable['built in']} with" in told
    assert f"and of {affordable['ungrown']} without" in told

    static, again = classifier(), grow(decider=controls["built in"])
    train(static, again, epochs=2)
    slot, _ = again.growing.slots.values()
    assert (slot.stage, slot.blueprint, slot.age, slot.alpha_now) == (Stage.FOSSILIZED, "conv_light", 1, 1.0)
    assert again.affordable_batches["built in"] == again.batches_seen
    assert "cost the FLOPs" not in capsys.readouterr().out


def test_a_schedule_from_a_file_is_played(tmp_path: Path) -> None:
    entries = (
        ScheduledAction(1, "GERMINATE", "5", blueprint="bottleneck"),
        ScheduledAction(3, "CULL", "5"),
        ScheduledAction(4, "GERMINATE", "3", blueprint="conv_light"),
    )
    write_schedule(Schedule(("3", "5"), entries), tmp_path / "plan.json")
    callback = grow(decider=str(tmp_path / "plan.json"), batches=1)

    train(classifier(), callback, epochs=6)

    first, second = callback.growing.slots.values()
    assert (first.blueprint, second.blueprint) == ("conv_light", None)
    assert second.stage is Stage.EMBARGOED


def test_a_policy_decides_by_the_rules_of_its_training_and_its_run_goes_on_with_it_alone(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batches": 1, "loss": "val_loss", "lifecycle": None, "horizon": 4}
    begun = train(classifier(), grow(decider="tamiyo", **settings), epochs=1)
    begun.save_checkpoint(tmp_path / "begun.ckpt")
    other = shutil.copy(POLICIES / NAMED_POLICIES["tamiyo"], tmp_path / "other.safetensors")

    resume = partial(train, resume_from=tmp_path / "begun.ckpt", epochs=2)
    resume(classifier(), callback := grow(decider="tamiyo", **settings))
    assert callback.lifecycle.training_ticks == 0 and not callback.lifecycle.auto_cull
    assert callback.pool is not None and len(callback.pool.env.history.score) == 2
    with pytest.raises(ValueError, match=r"of decider: tamiyo, the run of decider: .*other\.safetensors"):
        resume(classifier(), grow(decider=str(other), **settings))


def test_a_policy_goes_on_after_a_validation_without_a_number() -> None:
    class Broken(Classifier):
        """Classifier whose loss is not a number in one validation, with seeds in the network and without."""

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            super().validation_step(batch, batch_idx)
            if self.trainer.current_epoch == 2:
                self.log("val_loss", math.nan)

    L.seed_everything(0, verbose=False)
    callback = grow(decider="tamiyo", monitor="val_loss", mode="min", batches=1, lifecycle=None)
    train(Broken(), callback, epochs=5)

    assert callback.pool is not None
    assert any(math.isnan(loss) for loss in callback.pool.env.history.loss)
    state = callback.decider.state_dict()["state"]  # pyright: ignore[reportAttributeAccessIssue]
    assert all(part.isfinite().all() for part in state)
    assert callback.pool.observation.features.isfinite().all()


def test_a_decision_that_is_impossible_is_refused() -> None:
    with pytest.raises(ValueError, match="Plan: host 0: CULL 3 is masked; choose within the masks"):
        train(classifier(), grow({0: cull(0)}), epochs=1)


def test_a_decider_without_a_state_cannot_continue_a_run(tmp_path: Path) -> None:
    forgetful = type("Forgetful", (), {"actions": {}, "reset": Plan.reset, "act": Plan.act})
    train(classifier(), grow(decider=forgetful()), epochs=1).save_checkpoint(tmp_path / "saved.ckpt")

    with pytest.raises(ValueError, match="Forgetful cannot continue a run; give it state_dict"):
        train(classifier(), grow(decider=forgetful()), epochs=2, resume_from=tmp_path / "saved.ckpt")
