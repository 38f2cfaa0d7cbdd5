"""No operation within an epoch makes the program wait for the GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.envs.executors.fused.hosts import FAST_CONFIG, make, play

READING = {"item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__", "nonzero"}

INDEXING = {"__getitem__", "__setitem__", "masked_select"}


def is_python_index(index: Any) -> bool:
    """Return whether an index would be copied to the device or counted there."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, list) or (isinstance(part, Tensor) and part.dtype == torch.bool) for part in parts)


class WaitingOperations(TorchFunctionMode):
    """Records operations that would wait: reading numbers, and copying them to the device without `upload`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(function, "__name__", str(function)), kwargs or {}
        sent = function is torch.tensor and kwargs.get("device") is not None
        if name in READING or sent or (name in INDEXING and is_python_index(args[1])):
            self.found.append(name)
        return function(*args, **kwargs)


@pytest.mark.parametrize(("host", "rule"), [("cnn", "adamw"), ("gpt", "adam"), ("residual", "sgd")])
def test_training_and_validation_wait_for_nothing(host: str, rule: str) -> None:
    pool = make("fused", host, 4, training=replace(FAST_CONFIG.training, optimizer=rule, weight_decay=0.01))
    play(pool, 6)
    with WaitingOperations() as waits:
        pool.executor.train_epoch(pool.envs, pool.data.train)
        pool.executor.validate(pool.envs, pool.data.validation)

    assert waits.found == []


def test_the_watch_sees_what_would_wait() -> None:
    with WaitingOperations() as waits:
        numbers = torch.tensor([1.0, 2.0], device="cpu")
        numbers[numbers > 1.0], numbers[[0]], numbers[0].item()

    assert waits.found == ["tensor", "__getitem__", "__getitem__", "item"]
