"""Grow with stack slots: copies of the blocks of a GPT that fit the batches that are left."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.measuring import VariantMeter
from esper_lightning.controllers.rules import Scaling
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, ScheduledAction
from esper_lightning.envs.flops import positions_per_parameter
from esper_lightning.growth.gates import LifecycleConfig
from tests.callbacks.gpt import BATCHES, make, train

EPOCHS = 8


def grow(targets: float, **settings: Any) -> Grow:
    """Return the callback with the rule that deepens a network for which so many tokens per parameter are left."""
    rule = Scaling()
    rule.targets = targets
    return Grow(stacks={"blocks": 2}, decider=rule, monitor="val_loss", mode="min", batches=1, **settings)


def copies(module: Any) -> int:
    """Return the number of blocks that have grown."""
    return sum(name.endswith("norm1.weight") for name, _ in module.net.named_parameters()) - 1


@pytest.fixture(scope="module")
def left() -> float:
    """Tokens per parameter of a GPT with two blocks when a quarter of the training of one block is over."""
    callback = grow(0.0)
    train(make(1), callback, max_epochs=1)
    assert callback.pool is not None
    subject = callback.pool.subject
    block = sum(parameter.numel() for parameter in make(1).net.blocks[0].parameters())
    flops = subject.flops.of_step(()) * 0.75 * EPOCHS * BATCHES
    return positions_per_parameter(flops, subject.host_parameters + block)


@pytest.mark.parametrize(("share", "expected"), [(1.01, 0), (0.99, 1), (0.0, 2)])
def test_a_gpt_grows_as_deep_as_the_batches_that_are_left_suffice_for(left: float, share: float, expected: int) -> None:
    module = make(1)

    train(module, grow(share * left), max_epochs=EPOCHS)

    assert copies(module) == expected


def test_a_copy_is_trained_and_a_resumed_training_ends_as_the_whole_one(tmp_path: Path) -> None:
    def checkpoints() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)

    whole = make(1)
    train(whole, grow(0.0), checkpoints(), max_epochs=EPOCHS, enable_checkpointing=True)
    assert copies(whole) == 2
    queries = [weight for name, weight in whole.net.named_parameters() if name.endswith("qkv.weight")]
    assert not any(torch.equal(one, other) for one, other in combinations(queries, 2))

    for epoch in (0, 2, 4):
        resumed = make(1)
        train(resumed, grow(0.0), resume_from=tmp_path / f"epoch={epoch}.ckpt", max_epochs=EPOCHS)
        ours, theirs = resumed.state_dict(), whole.state_dict()
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_seed_beside_copies_is_judged_with_them_and_copies_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = ("blocks.stack1", "last"), ("norm", "norm")
    entries = tuple(ScheduledAction(0, "GERMINATE", *what) for what in grown)
    schedule = FixedSchedule(Schedule(("norm", "blocks.stack1"), entries))
    measured: list[frozenset[str]] = []
    real = VariantMeter.measure
    monkeypatch.setattr(VariantMeter, "measure", lambda *args: measured.extend(args[1]) or real(*args))
    metrics: dict[str, Any] = {"monitor": "val_loss", "mode": "min", "batches": 1}
    lifecycle = LifecycleConfig(isolation="straight_through", training_ticks=0, min_contribution=None)
    callback = Grow(["norm"], stacks={"blocks": 1}, decider=schedule, lifecycle=lifecycle, **metrics)

    train(make(1), callback, max_epochs=6)

    assert callback.pool is not None
    of_seed, of_copy = callback.pool.subject.records
    assert of_copy.contribution is None and of_seed.contribution is not None
    assert {frozenset({"norm", "blocks.stack1"}), frozenset({"blocks.stack1"})} <= {*measured}
    assert all("blocks.stack1" in variant for variant in measured if variant)


def test_with_stacks_alone_the_policy_of_the_package_is_the_one_that_knows_budgets(tmp_path: Path) -> None:
    def policy() -> Grow:
        metrics: dict[str, Any] = {"monitor": "val_loss", "mode": "min", "batches": 1}
        return Grow(stacks={"blocks": 2}, decider="tamiyo", **metrics)

    module, whole, resumed = make(1), policy(), policy()
    train(module, whole, ModelCheckpoint(tmp_path, "begun"), max_epochs=2, enable_checkpointing=True)
    train(make(1), resumed, resume_from=tmp_path / "begun.ckpt", max_epochs=3)

    assert whole.decider_name == resumed.decider_name == "tamiyo_depth"
    assert copies(module) == 0, "two epochs are a small budget"
