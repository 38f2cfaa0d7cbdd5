"""A policy after its training: it is evaluated, loaded, and decides in a user's training."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch
import yaml

from esper_lightning import load_controller
from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.grow import make_decider
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.runtime.checkpoint import DESCRIBED, METADATA_KEY, read_policy, write_policy
from tests.callbacks.grow.trainings import QUICK, classifier, train
from tests.runs import CONFIGS, Run, cli, fit, load, only_run

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


@pytest.mark.parametrize(
    ("part", "value"), [("observation_norm.host.var", math.nan), ("value_norm.var", math.inf), ("policy", math.nan)]
)
def test_a_policy_with_numbers_that_are_not_finite_is_refused_in_one_line(
    part: str, value: float, trained: Run, tmp_path: Path
) -> None:
    checkpoint = load(trained.last)
    name = next(name for name in checkpoint["state_dict"] if name.startswith(part))
    checkpoint["state_dict"][name].view(-1)[0] = value
    torch.save(checkpoint, tmp_path / "bad.ckpt")
    weights = {key: tensor.contiguous() for key, tensor in checkpoint["state_dict"].items()}
    described = {key: checkpoint[key] for key in DESCRIBED if key in checkpoint}
    metadata = {METADATA_KEY: json.dumps(described)}
    safetensors.torch.save_file(weights, tmp_path / "bad.safetensors", metadata)

    for file in ("bad.ckpt", "bad.safetensors"):
        with pytest.raises(ValueError, match=f"{file}'.*: {name} holds numbers that are not finite") as refused:
            load_controller(tmp_path / file)
        assert "\n" not in str(refused.value)


def test_it_decides_in_the_training_of_a_user_and_goes_on_from_a_checkpoint(trained: Run, tmp_path: Path) -> None:
    def callback() -> Grow:
        return Grow(["1", "3", "5"], decider=str(trained.last), batches=1, loss="val_loss", horizon=4)

    first, second = callback(), callback()
    train(classifier(dropout=0.0), first, epochs=2).save_checkpoint(tmp_path / "half.ckpt")
    train(classifier(dropout=0.0), second, epochs=4, resume_from=tmp_path / "half.ckpt")

    assert first.pool is not None and second.pool is not None
    assert len(first.pool.env.history.score) == 2 and len(second.pool.env.history.score) == 4
    assert second.pool.observation.features.shape[1] == 3, "a row for each slot"


def test_hosts_of_several_tasks_may_be_families_as_in_the_general_config(tmp_path: Path) -> None:
    settings = yaml.safe_load((CONFIGS / "general.yaml").read_text())
    data = settings["data"]
    tasks = {"Digits": data | {"family": data["env"]["family"]}, **data["also"]}
    for task in tasks.values():
        for group in task["family"]["train"]:
            if "horizon" in group:
                group["horizon"] = [1, 2]
        task.get("training", data["env"]["training"])["batches"] = 1
    for task in data["also"].values():
        task["n_envs"] = 3
    data["also"]["glyphs"]["task"]["init_args"] |= {"train": 100, "validation": 20, "test": 20}
    small = tmp_path / "small.yaml"
    small.write_text(yaml.safe_dump(settings, sort_keys=False))

    built = cli(
        *("--config", str(small), "--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.max_epochs=1"),
        *("--data.n_envs=6", "--data.env.horizon=2", "--data.env.family.held_out=[]"),
        *("--model.evaluation.hosts=0", "--trainer.enable_progress_bar=false"),
    )

    pool, report = built.datamodule.pool, built.model.report
    assert list(pool.task_slices) == list(tasks)
    assert pool.space.slot == [f"place{i + 1}" for i in range(8)]
    assert "bottleneck" not in pool.space.blueprint, "the benchmark offers it as an unknown one"
    offered = {
        name: (pool.masks.blueprint[span].any(-1).sum(-1).max().item(), pool.envs[span.start].slots[0].layout)
        for name, span in pool.task_slices.items()
    }
    assert 1 < offered["deep"][0] <= 8 and offered["wine"][0] <= 3
    assert {layout for _, layout in offered.values()} == {"image", "vector", "sequence"}
    assert {env.horizon for env in pool.envs} == {1, 2}
    assert report is not None and report.metrics["first_ratio_error"] < 1e-4
