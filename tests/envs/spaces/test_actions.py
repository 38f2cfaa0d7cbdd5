from typing import Any, get_args

import pytest
import torch

from esper_lightning.envs import HEADS, Action, ActionConfig, ActionSpace, EnvConfig, Op
from esper_lightning.envs.spaces.actions import STYLES, relevance_table, to_action, zero_irrelevant_heads
from esper_lightning.growth.alpha import Curve
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.gates import LifecycleConfig
from tests.decisions import CPU, WAIT, Row, advance, cull, fossilize, germinate, set_alpha

BY_HAND = LifecycleConfig(auto_blend=False)

SPACE = ActionSpace(
    op=[op.name for op in Op],
    slot=["block1", "block2.pool"],
    blueprint=["norm", "conv_light"],
    style=["linear_add", "cosine_gate"],
    tempo=["FAST", "SLOW"],
    target=[0.5, 1.0],
    speed=[0, 5],
    curve=["linear", "sigmoid12"],
)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blueprints": []}, "empty"),
        ({"blueprints": ["conv_ligth"]}, "did you mean 'conv_light'"),
        ({"blueprints": ["norm", "conv_light", "norm"]}, "'norm' is named twice"),
        ({"tempos": {}}, "at least one tempo"),
        ({"tempos": {"FAST": 3, "NOW": 0}}, "at least 1 host epoch"),
        ({"max_seeds": 0}, "max_seeds must be at least 1, got 0"),
        ({"max_seeds": -1}, "got -1"),
        ({"styles": []}, r"actions\.styles is empty; name at least one, or leave it out for the default"),
        ({"styles": ["linear_ad"]}, r"actions\.styles: unknown style 'linear_ad'; did you mean 'linear_add'\?"),
        ({"styles": ["xyz"]}, r"unknown style 'xyz'; there are: linear_add, linear_multiply, linear_gate, cosine_add"),
        ({"styles": ["linear_add", "cosine_gate", "linear_add"]}, r"actions\.styles: 'linear_add' is named twice"),
        ({"targets": []}, r"actions\.targets is empty"),
        ({"targets": [0.5, 0.5]}, r"actions\.targets: 0\.5 is named twice"),
        (
            {"targets": [0.0, 1.0]},
            r"targets must lie in \(0, 1\], got \[0\.0, 1\.0\]; to send alpha to 0, cull",
        ),
        ({"targets": [0.5, 1.1]}, r"actions\.targets must lie in \(0, 1\]"),
        ({"targets": [float("nan")]}, r"actions\.targets must lie in \(0, 1\]"),
        ({"speeds": []}, r"actions\.speeds is empty"),
        ({"speeds": [3, 5]}, r"actions\.speeds must begin with 0 \(at once\) and hold no negative, got \[3, 5\]"),
        ({"speeds": [0, -3]}, r"hold no negative, got \[0, -3\]"),
        ({"speeds": [0, 3, 0]}, r"actions\.speeds: 0 is named twice"),
        ({"curves": []}, r"actions\.curves is empty"),
        ({"curves": ["linear", "linear"]}, r"actions\.curves: 'linear' is named twice"),
    ],
)
def test_an_impossible_action_config_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionConfig(**settings)


def test_the_least_action_config_is_accepted() -> None:
    config = ActionConfig(
        blueprints=["norm"],
        tempos={"FAST": 1},
        max_seeds=1,
        styles=["cosine_gate"],
        targets=[1.0],
        speeds=[0],
        curves=["sigmoid24"],
    )

    space = config.make_space(["block1"], ["norm"])
    assert {head: size for head, size in space.sizes.items() if head != "op"} == dict.fromkeys(HEADS[1:], 1)


@pytest.mark.parametrize("off", ["auto_blend", "auto_probation"])
def test_a_seed_that_does_not_get_on_by_itself_needs_the_op_advance(off: str) -> None:
    lifecycle = LifecycleConfig(**{off: False})

    with pytest.raises(ValueError, match=r"so no seed gets on; switch on actions\.advance"):
        EnvConfig(lifecycle=lifecycle)
    EnvConfig(lifecycle=lifecycle, actions=ActionConfig(advance=True))


def test_an_op_without_use_is_refused() -> None:
    with pytest.raises(ValueError, match=r"actions\.advance has nothing to do; switch off lifecycle\.auto_blend or"):
        EnvConfig(actions=ActionConfig(advance=True))


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (WAIT, "WAIT"),
        (germinate(1, 1, tempo=1), "GERMINATE conv_light in block2.pool (SLOW, linear_add)"),
        (germinate(0, 0, tempo=0, style=1), "GERMINATE norm in block1 (FAST, cosine_gate)"),
        (cull(1), "CULL block2.pool (at once)"),
        (cull(0, speed=1, curve=1), "CULL block1 (in 5 ticks, sigmoid12)"),
        (fossilize(0), "FOSSILIZE block1"),
        (advance(1), "ADVANCE block2.pool"),
        (set_alpha(0, target=0), "SET_ALPHA block1 to 0.5 (at once)"),
        (set_alpha(1, target=1, speed=1), "SET_ALPHA block2.pool to 1 (in 5 ticks, linear)"),
    ],
)
def test_a_decision_is_described_in_words(row: Row, words: str) -> None:
    assert SPACE.describe(row) == words


def test_a_decision_is_spelled_out_head_by_head() -> None:
    chosen = SPACE.decode((Op.SET_ALPHA, 1, 0, 1, 1, 0, 1, 1))

    assert chosen == ("SET_ALPHA", "block2.pool", "norm", "cosine_gate", "SLOW", 0.5, 5, "sigmoid12")
    assert chosen._fields == HEADS


def test_every_curve_goes_with_every_way_of_blending() -> None:
    assert len(STYLES) == len(get_args(Curve)) * len(get_args(BlendStyle)) == 15
    for name, (curve, style) in STYLES.items():
        assert name == f"{curve}_{style}"
    assert STYLES["sigmoid6_multiply"] == ("sigmoid6", "multiply")


SWITCHES: list[tuple[dict[str, bool], int, set[str]]] = [
    ({}, 4, set()),
    ({"advance": True}, 5, set()),
    ({"set_alpha": True}, 6, {"target", "speed", "curve"}),
    ({"slow_cull": True}, 4, {"speed", "curve"}),
    ({"advance": True, "slow_cull": True}, 5, {"speed", "curve"}),
    ({"advance": True, "set_alpha": True, "slow_cull": True}, 6, {"target", "speed", "curve"}),
]


@pytest.mark.parametrize(("switches", "ops", "heads"), SWITCHES, ids=[",".join(s) or "none" for s, *_ in SWITCHES])
def test_only_what_is_switched_on_is_on_offer(switches: dict[str, bool], ops: int, heads: set[str]) -> None:
    space = ActionConfig(**switches, curves=["linear", "cosine"]).make_space(
        ["block1", "block2"], ["norm", "conv_light"]
    )

    assert space.op == [op.name for op in Op][:ops]
    more = {head for head in ("style", "target", "speed", "curve") if space.sizes[head] > 1}
    assert more == heads
    assert (space.target[-1], space.speed[0], space.curve[0]) == (1.0, 0, "linear")


def test_each_head_matters_for_the_ops_that_read_it() -> None:
    matters = relevance_table()

    by_op = {op: {head for head, yes in zip(HEADS, matters[op].tolist(), strict=True) if yes} for op in Op}
    assert by_op == {
        Op.WAIT: {"op"},
        Op.GERMINATE: {"op", "slot", "blueprint", "style", "tempo"},
        Op.CULL: {"op", "slot", "speed", "curve"},
        Op.FOSSILIZE: {"op", "slot"},
        Op.ADVANCE: {"op", "slot"},
        Op.SET_ALPHA: {"op", "slot", "target", "speed", "curve"},
    }


def test_choices_that_do_not_matter_become_0() -> None:
    ones = torch.ones(len(Op), dtype=torch.int64)
    action = Action(torch.arange(len(Op)), *[ones] * 7)

    blank = zero_irrelevant_heads(action, relevance_table())

    rows = [tuple(row) for row in torch.stack(blank, 1).tolist()]
    assert rows == [WAIT, germinate(1, 1, 1, 1), cull(1, 1, 1), fossilize(1), advance(1), set_alpha(1, 1, 1, 1)]


def test_heads_that_a_decision_leaves_out_are_0() -> None:
    action = to_action([(Op.GERMINATE, 2), (Op.WAIT,), set_alpha(1, 2, 3, 4)], CPU)

    rows = [tuple(row) for row in torch.stack(action, 1).tolist()]
    assert rows == [germinate(2), WAIT, set_alpha(1, 2, 3, 4)]
