from typing import Any

import pytest

from esper_lightning.envs import HEADS, ActionConfig, ActionSpace, Op
from esper_lightning.envs.actions import relevance

SPACE = ActionSpace(["block1", "block2.pool"], ["norm", "conv_light"], ["FAST", "SLOW"])


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
    ],
)
def test_an_impossible_action_config_is_refused_with_its_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ActionConfig(**settings)


def test_the_least_action_config_is_accepted() -> None:
    config = ActionConfig(blueprints=["norm"], tempos={"FAST": 1}, max_seeds=1)

    assert (config.blueprints, config.tempos, config.max_seeds) == (["norm"], {"FAST": 1}, 1)


def test_a_decision_is_described_in_words() -> None:
    assert SPACE.describe((Op.WAIT, 0, 0, 0)) == "WAIT"
    assert SPACE.describe((Op.GERMINATE, 1, 1, 1)) == "GERMINATE conv_light in block2.pool (SLOW)"
    assert SPACE.describe((Op.CULL, 1, 0, 0)) == "CULL block2.pool"
    assert SPACE.describe((Op.FOSSILIZE, 0, 0, 0)) == "FOSSILIZE block1"


def test_each_head_matters_for_the_ops_that_read_it() -> None:
    matters = relevance()

    by_op = {op: {head for head, yes in zip(HEADS, matters[op].tolist(), strict=True) if yes} for op in Op}
    assert by_op == {
        Op.WAIT: {"op"},
        Op.GERMINATE: {"op", "slot", "blueprint", "tempo"},
        Op.CULL: {"op", "slot"},
        Op.FOSSILIZE: {"op", "slot"},
    }
