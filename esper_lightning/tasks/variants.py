"""Variants of a data set: transformed or noisy inputs, other labels, or fewer samples."""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Modification of a task's data set. Its random parts are the same each time it is applied."""

    transform: str = "none"
    """Transform of images: none, inverted, transposed, coarse, shifted or shuffled."""

    noise: float = 0.0
    """Standard deviation of the Gaussian noise on every input, fixed for each sample."""

    label_noise: float = 0.0
    """Share of the samples with a random label, in training, validation and test data: an irreducible error."""

    classes: int | None = None
    """Number of classes; the label becomes the task's class number modulo this. None: as in the task."""

    samples: int | None = None
    """Number of training samples of each host, drawn for each host. None: all."""

    def __post_init__(self) -> None:
        if self.transform not in TRANSFORMS:
            raise ValueError(f"data.transform: unknown {self.transform!r}; there are: {', '.join(TRANSFORMS)}")
        if self.noise < 0.0 or not 0.0 <= self.label_noise <= 1.0:
            raise ValueError(
                f"data.noise must not be negative and data.label_noise must lie in [0, 1], got {self.noise} and "
                f"{self.label_noise}"
            )
        for name, least in (("classes", 2), ("samples", 1)):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise ValueError(f"data.{name} must be a whole number of at least {least}, got {value}")

    @property
    def without_subset(self) -> "Variant":
        """This variant with all samples, from which each host draws its own."""
        return replace(self, samples=None)

    def check(self, data: TaskData) -> None:
        """Raise ValueError if this variant cannot be made of `data`."""
        if self.transform != "none" and len(data.input_shape) != 3:
            raise ValueError(f"data.transform {self.transform!r} needs images, inputs have shape {data.input_shape}")
        if self.transform == "coarse" and min(data.input_shape[1:]) < 2:
            raise ValueError(f"data.transform coarse needs images of at least 2×2 pixels, got {data.input_shape}")
        if self.noise > 0.0 and not data.train.inputs.is_floating_point():
            raise ValueError("data.noise needs inputs that are numbers, this task's are symbols")
        if self.classes is not None and self.classes > data.classes:
            raise ValueError(f"data.classes is {self.classes}, the task has {data.classes}")
        if self.samples is not None and self.samples > data.train.samples:
            raise ValueError(f"data.samples is {self.samples}, the task has {data.train.samples} training samples")

    def apply(self, data: TaskData) -> TaskData:
        """Return the modified data with all samples, on the CPU."""
        # The RNG seed depends on the names of this class and its fields: renaming them would change the data.
        generator = torch.Generator().manual_seed(zlib.crc32(repr(self.without_subset).encode()))
        classes, splits = self.classes or data.classes, {}
        for name in SPLITS:
            inputs, targets = (part.cpu() for part in getattr(data, name))
            inputs = TRANSFORMS[self.transform](inputs, generator)
            if self.noise > 0.0:
                inputs = inputs + self.noise * torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
            targets = targets % classes
            if self.label_noise > 0.0:
                wrong = torch.rand(targets.shape, generator=generator) < self.label_noise
                targets = torch.where(wrong, torch.randint(classes, targets.shape, generator=generator), targets)
            splits[name] = Split(inputs, targets)
        return data._replace(**splits)


def make_variants(data: TaskData, variants: Sequence[Variant]) -> TaskData:
    """Return all variants in one data set, on the CPU. Raises ValueError if one cannot be made of `data`."""
    for variant in variants:
        variant.check(data)
    varied = [variant.apply(data) for variant in variants]
    parts = {name: zip(*(getattr(one, name) for one in varied), strict=True) for name in SPLITS}
    return data._replace(**{name: Split(*map(torch.cat, parts[name]), variants=len(variants)) for name in SPLITS})
