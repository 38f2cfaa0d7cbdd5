"""Figures: the cells show the numbers of the trace."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.figures import (
    OP_COLOURS,
    PIXEL_ROWS_PER_HOST,
    STAGE_COLOURS,
    growth_timeline,
    op_map,
    op_shares,
    stage_image,
)
from esper_lightning.telemetry.observer import Trace


def test_ops_have_their_colours_in_the_order_of_their_numbers() -> None:
    assert list(OP_COLOURS) == [op.name for op in Op]
    assert list(STAGE_COLOURS) == list(Stage)


@pytest.mark.parametrize(("alpha", "full"), [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, PIXEL_ROWS_PER_HOST)])
def test_a_cell_is_filled_up_to_alpha(alpha: float, full: int) -> None:
    pixels = stage_image(np.array([[int(Stage.BLENDING)]]), np.array([[alpha]]))[:, 0]
    strong = np.isclose(pixels, to_rgb(STAGE_COLOURS[Stage.BLENDING])).all(1)

    assert strong.sum() == full
    assert strong[PIXEL_ROWS_PER_HOST - full :].all(), "from below"


def test_rollbacks_are_marked_where_they_happened() -> None:
    trace = Trace(4, 2, 1)
    trace.length = 4
    trace.rolled_back[2, 1] = True

    (axes,) = growth_timeline(trace, ["block1"]).axes

    assert axes.collections[0].get_offsets().tolist() == [[3.0, 1.0]]


def test_shares_of_ops_add_up_in_every_tick() -> None:
    op = np.random.default_rng(0).integers(0, len(Op), (5, 3))

    shares = op_shares(op)

    assert np.allclose(shares.sum(0), 1.0)
    assert np.allclose(shares[Op.CULL], [(row == Op.CULL).sum() / 3 for row in op])


def test_the_op_map_shows_a_band_for_every_op() -> None:
    trace = Trace(5, 3, 1)
    trace.length = 5
    trace.op[2] = int(Op.CULL)

    _, right = op_map(trace).axes

    culled = right.collections[Op.CULL].get_paths()[0].vertices
    assert len(right.collections) == len(Op)
    assert {x for x, y in culled if y == 1.0} >= {2.5, 3.5}, "in the third tick all of them"
