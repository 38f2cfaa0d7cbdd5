"""Independent work in several processes: the same results, in the same order, whatever the number of processes.

Whatever has a method `map(function, items)` can do such work: `Processes` here, executors of `concurrent.futures` and
joblib's loky, pools of `multiprocessing` and of Ray.
"""

import multiprocessing
import os
import pickle
import random
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

Item = TypeVar("Item")
Result = TypeVar("Result")

PROCESS = secrets.token_hex(8)
"""Token of this process."""


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


def run_all(
    work: Mapping[str, Sequence[Callable[[], Result]]], executor: Mapper | None = None
) -> dict[str, list[Result]]:
    """Return the results of independent pieces of work, in their order.

    Every piece begins with the same state of the global random generators, from which only parts of users draw, so that
    no piece, order or number of processes changes what another one draws.

    Args:
        work: Functions without arguments, under any names; they may share a pool, whose state they overwrite.
        executor: Has a method `map(function, items)`, which runs the pieces in other processes, each with a copy of
            what it holds. None: one after the other in this process.

    Raises ValueError if the executor runs a piece in this process, as one of threads does.
    """
    if executor is None:
        return {name: [_run(piece) for piece in pieces] for name, pieces in work.items()}
    here = PROCESS, os.getpid()  # a forked process has the first, and one on another machine may have the second
    run = partial(_run_elsewhere, here, torch.get_num_threads(), torch.backends.cudnn.allow_tf32)
    # Pickled here: torch's own pickler would let the processes share the memory of tensors.
    pickled = [pickle.dumps(piece) for pieces in work.values() for piece in pieces]
    results = iter([pickle.loads(result) for result in executor.map(run, pickled)])
    return {name: [next(results) for _ in pieces] for name, pieces in work.items()}


def _run(piece: Callable[[], Any]) -> Any:
    with seeded_generators(0):
        return piece()


def _run_elsewhere(origin: tuple[str, int], threads: int, allow_tf32: bool, pickled: bytes) -> bytes:
    """Run a piece of work with the arithmetic of the process that wants its result."""
    if (PROCESS, os.getpid()) == origin:
        raise ValueError("executor: threads share hosts and random numbers; give an executor of processes")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allow_tf32
    return pickle.dumps(_run(pickle.loads(pickled)))
