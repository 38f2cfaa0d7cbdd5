"""`evaluate`: a trained policy against baselines, from its checkpoint alone."""

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from esper_lightning import load_controller
from esper_lightning.__main__ import main
from esper_lightning.controllers.schedule import Schedule, write_schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.evaluation.baselines import HAND_WRITTEN
from esper_lightning.evaluation.checkpoints import rival_names
from esper_lightning.evaluation.networks import load_host, read_description
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.run import run_comparison
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.module import TamiyoModule
from esper_lightning.tasks import Digits
from tests.runs import EPOCHS, HORIZON, ROOT, Run, fit, only_run

FEW = ("--evaluation.hosts=2",)
PAGE = (ROOT / "docs" / "guides" / "evaluation.md").read_text()
SLOTS = ("block1.pool", "block2.pool", "block3")
FILES = [
    *("curves.png", "evaluation.csv", "evaluation.json", "pareto.png", "schedule.json", "test_metrics.csv"),
    "timeline.png",
]


def evaluate(*args: str) -> None:
    """Run `esper-lightning evaluate` in this process."""
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process
        main(["evaluate", *args])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "evaluation.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def summary_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "evaluation.json").read_text())


def objectives(rows: list[dict[str, str]], controller: str) -> np.ndarray:
    """Return the objective of a controller on each host, in rows of at most one training seed."""
    return np.array([float(row["objective"]) for row in rows if row["controller"] == controller])


def without_time(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if name != "pool_seconds"} for row in rows]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Train with two RNG seeds; the first run ends with a comparison of its own."""
    root = tmp_path_factory.mktemp("trained")
    fit(root, "--seed_everything=0", *FEW)
    fit(root, "--seed_everything=1")
    return [Run(root / f"version_{n}") for n in (0, 1)]


def copy_of(run: Run, tmp_path: Path) -> Run:
    return Run(Path(shutil.copytree(run.folder, tmp_path / "copy")))


def test_a_checkpoint_is_all_that_is_needed_and_gives_the_table_of_its_run(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(trained[0], tmp_path)
    before = rows_of(run.folder / "evaluation")
    shutil.rmtree(run.folder / "evaluation")
    capsys.readouterr()

    evaluate("--ckpt_path", str(run.latest))

    said = capsys.readouterr().out
    assert said.splitlines()[0] == f"settings of {run.folder / 'config.yaml'}"
    assert sorted(path.name for path in (run.folder / "evaluation").iterdir()) == FILES
    assert without_time(rows_of(run.folder / "evaluation")) == without_time(before), "bit for bit what `fit` has found"
    names = list(dict.fromkeys(row["controller"] for row in before))
    assert all(f"│ {name} " in said for name in names)


def test_the_class_accuracies_of_a_host_make_up_its_accuracy_and_reach_tensorboard(trained: list[Run]) -> None:
    folder = trained[0].folder / "evaluation"
    with (folder / "test_metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    samples = torch.bincount(Digits().load().test.targets).tolist()

    for row, whole in zip(rows, rows_of(folder), strict=True):
        assert [row[name] for name in ("controller", "training_seed", "host")] == [
            whole[name] for name in ("controller", "training_seed", "host")
        ]
        right = sum(n * float(row[f"accuracy.{c}"]) for c, n in enumerate(samples))
        assert right / sum(samples) == pytest.approx(float(whole["accuracy"]), abs=1e-6)
    ours = [float(row["calibration_error"]) for row in rows if row["controller"] == "tamiyo"]
    ((tick, written),) = trained[0].scalars()["test/calibration_error"]
    assert tick == EPOCHS * HORIZON
    assert written == pytest.approx(sum(ours) / len(ours), rel=1e-5)
    assert summary_of(folder)["controllers"]["tamiyo"]["test_metrics"]["calibration_error"] == pytest.approx(written)


def test_every_controller_meets_the_same_hosts_and_is_measured_in_full(trained: list[Run]) -> None:
    rows = rows_of(trained[0].folder / "evaluation")

    by_name: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_name.setdefault(row["controller"], []).append(row)
    rules = ["random", "small static", "heuristic", "periodic", "climbing", "climbing, zero"]
    best = next(name.removeprefix("static ") for name in by_name if name.startswith("static ") and "tamiyo" not in name)
    assert best in HAND_WRITTEN
    statics = [f"static {name}{how}" for name in ("tamiyo", best) for how in ("", ", equal FLOPs")]
    assert list(by_name) == ["tamiyo", "sampled", *rules, "replayed", "yoked", *statics]
    hosts = [row["host_seed"] for row in by_name["tamiyo"]]
    assert len(set(hosts)) == 2
    for name, own in by_name.items():
        assert [row["host_seed"] for row in own] == hosts
        for row, grown in zip(own, by_name["tamiyo"], strict=True):
            assert 0.0 <= float(row["accuracy"]) <= 1.0
            assert float(row["flops"]) > 0.0
            assert int(row["parameters"]) >= 390
            if "equal FLOPs" not in name:
                assert int(row["ticks"]) == HORIZON
            if name == "static tamiyo, equal FLOPs":
                assert float(row["flops"]) <= float(grown["flops"])
    assert all(row["parameters"] == "390" and row["fossils"] == "0" for row in by_name["small static"])
    assert [row["parameters"] for row in by_name["static tamiyo"]] == [row["parameters"] for row in by_name["tamiyo"]]


@pytest.mark.slow
def test_a_policy_may_be_compared_with_nobody_but_its_own_network(trained: list[Run], tmp_path: Path) -> None:
    evaluate("--ckpt_path", str(trained[0].latest), *FEW, "--evaluation.against=[]", f"--out={tmp_path}")

    names = list(dict.fromkeys(row["controller"] for row in rows_of(tmp_path)))
    assert names == ["tamiyo", "static tamiyo", "static tamiyo, equal FLOPs"]


def test_the_governor_watches_the_hosts_that_are_evaluated(trained: list[Run], tmp_path: Path) -> None:
    everything_diverges = ("--governor.rules.max_loss=1e-6", "--governor.rules.patience=1")
    alone = (*FEW, "--evaluation.against=[]", "--evaluation.controls=false", f"--out={tmp_path}")
    evaluate("--ckpt_path", str(trained[0].latest), *alone, *everything_diverges)

    assert {int(row["rollbacks"]) for row in rows_of(tmp_path)} == {1}, "the cooldown lasts as long as the episode"


def test_the_best_hosts_of_the_policy_are_saved_as_they_were_tested(trained: list[Run], tmp_path: Path) -> None:
    alone = (*FEW, "--evaluation.against=[]", "--evaluation.controls=false", f"--out={tmp_path}")
    evaluate("--ckpt_path", str(trained[0].latest), *alone, "--save_networks=2")

    rows = sorted(rows_of(tmp_path), key=lambda row: -float(row["objective"]))
    folders = [tmp_path / "networks" / rank for rank in ("1", "2")]
    test = Digits().load().test
    for folder, row in zip(folders, rows, strict=True):
        description = read_description(folder)
        network = load_host(folder, description)
        with torch.no_grad():
            right = (network(test.inputs).argmax(1) == test.targets).double().mean().item()
        assert right == pytest.approx(float(row["accuracy"]), abs=1e-6)
        assert (description["controller"], str(description["rng_seed"])) == ("tamiyo", row["host_seed"])


@pytest.mark.slow
def test_a_line_says_that_an_earlier_comparison_will_be_replaced(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evaluation.csv").write_text("earlier")
    capsys.readouterr()

    alone = (*FEW, "--evaluation.against=[]", "--evaluation.controls=false", f"--out={tmp_path}")
    evaluate("--ckpt_path", str(trained[0].latest), *alone)

    assert f"this comparison will replace the earlier one in {tmp_path}" in capsys.readouterr().out.splitlines()
    assert {row["controller"] for row in rows_of(tmp_path)} == {"tamiyo"}


@pytest.mark.slow
def test_a_config_comes_before_that_of_the_run(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = tmp_path / "elsewhere.ckpt"
    shutil.copy(trained[0].latest, lone)
    capsys.readouterr()

    config = ("--config", str(trained[0].folder / "config.yaml"))
    evaluate(*config, "--ckpt_path", str(lone), "--out", str(tmp_path / "out"), "--evaluation.hosts=2")

    printed = capsys.readouterr().out
    assert "settings of" not in printed and "will replace" not in printed
    assert summary_of(tmp_path / "out")["hosts"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


@pytest.mark.slow
def test_further_training_seeds_are_reported_one_by_one_and_together(trained: list[Run], tmp_path: Path) -> None:
    more = json.dumps([str(trained[1].latest)])
    evaluate("--ckpt_path", str(trained[0].latest), "--more", more, "--out", str(tmp_path), *FEW)
    evaluate("--ckpt_path", str(trained[1].latest), "--out", str(tmp_path / "second"), *FEW)

    both = rows_of(tmp_path)
    seeds = {row["training_seed"] for row in both if row["controller"] == "tamiyo"}
    assert seeds == {"0", "1"}
    for seed, folder in (("0", trained[0].folder / "evaluation"), ("1", tmp_path / "second")):
        alone = without_time([row for row in rows_of(folder) if row["controller"] == "tamiyo"])
        ours = [row for row in both if row["controller"] == "tamiyo" and row["training_seed"] == seed]
        assert without_time(ours) == alone, "as if the policy had been compared alone"
    summary = summary_of(tmp_path)
    assert [one["training_seed"] for one in summary["checkpoints"]] == [0, 1]
    lead = summary["controllers"]["small static"]
    by_seed = lead["ahead_by_training_seed"]
    assert [one["training_seed"] for one in by_seed] == [0, 1]
    assert lead["ahead"]["mean"] == pytest.approx((by_seed[0]["mean"] + by_seed[1]["mean"]) / 2)
    assert {"timeline0.png", "timeline1.png", "schedule0.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_schedules_search_and_seeds_are_on_offer(trained: list[Run], tmp_path: Path) -> None:
    for name in ("late", "early"):
        write_schedule(Schedule(SLOTS, ()), tmp_path / f"{name}.json")
    named = json.dumps({name: str(tmp_path / f"{name}.json") for name in ("late", "early")})

    evaluate(
        *("--ckpt_path", str(trained[0].latest), "--out", str(tmp_path / "out"), "--evaluation.hosts=2"),
        *("--evaluation.schedules", named, "--evaluation.search.steps=480", "--evaluation.controls=false"),
        *("--evaluation.credit.hosts=1", "--evaluation.credit.repetitions=2"),
    )

    names = list(summary_of(tmp_path / "out")["controllers"])
    assert {"late", "early", "best fixed"} < set(names)
    assert not [name for name in names if name.startswith("static ")]
    assert {"best_schedule.json", "seeds.csv"} <= {path.name for path in (tmp_path / "out").iterdir()}
    still = {row["controller"]: row["accuracy"] for row in rows_of(tmp_path / "out") if row["host"] == "0"}
    assert still["late"] == still["early"] == still["small static"], "an ungrown host does not depend on the controller"


@pytest.mark.slow
def test_latest_is_the_newest_run_and_its_checkpoint_is_read_once(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = ("--trainer.default_root_dir", str(trained[1].folder.parent))

    few = (*FEW, "--evaluation.controls=false", "--evaluation.against=[small static]")
    with patch.object(torch, "load", wraps=torch.load) as read:
        evaluate("--ckpt_path=latest", *root, "--out", str(tmp_path), *few)

    assert [call.args[0].name for call in read.call_args_list] == [str(trained[1].latest)]
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == [f"evaluating {trained[1].latest}", f"settings of {trained[1].folder / 'config.yaml'}"]


def test_without_a_policy_rules_and_schedules_are_compared_on_the_same_hosts(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_schedule(Schedule(SLOTS, ()), tmp_path / "never.json")
    capsys.readouterr()

    evaluate(
        *("--config", str(trained[0].folder / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "fresh")),
        *(*FEW, "--evaluation.against=[periodic, random, never]"),
        *("--evaluation.schedules", json.dumps({"never": str(tmp_path / "never.json")})),
    )

    folder = tmp_path / "fresh" / "evaluation"
    assert sorted(path.name for path in folder.iterdir()) == [name for name in FILES if name != "schedule.json"]
    rows = without_time(rows_of(folder))
    names = list(dict.fromkeys(row["controller"] for row in rows))
    assert names == ["periodic", "random", "never", "static periodic", "static periodic, equal FLOPs"]
    beside_a_policy = without_time(rows_of(trained[0].folder / "evaluation"))
    for name in ("periodic", "random"):
        assert [row for row in rows if row["controller"] == name] == [
            row for row in beside_a_policy if row["controller"] == name
        ]
    assert {row["training_seed"] for row in rows} == {""}
    summary = summary_of(folder)
    assert summary["checkpoints"] == [] and summary["rivals"] == {}
    for name in names:
        lead = objectives(rows, "periodic") - objectives(rows, name)
        assert summary["controllers"][name]["ahead"]["mean"] == pytest.approx(lead.mean(), abs=1e-6)
    said = capsys.readouterr().out
    assert said.splitlines()[0] == "no checkpoint: rules and schedules alone"
    assert "periodic ahead" in said


def test_without_a_list_rules_are_compared_with_the_host_that_never_grows(trained: list[Run], tmp_path: Path) -> None:
    quick = ("--data.env.horizon=1", "--evaluation.controls=false")
    evaluate("--config", str(trained[0].folder / "config.yaml"), "--out", str(tmp_path), *FEW, *quick)

    rules = ["small static", "random", "heuristic", "periodic", "climbing", "climbing, zero"]
    assert list(summary_of(tmp_path)["controllers"]) == rules


@pytest.fixture(scope="module")
def other_kind(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Train with another reward, another observation and another kind of policy than `trained`."""
    root = tmp_path_factory.mktemp("other")
    fit(
        *(root, "--seed_everything=2", "--trainer.max_epochs=1", "--data.env.reward.mode=shaped"),
        *("--data.env.sight.hidden=['*.contribution*', blueprints]", "--data.env.sight.masks=false"),
        *("--model.policy.memory=none", "--model.policy.width=16"),
    )
    return only_run(root)


@pytest.mark.slow
def test_rivals_of_other_trainings_meet_the_hosts_of_the_policy_and_observe_them_as_in_their_training(
    trained: list[Run], other_kind: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = (*FEW, "--evaluation.against=[]", "--evaluation.controls=false")
    paths = [str(trained[0].latest), str(trained[1].latest), str(other_kind.latest)]
    rivals = rival_names(paths[1:], paths[:1])
    evaluate("--ckpt_path", paths[2], "--out", str(tmp_path / "own"), *alone)
    capsys.readouterr()

    with patch("esper_lightning.trainer.run_comparison", wraps=run_comparison) as compared:
        evaluate("--ckpt_path", paths[0], "--rivals", ",".join(paths[1:]), "--out", str(tmp_path / "both"), *alone)

    observed = [rival.sight for rival in compared.call_args.kwargs["rivals"].values()]
    assert observed == [ObservationConfig(), ObservationConfig(hidden=["*.contribution*", "blueprints"], masks=False)]
    rows = without_time(rows_of(tmp_path / "both"))
    assert list(dict.fromkeys(row["controller"] for row in rows)) == ["tamiyo", *rivals]
    assert {row["controller"]: row["training_seed"] for row in rows} == {"tamiyo": "0", rivals[0]: "1", rivals[1]: "2"}
    expected = [row for row in rows_of(trained[0].folder / "evaluation") if row["controller"] == "tamiyo"]
    expected += [row | {"controller": rivals[1]} for row in rows_of(tmp_path / "own")]
    assert [row for row in rows if row["controller"] != rivals[0]] == without_time(expected), "as if compared alone"
    summary = summary_of(tmp_path / "both")
    assert summary["rivals"][rivals[1]] == {"training_seed": 2, "source": paths[2]}
    for name in rivals:
        lead = mean_interval(objectives(rows, "tamiyo") - objectives(rows, name))
        said = summary["controllers"][name]["ahead"]
        assert [said[end] for end in lead._fields] == pytest.approx(list(lead), abs=1e-6)
    said = capsys.readouterr().out
    assert f"{paths[2]}: data.env.reward.mode: objective in the first, shaped here" in said
    assert all(f"│ {name} " in said for name in rivals)


@pytest.mark.parametrize(
    ("foreign", "named"),
    [
        ({"host": "a host of 7 parameters"}, "host: the checkpoint has a host of 7 parameters, this run"),
        ({"choices of the tempo head": ["SLOW"]}, "choices of the tempo head: the checkpoint has ['SLOW'], this run"),
        ({"observed features": ["progress"]}, "set data.env.objective as in its training"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_a_rival_of_other_hosts_is_refused_in_one_line_that_names_the_difference(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str], foreign: dict[str, Any], named: str
) -> None:
    checkpoint = torch.load(trained[1].latest, weights_only=True)
    checkpoint["esper_identity"] |= foreign
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        evaluate("--ckpt_path", str(trained[0].latest), "--rivals", str(tmp_path / "foreign.ckpt"), *FEW)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "foreign.ckpt' cannot be evaluated: " in line and named in line


UNWANTED: dict[str, tuple[tuple[str, ...], str]] = {
    "no checkpoint and no config": ((), "evaluate needs a trained policy or hosts: give --ckpt_path, or --config"),
    "a checkpoint that the config replaces": (("--ckpt_path", "LATEST", "--config", "CONFIG"), "behind --config"),
    "a policy without its run": (("--ckpt_path", "tamiyo"), "give the hosts by --config, and --transfer true"),
    "a policy of other hosts": (("--config", "CONFIG", *FEW, "--ckpt_path=tamiyo"), "evaluate on others with transfer"),
    "nothing to compare": (
        ("--config", "CONFIG", *FEW, "--evaluation.against=[]", "--evaluation.controls=false"),
        "there is nothing to compare",
    ),
    "a control of no policy": (
        ("--config", "CONFIG", *FEW, "--evaluation.against=[climbing, yoked]"),
        "'yoked' needs a trained policy; give --ckpt_path",
    ),
    "seeds of no policy": (("--config", "CONFIG", *FEW, "--evaluation.credit.hosts=1"), "evaluation.credit analyses"),
    "rivals of no policy": (("--config", "CONFIG", "--rivals", "OTHER"), "--rivals needs a trained policy"),
    "a rival that is not there": (("--ckpt_path", "LATEST", "--rivals=OTHER,no.ckpt"), "'no.ckpt' does not exist"),
    "a policy as its own rival": (("--ckpt_path", "LATEST", "--rivals", "LATEST"), "is named twice"),
    "a checkpoint that is not there": (("--ckpt_path", "nowhere.ckpt"), "checkpoint 'nowhere.ckpt' does not exist"),
    "no run": (("--ckpt_path=latest", "--trainer.default_root_dir=nowhere"), "there is no run with a latest.ckpt"),
    "another one that is not there": (("--ckpt_path", "LATEST", "--more=[no.ckpt]"), "'no.ckpt' does not exist"),
    "the same one twice": (("--ckpt_path", "LATEST", "--more", '["OTHER", "OTHER"]'), "is named twice"),
    "the first one again": (("--ckpt_path", "LATEST", "--more", '["LATEST"]'), "is named twice"),
    "a training seed twice": (("--ckpt_path", "LATEST", "--more", '["BEST"]'), "are both of training seed 0"),
    "no hosts": (("--ckpt_path", "LATEST", "--evaluation.hosts=0"), "evaluation.hosts is 0"),
    "fewer hosts than none": (("--ckpt_path", "LATEST", "--evaluation.hosts=-3"), "evaluation.hosts must be 0"),
    "another policy": (("--ckpt_path", "LATEST", "--model.policy.width=32"), "model.policy.width: the checkpoint has"),
    "other hosts": (("--ckpt_path", "LATEST", "--data.host.init_args.base=8"), "host: the checkpoint has"),
    "a schedule that is not there": (("--ckpt_path", "LATEST", "--evaluation.schedule=no.json"), "no.json cannot be"),
    "a schedule for others": (("--ckpt_path", "LATEST", "--evaluation.schedules", '{"a": "SCHEDULE"}'), "'a': the sch"),
    "a name that is taken": (("--ckpt_path", "LATEST", "--evaluation.schedules", '{"random": "SCHEDULE"}'), "'random'"),
    "a rival's name": (("--ckpt_path", "LATEST", "--evaluation.schedules", '{"rival a": "SCHEDULE"}'), "'rival a'"),
    "code in a checkpoint": (("--ckpt_path", "LATEST", "--weights_only=false"), "weights_only"),
    "a folder in a file": (("--ckpt_path", "LATEST", "--out", "SCHEDULE/out"), "SCHEDULE"),
}


@pytest.mark.parametrize(("flags", "named"), UNWANTED.values(), ids=list(UNWANTED))
def test_bad_input_ends_in_one_line(
    flags: tuple[str, ...],
    named: str,
    trained: list[Run],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    schedule = tmp_path / "schedule.json"
    write_schedule(Schedule(("elsewhere",), ()), schedule)
    first, second = trained
    known = {"LATEST": first.latest, "OTHER": second.latest, "BEST": first.checkpoints / "best.ckpt"}
    known |= {"CONFIG": first.folder / "config.yaml"}
    texts = {name: str(path) for name, path in (known | {"SCHEDULE": schedule}).items()}
    before = sorted((path, path.stat().st_mtime_ns) for path in first.folder.parent.rglob("*"))
    capsys.readouterr()
    for name, text in texts.items():
        flags = tuple(flag.replace(name, text) for flag in flags)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(SystemExit) as ended:
        evaluate(*flags)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert named.replace("SCHEDULE", texts["SCHEDULE"]) in line
    assert sorted((path, path.stat().st_mtime_ns) for path in first.folder.parent.rglob("*")) == before


def test_a_checkpoint_without_settings_beside_it_is_refused(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lone = tmp_path / "lone.ckpt"
    shutil.copy(trained[0].latest, lone)
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        evaluate("--ckpt_path", str(lone))

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        f"error: there are no settings beside checkpoint {str(lone)!r}: {tmp_path / 'config.yaml'} is missing; "
        f"give --config, or, if `train` of Python made the run, call esper_lightning.evaluate({str(lone)!r}, data) "
        f"with its hosts"
    )


def test_weights_of_other_names_are_refused_in_one_line(
    trained: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(trained[0], tmp_path)
    checkpoint = torch.load(run.latest, weights_only=True)
    checkpoint["state_dict"]["policy.nonsense"] = torch.zeros(3)
    torch.save(checkpoint, run.latest)

    with pytest.raises(SystemExit) as ended:
        evaluate("--ckpt_path", str(run.latest), *FEW)

    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be evaluated" in line and "policy.nonsense" in line


def test_a_run_with_a_schedule_for_other_hosts_is_refused_before_it_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_schedule(Schedule(("elsewhere",), ()), tmp_path / "schedule.json")

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path / "runs", f"--evaluation.schedule={tmp_path / 'schedule.json'}", *FEW)

    assert ended.value.code == 2
    assert "schedule 'schedule': the schedule is for hosts with slots" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_controller_is_loaded_from_a_checkpoint_as_the_page_says(
    trained: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On hosts like those of its run it acts like the module that was trained there."""
    shutil.copytree(trained[0].folder, tmp_path / "runs" / "digits" / "version_0")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    page: dict[str, Any] = {}
    exec(example, page)

    assert len(capsys.readouterr().out.split()) >= 2
    plain = TamiyoModule.load_from_checkpoint(trained[0].latest).controller()
    played, expected = (
        play_episode(page["pool"], "tamiyo", controller, rng_seeds=[5, 7]) for controller in (page["controller"], plain)
    )
    assert played.objective.tolist() == expected.objective.tolist()
    assert (played.trace.ops == expected.trace.ops).all()
    states = page["controller"].controller.state, plain.state
    assert all(map(torch.equal, *states)) and states[0].hidden.any(), "it has seen the same all the way"


def test_a_controller_refuses_files_and_hosts_that_do_not_fit_in_one_line(
    trained: list[Run], tmp_path: Path, make_pool: Callable[..., HostPool]
) -> None:
    checkpoint = torch.load(trained[0].latest, weights_only=True)
    checkpoint["esper_identity"] = {"choices": {"action": 2}, "features": 4}
    torch.save(checkpoint, tmp_path / "cartpole.ckpt")

    with pytest.raises(ValueError, match=r"cartpole\.ckpt' cannot be loaded: it does not contain the spaces"):
        load_controller(tmp_path / "cartpole.ckpt")
    checkpoint = torch.load(trained[0].latest, weights_only=True)
    checkpoint["esper_identity"]["observed features"].append("weather")
    torch.save(checkpoint, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other\.ckpt' cannot be loaded: its policy is not one for the hosts"):
        load_controller(tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"chooses among \['FAST'\] with its tempo head, these hosts offer"):
        load_controller(trained[0].latest).reset(make_pool(1))


def test_the_page_names_every_column_and_file() -> None:
    for name in [*FILES, "host_seed", "training_seed", "flops", "ticks", "fossils", "rollbacks", "pool_seconds", "d_z"]:
        assert f"`{name}`" in PAGE, name
