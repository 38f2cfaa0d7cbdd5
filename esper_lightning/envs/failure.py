"""A host that runs out of memory ends its own episode, and not the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from esper_lightning.envs.host_env import HostEnv

CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"
"""How torch says it of the CPU, in a plain RuntimeError."""


def is_out_of_memory(error: Exception) -> bool:
    """Did a GPU, torch on the CPU or Python itself find no more memory?"""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or CPU_ALLOCATOR in str(error)


def in_a_line(error: Exception) -> str:
    """`out of memory: …`"""
    said = str(error).strip() or "Python has no more"  # which does not say anything itself
    return f"out of memory: {said.splitlines()[0]}"


@contextmanager
def alone(env: HostEnv) -> Iterator[None]:
    """What happens here concerns this host only: if memory runs out it is noted as the host's failure, for the pool.

    Where nobody watches over the host, nobody could bring it back, and the error is raised.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if env.guard is None or not is_out_of_memory(error):
            raise
        env.failure = in_a_line(error)
        env.optimizer.zero_grad()  # gives the memory of its gradients back


@contextmanager
def together(envs: Sequence[HostEnv]) -> Iterator[None]:
    """What happens here concerns all of these hosts: if memory runs out nobody can tell for whom: it is an error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"{len(envs)} hosts as one network: {in_a_line(error)}; use env.executor loop, or lower data.n_envs or "
            f"training.batch_size"
        ) from error
