"""A policy after its training: it is evaluated, loaded, and decides in a user's training."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from esper_lightning import load_controller
from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.grow import make_decider
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.runtime.checkpoint import DESCRIBED, METADATA_KEY, read_policy, write_policy
from tests.callbacks.grow.trainings import QUICK
from tests.runs import Run, fit, load, only_run

pytestmark = pytest.mark.slow

FAST = ActionConfig(tempos={"FAST": 2})
RULES = LifecycleConfig(
    isolation="straight_through", training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0
)
"""Lifecycle of `configs/smoke.yaml`."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two rollouts on hosts with three slots."""
    root = tmp_path_factory.mktemp("trained")
    fit(root, "--trainer.max_epochs=2", "--seed_everything=0")
    return only_run(root)


def test_a_policy_as_safetensors_acts_as_that_of_its_checkpoint_and_is_found_by_name(
    trained: Run, make_pool: Callable[..., HostPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_lightning.runtime.checkpoint.POLICIES", tmp_path)
    file = tmp_path / "general.safetensors"
    write_policy(trained.last, file, {"zero shot": "a table"})

    named, loaded = make_decider("tamiyo"), load_controller(trained.last)
    pool = make_pool(2, sight=loaded.sight, actions=FAST)
    ours, theirs = (play_episode(pool, "tamiyo", one, rng_seeds=[3, 4]) for one in (named, loaded))

    assert (ours.ops == theirs.ops).all() and (ours.objective == theirs.objective).all()
    told = read_policy(file)
    assert told["results"] == {"zero shot": "a table"} and "torch" in told["versions"]
    write_policy(file, file, {"zero shot": "a newer table"})
    newer = read_policy(file)
    assert newer["results"] == {"zero shot": "a newer table"} and newer["versions"] == told["versions"]
    assert all(torch.equal(newer["state_dict"][name], told["state_dict"][name]) for name in told["state_dict"])
    assert find_controller("tamiyo", "--controller").sight == loaded.sight
    grow = Grow(["3"], decider="tamiyo")
    assert (grow.lifecycle, grow.actions) == (RULES, FAST), "it grows by the rules of its training"
    own = Grow(["3"], decider="tamiyo", lifecycle=QUICK, actions=ActionConfig(blueprints=["norm"]))
    assert own.lifecycle == QUICK and own.actions.blueprints == ["norm"]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is damaged or no policy of this version"):
        load_controller(file)


def test_a_policy_with_numbers_that_are_not_finite_is_refused_in_one_line(trained: Run, tmp_path: Path) -> None:
    checkpoint, name = load(trained.last), "observation_norm.host.var"
    checkpoint["state_dict"][name].view(-1)[0] = math.inf
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    weights = {key: tensor.contiguous() for key, tensor in checkpoint["state_dict"].items()}
    described = {key: checkpoint[key] for key in DESCRIBED if key in checkpoint}
    metadata = {METADATA_KEY: json.dumps(described)}
    safetensors.torch.save_file(weights, tmp_path / "bad.safetensors", metadata)

    for file in ("bad.ckpt", "bad.safetensors"):
        with pytest.raises(ValueError, match=f"{file}'.*: {name} holds numbers that are not finite") as refused:
            load_controller(tmp_path / file)
        assert "\n" not in str(refused.value)
