"""Handwritten digits: real images with a fixed split."""

from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from esper_lightning.tasks import Digits, Split, TaskData


@pytest.fixture(scope="module")
def data() -> TaskData:
    return Digits().load()


def pictures(data: TaskData, split: Split) -> list[bytes]:
    """Return image and digit as in the file: grey values 0 to 16, recovered from the standardised ones."""
    low, high = data.train.inputs.min(), data.train.inputs.max()
    grey = ((split.inputs - low) / (high - low) * 16).round().to(torch.int64).flatten(1)
    return [row.tobytes() for row in torch.cat([grey, split.targets[:, None]], 1).numpy()]


def test_the_images_are_split_into_three_parts(data: TaskData) -> None:
    assert [data.train.samples, data.validation.samples, data.test.samples] == [897, 200, 700]
    assert [len(split.targets) for split in data[:3]] == [897, 200, 700]
    assert data.classes == 10
    assert data.input_shape == (1, 8, 8)
    assert {split.inputs.dtype for split in data[:3]} == {torch.float32}
    assert {split.targets.dtype for split in data[:3]} == {torch.int64}


def test_no_image_is_in_two_parts_and_none_is_lost(data: TaskData) -> None:
    images, digits = load_digits(return_X_y=True)
    known = np.concatenate([images, digits[:, None]], 1).astype(np.int64)
    assert len({row.tobytes() for row in known}) == 1797  # all images differ, so an image determines its index
    parts = [pictures(data, split) for split in data[:3]]
    assert Counter(chain(*parts)) == Counter(row.tobytes() for row in known)


def test_every_load_gives_the_same_split(data: TaskData) -> None:
    torch.manual_seed(1)
    np.random.seed(1)
    for split, again in zip(data[:3], Digits().load()[:3], strict=True):
        assert torch.equal(split.inputs, again.inputs)
        assert torch.equal(split.targets, again.targets)


def test_every_part_has_every_digit_in_proportion(data: TaskData) -> None:
    whole = torch.cat([split.targets for split in data[:3]]).bincount() / 1797
    for split in data[:3]:
        shares = split.targets.bincount(minlength=10) / split.samples
        assert (shares - whole).abs().max() < 0.006


def test_pixels_are_standardised_by_the_training_images_alone(data: TaskData) -> None:
    train = data.train.inputs.double()
    assert train.mean().item() == pytest.approx(0.0, abs=1e-5)
    assert train.std().item() == pytest.approx(1.0, abs=1e-5)
    assert abs(data.validation.inputs.mean().item()) > 1e-4


@pytest.mark.parametrize(("validation", "test"), [(10, 10), (10, 1777), (1777, 10), (900, 887)])
def test_the_smallest_parts_still_have_every_digit(validation: int, test: int) -> None:
    data = Digits(validation=validation, test=test).load()
    assert [split.samples for split in data[:3]] == [1797 - validation - test, validation, test]
    for split in data[:3]:
        assert len(split.targets.unique()) == 10


@pytest.mark.parametrize(("validation", "test"), [(9, 700), (200, 9), (0, 700), (-5, 700), (200, 1588), (1797, 1797)])
def test_sizes_that_leave_a_part_too_small_are_refused(validation: int, test: int) -> None:
    with pytest.raises(ValueError, match=rf"^digits: validation and test need .* got {validation} and {test}$"):
        Digits(validation=validation, test=test)
