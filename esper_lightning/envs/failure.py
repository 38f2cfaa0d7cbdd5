"""Out-of-memory errors: they end the episode of the host that caused them, and not the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from esper_lightning.envs.host_env import HostEnv

CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""Text in the RuntimeError that torch raises if the CPU is out of memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Return True if a GPU, torch on the CPU or Python itself ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)


def in_a_line(error: Exception) -> str:
    """Return the first line of an error message, as `out of memory: …`."""
    said = str(error).strip() or "Python has no more"  # a MemoryError of Python has no message
    return f"out of memory: {said.splitlines()[0]}"


@contextmanager
def alone(env: HostEnv) -> Iterator[None]:
    """Turn an out-of-memory error in this block into `env.failure`, so that only this host is affected.

    Without a monitor (the Governor is disabled) the host cannot be rolled back, and the error is raised.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if env.guard is None or not is_out_of_memory(error):
            raise
        env.failure = in_a_line(error)
        env.optimizer.zero_grad()  # frees the memory of its gradients


@contextmanager
def together(envs: Sequence[HostEnv]) -> Iterator[None]:
    """Raise MemoryError if memory runs out in this block, in which all hosts run as one network and fail together."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"{len(envs)} hosts as one network: {in_a_line(error)}; use env.executor loop, or lower data.n_envs or "
            f"training.batch_size"
        ) from error
