"""How features of many hosts lie in one tensor. V entries in the stack, B samples, C channels of one host.

Image features are stacked along their channels, [B, V·C, H, W]: then torch's own grouped convolutions, normalisations
and pools serve V hosts at once. All others are stacked along their first axis, [V·B, …].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_lightning.envs.transfer import upload


class Members:
    """Whose weights the entries of a stack are computed with.

    Attributes:
        count: Entries V in the features now.
        index: Row [V] of the stacked weights for each entry; None: each row once, in order.
    """

    def __init__(self) -> None:
        self.count = 0
        self.index: Tensor | None = None

    def all(self, count: int) -> None:
        """One entry for each row of the weights."""
        self.count, self.index = count, None

    def some(self, index: Tensor) -> None:
        """These rows, in this order, any of them several times."""
        self.count, self.index = len(index), index

    def pick(self, weight: Tensor) -> Tensor:  # [rows, …] -> [V, …]
        return weight if self.index is None else weight.index_select(0, self.index)


def is_image(x: Tensor) -> bool:
    """Stacked along its channels."""
    return x.ndim == 4


def spread(values: Tensor, x: Tensor) -> Tensor:  # [V] and a stacked feature -> broadcasts against it
    """One number per entry."""
    if is_image(x):
        return values.repeat_interleave(x.shape[1] // len(values))[None, :, None, None]
    return values.repeat_interleave(x.shape[0] // len(values)).view(-1, *[1] * (x.ndim - 1))


def stack_inputs(x: Tensor, count: int) -> Tensor:  # [V·B, …], entry by entry -> a stacked feature
    """What goes into a stack of hosts."""
    if not is_image(x):
        return x
    # Channels last in memory, whatever the single host prefers: convolutions over many groups, normalisation and pools
    # are then 1.3 to 8 times as fast (CPU, 16 hosts of 4 to 16 channels).
    return x.unflatten(0, (count, -1)).permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def columns_to_rows(x: Tensor, count: int) -> Tensor:  # [B, V·C] -> [V·B, C]
    """What an image leaves behind, as other features are stacked."""
    return x.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


def rows_to_columns(x: Tensor, count: int) -> Tensor:  # [V·B, C] -> [B, V·C]
    """The inverse."""
    return x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1)


def unstack_outputs(x: Tensor, count: int, samples: int) -> Tensor:  # -> [V·B, …], entry by entry
    """What comes out of a stack of hosts: outputs computed from an image are still stacked along their second axis."""
    return columns_to_rows(x, count) if x.shape[0] == samples and count > 1 else x


def _opened(x: Tensor, count: int) -> tuple[Tensor, int]:
    """A view with an axis of its own for the entries, and that axis."""
    if is_image(x):
        return x.permute(0, 2, 3, 1).unflatten(3, (count, -1)), 3
    return x.unflatten(0, (count, -1)), 0


def _closed(x: Tensor, axis: int) -> Tensor:
    return x.flatten(3).permute(0, 3, 1, 2) if axis == 3 else x.flatten(0, 1)


def select(x: Tensor, count: int, entries: Tensor) -> Tensor:
    """Some entries of a stacked feature of `count`, as a stacked feature."""
    opened, axis = _opened(x, count)
    return _closed(opened.index_select(axis, entries), axis)


def divide(x: Tensor, sizes: Sequence[int], entries: Tensor | None = None) -> list[Tensor]:
    """A stacked feature as several: each gets the next so many of its entries, or of those that `entries` names."""
    opened, axis = _opened(x, sum(sizes))
    opened = opened if entries is None else opened.index_select(axis, entries)
    return [_closed(part, axis) for part in opened.split(sizes, axis)]


def unite(parts: Sequence[Tensor], sizes: Sequence[int], entries: Tensor | None = None) -> Tensor:
    """Several stacked features as one: with all their entries, or those that `entries` names."""
    opened = [_opened(part, size) for part, size in zip(parts, sizes, strict=True)]
    axis = opened[0][1]
    whole = torch.cat([part for part, _ in opened], axis)
    return _closed(whole if entries is None else whole.index_select(axis, entries), axis)


class Deal:
    """How the entries of a stacked feature are dealt out to parts, each entry to one.

    Args:
        parts: The entries of each part.
        device: Of the features.
    """

    def __init__(self, parts: Sequence[Sequence[int]], device: torch.device) -> None:
        order = [entry for part in parts for entry in part]
        self.sizes = [len(part) for part in parts]
        self.order = upload(order, device)
        self.back = upload(sorted(range(len(order)), key=order.__getitem__), device)

    def split(self, x: Tensor) -> list[Tensor]:
        """The parts, as stacked features."""
        return divide(x, self.sizes, self.order)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse."""
        return unite(parts, self.sizes, self.back)
