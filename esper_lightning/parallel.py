"""Independent work in several processes: the same results, in the same order, whatever the number of processes.

Whatever has a method `map(function, items)` can do such work: `Processes` here, executors of `concurrent.futures` and
joblib's loky, pools of `multiprocessing` and of Ray.
"""

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

Item = TypeVar("Item")
Result = TypeVar("Result")


def check_jobs(jobs: int) -> None:
    """Raise ValueError unless `jobs` is a number of processes."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")


class Mapper(Protocol):
    """Applies a function to independent items."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], /) -> Iterable[Any]:
        """Return the results in the order of the items."""
        ...


class Processes:
    """Applies a function to items in `jobs` processes of its own, which are started by `spawn`.

    Function, items and results must be picklable; tensors are copied.
    """

    def __init__(self, jobs: int) -> None:
        check_jobs(jobs)
        self.jobs = jobs

    def map(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Yield the results in the order of the items, each as soon as all before it are there."""
        # Both are pickled here, which copies their tensors: where torch pickles arguments for another process, tensors
        # move to memory that all of the processes share, and write to.
        with ProcessPoolExecutor(self.jobs, multiprocessing.get_context("spawn")) as executor:
            work = [executor.submit(_call, pickle.dumps((function, item))) for item in items]
            try:
                yield from (pickle.loads(one.result()) for one in work)
            finally:
                executor.shutdown(wait=False, cancel_futures=True)


def _call(pickled_work: bytes) -> bytes:
    function, item = pickle.loads(pickled_work)
    return pickle.dumps(function(item))


@contextmanager
def seeded_generators(rng_seed: int) -> Iterator[None]:
    """Within this context the global generators of Python, numpy and torch begin with a seed; then as before it."""
    with isolate_rng():
        random.seed(rng_seed)
        np.random.seed(rng_seed)
        torch.manual_seed(rng_seed)
        yield
