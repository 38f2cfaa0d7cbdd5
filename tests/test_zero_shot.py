"""benchmarks/zero_shot.py: policies over sets are compared on hosts that their training has left out."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml

from benchmarks import zero_shot, zero_shot_ablations
from benchmarks.rows import read_rows
from benchmarks.zero_shot import GENERAL, RULE, SCHEDULE, WAITING, Row, Setting
from benchmarks.zero_shot_ablations import AS_CONFIGURED
from esper_lightning.blueprints import blueprint_names
from esper_lightning.controllers.schedule import Schedule, ScheduledAction
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.hosts import CNN, MLP
from esper_lightning.tasks import Digits, Tabular
from tests.runs import CONFIGS, fit, only_run

TRAINING = HostTraining(batches=1)
SMALL_SETTINGS = {
    "five slots": Setting(
        partial(Digits, validation=50, test=50),
        partial(CNN, base=2, kernel=1, pools=2, slots=["block1", "block1.pool", "block2", "block2.pool", "block3"]),
        "Digits",
        TRAINING,
        horizon=3,
        hosts=2,
        blueprints=("norm", "depthwise"),
    ),
    "table": Setting(partial(Tabular, "wine"), partial(MLP, width=4), "Digits", TRAINING, horizon=4, hosts=3),
}


def test_a_schedule_is_fitted_to_hosts_with_other_slots_and_seeds(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, horizon=6)
    first, *_ = pool.space.slot
    found = Schedule(
        ("place1", "place9", *(f"more{i}" for i in range(9))),
        (
            ScheduledAction(0, "GERMINATE", "place1", blueprint="norm", tempo="FAST"),
            ScheduledAction(1, "GERMINATE", "place1", blueprint="lora", tempo="FAST"),
            ScheduledAction(2, "FOSSILIZE", "more8"),
            ScheduledAction(5, "FOSSILIZE", "place1"),
            ScheduledAction(6, "CULL", "place1"),
        ),
    )

    for horizon, last in ((6, 5), (12, 2), (20, 1)):
        fitted = zero_shot.fit_schedule(found, pool, horizon)

        assert fitted.slots == tuple(pool.space.slot)
        assert [(entry.tick, entry.op, entry.slot) for entry in fitted.entries][:2] == [
            (0, "GERMINATE", first),
            (last, "FOSSILIZE", first),
        ]
        assert len(fitted.entries) == (2 if horizon == 6 else 3), "an entry beyond the horizon is left out"


def test_every_setting_weighs_the_same_in_the_mean_over_settings(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        Row(setting, controller, seed, host, objective, 0.0, 0)
        for setting, hosts, lead in (("a", 2, 0.3), ("b", 8, 0.1))
        for host in range(hosts)
        for controller, seed, objective in ((WAITING, "", 0.5), (GENERAL, "0", 0.5 + lead), (GENERAL, "1", 0.5 + lead))
    ]

    *_, last = zero_shot.table(rows, GENERAL)

    assert "+.200 [" in last
    with pytest.raises(ValueError, match="there are no results of 'one kind'"):
        zero_shot.table(rows, "one kind")


def test_a_policy_that_was_not_measured_in_a_setting_has_an_empty_cell() -> None:
    rows = [
        Row(setting, controller, seed, 0, objective, 0.0, 0)
        for setting, controller, seed, objective in (
            ("a", WAITING, "", 0.1),
            ("a", GENERAL, "0", 0.2),
            ("a", GENERAL, "1", 0.3),
            ("b", WAITING, "", 0.4),
            ("b", GENERAL, "1", 0.5),
        )
    ]

    assert zero_shot.seed_table(rows, GENERAL)[2:] == ["| a | .100 | .200 | .300 |", "| b | .400 |  | .500 |"]


SHAPES = {
    **dict.fromkeys(zero_shot.SETTINGS, ((1, 8, 8), 10)),
    "another table": ((30,), 2),
    "another text": ((32,), 256),
}


@pytest.mark.slow
def test_the_held_out_hosts_have_slots_for_seeds_that_the_general_config_offers_elsewhere() -> None:
    data = yaml.safe_load((CONFIGS / "general.yaml").read_text())["data"]
    blueprints = {"Digits": data["env"]["actions"]["blueprints"]} | {
        name: task.get("blueprints") for name, task in data["also"].items()
    }
    slots = {name: slots_of(one.host(*SHAPES[name])) for name, one in zero_shot.SETTINGS.items()}

    assert len(slots["twelve slots"]) == 12 and len(slots["torchvision"]) == 4
    for name, setting in zero_shot.SETTINGS.items():
        offered = setting.blueprints or blueprints[setting.like] or ["norm"]
        layouts = {slot.layout for slot in slots[name].values()}
        assert all("norm" in blueprint_names(layout) for layout in layouts) and "norm" in offered
    (unknown,) = set(zero_shot.SETTINGS["unknown blueprint"].blueprints or ()) - {"norm"}
    assert not any(unknown in (names or ()) for names in blueprints.values())


@pytest.mark.slow
def test_policies_rules_and_schedules_are_measured_once_on_the_same_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path / "run", "--data.env.sight.layout=rows", "--trainer.max_epochs=1", "--seed_everything=0")
    monkeypatch.setattr(zero_shot, "SETTINGS", SMALL_SETTINGS)
    monkeypatch.setattr(zero_shot, "RULE_HOSTS", 2)
    monkeypatch.setattr(zero_shot, "RULES", dict(list(zero_shot.RULES.items())[:2]))
    csv, folder, config = tmp_path / "rows.csv", tmp_path / "baselines", tmp_path / "rows.yaml"
    settings = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    settings["data"]["env"] |= {"horizon": 4, "sight": {"layout": "rows", "hidden": ["slot.seed.size"]}}
    config.write_text(yaml.safe_dump(settings))
    policy = str(only_run(tmp_path / "run").last)
    common = ("--config", str(config), "--baselines", str(folder))
    result = ("result", *common, "--csv", str(csv), "--policies", policy)

    zero_shot.main(["baselines", *common, "--steps", "24"])
    zero_shot.main([*result, "--settings", "five slots"])
    zero_shot.main([*result, "--settings", *SMALL_SETTINGS])
    zero_shot.main(["table", "--csv", str(csv)])

    rows = read_rows(csv, Row)
    controllers = (WAITING, "", RULE, "", SCHEDULE, "", GENERAL, "0")
    expected = [
        (name, *pair, host)
        for name, setting in SMALL_SETTINGS.items()
        for pair in zip(controllers[::2], controllers[1::2], strict=True)
        for host in range(setting.hosts)
    ]
    assert [row[:4] for row in rows] == expected
    waiting = [row for row in rows if row.controller == WAITING]
    assert all(row.fossils == 0 and row.objective == row.accuracy for row in waiting)
    assert np.ptp([row.accuracy for row in waiting]) > 0.0


@pytest.mark.slow
def test_without_exchange_the_weights_between_host_and_slots_stay_zero(tmp_path: Path) -> None:
    callback = "[benchmarks.zero_shot_ablations.NoExchange]"
    trained = fit(tmp_path, "--data.env.sight.layout=rows", f"--trainer.callbacks={callback}")

    heads = trained.model.policy.heads
    assert not heads.of_core.weight.any() and not heads.tables["slot"].query.weight.any()
    assert heads.of_slot.bias.any()


def test_ablations_are_compared_host_by_host_with_runs_of_the_same_seed() -> None:
    rows = [
        Row(setting, controller, seed, host, host / 10 + bonus, 0.0, 0)
        for setting, lost in (("Digits", 0.1), ("seven blocks", 0.3))
        for host in range(4)
        for controller, seed, bonus in (
            (AS_CONFIGURED, "0", 0.4),
            (AS_CONFIGURED, "1", 0.9),
            ("no memory", "0", 0.4 - lost),
        )
    ]

    *_, last = zero_shot_ablations.table(rows)

    assert last == "| no memory | 1 | .450 | −.100 [−.100, −.100] | .250 | −.300 [−.300, −.300] |"
