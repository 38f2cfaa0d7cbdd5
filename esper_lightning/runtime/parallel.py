"""Independent work in several processes: the same results, in the same order, whatever the number of processes."""

import multiprocessing
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

Result = TypeVar("Result")


def check_jobs(jobs: int) -> None:
    """Raise ValueError unless `jobs` is a number of processes."""
    if jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")


def processes(jobs: int) -> ProcessPoolExecutor:
    """Return an executor of `jobs` processes. They are spawned, because a fork of a process with threads may hang."""
    return ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))


@contextmanager
def seeded_generators(rng_seed: int) -> Iterator[None]:
    """Within this context the global generators of Python, numpy and torch begin with a seed; then as before it."""
    with isolate_rng():
        random.seed(rng_seed)
        np.random.seed(rng_seed)
        torch.manual_seed(rng_seed)
        yield


def run_all(
    work: Mapping[str, Sequence[Callable[[], Result]]], executor: ProcessPoolExecutor | None = None
) -> dict[str, list[Result]]:
    """Return the results of independent pieces of work, in their order; an executor runs them in other processes.

    Every piece begins with the same state of the global random generators. Pieces of one process may share a pool,
    whose state they overwrite; each other process has a copy.
    """
    if executor is None:
        return {name: [_run(piece) for piece in pieces] for name, pieces in work.items()}
    run = partial(_run_elsewhere, torch.get_num_threads(), torch.backends.cudnn.allow_tf32)
    # Pickled here: torch's own pickler would let the processes share the memory of tensors.
    pickled = [pickle.dumps(piece) for pieces in work.values() for piece in pieces]
    results = iter([pickle.loads(result) for result in executor.map(run, pickled)])
    return {name: [next(results) for _ in pieces] for name, pieces in work.items()}


def _run(piece: Callable[[], Any]) -> Any:
    with seeded_generators(0):
        return piece()


def _run_elsewhere(threads: int, allow_tf32: bool, pickled: bytes) -> bytes:
    """Run a piece of work with the arithmetic of the process that wants its result."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allow_tf32
    return pickle.dumps(_run(pickle.loads(pickled)))
