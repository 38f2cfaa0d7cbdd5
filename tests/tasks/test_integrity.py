"""Data from which nothing can be learned are refused, and doubtful measurements are named."""

import pytest
import torch

from esper_lightning.tasks import Split, TaskData, check_data, find_doubts
from esper_lightning.tasks.integrity import rows_are_equal


def split(samples: int, *, inputs: float | None = None, target: int | None = None) -> Split:
    """Return random samples, with equal inputs or targets where a value is given."""
    generator = torch.Generator().manual_seed(samples)
    x = torch.randn(samples, 3, generator=generator) if inputs is None else torch.full((samples, 3), inputs)
    y = torch.arange(samples) % 2 if target is None else torch.full((samples,), target)
    return Split(x, y)


def data(train: Split, validation: Split | None = None, test: Split | None = None) -> TaskData:
    return TaskData(train, validation or split(10), test or split(11), classes=2)


@pytest.mark.parametrize(
    ("train", "named"),
    [
        (split(500, target=1), "all targets of its training data are equal"),
        (split(500, inputs=0.5), "all inputs of its training data are equal"),
        (split(1), "all inputs of its training data are equal"),
    ],
)
def test_training_data_that_teach_nothing_are_refused(train: Split, named: str) -> None:
    with pytest.raises(ValueError, match=f"^task Mine: {named}, so there is nothing to learn$"):
        check_data(data(train), "Mine")


@pytest.mark.parametrize(
    ("inputs", "classes", "named"),
    [
        (torch.randn(8, 3, 4, 4), 5_000_001, "task Mine has 5000001 classes, more than 100000; correct its labels"),
        (torch.randn(8, 3, 4, 4).to(torch.complex64), 2, "its train data have complex inputs; give real numbers"),
        (torch.ones(8, 3, 4, 4, dtype=torch.int64), 2, "its train data have images of torch.int64; give floats"),
        (torch.ones(8, 3, 4, 4, dtype=torch.uint8), 2, "its train data have images of torch.uint8; give floats"),
    ],
)
def test_data_that_no_host_can_take_are_refused(inputs: torch.Tensor, classes: int, named: str) -> None:
    part = Split(inputs, torch.arange(8) % 2)
    with pytest.raises(ValueError) as refused:
        check_data(TaskData(part, part, part, classes=classes), "Mine")
    assert named in str(refused.value)


def test_a_text_of_one_repeated_token_is_refused() -> None:
    tokens = torch.full((40, 8), 7)
    with pytest.raises(ValueError, match="all inputs of its training data are equal"):
        check_data(TaskData(*[Split(tokens, tokens)] * 3, classes=9), "Text")


def test_one_differing_sample_is_enough_wherever_it_is() -> None:
    for place in (0, 255, 256, 999):
        inputs = torch.zeros(1000, 2, 2)
        inputs[place, 1, 1] = 1.0
        assert not rows_are_equal(inputs)
    assert rows_are_equal(torch.zeros(1000, 2, 2))


@pytest.mark.parametrize("name", ["validation", "test"])
@pytest.mark.parametrize(
    ("doubtful", "named"),
    [
        (split(1), "are one sample, so an accuracy"),
        (split(20, target=0), "have one class, so a constant output"),
        (split(20, inputs=1.0), "have equal inputs, so every network"),
    ],
)
def test_doubtful_measurements_are_named(doubtful: Split, named: str, name: str) -> None:
    doubted = data(split(100), **{name: doubtful})
    check_data(doubted, "Mine")
    (line,) = find_doubts(doubted, "Mine")
    assert line.startswith(f"task Mine: its {name} data {named}")


def test_ordinary_data_raise_no_doubt() -> None:
    assert find_doubts(data(split(100)), "Mine") == []
