"""Independent pieces of work of a comparison, such as episodes and searches, in this process or in others."""

import os
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import TypeVar

import torch

from esper_lightning.parallel import Mapper

Result = TypeVar("Result")


def run_all(
    work: Mapping[str, Sequence[Callable[[], Result]]], executor: Mapper | None = None
) -> dict[str, list[Result]]:
    """Return the results of independent pieces of work, in their order.

    Args:
        work: Functions without arguments, under any names; they may share a pool, whose state they overwrite.
        executor: Has a method `map(function, items)`, which runs the pieces wherever it likes: each works with a copy
            of what it holds. None: one after the other in this process, without copies.
    """
    pieces = [piece for named in work.values() for piece in named]
    if executor is None:
        results = iter([piece() for piece in pieces])
    else:
        run = partial(_run_alike, os.getpid(), torch.get_num_threads(), torch.backends.cudnn.allow_tf32)
        results = iter(list(executor.map(run, pieces)))
    return {name: [next(results) for _ in named] for name, named in work.items()}


def _run_alike(origin: int, threads: int, allow_tf32: bool, work: Callable[[], Result]) -> Result:
    """Run a piece of work with the arithmetic of the process that wants its result."""
    if os.getpid() == origin:
        work = deepcopy(work)  # an executor of threads: other pieces share its pool
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allow_tf32
    return work()
