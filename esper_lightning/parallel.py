"""Independent work in several processes: the same results, in the same order, whatever the number of processes.

Whatever has a method `map(function, items)` can do such work: `Processes` here, executors of `concurrent.futures` and
joblib's loky, pools of `multiprocessing` and of Ray.
"""

import importlib
import multiprocessing
import os
import pickle
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from lightning.pytorch.utilities.seed import isolate_rng

from esper_lightning.plugins import PartError, import_modules, imported_modules
from esper_lightning.process import watch_parent

Item = TypeVar("Item")
Result = TypeVar("Result")

SECONDS_TO_END = 60.0
"""Time in which a worker saves its work once the process that has started it has ended."""

ATTEMPTS = 2
"""Number of workers that try an item before it is given up."""


MAX_JOBS = 1024
"""Largest number of processes; no machine has more cores."""


def check_jobs(jobs: int) -> None:
    """Raise ValueError unless `jobs` is a number of processes that a machine can have."""
    if not 1 <= jobs <= MAX_JOBS:
        raise ValueError(f"jobs must lie in 1 … {MAX_JOBS}, got {jobs}")


class Mapper(Protocol):
    """Applies a function to independent items."""

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], /) -> Iterable[Any]:
        """Return the results in the order of the items."""
        ...


@contextmanager
def seeded_generators(rng_seed: int) -> Iterator[None]:
    """Within this context the global generators of Python, numpy and torch begin with a seed; then as before it."""
    with isolate_rng():
        random.seed(rng_seed)
        np.random.seed(rng_seed)
        torch.manual_seed(rng_seed)
        yield


def make_executor(path: str, jobs: int) -> Mapper:
    """Return `path(jobs)`, an executor of another library, such as `ray.util.multiprocessing.Pool`.

    Args:
        path: Dotted path of a class or function whose first argument is the number of workers.
        jobs: Number of workers.

    Raises ValueError if there is no such name, or if what it makes has no method `map`.
    """
    module, _, name = path.rpartition(".")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"executor {path!r} cannot be imported: {error}; give a dotted path, as ray.util.multiprocessing.Pool"
        ) from error
    check_jobs(jobs)
    executor: Any = make(jobs) if callable(make) else make
    if not callable(getattr(executor, "map", None)):
        raise ValueError(f"executor {path!r} has no method map; give one such as ray.util.multiprocessing.Pool")
    return executor


class WorkerDied(RuntimeError):
    """Error of an item whose worker process has died in every attempt, killed or out of memory."""


class Processes:
    """Applies a function to items in processes of its own, which are started by `spawn`.

    A process serves many items. If it dies, another one tries the item once more. Function, items and results must be
    picklable; tensors are copied. The processes import the modules that `imports` names, so that parts can be named
    there, too.

    Args:
        jobs: Number of processes.
        on_death: Function that returns the result in place of an item whose workers have died. None: the error
            `WorkerDied` is raised.
    """

    def __init__(self, jobs: int, on_death: Callable[[Any], Any] | None = None) -> None:
        check_jobs(jobs)
        self.jobs = jobs
        self.on_death = on_death

    def map(self, function: Callable[[Item], Result], items: Iterable[Item], /) -> Iterator[Result]:
        """Yield the results in the order of the items, each as soon as all before it are there."""
        workers = [_Worker() for _ in range(self.jobs)]
        idle: SimpleQueue[_Worker] = SimpleQueue()
        for worker in workers:
            idle.put(worker)

        def run(item: Item) -> Result:
            worker = idle.get()
            try:
                return worker.run(function, item)
            except WorkerDied:
                if self.on_death is None:
                    raise
                return self.on_death(item)
            finally:
                idle.put(worker)

        threads = ThreadPoolExecutor(self.jobs)
        try:
            yield from threads.map(run, items)
        finally:
            threads.shutdown(cancel_futures=True)
            for worker in workers:
                worker.close()


def _begin_worker(modules: tuple[str, ...]) -> None:
    watch_parent(_end_worker)
    import_modules(modules)


def _call(pickled_work: bytes) -> bytes:
    """Apply a function to an item.

    Both are pickled beforehand, which copies their tensors: where torch pickles arguments for another process, tensors
    move to memory that all of the processes share, and write to.
    """
    function, item = pickle.loads(pickled_work)
    return pickle.dumps(function(item))


def _end_worker() -> None:
    """End this process as SIGTERM would: a run in training saves its tick first."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECONDS_TO_END)
    os._exit(128 + signal.SIGTERM)


class _Worker:
    """One process, which is replaced when it dies. It is a pool of its own, so that its death concerns no other."""

    def __init__(self) -> None:
        self._process: ProcessPoolExecutor | None = None

    def run(self, function: Callable[[Item], Result], item: Item) -> Result:
        try:
            pickled_work = pickle.dumps((function, item))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise PartError(f"{item!r:.200} cannot be sent to another process: {error}; give one job") from error
        for _ in range(ATTEMPTS):
            if self._process is None:
                self._process = ProcessPoolExecutor(
                    1, multiprocessing.get_context("spawn"), _begin_worker, (imported_modules(),)
                )
            try:
                return pickle.loads(self._process.submit(_call, pickled_work).result())
            except BrokenProcessPool:
                self.close()
        raise WorkerDied(f"the worker process died {ATTEMPTS} times, killed or out of memory, with {item!r:.200}")

    def close(self) -> None:
        if self._process is not None:
            self._process.shutdown()
            self._process = None
