"""Work in processes: the same results in the same order, and tensors that nobody shares."""

from typing import Any

import pytest
from torch import zeros

from esper_lightning.parallel import Processes


def square(number: int) -> int:
    return number * number


def refuse(number: int) -> int:
    raise ValueError(f"{number} is refused")


def add_one(values: Any) -> Any:
    return values.add_(1)


@pytest.mark.slow
def test_results_come_in_the_order_of_the_items_whatever_the_number_of_processes() -> None:
    expected = [0, 1, 4, 9, 16]
    assert list(Processes(1).map(square, range(5))) == expected
    assert list(Processes(2).map(square, reversed(range(5)))) == expected[::-1]
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        Processes(0)


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(ValueError, match="3 is refused"):
        list(Processes(1).map(refuse, [3, 4]))


@pytest.mark.slow
def test_workers_share_no_tensor_with_each_other_or_with_the_process_that_started_them() -> None:
    values = zeros(3)
    assert [added.tolist() for added in Processes(2).map(add_one, [values] * 4)] == [[1.0] * 3] * 4
    assert values.tolist() == [0.0] * 3
