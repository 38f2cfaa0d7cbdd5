"""CIFAR-10: 60,000 colour images of 32×32 pixels in ten classes (https://www.cs.toronto.edu/~kriz/cifar.html)."""

from pathlib import Path
from urllib.error import URLError

import torch
from torch import Tensor

from esper_lightning.tasks.task import Split, Task, TaskData

ARCHIVE = "cifar-10-python.tar.gz"

SPLIT_RNG_SEED = 0
"""RNG seed of the split into training and validation images, which is the same in every run."""


class CIFAR10(Task):
    """Classification of CIFAR-10. Only evaluations use its 10,000 test images; validation images come from the rest.

    All images are kept in memory on the hosts' device, each channel with mean 0 and standard deviation 1; minibatches
    are augmented there (`data.env.training.augment`).

    Args:
        root: Folder that holds `cifar-10-batches-py`, or the archive `cifar-10-python.tar.gz`.
        download: Download missing files (170 MB) and verify them.
        validation: Number of images for rewards and observations.
        train: Number of images that hosts are trained on. None: all the others. Fewer make ticks shorter.
        test: Number of images for evaluations. None: all.
    """

    def __init__(
        self,
        root: str = "data",
        *,
        download: bool = False,
        validation: int = 5000,
        train: int | None = None,
        test: int | None = None,
    ) -> None:
        for name, value in (("validation", validation), ("train", train), ("test", test)):
            if value is not None and value < 1:
                raise ValueError(f"CIFAR10: {name} must be at least 1 image, got {value}")
        self.root = Path(root)
        self.download = download
        self.validation = validation
        self.train = train
        self.test = test

    def load(self) -> TaskData:
        images, labels = self._read(train=True)
        if self.validation + (self.train or 1) > len(images):
            raise ValueError(
                f"CIFAR10: {self.validation} images for validation and {self.train or 1} for training are more than "
                f"there are, {len(images)}; lower validation or train"
            )
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_RNG_SEED))
        held_out, rest = order[: self.validation], order[self.validation :][: self.train]
        mean, deviation = channel_statistics(images[rest])

        def split(images: Tensor, labels: Tensor) -> Split:
            return Split((images.float() - mean) / deviation, labels)

        train, validation = (split(images[part], labels[part]) for part in (rest, held_out))
        test_images, test_labels = self._read(train=False)
        test = split(test_images[: self.test], test_labels[: self.test])
        return TaskData(train, validation, test, classes=10)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:  # [n, 3, 32, 32] uint8, [n] int64
        from torchvision.datasets import CIFAR10 as Stored  # imported late: it takes a second

        try:
            stored = Stored(self.root, train=train, download=self.download)
        except (RuntimeError, URLError) as error:  # raised by torchvision for missing or damaged files
            raise ValueError(self._download_hint(error)) from error
        return torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(stored.targets)

    def _download_hint(self, error: Exception) -> str:
        if self.download:
            return f"CIFAR10: the download to {str(self.root)!r} failed ({error}); put {ARCHIVE} there by hand"
        return (
            f"CIFAR10: no sound data set in {str(self.root)!r}; give --data.task.init_args.download true to fetch it "
            f"(170 MB), or name the folder that holds it by --data.task.init_args.root"
        )


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:  # [n, C, H, W] uint8 -> [C, 1, 1] each
    """Return mean and standard deviation of each channel, from counts of its 256 values to save a float copy."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum(1) / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.float()[:, None, None], variance.sqrt().float()[:, None, None]
