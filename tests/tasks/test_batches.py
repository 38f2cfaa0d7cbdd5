"""Minibatches are split and concatenated without separating a sample from its augmentation."""

import pytest
import torch
from torch import Tensor

from esper_lightning.tasks import AugmentConfig, Batches, Split, draw_augment_params, fetch

ALL = AugmentConfig(pad=2, flip=True, cutout=3)
SETTINGS = [AugmentConfig(), AugmentConfig(flip=True), ALL]


def tick(config: AugmentConfig, seed: int = 0) -> Batches:
    """Return three minibatches of eight samples."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.randperm(40, generator=generator)[:24].view(3, 8)
    return Batches(indices, draw_augment_params(config, indices.shape, generator))


@pytest.fixture(scope="module")
def data() -> Split:
    return Split(torch.randn(40, 3, 6, 5, generator=torch.Generator().manual_seed(1)), torch.arange(40))


def inputs(data: Split, config: AugmentConfig, *batches: Batches) -> Tensor:
    return torch.cat([fetch(data, batch, config).inputs for batch in batches])


def test_without_augmentation_a_minibatch_is_what_lies_at_its_indices(data: Split) -> None:
    batch = tick(AugmentConfig()).minibatch(1)

    images, targets = fetch(data, batch, AugmentConfig())

    assert torch.equal(images, data.inputs[batch.indices])
    assert torch.equal(targets, batch.indices)


def test_what_is_fetched_has_been_varied_and_keeps_its_target(data: Split) -> None:
    batch = tick(ALL).minibatch(2)

    images, targets = fetch(data, batch, ALL)

    assert images.shape == (8, 3, 6, 5)
    assert not any(torch.equal(image, data.inputs[i]) for image, i in zip(images, batch.indices, strict=True))
    assert torch.equal(targets, batch.indices)


@pytest.mark.parametrize("config", SETTINGS, ids=str)
@pytest.mark.parametrize("number", [1, 2, 8])
def test_parts_are_the_minibatch(data: Split, config: AugmentConfig, number: int) -> None:
    whole = tick(config)

    parts = whole.split(number)

    assert parts.indices.shape == (3 * number, 8 // number)
    for i in range(3):
        of_this = [parts.minibatch(k) for k in range(i * number, (i + 1) * number)]
        assert torch.equal(inputs(data, config, *of_this), inputs(data, config, whole.minibatch(i)))


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_several_ticks_side_by_side_are_each_what_they_were(data: Split, config: AugmentConfig) -> None:
    ticks = [tick(config, seed) for seed in range(3)]

    joined = Batches.concatenate(ticks)

    assert joined.indices.shape == (3, 24)
    for i in range(3):
        apart = inputs(data, config, *(batches.minibatch(i) for batches in ticks))
        assert torch.equal(inputs(data, config, joined.minibatch(i)), apart)
        assert torch.equal(inputs(data, config, Batches.concatenate([one.minibatch(i) for one in ticks])), apart)


def test_one_tick_side_by_side_with_nothing_is_itself(data: Split) -> None:
    alone = Batches.concatenate([tick(ALL)])

    assert torch.equal(alone.indices, tick(ALL).indices)
    assert all(torch.equal(a, b) for a, b in zip(alone.augment_params, tick(ALL).augment_params, strict=True))
