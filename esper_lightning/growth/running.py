"""Forward passes of a network on an example, without changing the network."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from esper_lightning.growth.nested import map_tensors, tensors

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""Input of a network: one tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


def run(network: nn.Module, example: Example) -> Any:
    """Return the network's output for `example`."""
    if isinstance(example, Mapping):
        return network(**example)
    return network(*example) if isinstance(example, tuple) else network(example)


def batch_size(example: Any) -> int:
    """Return the number of rows of the first tensor in an example."""
    return len(next(tensors(example)))


def repeat_rows(example: Any, rows: int, times: int) -> Any:
    """Return `example` with every tensor of `rows` rows repeated `times` times; others (a mask, say) are unchanged."""

    def repeat(x: Tensor) -> Tensor:
        return x.repeat(times, *[1] * (x.ndim - 1)) if x.ndim and len(x) == rows else x

    return map_tensors(example, repeat)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Set evaluation mode within a `with` block; then restore each module's mode, new modules taking the network's."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module in network.modules():
            module.training = modes.get(module, modes[network])
