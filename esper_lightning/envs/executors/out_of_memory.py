"""Out-of-memory errors: they end the episode of the host that caused them, and not the run."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.machine import is_out_of_memory


def first_line(error: Exception) -> str:
    """Return the first line of an error message, as `out of memory: …`."""
    message = str(error).strip() or "Python has no more"  # a MemoryError of Python has no message
    return f"out of memory: {message.splitlines()[0]}"


@contextmanager
def isolate_oom(env: HostEnv) -> Iterator[None]:
    """Turn an out-of-memory error in this block into `env.failure`, so that only this host is affected."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        env.failure = first_line(error)
        env.optimizer.zero_grad()  # frees the memory of its gradients


@contextmanager
def raise_oom(envs: Sequence[HostEnv]) -> Iterator[None]:
    """Raise MemoryError if memory runs out in this block, in which all hosts run as one network and fail together."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryError(
            f"{len(envs)} hosts as one network: {first_line(error)}; use env.executor loop, or lower data.n_envs or "
            f"training.batch_size"
        ) from error
