"""LightningDataModules as tasks."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning import LightningDataModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.functional import cosine_similarity

from esper_lightning.tasks import FromDataModule, check_data, check_measures, fingerprint

SIZES = {"train": 23, "val": 11, "test": 7}


class Numbers(LightningDataModule):
    """Data module whose samples contain their index; the training data come in a random order."""

    def setup(self, stage: str) -> None:
        parts = {"fit": ("train", "val"), "test": ("test",)}[stage]
        self.sets = getattr(self, "sets", {}) | {part: self.make(part) for part in parts}

    def make(self, part: str) -> TensorDataset:
        start = 100 * list(SIZES).index(part)
        inputs = torch.arange(start, start + SIZES[part]).float().view(-1, 1).expand(-1, 4)
        return TensorDataset(inputs, torch.arange(SIZES[part]) % 3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["train"], batch_size=5, shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["val"], batch_size=5)


class Complete(Numbers):
    def test_dataloader(self) -> DataLoader:
        return DataLoader(self.sets["test"], batch_size=5)


def test_every_sample_is_there_once_beside_its_target() -> None:
    data = FromDataModule(Complete()).load()

    check_data(data, "Complete")
    assert data.outputs == 3
    for i, (split, size) in enumerate(zip(data[:3], SIZES.values(), strict=True)):
        numbers = split.inputs[:, 0] - 100 * i
        assert sorted(numbers.tolist()) == list(range(size))
        assert torch.equal(split.targets, numbers.long() % 3)
    assert data.train.inputs[:, 0].tolist() != sorted(data.train.inputs[:, 0].tolist())


similarity = partial(cosine_similarity, reduction="none")
"""Criterion of torchmetrics, a number per sample."""


def test_a_criterion_of_the_user_takes_the_place_of_the_score_and_leaves_the_loss() -> None:
    outputs, targets = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(0))
    plain = FromDataModule(Complete(), score="r2")
    task = FromDataModule(Complete(), score="r2", metric=f"{__name__}.similarity")
    measures = task.measure(outputs, targets)

    check_measures(measures, 9, "Complete")
    torch.testing.assert_close(measures.score, F.cosine_similarity(outputs, targets))
    assert torch.equal(measures.loss, plain.measure(outputs, targets).loss)
    assert (task.score_name, plain.score_name) == ("similarity", "r2")
    with pytest.raises(ValueError, match=r"FromDataModule: metric: .*nothing"):
        FromDataModule(Complete(), metric=f"{__name__}.nothing")


class Divided(Complete):
    """Data module that draws its splits from the global random generators."""

    def make(self, part: str) -> TensorDataset:
        self.drawn = (np.random.permutation(100).tolist(), random.random())
        return TensorDataset(torch.tensor(self.drawn[0][:20]).float().view(-1, 1), torch.arange(20) % 3)


def test_data_that_are_drawn_by_numpy_or_python_are_the_same_again_too() -> None:
    prints = []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        expected = (random.Random(seed).random(), np.random.RandomState(seed).rand())
        prints.append(fingerprint(FromDataModule(Divided()).load()))
        assert (random.random(), np.random.rand()) == expected, "the global generators do not advance"

    assert prints[0] == prints[1]


class Quantities(Complete):
    """Data module whose targets are two scaled quantities."""

    def make(self, part: str) -> TensorDataset:
        numbers = torch.arange(SIZES[part]).double().view(-1, 1)
        return TensorDataset(numbers, ((-1.0) ** numbers).expand(-1, 2))


def test_quantities_are_read_as_they_are() -> None:
    data = FromDataModule(Quantities(), score="r2").load()

    check_data(data, "Quantities", "r2")
    assert data.outputs == 2 and data.train.targets.dtype is torch.float32
    assert set(map(tuple, data.test.targets.tolist())) == {(1.0, 1.0), (-1.0, -1.0)}


@pytest.mark.parametrize(("kind", "becomes"), [(torch.float64, torch.float32), (torch.int32, torch.int64)], ids=str)
def test_numbers_are_what_networks_take(kind: torch.dtype, becomes: torch.dtype) -> None:
    class Other(Complete):
        def make(self, part: str) -> TensorDataset:
            inputs, targets = super().make(part).tensors
            return TensorDataset(inputs.to(kind), targets.int())

    data = FromDataModule(Other()).load()

    assert data.train.inputs.dtype is becomes and data.train.targets.dtype is torch.int64


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, y: {"x": x}, "must be pairs of tensors"),
        (lambda x, y: (x, y, y), "must be pairs of tensors"),
        (lambda x, y: (x, y.float()), "are torch.float32 and torch.float32"),
        (lambda x, y: (x.byte(), y), "are torch.uint8 and torch.int64; give"),
        (lambda x, y: (x[:, : len(x)], y), "empty or of several shapes"),
        (lambda x, y: (x, y.sum()), r"batches are \[5, 4\] and \[\]"),
        (lambda x, y: (x, y.view(-1, 1)), r"are \[5, 4\] and \[5, 1\]; they"),
    ],
)
def test_batches_that_cannot_be_learned_from_are_refused_in_one_line(
    change: Callable[[Tensor, Tensor], Any], said: str
) -> None:
    class Changed(Complete):
        def val_dataloader(self) -> list[Any]:
            return [change(*batch) for batch in super().val_dataloader()]

    with pytest.raises(ValueError, match=said):
        FromDataModule(Changed()).load()


def test_a_data_module_without_a_loader_is_refused_in_one_line() -> None:
    for module, said in ((Numbers(), "Numbers has no test data; give it a test_"), (LightningDataModule(), "a train_")):
        with pytest.raises(ValueError, match=f"{said}dataloader$"):
            FromDataModule(module).load()
