"""Transforms of the images of a data set, which make hosts with different data."""

import zlib
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from esper_lightning.tasks.task import SPLITS, Split, TaskData

PERMUTATION_RNG_SEED = 0
"""RNG seed of the pixel permutation of `shuffled`, which must be the same in all splits."""


def _shuffled(images: Tensor, generator: torch.Generator) -> Tensor:
    order = torch.randperm(images[0, 0].numel(), generator=torch.Generator().manual_seed(PERMUTATION_RNG_SEED))
    return images.flatten(2)[:, :, order].view_as(images)


def _shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    max_shift = max(1, images.shape[-1] // 8)
    shifts = torch.randint(-max_shift, max_shift + 1, (len(images), 2), generator=generator)
    return torch.stack([image.roll(move, (1, 2)) for image, move in zip(images, shifts.tolist(), strict=True)])


def _coarse(images: Tensor, generator: torch.Generator) -> Tensor:
    return F.interpolate(F.avg_pool2d(images, 2), size=images.shape[2:], mode="nearest")


TRANSFORMS: dict[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "none": lambda images, generator: images,
    "inverted": lambda images, generator: -images,
    "transposed": lambda images, generator: images.transpose(2, 3).contiguous(),
    "coarse": _coarse,
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


def transform_data(data: TaskData, name: str) -> TaskData:
    """Return the transformed data, on the CPU; the random parts of a transform are the same each time."""
    # The RNG seed of earlier versions, which had further settings: another one would change the data of results.
    described = f"Variant(transform={name!r}, noise=0.0, label_noise=0.0, classes=None, samples=None)"
    generator = torch.Generator().manual_seed(zlib.crc32(described.encode()))
    splits = (getattr(data, split).to(torch.device("cpu")).batch() for split in SPLITS)
    transformed = (Split(TRANSFORMS[name](inputs, generator), targets) for inputs, targets in splits)
    return data._replace(**dict(zip(SPLITS, transformed, strict=True)))


def make_variants(data: TaskData, transforms: Sequence[str]) -> TaskData:
    """Return the data in each of these transforms in one data set, on the CPU."""
    varied = [transform_data(data, name) for name in transforms]
    parts = {split: zip(*(getattr(one, split) for one in varied), strict=True) for split in SPLITS}
    return data._replace(**{split: Split(*map(torch.cat, parts[split]), variants=len(varied)) for split in SPLITS})
