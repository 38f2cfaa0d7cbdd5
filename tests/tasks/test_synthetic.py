"""Synthetic data: learnable, and the same each time they are generated."""

import pytest
import torch
from sklearn.neighbors import KNeighborsClassifier

from esper_lightning.tasks import Synthetic, check_data, fingerprint


def test_it_is_the_same_whenever_it_is_made() -> None:
    assert fingerprint(Synthetic().load()) == fingerprint(Synthetic().load())
    assert fingerprint(Synthetic().load()) != fingerprint(Synthetic(seed=1).load())


def test_classes_can_be_told_apart() -> None:
    data = Synthetic(shape=(20,), noise=0.5).load()
    check_data(data, "Synthetic")

    neighbours = KNeighborsClassifier(5).fit(data.train.inputs, data.train.targets)
    assert neighbours.score(data.test.inputs, data.test.targets) > 0.95


def test_sizes_are_as_asked_for() -> None:
    data = Synthetic(shape=(3, 8, 8), classes=3, train=30, validation=20, test=10).load()

    assert [tuple(split.inputs.shape) for split in data[:3]] == [(30, 3, 8, 8), (20, 3, 8, 8), (10, 3, 8, 8)]
    assert torch.cat([split.targets for split in data[:3]]).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        *({"classes": 1}, {"train": 0}, {"shape": ()}, {"noise": -1.0}, {"centres": 0}, {"seed": 10**20}),
        *({"train": 10**12}, {"shape": (10**6, 10**6)}, {"shape": (10**200, 10**200)}, {"centres": 10**12}),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match="Synthetic"):
        Synthetic(**settings)
