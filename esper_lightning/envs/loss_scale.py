"""State of a loss scaler as tensors on its device. `GradScaler.state_dict` reads it, and so waits for a GPU."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

TENSOR_KEYS = ("scale", "_growth_tracker")
"""Keys of a scaler's state that are tensors on its device: the scale, and the steps since it last changed."""


def scale_tensors(scaler: torch.amp.GradScaler, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the scale [] float32 and the steps since its last change [] int32: the scaler's own tensors.

    Args:
        scaler: An enabled scaler.
        device: Device of the scaled losses.
    """
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(device)
    assert scaler._scale is not None and scaler._growth_tracker is not None, "they have just been created"
    return scaler._scale, scaler._growth_tracker


def scaler_state(scaler: torch.amp.GradScaler, device: torch.device) -> dict[str, Any]:
    """Return what `scaler.state_dict` returns, with the scaler's own tensors in place of the numbers in them."""
    if not scaler.is_enabled():
        return {}
    return {
        "scale": scale_tensors(scaler, device)[0],
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": scale_tensors(scaler, device)[1],
    }


def scaler_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state of `scaler_state` with numbers in place of tensors, as `scaler.state_dict` has it."""
    return {name: value.item() if isinstance(value, Tensor) else value for name, value in state.items()}
