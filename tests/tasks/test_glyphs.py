"""Rendered letters and digits: fonts, determinism, and refusals in one line."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from esper_lightning.tasks import Glyphs, TaskData, check_data
from esper_lightning.tasks.glyphs import CHARACTERS, FONTS, draw_fonts

FEW = {"train": 200, "validation": 50, "test": 60}


@pytest.fixture(scope="module")
def data() -> TaskData:
    return Glyphs(**FEW).load()


@contextmanager
def elsewhere() -> Iterator[None]:
    """Other global random numbers, default dtype and number of threads, as in another process."""
    threads = torch.get_num_threads()
    torch.manual_seed(1)
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)


def same_images(one: TaskData, other: TaskData) -> list[bool]:
    return [torch.equal(a.inputs, b.inputs) for a, b in zip(one[:3], other[:3], strict=True)]


def test_images_are_grey_squares_of_62_classes(data: TaskData) -> None:
    check_data(data, "Glyphs")
    assert data.outputs == len(CHARACTERS) == 62
    assert [split.samples for split in data[:3]] == [200, 50, 60]
    assert data.input_shape == (1, 16, 16)
    assert Glyphs(32, **FEW).load().input_shape == (1, 32, 32)
    assert data.train.inputs.dtype is torch.float32


def test_rgb_images_have_other_colours_and_the_same_characters() -> None:
    grey, rgb = (Glyphs(32, "mild", channels=channels, **FEW).load() for channels in (1, 3))
    check_data(rgb, "Glyphs")
    assert rgb.input_shape == (3, 32, 32)
    assert torch.equal(grey.train.targets, rgb.train.targets)
    brightness = rgb.train.inputs.mean((2, 3))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (brightness[:, one] - brightness[:, other]).abs().mean() > 0.05, "noise alone is a tenth of this"


def test_each_font_draws_62_different_characters() -> None:
    drawings = draw_fonts()
    assert drawings.shape == (len(FONTS), 62, 64, 64)
    assert all(len(drawing.unique(dim=0)) == 62 and drawing.any(1).all() for drawing in drawings.flatten(2))


def test_every_load_gives_the_same_images(data: TaskData) -> None:
    with elsewhere():
        again = Glyphs(**FEW).load()
    assert same_images(data, again) == [True] * 3
    assert torch.equal(data.train.targets, again.train.targets)
