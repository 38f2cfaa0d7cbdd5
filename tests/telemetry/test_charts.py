"""Charts: every op and stage has a look, and pictures show what happened."""

import numpy as np
import pytest

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.charts import OPS, STAGES, draw_pictures, render, shapes_of, timeline
from esper_lightning.telemetry.observer import HOST, SLOT, Observer, Tick
from tests.processes import run_in_fork


def test_every_op_and_stage_has_a_look() -> None:
    assert list(OPS) == [op.name for op in Op]
    assert list(STAGES) == [stage.name for stage in Stage]


def test_no_two_series_of_64_look_alike() -> None:
    shapes = shapes_of([str(i) for i in range(64)]).to_dict()["range"]
    assert len({(i % 8, shape) for i, shape in enumerate(shapes)}) == 64


def test_a_timeline_has_a_legend_of_what_happened_alone() -> None:
    spec = timeline(["GERMINATE"], [[("TRAINING", "norm")]], ["a"], ticks=3, rolled_back=[1]).to_dict()

    colour = spec["layer"][0]["encoding"]["color"]["scale"]
    assert colour == {"domain": ["TRAINING", "GERMINATE"], "range": [STAGES["TRAINING"][0], OPS["GERMINATE"][0]]}
    assert spec["layer"][2]["data"]["values"] == [{"tick": 1, "row": "action", "what": "rolled back"}]


def pixels_of(picture: np.ndarray, colour: str) -> int:
    rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return int((picture == rgb).all(-1).sum())


def test_a_forked_process_draws_after_its_parent_has() -> None:
    chart = timeline(["WAIT"], [[("TRAINING", "norm")]], ["a"], ticks=1)
    render({"a": [chart]})
    assert run_in_fork(lambda: render({"a": [chart]})) == (0, "")


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING])
def test_pictures_show_the_stages_of_a_rollout_and_nothing_of_one_that_was_not_seen_whole(stage: Stage) -> None:
    observer = Observer(["a"], ["norm"], horizon=2, n_envs=3)
    hosts, slots = np.zeros(3, HOST), np.zeros((3, 1), SLOT)
    slots["stage"], slots["blueprint"], hosts["health"] = stage, -1, np.nan
    for number in (1, 2):
        observer.update(Tick(number, number, hosts, slots, {}, []))

    pictures = draw_pictures(observer, np.array([0.1, 0.3, 0.2]))

    assert list(pictures) == ["figures/growth"], "no seed has germinated"
    assert pictures["figures/growth"].dtype == np.uint8
    other = {Stage.TRAINING: Stage.BLENDING, Stage.BLENDING: Stage.TRAINING}[stage]
    assert pixels_of(pictures["figures/growth"], STAGES[stage.name][0]) > 10_000
    assert pixels_of(pictures["figures/growth"], STAGES[other.name][0]) < 100
    observer.seen = 1
    assert draw_pictures(observer, np.zeros(3)) == {}
