"""Work in processes: the same results in the same order, and tensors that no process shares."""

from functools import partial

import pytest
from torch import Tensor, zeros

from esper_lightning.runtime.parallel import processes, run_all


def add(values: Tensor, number: int) -> Tensor:
    if number < 0:
        raise ValueError(f"{number} is refused")
    return values.add_(number)


@pytest.mark.slow
def test_pieces_share_no_tensor_and_their_results_come_in_order_whatever_the_number_of_processes() -> None:
    values = zeros(3)
    for jobs in (1, 2):
        work = {"a": [partial(add, values, 1), partial(add, values, 2)], "b": [partial(add, values, 3)]}
        results = run_all(work, processes(jobs))
        assert {name: [row.tolist() for row in rows] for name, rows in results.items()} == {
            "a": [[1.0] * 3, [2.0] * 3],
            "b": [[3.0] * 3],
        }
    assert values.tolist() == [0.0] * 3


def test_an_error_of_a_piece_is_raised() -> None:
    with pytest.raises(ValueError, match="-3 is refused"):
        run_all({"a": [partial(add, zeros(1), -3)]}, processes(1))
