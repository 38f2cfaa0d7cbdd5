"""Generated samples around random centres, for tests and speed measurements."""

from collections.abc import Sequence

import torch

from esper_lightning.tasks.task import Split, Task, TaskData


class Synthetic(Task):
    """Classification of generated samples; each class is a mixture of Gaussians around random centres.

    Args:
        shape: Shape of one input: [3, 32, 32] for images, [20] for vectors.
        classes: Number of classes.
        train, validation, test: Number of samples in each split.
        centres: Number of centres per class; with more than one, a linear model does not suffice.
        noise: Standard deviation around a centre; the centres themselves are standard normal.
        seed: RNG seed of all data.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 32, 32),
        classes: int = 10,
        *,
        train: int = 1024,
        validation: int = 256,
        test: int = 256,
        centres: int = 4,
        noise: float = 1.0,
        seed: int = 0,
    ) -> None:
        if min(train, validation, test, centres, classes - 1, *shape) < 1:
            raise ValueError("Synthetic: sizes and counts must be positive, and classes at least 2")
        self.shape = tuple(shape)
        self.classes = classes
        self.sizes = (train, validation, test)
        self.centres = centres
        self.noise = noise
        self.seed = seed

    def load(self) -> TaskData:
        generator = torch.Generator().manual_seed(self.seed)
        centres = torch.randn(self.classes * self.centres, *self.shape, generator=generator)

        def split(samples: int) -> Split:
            chosen = torch.randint(len(centres), (samples,), generator=generator)
            noise = torch.randn(samples, *self.shape, generator=generator)
            return Split(centres[chosen] + self.noise * noise, chosen % self.classes)

        return TaskData(*map(split, self.sizes), classes=self.classes)
