"""Task with the data of any LightningDataModule, which may be more than fit into memory."""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from lightning import LightningDataModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor

from esper_lightning.runtime.generators import seeded_generators
from esper_lightning.runtime.registry import import_object
from esper_lightning.tasks.task import Score, Split, Task, TaskData

LOADERS = {"training": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}
"""Name of the loader method for each split."""

RNG_SEED = 0
"""RNG seed for reading a data module, which may draw the order of samples and their augmentation."""

STREAM_SAMPLES = 1024
"""Least number of samples that are read of a stream before training, to try hosts and seeds on them."""


class FromDataModule(Task):
    """The data of a LightningDataModule, whose batches are pairs of inputs, and class numbers or quantities.

    The data are read once and kept on the hosts' device, so a random transform is applied only once, unless the
    training data are a stream; data.env.training.augment differs each time.

    Args:
        data: Data module with loaders for training, validation and test.
        classes: Number of classes. None: one more than the largest class number in the data. Not for quantities.
        score: accuracy or likelihood for classes or tokens, r2 for quantities; see `Score`.
        metric: Import path of a function that takes the place of the score: of outputs and targets, to a number per
            sample, at most 1. The score still tells what the targets are.
        stream: True for training data that do not fit into memory: in each host epoch all hosts are trained on the next
            batches of the training loader.
    """

    def __init__(
        self,
        data: LightningDataModule,
        classes: int | None = None,
        score: Score = "accuracy",
        *,
        metric: str | None = None,
        stream: bool = False,
    ) -> None:
        if metric is not None:
            import_object(metric, "FromDataModule: metric")  # raises ValueError now if there is none
        self.data, self.metric, self.stream = data, metric, stream
        self.score: Score = score
        self.classes = classes

    def load(self) -> TaskData:
        kind = type(self.data).__name__
        for name, loader in LOADERS.items():
            if not is_overridden(loader, self.data, LightningDataModule):
                raise ValueError(f"FromDataModule: {kind} has no {name} data; give it a {loader}")
        with seeded_generators(RNG_SEED):  # so that a resumed run has the same data
            self.data.prepare_data()
            self.data.setup("fit")
            self.data.setup("test")
            splits, stream = [], None
            for name, loader in LOADERS.items():
                gather = partial(concatenate, source=f"{kind}'s {name}", quantities=self.score == "r2")
                batches = getattr(self.data, loader)()
                if self.stream and name == "training":
                    stream = Stream(batches, gather)
                    splits.append(stream.chunk(RNG_SEED, 0, STREAM_SAMPLES))
                else:
                    splits.append(gather(batches))
        if self.score == "r2":
            return TaskData(*splits, outputs=splits[0].targets[0].numel(), stream=stream)
        classes_in_data = 1 + max(int(split.targets.max()) for split in splits if split.samples)
        return TaskData(*splits, outputs=self.classes or max(2, classes_in_data), stream=stream)


def concatenate(batches: Iterable[Any], source: str, *, quantities: bool) -> Split:
    """Concatenate all batches of a loader. Raises ValueError unless they are pairs of tensors that fit."""
    pairs: list[Any] = list(batches)
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(isinstance(part, Tensor) for part in pair):
            raise ValueError(f"FromDataModule: {source} batches must be pairs of tensors, inputs and class numbers")
        inputs, targets = pair
        is_byte = inputs.dtype is torch.uint8 and inputs.ndim < 4  # of images they are brightness
        is_wrong = is_byte or inputs.dtype is torch.bool or inputs.is_complex()
        if is_wrong or targets.is_floating_point() != quantities:
            raise ValueError(
                f"FromDataModule: {source} batches are {inputs.dtype} and {targets.dtype}; give numbers (float32), "
                "images (float32 or uint8, [B, C, H, W]) or tokens (int64), and class numbers (int64), or quantities "
                "(float32) with the score r2"
            )
        alike = 1 if quantities else targets.ndim  # leading axes
        if targets.ndim not in (1, 2) or inputs.ndim < 2 or inputs.shape[:alike] != targets.shape[:alike]:
            raise ValueError(
                f"FromDataModule: {source} batches are {list(inputs.shape)} and {list(targets.shape)}; they need "
                "inputs [B, …] and class numbers [B], or [B, T] for tokens, or quantities [B] or [B, k]"
            )
    if len({(inputs.shape[1:], targets.shape[1:]) for inputs, targets in pairs}) != 1:
        raise ValueError(f"FromDataModule: {source} data are empty or of several shapes; bring them to one")
    inputs, targets = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    if inputs.dtype is not torch.uint8:
        inputs = inputs.float() if inputs.is_floating_point() else inputs.long()
    return Split(inputs, targets.float() if quantities else targets.long())


class Stream:
    """Training data that a loader reads chunk by chunk, one for each host epoch of all hosts of a pool.

    An episode begins a pass through the loader, and further passes follow where one does not suffice. A chunk depends
    on the RNG seed of the episode and on the tick alone, as do random transforms that draw from the global generators
    of torch, numpy or Python. Workers of the loader read ahead while hosts train; without workers hosts wait.

    Args:
        loader: Batches of one pass, such as a DataLoader.
        gather: Function that makes a split of some batches.
    """

    def __init__(self, loader: Iterable[Any], gather: Callable[[Sequence[Any]], Split]) -> None:
        if getattr(loader, "persistent_workers", False):
            raise ValueError(
                "a stream: persistent workers do not begin a pass with new random numbers, so that a run could not be "
                "resumed; leave persistent_workers of the training loader off"
            )
        self.loader, self.gather = loader, gather
        self._rewind(0)

    def _rewind(self, rng_seed: int) -> None:
        self._rng_seed, self._tick, self._batches = rng_seed, 0, passes(self.loader)

    def __reduce__(self) -> tuple[Any, ...]:
        return Stream, (self.loader, self.gather)  # a copy in another process begins its passes anew

    def chunk(self, rng_seed: int, tick: int, samples: int) -> Split:
        """Return the chunk of a tick (counted from 0) in an episode: whole batches, at least so many samples.

        To resume in the middle of an episode, the chunks before it are read again and dropped.
        """
        if rng_seed != self._rng_seed or tick < self._tick:
            self._rewind(rng_seed)
        batches: list[Any] = []
        while self._tick <= tick:
            with seeded_generators(zlib.crc32(f"chunk {rng_seed} {self._tick}".encode())):
                batches, missing = [], samples
                while missing > 0:
                    batches.append(next(self._batches))
                    missing -= self.gather(batches[-1:]).samples
            self._tick += 1
        return self.gather(batches)


def passes(loader: Iterable[Any]) -> Iterator[Any]:
    """Iterate over the batches of endless passes. Raises ValueError if a pass has none.

    As a method it would refer to its stream, whose removal would later wait five seconds for each worker of the loader.
    """
    while True:
        for part in (loader, getattr(loader, "sampler", None)):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(int(torch.randint(2**62, ())))
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise ValueError("a stream: the training loader has no batches; give it data")
