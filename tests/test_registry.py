"""Parts from outside of the package: five kinds in one file, used from YAML and from Python."""

import importlib
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest
import torch

from esper_lightning import controllers
from esper_lightning.callbacks.grow import make_decider
from esper_lightning.controllers import make_controller
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool, StepResult, executors
from esper_lightning.envs.executors import EXECUTORS, LoopExecutor
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import REWARDS, RewardConfig, compute_terms
from esper_lightning.envs.rewards import register as register_reward
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.blueprints import (
    blueprint_names,
    default_blueprints,
    find_blueprint,
    get_blueprint,
    register,
)
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.hosts import CNN
from esper_lightning.runtime import registry
from tests.rewards.ticks import host_step
from tests.runs import forgotten_parts
from tests.test_pages import guide

PARTS = guide("extending").files["parts.py"]
"""A blueprint, a task, a host, a controller, a reward and an executor of the page."""

NEEDY = """
class Needy:
    def __init__(self, speed):
        self.speed = speed
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Change to a folder with the file of parts; forget afterwards what it has registered."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine_parts.py").write_text(PARTS + NEEDY)
    with forgotten_parts():
        yield tmp_path
    sys.modules.pop("mine_parts", None)


def test_the_same_file_is_used_from_python(place: Path) -> None:
    parts = importlib.import_module("mine_parts")
    task = parts.EvenDigits()
    config = EnvConfig(
        horizon=6,
        training=HostTraining(batches=1),
        actions=ActionConfig(blueprints=["mine_parts.pointwise"], tempos={"FAST": 1}),
        lifecycle=LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0),
        reward=RewardConfig(mode="mine_parts.thrifty"),
        executor="mine_parts.Counting",
    )
    pool = HostPool(task, task.load(), parts.TwoLayers, config=config, n_envs=2, device=torch.device("cpu"))
    steps: list[StepResult] = []
    controller = make_controller("mine_parts.GrowOnce")
    outcome = play_episode(pool, "ours", controller, rng_seeds=[1, 3], on_step=steps.append)

    assert pool.space.blueprint == ["pointwise"], "the space has the name that is registered"
    assert type(pool.executor) is parts.Counting and pool.executor.epochs > 0
    assert outcome.fossils.tolist() == [1, 1]
    assert list(steps[0].terms) == ["gain", "size"]
    for step in steps:
        torch.testing.assert_close(step.reward.double(), step.terms["gain"] + step.terms["size"])
    assert type(make_decider("mine_parts.GrowOnce")) is type(make_decider("grow once")) is parts.GrowOnce


def test_parts_that_are_not_what_they_should_be_are_refused_in_a_sentence(place: Path) -> None:
    parts = importlib.import_module("mine_parts")
    for call, said in (
        (lambda: RewardConfig(mode="thrify"), "unknown reward 'thrify'; did you mean 'thrifty'?"),
        (lambda: RewardConfig(mode="something"), "; name a reward of your own by its import path"),
        (
            lambda: RewardConfig(mode="mine_parts.pointwise"),
            "reward 'mine_parts.pointwise' is not one; see docs/guides/ext",
        ),
        (lambda: RewardConfig(mode="mine_parts.thrify"), "reward: mine_parts has no 'thrify'; did you mean 'thrifty'?"),
        (lambda: RewardConfig(mode="not_there.thrifty"), "reward: cannot import 'not_there' for 'not_there.thrifty'"),
        (lambda: ActionConfig(blueprints=["mine_parts.thrifty"]), "blueprint 'mine_parts.thrifty' is not one"),
        (lambda: EnvConfig(executor="mine_parts.TwoLayers"), "executor 'mine_parts.TwoLayers' is not one"),
        (lambda: make_controller("mine_parts.Needy"), "missing a required argument: 'speed'; give every argument a"),
        (lambda: make_controller("mine_parts.EvenDigits"), "EvenDigits has no method 'reset'; give it one"),
        (lambda: register_reward("thrifty", ["gain"])(lambda step, config: {}), "'thrifty' is already registered"),
        (lambda: register_reward("a.b", ["gain"])(parts.thrifty), "register it under a name without a dot"),
        (lambda: register_reward("none", [])(parts.thrifty), "terms must be a list of different names"),
        (lambda: register_reward("twice", ["gain", "gain"])(parts.thrifty), "terms must be a list of different names"),
        (lambda: register_reward("taken", ["gain", "rollback"])(parts.thrifty), "none may be 'rollback'"),
        (lambda: controllers.register(parts.GrowOnce), "'mine_parts.GrowOnce'>: register it under a name"),
        (lambda: executors.register("mine")(parts.GrowOnce), "mine_parts.GrowOnce'> is not one"),
        (lambda: executors.register("auto")(LoopExecutor), "executor 'auto' is a name of this package"),
        (lambda: register("a", "image", parameters=len, flops=len), "layouts must be a set such as {'image'}"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            call()
    step = host_step()
    for returned, said in (
        ({"gain": 0.0}, r"returned {'gain': 0.0}, not its terms; return a dictionary of \['gain', 'size'\]"),
        (None, "returned None, not its terms; return a dictionary"),
        ({"gain": torch.zeros(3), "size": 0.0}, r"returned tensor.* as its term 'gain'; return a finite number"),
        ({"gain": None, "size": 0.0}, "returned None as its term 'gain'"),
        ({"gain": math.nan, "size": 0.0}, "returned nan as its term 'gain'; return a finite number"),
    ):
        with forgotten_parts(), pytest.raises(ValueError, match=f"reward 'forgetful' {said}"):
            register_reward("forgetful", ["gain", "size"])(lambda step, config, returned=returned: returned)
            compute_terms(step, RewardConfig(mode="forgetful"))
    assert compute_terms(step._replace(diverged=True), RewardConfig(mode="thrifty")) == {"gain": 0.0, "size": 0.0}


def test_a_term_may_be_a_tensor_of_one_number_and_is_nan_where_the_host_is(place: Path) -> None:
    register_reward("tensors", ["loss"])(lambda step, config: {"loss": -torch.tensor([step.loss])})
    terms = [compute_terms(host_step(loss=loss), RewardConfig(mode="tensors")) for loss in (0.5, math.nan)]

    assert terms[0] == {"loss": -0.5} and type(terms[0]["loss"]) is float
    assert math.isnan(terms[1]["loss"]), "the host has diverged, which is not the reward's fault"


def test_a_part_that_is_defined_again_replaces_the_first(place: Path) -> None:
    module = importlib.import_module("mine_parts")
    first = type(make_controller("mine_parts.GrowOnce"))

    importlib.reload(module)  # as when the cell of a notebook runs again

    assert first is not module.GrowOnce
    assert type(make_controller("grow once")) is type(make_controller("mine_parts.GrowOnce")) is module.GrowOnce
    assert REWARDS["thrifty"].compute is module.thrifty
    assert get_blueprint("pointwise", "vector").build is module.pointwise


def test_what_no_setting_names_is_not_offered(place: Path) -> None:
    importlib.import_module("mine_parts")

    assert "pointwise" in blueprint_names("vector")
    assert "pointwise" not in default_blueprints("vector")
    assert "counting" in EXECUTORS


def test_an_installed_package_brings_parts(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    points = EntryPoints([EntryPoint("mine", "mine_parts", registry.ENTRY_POINTS)])
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))
    registry.import_installed.cache_clear()
    assert "mine_parts" not in sys.modules

    assert find_blueprint("pointwise") == "pointwise"
    assert RewardConfig(mode="thrifty").mode == "thrifty"

    registry.import_installed.cache_clear()


def test_a_factory_is_described_as_in_a_config() -> None:
    as_configured = partial(partial(lambda call, *args, **options: call(*args, **options), print), CNN, base=4)
    public = "esper_lightning.hosts.CNN"
    assert registry.describe_factory(CNN, {}) == {"class_path": public, "init_args": {}}
    assert registry.describe_factory(partial(CNN, base=4), {"kernel": 1})["init_args"] == {"base": 4, "kernel": 1}
    assert registry.describe_factory(as_configured, {}) == {"class_path": public, "init_args": {"base": 4}}
