"""Loss scale of a host in fp16: that of `torch.amp.GradScaler`, but its state is read without waiting for a GPU."""

from collections.abc import Mapping

import torch
from torch import Tensor

INITIAL_LOSS_SCALE = 2.0**12
"""Initial loss scale. Eight digits hosts skipped 3 of their first 64 steps; with torch's 2^16, 26."""

GROWTH, BACKOFF, GROWTH_INTERVAL = 2.0, 0.5, 2000
"""Factors of the scale after this many steps in a row, and after a skipped step: those of `torch.amp.GradScaler`."""


def next_scale(scale: Tensor, good_steps: Tensor, finite: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the steps since their last change after one more step, of one host or of several.

    Args:
        scale, good_steps: Their values before the step.
        finite: True for a host whose gradients are finite; the others skip the step.
    """
    good_steps = torch.where(finite, good_steps + 1, 0)
    is_due, higher = good_steps == GROWTH_INTERVAL, scale * GROWTH
    raised = torch.where(is_due & higher.isfinite(), higher, scale)
    return torch.where(finite, raised, scale * BACKOFF), torch.where(is_due, 0, good_steps)


class LossScale:
    """Loss scale of one host.

    Attributes:
        scale: Factor of the loss, [] float32.
        good_steps: Steps since the last skipped step or increase of the scale, [] int32.
    """

    def __init__(self, device: torch.device) -> None:
        self.scale = torch.full((), INITIAL_LOSS_SCALE, device=device)
        self.good_steps = torch.zeros((), dtype=torch.int32, device=device)
        # It divides gradients by the scale, and lets the optimizer skip a step without waiting for the GPU. The scale
        # is set from here, because `GradScaler.state_dict` reads it from the device.
        self._scaler = torch.amp.GradScaler(device.type, INITIAL_LOSS_SCALE)
        self._scaler.scale(self.scale)  # makes its scale

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale."""
        self._scaler.unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
        """Take the optimizer's step unless gradients are not finite, and adapt the scale. `unscale` comes before."""
        self._scaler.step(optimizer)
        self.set(*next_scale(self.scale, self.good_steps, finite))

    def set(self, scale: Tensor, good_steps: Tensor) -> None:
        """Set scale and steps in place."""
        self.scale.copy_(scale)
        self.good_steps.copy_(good_steps)
        self._scaler.update(self.scale)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state: the tensors themselves, which later steps change."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state of `state_dict`."""
        self.set(**state)
