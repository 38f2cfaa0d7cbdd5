"""Running a network to look at it, without leaving a trace in it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from esper_lightning.growth.nested import map_tensors, tensors

Example = Tensor | tuple[Any, ...] | Mapping[str, Any]
"""What a network is called with: one tensor, positional or keyword arguments."""


def run(network: nn.Module, example: Example) -> Any:
    """The network's output on `example`."""
    if isinstance(example, Mapping):
        return network(**example)
    return network(*example) if isinstance(example, tuple) else network(example)


def batch_size(example: Any) -> int:
    """Rows of the first tensor in what a network is called with."""
    return len(next(tensors(example)))


def repeat_rows(example: Any, rows: int, times: int) -> Any:
    """`example` with every tensor of `rows` rows repeated as a whole; others (a mask, say) stay as they are."""

    def repeat(x: Tensor) -> Tensor:
        return x.repeat(times, *[1] * (x.ndim - 1)) if x.ndim and len(x) == rows else x

    return map_tensors(example, repeat)


@contextmanager
def evaluating(network: nn.Module) -> Iterator[None]:
    """Evaluation mode; every module's own mode is restored, and new modules get that of the network."""
    modes = {module: module.training for module in network.modules()}
    network.eval()
    try:
        yield
    finally:
        for module in network.modules():
            module.training = modes.get(module, modes[network])
