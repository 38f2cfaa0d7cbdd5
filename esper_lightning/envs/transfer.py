"""Numbers on their way to a device and back."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def upload(numbers: Sequence[float] | np.ndarray, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of `numbers` on `device`."""
    return send(torch.tensor(numbers, dtype=dtype), device)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor`, which lies on the CPU, on `device`; on CUDA nobody waits: the copy is queued before what needs it."""
    if device.type != "cuda":
        return tensor.to(device)
    # Pinned memory of torch's own, which it does not give away again before the copy is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def download(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU: a tick's one way to read what is on its device, and the one place where a tick waits for it.

    What the current stream holds is waited for, and no more than that: not the whole device.
    """
    if tensor.device.type != "cuda":
        return tensor.cpu()
    numbers = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    numbers.copy_(tensor, non_blocking=True)
    # The copy is only queued: until this event has passed, the numbers are not there.
    torch.cuda.current_stream(tensor.device).record_event().synchronize()
    return numbers
