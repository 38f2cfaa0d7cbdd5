"""The comparison: `fit` ends with it; `test` repeats it with other policies, rules and schedules. Files of policies."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from esper_lightning import load_controller
from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.grow import make_decider
from esper_lightning.controllers.schedules import Schedule, write_schedule
from esper_lightning.envs import ActionConfig, HostPool
from esper_lightning.evaluation.checkpoints import find_controller
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.runtime.checkpoint import read_policy, write_policy
from tests.callbacks.grow.trainings import QUICK
from tests.runs import TINY, Run, command, csv_rows, fit, only_run, refusal

FEW = ("--model.evaluation.hosts=2",)
LITTLE = (*FEW, "--model.evaluation.controls=false", "--model.evaluation.against=[climbing]")
SLOTS = ("block1.pool", "block2.pool", "block3")


def rows_of(folder: Path) -> list[dict[str, str]]:
    return csv_rows(folder / "evaluation.csv")


def compare(root: Path, *args: str) -> Path:
    """Run `test` in this process and return the folder of its only results."""
    command("test", *args, "--trainer.default_root_dir", str(root))
    (found,) = root.rglob("evaluation.csv")
    return found.parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Runs of two training seeds, each with its comparison."""
    runs = []
    for seed in range(2):
        root = tmp_path_factory.mktemp("trained")
        fit(root, "--trainer.max_epochs=1", f"--seed_everything={seed}", *FEW)
        runs.append(only_run(root))
    return runs


def lone(run: Run, folder: Path) -> str:
    """Return a copy of the last checkpoint of a run; results of one in a run folder go there."""
    return str(shutil.copy(run.last, folder / "lone.ckpt"))


def names(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["controller"] for row in rows))


def test_fit_ends_with_the_comparison_of_all_controllers(trained: list[Run]) -> None:
    folder = trained[0].folder / "evaluation"
    rules = ["small static", "random", "heuristic", "periodic", "climbing"]

    assert {"tamiyo", *rules} <= set(names(rows_of(folder)))
    summary = json.loads((folder / "evaluation.json").read_text())["controllers"]
    own = [float(row["objective"]) for row in rows_of(folder) if row["controller"] == "tamiyo"]
    assert summary["tamiyo"]["objective"]["mean"] == pytest.approx(np.mean(own), rel=1e-5)
    scalars = trained[0].scalars()
    assert scalars["test/objective"][0][1] == pytest.approx(np.mean(own), rel=1e-5)


def test_test_repeats_the_comparison_with_other_hosts_and_rules(trained: list[Run], tmp_path: Path) -> None:
    own = compare(tmp_path, *TINY, *LITTLE, "--ckpt_path", lone(trained[0], tmp_path))

    expected = [row for row in rows_of(trained[0].folder / "evaluation") if row["controller"] in ("tamiyo", "climbing")]
    assert rows_of(own) == expected


def test_several_policies_are_training_seeds_and_rivals_are_rows(trained: list[Run], tmp_path: Path) -> None:
    paths = [str(run.last) for run in trained]
    both = compare(tmp_path / "a", *TINY, *LITTLE, f"--model.evaluation.policies={json.dumps(paths)}")
    rival = ("--ckpt_path", lone(trained[0], tmp_path), f"--model.evaluation.against=[{paths[1]}, climbing]")
    against = compare(tmp_path / "b", *TINY, *LITTLE, *rival)

    assert {row["training_seed"] for row in rows_of(both) if row["controller"] == "tamiyo"} == {"0", "1"}
    name = f"rival {paths[1]}"
    assert names(rows_of(against)) == ["tamiyo", name, "climbing"]
    theirs = [row["objective"] for row in rows_of(both) if row["training_seed"] == "1"]
    assert [row["objective"] for row in rows_of(against) if row["controller"] == name] == theirs


def test_rules_and_schedules_are_compared_without_a_policy(trained: list[Run], tmp_path: Path) -> None:
    """A13: rules run from the command line without a trained policy."""
    write_schedule(Schedule(SLOTS, ()), tmp_path / "never.json")
    schedules = ("--model.evaluation.schedules", json.dumps({"never": str(tmp_path / "never.json")}))
    alone = ("--model.evaluation.policies=[]", "--model.evaluation.against=[periodic, never]")

    rows = rows_of(compare(tmp_path / "runs", *TINY, *FEW, "--model.evaluation.controls=false", *alone, *schedules))

    assert names(rows) == ["periodic", "never"]
    beside = [row for row in rows_of(trained[0].folder / "evaluation") if row["controller"] == "periodic"]
    assert [row for row in rows if row["controller"] == "periodic"] == beside


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "nothing to compare": (
        (*FEW, "--model.evaluation.against=[]", "--model.evaluation.controls=false", "--model.evaluation.policies=[]"),
        "is empty and there is no policy, so nothing is compared",
    ),
    "a control of no policy": (
        (*FEW, "--model.evaluation.against=[climbing, yoked]", "--model.evaluation.policies=[]"),
        "'yoked' needs a trained policy",
    ),
    "a policy that is not there": ((*LITTLE, "--model.evaluation.policies=[no.ckpt]"), "'no.ckpt' does not exist"),
    "a training seed twice": ((*LITTLE, "--model.evaluation.policies=[LAST, BEST]"), "are both of training seed 0"),
    "a checkpoint that is not there": ((*LITTLE, "--ckpt_path=nowhere.ckpt"), "'nowhere.ckpt' does not exist"),
    "other hosts": ((*LITTLE, "--ckpt_path=LAST", "--data.host.init_args.base=8"), "host: the checkpoint has"),
    "a schedule of other hosts": (
        (*FEW, "--ckpt_path=LAST", '--model.evaluation.schedules={"a": "SCHEDULE"}'),
        "the schedule is for hosts with slots",
    ),
    "a schedule that was never searched": (
        (*FEW, "--ckpt_path=LAST", "--model.evaluation.against=[best fixed]"),
        "'best fixed' must be searched first; set search.steps, or name its file in schedules",
    ),
    "too short a search": (
        (*FEW, "--ckpt_path=LAST", "--model.evaluation.search.steps=9"),
        "search.steps is 9; to see one schedule on a host of each context",
    ),
    "a schedule that is not there": (
        (*FEW, "--ckpt_path=LAST", "--model.evaluation.schedules={best fixed: nowhere.json}"),
        "schedule nowhere.json cannot be read",
    ),
    "no contexts": ((*FEW, "--ckpt_path=LAST", "--model.evaluation.held_out=true"), "no held-out contexts"),
    "no hosts": (("--ckpt_path=LAST", "--model.evaluation.hosts=0"), "evaluation.hosts is 0"),
    "a policy of other tempos": (
        (*LITTLE, "--model.evaluation.policies=[LAST]", "--data.env.actions.tempos={SLOW: 3}"),
        'set data.env.actions as in its training: {"tempos": {',
    ),
}


@pytest.mark.parametrize(("flags", "said"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_compared_ends_in_one_line(
    flags: tuple[str, ...], said: str, trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_schedule(Schedule(("elsewhere",), ()), tmp_path / "schedule.json")
    known = {"LAST": trained[0].last, "BEST": trained[0].checkpoints / "best.ckpt"}
    for name, path in (known | {"SCHEDULE": tmp_path / "schedule.json"}).items():
        flags = tuple(flag.replace(name, str(path)) for flag in flags)

    assert said in refusal(capsys, lambda: compare(tmp_path, *TINY, *flags))


# Its policy, as a file of its own

FAST = ActionConfig(tempos={"FAST": 2})


def test_a_policy_as_safetensors_acts_as_that_of_its_checkpoint_and_is_found_by_name(
    trained: list[Run], make_pool: Callable[..., HostPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_lightning.runtime.checkpoint.POLICIES", tmp_path)
    file = tmp_path / "general.safetensors"
    write_policy(trained[0].last, file, {"zero shot": "a table"})

    named, loaded = make_decider("tamiyo"), load_controller(trained[0].last)
    pool = make_pool(2, observation=loaded.observation, actions=FAST)
    ours, theirs = (play_episode(pool, "tamiyo", one, rng_seeds=[3, 4]) for one in (named, loaded))

    assert (ours.ops == theirs.ops).all() and (ours.objective == theirs.objective).all()
    told = read_policy(file)
    assert told["results"] == {"zero shot": "a table"} and "torch" in told["versions"]
    write_policy(file, file, {"zero shot": "a newer table"})
    newer = read_policy(file)
    assert newer["results"] == {"zero shot": "a newer table"} and newer["versions"] == told["versions"]
    assert all(torch.equal(newer["state_dict"][name], told["state_dict"][name]) for name in told["state_dict"])
    assert find_controller("tamiyo", "controller").observation == loaded.observation
    grow = Grow(["3"], decider="tamiyo")
    rules = LifecycleConfig(
        isolation="straight_through", training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0
    )
    assert (grow.lifecycle, grow.actions) == (rules, FAST), "it grows by the rules of its training"
    own = Grow(["3"], decider="tamiyo", lifecycle=QUICK, actions=ActionConfig(blueprints=["norm"]))
    assert own.lifecycle == QUICK and own.actions.blueprints == ["norm"]

    weights, name = safetensors.torch.load_file(file), "observation_norm.host.var"
    weights[name].fill_(math.inf)
    with safetensors.safe_open(file, "pt") as opened:
        safetensors.torch.save_file(weights, tmp_path / "bad.safetensors", opened.metadata())
    with pytest.raises(ValueError, match=f"bad.safetensors'.*: {name} holds numbers that are not finite"):
        load_controller(tmp_path / "bad.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match="is damaged or no policy of this version"):
        load_controller(file)
