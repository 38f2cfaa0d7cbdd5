"""Independent pieces of work of a comparison, such as episodes and searches, in this process or in others."""

import os
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from esper_lightning.parallel import Mapper, seeded_generators

Result = TypeVar("Result")

RNG_SEED = 0
"""Seed of the global random generators, from which only parts of users draw: those of this package have their own."""

PROCESS = secrets.token_hex(8)
"""Token of this process."""


def run_all(
    work: Mapping[str, Sequence[Callable[[], Result]]], executor: Mapper | None = None
) -> dict[str, list[Result]]:
    """Return the results of independent pieces of work, in their order.

    Every piece begins with the same state of the global random generators, so that no piece, order or number of
    processes changes what another one draws from them.

    Args:
        work: Functions without arguments, under any names; they may share a pool, whose state they overwrite.
        executor: Has a method `map(function, items)`, which runs the pieces in other processes, each with a copy of
            what it holds. None: one after the other in this process.

    Raises ValueError if the executor runs a piece in this process, as one of threads does.
    """
    if executor is None:
        return {name: [_run(piece) for piece in pieces] for name, pieces in work.items()}
    here = PROCESS, os.getpid()  # a forked process has the first, and one on another machine may have the second
    run = partial(_run_alike, here, torch.get_num_threads(), torch.backends.cudnn.allow_tf32)
    copied = [_Copied(name, piece) for name, pieces in work.items() for piece in pieces]
    results = iter(list(executor.map(run, copied)))
    return {name: [next(results).content for _ in pieces] for name, pieces in work.items()}


class _Copied:
    """Something whose tensors are copied for another process; torch's own pickler would let both share their memory.

    Args:
        name: Name in errors.
        content: The thing.
    """

    def __init__(self, name: str, content: Any) -> None:
        self.name = name
        self.content = content

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack, (self.name, pickle.dumps(self.content))


def _unpack(name: str, pickled: bytes) -> _Copied:
    return _Copied(name, pickle.loads(pickled))


def _run(piece: Callable[[], Result]) -> Result:
    with seeded_generators(RNG_SEED):
        return piece()


def _run_alike(origin: tuple[str, int], threads: int, allow_tf32: bool, work: _Copied) -> _Copied:
    """Run a piece of work with the arithmetic of the process that wants its result."""
    if (PROCESS, os.getpid()) == origin:
        raise ValueError("executor: threads share hosts and random numbers; give an executor of processes")
    torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = allow_tf32
    return _Copied(work.name, _run(work.content))
