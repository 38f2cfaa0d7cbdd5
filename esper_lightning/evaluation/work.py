"""Independent pieces of work of a comparison, such as episodes and searches, in this process or in others."""

import os
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from esper_lightning.parallel import Mapper

Result = TypeVar("Result")

PROCESS = secrets.token_hex(8)
"""Token of this process."""


def run_all(
    work: Mapping[str, Sequence[Callable[[], Result]]], executor: Mapper | None = None
) -> dict[str, list[Result]]:
    """Return the results of independent pieces of work, in their order.

    Args:
        work: Functions without arguments, under any names; they may share a pool, whose state they overwrite.
        executor: Has a method `map(function, items)`, which runs the pieces in other processes, each with a copy of
            what it holds. None: one after the other in this process.

    Raises ValueError if the executor runs a piece in this process, as one of threads does.
    """
    if executor is None:
        return {name: [piece() for piece in pieces] for name, pieces in work.items()}
    here = PROCESS, os.getpid()  # a forked process has the first, and one on another machine may have the second
    run = partial(_run_alike, here, torch.get_num_threads(), torch.backends.cudnn.allow_tf32)
    results = iter(list(executor.map(run, [_Copied(piece) for pieces in work.values() for piece in pieces])))
    return {name: [next(results).content for _ in pieces] for name, pieces in work.items()}


class _Copied:
    """Something whose tensors are copied for another process; torch's own pickler would let both share their memory."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (pickle.dumps(self.content),)


def _unpack(pickled: bytes) -> _Copied:
    return _Copied(pickle.loads(pickled))


def _run_alike(origin: tuple[str, int], threads: int, allow_tf32: bool, work: _Copied) -> _Copied:
    """Run a piece of work with the arithmetic of the process that wants its result."""
    if (PROCESS, os.getpid()) == origin:
        raise ValueError("executor: threads share hosts and random numbers; give an executor of processes")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allow_tf32
    return _Copied(work.content())
