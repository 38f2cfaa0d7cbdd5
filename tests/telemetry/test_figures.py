"""Figures: the cells show the numbers of the trace."""

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.figures import OP_COLOURS, PIXEL_ROWS_PER_HOST, STAGE_COLOURS, cells, timeline


def test_every_op_and_stage_has_a_colour_in_the_order_of_their_numbers() -> None:
    assert list(OP_COLOURS) == list(Op)
    assert list(STAGE_COLOURS) == list(Stage)


@pytest.mark.parametrize(("alpha", "full"), [(0.0, 0), (0.3, 3), (0.5, 5), (1.0, PIXEL_ROWS_PER_HOST)])
def test_a_cell_is_filled_up_to_alpha(alpha: float, full: int) -> None:
    pixels = cells(np.array([[int(Stage.BLENDING)]]), list(STAGE_COLOURS.values()), np.array([[alpha]]))[:, 0]
    strong = np.isclose(pixels, to_rgb(STAGE_COLOURS[Stage.BLENDING])).all(1)

    assert strong.sum() == full
    assert strong[PIXEL_ROWS_PER_HOST - full :].all(), "from below"


def test_a_timeline_shows_ops_stages_and_rollbacks_where_they_happened() -> None:
    op, stage = np.zeros((4, 2), np.uint8), np.zeros((4, 2, 1), np.uint8)
    op[1, 0], stage[2:, 1, 0] = Op.CULL, Stage.TRAINING
    rolled_back = np.zeros((4, 2), bool)
    rolled_back[2, 1] = True

    figure = timeline(op, stage, ["block1"], rolled_back=rolled_back)

    actions, block = figure.axes
    done, grown = (axes.images[0].get_array() for axes in (actions, block))
    assert tuple(done[0, 1]) == pytest.approx(to_rgb(OP_COLOURS[Op.CULL])), "host 0 in the second tick"
    assert tuple(grown[1, 3]) == pytest.approx(to_rgb(STAGE_COLOURS[Stage.TRAINING]))
    assert block.collections[0].get_offsets().tolist() == [[3.0, 1.0]]
    said = [text.get_text() for text in figure.legends[0].get_texts()]
    assert said == ["WAIT", "CULL", "DORMANT", "TRAINING", "▼ rolled back"]
