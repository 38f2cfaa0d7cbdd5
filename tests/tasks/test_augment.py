"""Augmented images compared with torchvision, image by image; minibatches keep their augmentation; transforms."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torchvision.transforms import functional as vision

from esper_lightning.tasks import TRANSFORMS, Batches, Digits, Split, TaskData, check_transform, fetch, make_variants
from esper_lightning.tasks.augment import AugmentConfig, AugmentParams, augment, draw_augment_params

ALL = AugmentConfig(pad=2, flip=True)
DATA = Split(torch.randn(40, 3, 6, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pictures(count: int, *shape: int) -> Tensor:
    """Return images with pixels 1, 2, 3 …: all pixels in a batch differ and none is zero."""
    size = (count, *shape)
    return torch.arange(1.0, 1.0 + torch.Size(size).numel()).view(size)


def by_torchvision(images: Tensor, choices: AugmentParams, config: AugmentConfig) -> Tensor:
    """Augment image by image, as defined in the papers."""
    varied = []
    for i, image in enumerate(images):
        _, height, width = image.shape
        if choices.shift is not None:
            down, right = (config.pad + choices.shift[i]).tolist()
            image = vision.crop(vision.pad(image, [config.pad] * 4, fill=0), down, right, height, width)
        if choices.flip is not None and choices.flip[i]:
            image = vision.hflip(image)
        varied.append(image)
    return torch.stack(varied)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, AugmentParams, AugmentConfig]:
    shape = tuple(draw(st.integers(1, 3)) if axis == 0 else draw(st.integers(2, 9)) for axis in range(3))
    below = st.integers(0, min(shape[1:]) - 1)
    config = AugmentConfig(pad=draw(below), flip=draw(st.booleans()))
    config.check(shape)
    count = draw(st.integers(1, 6))
    return pictures(count, *shape), draw_augment_params(config, (count,), generator(draw(st.integers(0, 999)))), config


@given(cases())
def test_images_are_varied_as_torchvision_does_it_one_by_one(case: tuple[Tensor, AugmentParams, AugmentConfig]) -> None:
    images, choices, config = case
    before = images.clone()

    assert torch.equal(augment(images, choices, config), by_torchvision(images, choices, config))
    assert torch.equal(images, before), "the images that came in are left alone"


def test_every_choice_is_as_likely_as_it_should_be() -> None:
    shifts, flips = draw_augment_params(ALL, (5, 2000), generator())

    for axis in shifts.flatten(0, 1).unbind(1):
        shares = torch.bincount(axis + 2, minlength=5) / 10_000
        assert len(shares) == 5  # -2 … 2
        assert (shares - 0.2).abs().max() < 0.02
    assert flips.float().mean().item() == pytest.approx(0.5, abs=0.02)
    correlations = torch.corrcoef(torch.cat([shifts, flips[..., None]], -1).flatten(0, 1).T) - torch.eye(3)
    assert correlations.abs().max() < 0.05, "one choice says nothing of the others"


def test_choices_follow_from_the_generator_alone() -> None:
    one, again = (draw_augment_params(ALL, (3, 8), generator(5)) for _ in range(2))
    torch.manual_seed(1)
    other = draw_augment_params(ALL, (3, 8), generator(6))

    assert [tuple(part.shape) for part in one] == [(3, 8, 2), (3, 8)]
    assert [part.dtype for part in one] == [torch.int64, torch.bool]
    assert all(torch.equal(a, b) for a, b in zip(one, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_is_off_draws_nothing_and_changes_nothing() -> None:
    source = generator()
    before = source.get_state()

    choices = draw_augment_params(AugmentConfig(), (4, 8), source)

    assert choices == (None, None)
    assert torch.equal(source.get_state(), before)
    tokens = torch.arange(6).view(2, 3)
    assert augment(tokens, choices, AugmentConfig()) is tokens


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("config", [ALL, AugmentConfig(flip=True)], ids=str)
def test_type_and_memory_format_are_kept(
    dtype: torch.dtype, memory: torch.memory_format, config: AugmentConfig
) -> None:
    images = torch.randint(1, 256, (4, 3, 6, 5), generator=generator()).to(dtype).clone(memory_format=memory)
    choices = draw_augment_params(config, (4,), generator())

    varied = augment(images, choices, config)

    assert varied.stride() == images.stride() and varied.dtype == dtype
    assert varied.is_contiguous(memory_format=memory)
    assert torch.equal(varied, by_torchvision(images, choices, config))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_varies_images_as_the_cpu_does() -> None:
    cuda = torch.device("cuda")
    images = pictures(64, 3, 9, 7)
    choices = draw_augment_params(ALL, (64,), torch.Generator(cuda).manual_seed(0))

    varied = augment(images.to(cuda), choices, ALL)

    assert {part.device.type for part in (*choices, varied)} == {"cuda"}
    assert torch.equal(varied.cpu(), augment(images, choices.map(Tensor.cpu), ALL))


@pytest.mark.parametrize(
    ("settings", "shape", "message"),
    [
        ({"pad": -1}, (1, 8, 8), "pad must lie in 0 … 7 for images of 8 pixels, got -1$"),
        ({"pad": 6}, (3, 9, 6), "pad must lie in 0 … 5 for images of 6 pixels, got 6$"),
        ({"flip": True}, (64,), r"needs images of shape \(C, H, W\), the task gives \(64,\); leave it off$"),
    ],
)
def test_inputs_that_cannot_be_varied_so_are_refused(
    settings: dict[str, Any], shape: tuple[int, ...], message: str
) -> None:
    AugmentConfig().check(shape)
    with pytest.raises(ValueError, match=rf"^training\.augment:? {message}"):
        AugmentConfig(**settings).check(shape)


def tick(config: AugmentConfig, seed: int = 0) -> Batches:
    """Return three minibatches of eight samples."""
    indices = torch.randperm(40, generator=generator(seed))[:24].view(3, 8)
    return Batches(indices, draw_augment_params(config, indices.shape, generator(seed)))


def inputs(*batches: Batches, config: AugmentConfig) -> Tensor:
    return torch.cat([fetch(DATA, batch, config).inputs for batch in batches])


@pytest.mark.parametrize("config", [AugmentConfig(), ALL], ids=str)
def test_minibatches_are_split_and_concatenated_with_their_augmentation(config: AugmentConfig) -> None:
    whole = tick(config)
    images, targets = fetch(DATA, whole.minibatch(1), config)
    assert torch.equal(targets, whole.indices[1])
    assert torch.equal(images, DATA.inputs[whole.indices[1]]) == (config is not ALL)
    for number in (1, 2, 8):
        parts = whole.split(number)
        assert parts.indices.shape == (3 * number, 8 // number)
        for i in range(3):
            of_this = [parts.minibatch(k) for k in range(i * number, (i + 1) * number)]
            assert torch.equal(inputs(*of_this, config=config), inputs(whole.minibatch(i), config=config))
    ticks = [tick(config, seed) for seed in range(3)]
    joined = Batches.concatenate(ticks)
    assert joined.indices.shape == (3, 24)
    for i in range(3):
        own = [batches.minibatch(i) for batches in ticks]
        assert torch.equal(inputs(joined.minibatch(i), config=config), inputs(*own, config=config))
        assert torch.equal(inputs(Batches.concatenate(own), config=config), inputs(*own, config=config))


@pytest.fixture(scope="module")
def digits() -> TaskData:
    return Digits(validation=100, test=100).load()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_keeps_shape_and_labels_and_is_the_same_each_time(digits: TaskData, name: str) -> None:
    varied, again = (make_variants(digits, [name]) for _ in range(2))
    assert varied.train.inputs.shape == digits.train.inputs.shape
    assert torch.equal(varied.train.targets, digits.train.targets)
    assert torch.equal(varied.train.inputs, digits.train.inputs) == (name == "none")
    assert torch.equal(varied.test.inputs, again.test.inputs)


def test_what_each_transform_does(digits: TaskData) -> None:
    image = digits.train.inputs[:3]

    def seen(name: str) -> Tensor:
        return TRANSFORMS[name](image, generator())

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
        for ours, theirs in zip(data.validation.variant(i), make_variants(digits, [name]).validation, strict=True):
            assert torch.equal(ours, theirs)
    moved = data.copy_to([torch.device("cpu"), torch.device("meta")])
    assert moved.train.variants == 3 and moved.train.to(torch.device("meta")).variants == 3


def test_inputs_that_cannot_be_transformed_are_refused() -> None:
    words = Split(torch.zeros(8, 5, dtype=torch.int64), torch.zeros(8, 5, dtype=torch.int64))
    check_transform("none", text := TaskData(words, words, words, outputs=4))
    with pytest.raises(ValueError, match=r"data\.transform 'inverted' needs images"):
        check_transform("inverted", text)
