"""Figures: the cells show what the numbers say."""

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.figures import OP_COLOURS, ROWS, STAGE_COLOURS, filled, growth_timeline, op_map
from esper_lightning.telemetry.trace import EpisodeTrace


def test_ops_have_their_colours_in_the_order_of_their_numbers() -> None:
    assert list(OP_COLOURS) == [op.name for op in Op]
    assert list(STAGE_COLOURS) == list(Stage)


@pytest.mark.parametrize(("alpha", "full"), [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, ROWS)])
def test_a_cell_is_filled_up_to_alpha(alpha: float, full: int) -> None:
    pixels = filled(np.array([[int(Stage.BLENDING)]]), np.array([[alpha]]))[:, 0]
    strong = np.isclose(pixels, to_rgb(STAGE_COLOURS[Stage.BLENDING])).all(1)

    assert strong.sum() == full
    assert strong[ROWS - full :].all(), "from below"


def test_rollbacks_are_marked_where_they_happened() -> None:
    trace = EpisodeTrace(4, 2, 1)
    trace.length = 4
    trace.rolled_back[2, 1] = True

    (axes,) = growth_timeline(trace, ["block1"]).axes

    assert axes.collections[0].get_offsets().tolist() == [[3.0, 1.0]]


def test_shares_of_ops_add_up_in_every_tick() -> None:
    trace = EpisodeTrace(5, 3, 1)
    trace.length = 5
    trace.op[:] = torch.randint(0, 6, (5, 3), generator=torch.Generator().manual_seed(0)).byte()

    _, right = op_map(trace).axes

    heights = np.array([bar.get_height() for bar in right.patches]).reshape(len(Op), 5)
    assert np.allclose(heights.sum(0), 1.0)
    assert np.allclose(heights[Op.CULL], (trace.op == int(Op.CULL)).float().mean(1))
