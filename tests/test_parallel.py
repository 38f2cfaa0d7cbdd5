"""Work in processes: the same results in the same order, and tensors that nobody shares."""

from typing import Any

import pytest
from torch import zeros

from esper_lightning.parallel import Processes


def square(number: int) -> int:
    return number * number


def tell_and_wait(file: Path) -> None:
    """Write the number of this process to a file, in one step, and work for as long as the test may take."""
    file.with_suffix(".tmp").write_text(str(os.getpid()))
    file.with_suffix(".tmp").rename(file)
    time.sleep(60.0)


def refuse(number: int) -> int:
    raise ValueError(f"{number} is refused")


def add_one(values: Any) -> Any:
    return values.add_(1)


def test_results_come_in_the_order_of_the_items_whatever_the_number_of_processes() -> None:
    expected = [0, 1, 4, 9, 16]
    assert list(Processes(1).map(square, range(5))) == expected
    assert list(Processes(2).map(square, reversed(range(5)))) == expected[::-1]
    with pytest.raises(ValueError, match="jobs must lie in 1 … 1024, got 0"):
        Processes(0)


def test_an_error_of_the_function_is_raised() -> None:
    with pytest.raises(ValueError, match="3 is refused"):
        list(Processes(1).map(refuse, [3, 4]))


@pytest.mark.slow
def test_workers_share_no_tensor_with_each_other_or_with_the_process_that_started_them() -> None:
    values = zeros(3)
    assert [added.tolist() for added in Processes(2).map(add_one, [values] * 4)] == [[1.0] * 3] * 4
    assert values.tolist() == [0.0] * 3


def test_a_worker_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "worker"
    code = "from tests.test_parallel import *\nlist(Processes(1).map(tell_and_wait, [Path(sys.argv[1])]))"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(file)], cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL
    ) as started:
        while not file.exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.kill()

    worker = Path("/proc", file.read_text())
    deadline = time.monotonic() + 30.0
    while worker.exists() and "\nState:\tZ" not in (worker / "status").read_text():
        assert time.monotonic() < deadline, "it works for nobody"
        time.sleep(0.05)
