"""Variants of a data set."""

import pytest
import torch

from esper_lightning.tasks import Digits, Split, TaskData, Variant, make_variants
from esper_lightning.tasks.variants import TRANSFORMS


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return Digits(validation=100, test=100).load()


def test_a_variant_is_the_same_whenever_it_is_made_and_another_one_is_not(digits: TaskData) -> None:
    noisy = Variant(noise=0.5, label_noise=0.2)
    first, second = noisy.apply(digits), noisy.apply(digits)
    other = Variant(noise=0.5, label_noise=0.3).apply(digits)
    for name in ("train", "validation", "test"):
        a, b, c = (getattr(data, name) for data in (first, second, other))
        assert torch.equal(a.inputs, b.inputs) and torch.equal(a.targets, b.targets)
        assert not torch.equal(a.inputs, c.inputs)


def test_noise_has_its_deviation_and_wrong_labels_their_share(digits: TaskData) -> None:
    varied = Variant(noise=0.5, label_noise=0.4).apply(digits)
    added = varied.train.inputs - digits.train.inputs
    assert added.std().item() == pytest.approx(0.5, rel=0.02) and added.mean().item() == pytest.approx(0.0, abs=0.01)
    # One of ten random labels is the right one.
    wrong = (varied.train.targets != digits.train.targets).float().mean().item()
    assert wrong == pytest.approx(0.4 * 0.9, abs=0.04)


def test_classes_are_merged_and_no_sample_is_lost(digits: TaskData) -> None:
    varied = Variant(classes=3).apply(digits)
    assert torch.equal(varied.test.targets, digits.test.targets % 3)
    assert torch.equal(varied.test.inputs, digits.test.inputs)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_keeps_shape_and_labels(digits: TaskData, name: str) -> None:
    varied = Variant(transform=name).apply(digits)
    assert varied.train.inputs.shape == digits.train.inputs.shape
    assert torch.equal(varied.train.targets, digits.train.targets)
    assert torch.equal(varied.train.inputs, digits.train.inputs) == (name == "none")


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
    shuffled = Variant(transform="shuffled").apply(digits)
    weights = torch.randn(64, generator=torch.Generator().manual_seed(1))
    order = (shuffled.train.inputs.flatten(1).T[:, None] == digits.train.inputs.flatten(1).T[None]).all(-1).float()
    order = order / order.sum(1, keepdim=True)  # pixels that are always blank cannot be distinguished
    for name in ("validation", "test"):
        ours, plain = (getattr(data, name).inputs.flatten(1) for data in (shuffled, digits))
        torch.testing.assert_close(ours @ weights, plain @ order.T @ weights, msg="another order in another split")
    for before, after in zip(image, seen("shifted"), strict=True):
        assert any(torch.equal(before.roll((y, x), (1, 2)), after) for y in (-1, 0, 1) for x in (-1, 0, 1))


def test_variants_lie_one_behind_the_other(digits: TaskData) -> None:
    variants = [Variant(), Variant(transform="inverted"), Variant(classes=2)]
    data = make_variants(digits, variants)
    assert data.train.variants == 3 and data.train.samples == digits.train.samples
    for i, variant in enumerate(variants):
        for ours, theirs in zip(data.validation.variant(i), variant.apply(digits).validation, strict=True):
            assert torch.equal(ours, theirs)
    moved = data.copy_to([torch.device("cpu"), torch.device("meta")])
    assert moved.train.variants == 3 and moved.train.to(torch.device("meta")).variants == 3


def test_what_a_task_does_not_have_is_refused() -> None:
    words = Split(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64))
    text = TaskData(words, words, words, classes=4)
    for variant, said in (
        (Variant(transform="inverted"), "needs images"),
        (Variant(noise=0.1), "this task's are symbols"),
        (Variant(classes=5), "the task has 4"),
        (Variant(samples=9), "the task has 8 training samples"),
    ):
        with pytest.raises(ValueError, match=said):
            make_variants(text, [variant])
    assert make_variants(text, [Variant(label_noise=0.5)]).train.targets.shape == (8, 5)
