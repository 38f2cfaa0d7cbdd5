"""Real images: the handwritten digits of scikit-learn, which need no download, and CIFAR-10."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from esper_lightning.tasks.task import Split, Task, TaskData

SPLIT_RNG_SEED = 0
"""RNG seed of the splits, which are the same in every run."""


class Digits(Task):
    """1,797 images of 8×8 pixels in ten classes (https://archive.ics.uci.edu/dataset/80), splits stratified by class.

    Args:
        validation: Number of images for rewards and observations.
        test: Number of images for evaluations only.
    """

    def __init__(self, validation: int = 200, test: int = 700) -> None:
        self.validation = validation
        self.test = test
        if min(validation, test) < 10 or validation + test > 1787:
            raise ValueError(
                f"digits: validation and test need at least 10 images each and must leave 10 of 1,797 for training, "
                f"got {validation} and {test}"
            )

    def load(self) -> TaskData:
        images, digits = load_digits(return_X_y=True)
        parts = stratified(digits, self.validation, self.test)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8)
        mean, deviation = pixels[parts[0]].mean(), pixels[parts[0]].std()
        inputs, targets = (pixels - mean) / deviation, torch.tensor(digits, dtype=torch.int64)
        return TaskData(*(Split(inputs[part], targets[part]) for part in parts), outputs=10)


def stratified(labels: np.ndarray, validation: float, test: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the rows of training, validation and test, with classes in the same proportion in each.

    Args:
        labels: Class of each row, or a quantity as a float.
        validation, test: Numbers of rows; or shares, that of validation among the rows that are left by test.
    """

    def split(rows: np.ndarray, share: float) -> Any:
        classes = None if labels.dtype.kind == "f" else labels[rows]
        return train_test_split(rows, test_size=share, random_state=SPLIT_RNG_SEED, stratify=classes)

    rest, tested = split(np.arange(len(labels)), test)
    trained, validated = split(rest, validation)
    return trained, validated, tested


class CIFAR10(Task):
    """60,000 colour images of 32×32 pixels in ten classes (https://www.cs.toronto.edu/~kriz/cifar.html).

    Only evaluations use its 10,000 test images; validation images come from the rest. In a minibatch each channel has
    mean 0 and standard deviation 1, and images are augmented (`data.env.training.augment`).

    Args:
        root: Folder that holds `cifar-10-batches-py`.
        download: Unpack the archive `cifar-10-python.tar.gz` in `root` where files are missing or damaged; download it
            (170 MB) if it is not there.
        validation: Number of images for rewards and observations.
    """

    def __init__(self, root: str = "data", *, download: bool = False, validation: int = 5000) -> None:
        self.root = Path(root)
        self.download = download
        self.validation = validation

    def load(self) -> TaskData:
        images, labels = self._read(train=True)
        if not 1 <= self.validation < len(images):
            raise ValueError(f"CIFAR10: validation must be at least 1 of {len(images)} images, got {self.validation}")
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_RNG_SEED))
        held_out, rest = order[: self.validation], order[self.validation :]
        scale = channel_statistics(images[rest])
        train, validation = (Split(images[part], labels[part], scale=scale) for part in (rest, held_out))
        test = Split(*self._read(train=False), scale=scale)
        # Floats once and for all: converting them in every validation would add 5 % to the tick of a small CNN.
        return TaskData(train, validation.batch(), test.batch(), outputs=10)

    def _read(self, train: bool) -> tuple[Tensor, Tensor]:  # [n, 3, 32, 32] uint8, [n] int64
        from torchvision.datasets import CIFAR10 as Stored  # imported late: it takes a second

        try:
            stored = Stored(self.root, train=train, download=self.download)
        except (RuntimeError, OSError) as error:  # RuntimeError: a file is missing or damaged
            hint = "give --data.task.init_args.download true to fetch it (170 MB), or name its folder by root"
            if self.download:
                hint = f"remove {self.root / Stored.base_folder}, and without a network put {Stored.filename} beside it"
            raise ValueError(f"CIFAR10: no sound data set in {str(self.root)!r} ({error}); {hint}") from error
        return torch.from_numpy(stored.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(stored.targets)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:  # [n, C, H, W] uint8 -> [C, 1, 1] each
    """Return mean and standard deviation of each channel, from counts of its 256 values to save a float copy."""
    counts = torch.stack([torch.bincount(channel.flatten(), minlength=256) for channel in images.unbind(1)]).double()
    values = torch.arange(256, dtype=torch.float64)
    mean = (counts * values).sum(1) / counts.sum(1)
    variance = (counts * (values - mean[:, None]) ** 2).sum(1) / counts.sum(1)
    return mean.float()[:, None, None], variance.sqrt().float()[:, None, None]
