"""Charts: every op and stage has a look."""

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.charts import OPS, STAGES, shapes_of, timeline


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
