"""Ranks of one run as threads of the test's process, which note every collective operation."""

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from esper_lightning.runtime.ranks import Ranks

PATIENCE = 120.0
"""Seconds that a rank waits for the others: a rank that leaves out an operation fails the test instead of hanging."""


class Meeting:
    """Place where W threads exchange values.

    Attributes:
        noted: For each rank the names of its operations with the shapes of their tensors, in their order.
    """

    def __init__(self, world: int) -> None:
        self.noted: list[list[str]] = [[] for _ in range(world)]
        self._values: list[Any] = [None] * world
        self._barrier = threading.Barrier(world, timeout=PATIENCE)

    def exchange(self, rank: int, operation: str, value: Any) -> list[Any]:
        self.noted[rank].append(operation)
        self._values[rank] = value
        self._barrier.wait()
        values = list(self._values)
        self._barrier.wait()  # nobody writes the next value before all have read this one
        return values


class ThreadRanks(Ranks):
    """Ranks that meet in this process. Reductions add up in the order of ranks."""

    def __init__(self, sizes: Sequence[int], rank: int, world: int, meeting: Meeting) -> None:
        super().__init__(sizes, rank, world)
        self.meeting = meeting

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        parts = self.meeting.exchange(self.rank, f"reduce {list(values.shape)}", values.detach().clone())
        return reduce(torch.add if operation == dist.ReduceOp.SUM else torch.maximum, parts)

    def gather_rows(self, rows: Tensor) -> Tensor:
        return self.join(self.meeting.exchange(self.rank, f"rows {list(rows.shape)}", rows))

    def gather_everywhere(self, record: Any) -> list[Any]:
        return self.meeting.exchange(self.rank, "records", record)

    def average(self, gradient: Tensor) -> Tensor:
        """Return the mean of the ranks' gradients, as DDP does."""
        return torch.stack(self.meeting.exchange(self.rank, "gradient", gradient)).mean(0)


def run_in_threads(world: int, work: Callable[[int], Any]) -> list[Any]:
    """Return the result of `work(rank)` of each of `world` threads. Raises the first error of any."""
    results: list[Any] = [None] * world
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = work(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
