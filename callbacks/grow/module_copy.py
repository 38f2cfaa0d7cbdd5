"""Copies of a LightningModule, whose validation steps leave the module itself as it is."""

import copy
from collections import deque
from typing import Any

import numpy as np
from lightning import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric


def isolated_copy(module: LightningModule) -> LightningModule:
    """Return a copy of a module that has its own state and shares its networks.

    Its own are containers at any depth, with the tensors and arrays in them, its buffers, and torchmetrics, which begin
    without what they have counted. Networks, parameters and objects of other classes are shared.
    """
    copied = object.__new__(type(module))
    copies: dict[int, Any] = {id(module): copied}
    vars(copied).update({name: _own(value, copies) for name, value in vars(module).items()})
    return copied


def _own(value: Any, copies: dict[int, Any]) -> Any:
    """Return a copy of a value if it is state, else the value; `copies` holds what is copied already, by id."""
    if id(value) in copies:
        return copies[id(value)]
    own = value
    if isinstance(value, nn.Module):
        own = _own_metrics(value, copies)
    elif isinstance(value, Tensor):
        own = value if isinstance(value, nn.Parameter) else value.clone()
    elif isinstance(value, np.ndarray | set):
        own = value.copy()
    elif isinstance(value, dict):
        own = copies[id(value)] = copy.copy(value)
        for key, element in value.items():
            own[key] = _own(element, copies)
    elif isinstance(value, list | deque):
        own = copies[id(value)] = copy.copy(value)
        own.clear()
        own.extend(_own(element, copies) for element in value)
    elif type(value) is tuple:
        own = tuple(_own(element, copies) for element in value)
    copies[id(value)] = own
    return own


def _own_metrics(value: nn.Module, copies: dict[int, Any]) -> nn.Module:
    """Return a copy of a torchmetric, or of a module that holds some and no parameters; any other module is shared."""
    if not any(isinstance(part, Metric) for part in value.modules()) or any(True for _ in value.parameters()):
        return value
    own = copy.deepcopy(value, copies)
    for part in own.modules():
        if isinstance(part, Metric):
            part.reset()
    return own
