"""Images as hosts get them: transforms of a whole data set, and the random augmentation of each minibatch."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.tasks.task import SPLITS, Split, TaskData


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentation of training images, in this order. Validation and test images are not augmented."""

    pad: int = 0
    """Largest random shift of each image in pixels, with zero padding. 0: off. 4 is usual for 32×32 pixels."""

    flip: bool = False
    """Mirror each image left to right with probability 1/2."""

    def check(self, input_shape: Sequence[int]) -> None:
        """Raise ValueError unless inputs of this shape can be augmented with these settings."""
        if not (self.pad or self.flip):
            return
        if len(input_shape) != 3:
            raise ValueError(
                f"training.augment needs images of shape (C, H, W), the task gives {tuple(input_shape)}; leave it off"
            )
        side = min(input_shape[1:])
        if not 0 <= self.pad < side:
            raise ValueError(
                f"training.augment: pad must lie in 0 … {side - 1} for images of {side} pixels, got {self.pad}"
            )


class AugmentParams(NamedTuple):
    """Random augmentation parameters of B images. None: this augmentation is off."""

    shift: Tensor | None = None  # [..., B, 2] int64 in -pad … pad: offset of the window, in pixels down and right
    flip: Tensor | None = None  # [..., B] bool

    def map(self, change: Callable[[Tensor], Tensor]) -> "AugmentParams":
        """Return these parameters with `change` applied to every tensor."""
        return AugmentParams(*(None if drawn is None else change(drawn) for drawn in self))


def draw_augment_params(config: AugmentConfig, shape: Sequence[int], generator: torch.Generator) -> AugmentParams:
    """Draw parameters for images of batch shape `shape` [..., B]; augmentations that are off draw nothing."""
    options = {"generator": generator, "device": generator.device}
    return AugmentParams(
        shift=torch.randint(-config.pad, config.pad + 1, (*shape, 2), **options) if config.pad else None,
        flip=torch.randint(2, tuple(shape), dtype=torch.bool, **options) if config.flip else None,
    )


def augment(images: Tensor, params: AugmentParams, config: AugmentConfig) -> Tensor:  # [B, C, H, W] -> [B, C, H, W]
    """Pad and crop (https://arxiv.org/abs/1512.03385), and flip.

    The result has the dtype, device and memory format of `images`, and is `images` itself if all augmentations are off.
    """
    if all(drawn is None for drawn in params):
        return images
    count, channels, height, width = images.shape
    rows = torch.arange(height, device=images.device).expand(count, -1)  # [B, H], rows of the original image
    columns = torch.arange(width, device=images.device).expand(count, -1)  # [B, W]
    if params.flip is not None:
        columns = torch.where(params.flip[:, None], columns.flip(1), columns)
    if params.shift is not None:
        rows, columns = rows + params.shift[:, :1], columns + params.shift[:, 1:]

    padded = F.pad(images, (config.pad,) * 4)
    # One gather for both: separate steps take over 1.5 times as long.
    source = ((rows + config.pad) * padded.shape[3])[:, :, None] + (columns + config.pad)[:, None, :]  # [B, H, W]
    pixels = padded.flatten(2).gather(2, source.view(count, 1, -1).expand(-1, channels, -1)).view(images.shape)
    return pixels if pixels.stride() == images.stride() else torch.empty_like(images).copy_(pixels)


class Batches(NamedTuple):
    """The minibatches of one environment step, [batches, B], or a single minibatch, [B]."""

    indices: Tensor  # [..., B] int64: indices into the training data
    augment_params: AugmentParams  # [..., B, …]

    @classmethod
    def concatenate(cls, all_batches: Sequence["Batches"]) -> "Batches":
        """Concatenate minibatches of N hosts along the sample axis: N times [batches, B] -> [batches, N·B]."""
        sample_axis = all_batches[0].indices.ndim - 1
        drawn = zip(*(batches.augment_params for batches in all_batches), strict=True)
        return cls(
            torch.cat([batches.indices for batches in all_batches], sample_axis),
            AugmentParams(*(None if parts[0] is None else torch.cat(parts, sample_axis) for parts in drawn)),
        )

    def minibatch(self, i: int) -> "Batches":  # [batches, B] -> [B]
        """Return the i-th minibatch."""
        return self._map(lambda part: part[i])

    def section(self, begin: int, end: int) -> "Batches":
        """Return the minibatches from number `begin` to number `end`, without the last one."""
        return self._map(lambda part: part[begin:end])

    def split(self, number: int) -> "Batches":  # [batches, B] -> [batches · number, B / number]
        """Split each minibatch into `number` smaller ones, in order."""
        return self._map(lambda part: part.unflatten(1, (number, -1)).flatten(0, 1))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "Batches":
        return Batches(change(self.indices), self.augment_params.map(change))


def fetch(data: Split, batch: Batches, config: AugmentConfig) -> Split:
    """Return the augmented samples of one minibatch [B]."""
    inputs, targets = data.batch(batch.indices)
    return Split(augment(inputs, batch.augment_params, config), targets)


def _shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    # The same order in all splits.
    order = torch.randperm(images[0, 0].numel(), generator=torch.Generator().manual_seed(0))
    return images.flatten(2)[:, :, order].view_as(images)


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    max_shift = max(1, images.shape[-1] // 8)
    shifts = torch.randint(-max_shift, max_shift + 1, (len(images), 2), generator=generator)
    return torch.stack([image.roll(move, (1, 2)) for image, move in zip(images, shifts.tolist(), strict=True)])


TRANSFORMS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": lambda images, generator: images,
    "inverted": lambda images, generator: -images,
    "transposed": lambda images, generator: images.transpose(2, 3).contiguous(),
    "coarse": lambda images, generator: F.interpolate(F.avg_pool2d(images, 2), size=images.shape[2:], mode="nearest"),
    "shifted": _shifted,
    "shuffled": _shuffled,
}
"""Transforms of images [n, C, H, W]. coarse: means of 2×2 pixels. shifted: each image rolled by up to an eighth of its
side. shuffled: the pixels of all images in the same random order."""


def check_transform(name: str, data: TaskData) -> None:
    """Raise ValueError if the inputs of `data` cannot be transformed in this way."""
    if name != "none" and data.stream is not None:
        raise ValueError(f"data.transform {name!r}: the training data are a stream; transform them in the data module")
    if name != "none" and len(data.input_shape) != 3:
        raise ValueError(f"data.transform {name!r} needs images, inputs have shape {data.input_shape}")
    if name == "coarse" and min(data.input_shape[1:]) < 2:
        raise ValueError(f"data.transform coarse needs images of at least 2×2 pixels, got {data.input_shape}")


def make_variants(data: TaskData, transforms: Sequence[str]) -> TaskData:
    """Return the data in each of these transforms in one data set, on the CPU; it is the same each time."""
    parts: dict[str, list[Sequence[Tensor]]] = {split: [] for split in SPLITS}
    for name in transforms:
        # The RNG seed of earlier versions, which had further settings: another one would change the data of results.
        described = f"Variant(transform={name!r}, noise=0.0, label_noise=0.0, classes=None, samples=None)"
        generator = torch.Generator().manual_seed(zlib.crc32(described.encode()))
        for split, pairs in parts.items():
            inputs, targets = getattr(data, split).to(torch.device("cpu")).batch()
            pairs.append((TRANSFORMS[name](inputs, generator), targets))
    joined = {split: map(torch.cat, zip(*pairs, strict=True)) for split, pairs in parts.items()}
    return data._replace(**{split: Split(*pair, variants=len(transforms)) for split, pair in joined.items()})
