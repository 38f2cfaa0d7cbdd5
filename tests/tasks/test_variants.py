"""Transforms of the images of a data set."""

import pytest
import torch

from esper_lightning.tasks import TRANSFORMS, Digits, Split, TaskData, check_transform, make_variants
from esper_lightning.tasks.variants import transform_data


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return Digits(validation=100, test=100).load()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_keeps_shape_and_labels_and_is_the_same_each_time(digits: TaskData, name: str) -> None:
    varied, again = (transform_data(digits, name) for _ in range(2))
    assert varied.train.inputs.shape == digits.train.inputs.shape
    assert torch.equal(varied.train.targets, digits.train.targets)
    assert torch.equal(varied.train.inputs, digits.train.inputs) == (name == "none")
    assert torch.equal(varied.test.inputs, again.test.inputs)


def test_what_each_transform_does(digits: TaskData) -> None:
    image = digits.train.inputs[:3]

    def seen(name: str) -> torch.Tensor:
        return TRANSFORMS[name](image, torch.Generator().manual_seed(0))

    assert torch.equal(seen("inverted"), -image)
    assert torch.equal(seen("transposed")[1, 0, 2, 5], image[1, 0, 5, 2])
    coarse = seen("coarse")
    assert torch.equal(coarse[..., ::2, ::2], coarse[..., 1::2, 1::2])
    assert coarse[0, 0, 2, 4].item() == pytest.approx(image[0, 0, 2:4, 4:6].mean().item(), abs=1e-6)
    order = [(image[:, 0].flatten(1) == pixel[:, None]).all(0) for pixel in seen("shuffled")[:, 0].flatten(1).T]
    assert all(match.any() for match in order), "every pixel of all images comes from one place"
    for before, after in zip(image, seen("shifted"), strict=True):
        assert any(torch.equal(before.roll((y, x), (1, 2)), after) for y in (-1, 0, 1) for x in (-1, 0, 1))


def test_variants_lie_one_behind_the_other(digits: TaskData) -> None:
    names = ["none", "inverted", "shifted"]
    data = make_variants(digits, names)
    assert data.train.variants == 3 and data.train.samples == digits.train.samples
    for i, name in enumerate(names):
        for ours, theirs in zip(data.validation.variant(i), transform_data(digits, name).validation, strict=True):
            assert torch.equal(ours, theirs)
    moved = data.copy_to([torch.device("cpu"), torch.device("meta")])
    assert moved.train.variants == 3 and moved.train.to(torch.device("meta")).variants == 3


def test_inputs_that_cannot_be_transformed_are_refused() -> None:
    words = Split(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64))
    check_transform("none", text := TaskData(words, words, words, outputs=4))
    with pytest.raises(ValueError, match=r"data\.transform 'inverted' needs images"):
        check_transform("inverted", text)
