"""Layout of the features of many hosts in one tensor. V stack entries, B samples, C channels of one host.

Image features are stacked along their channels, [B, V·C, H, W], so that torch's grouped convolutions, normalisations
and pools compute V hosts at once. All others are stacked along their first axis, [V·B, …].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

CHANNELS_LAST: dict[str, bool] = {"cpu": True, "cuda": False}
"""Memory format of stacked image features by type of device; True: channels last.

On the CPU grouped convolutions, normalisation and pools are then 1.3 to 8 times as fast (16 hosts of 4 to 16 channels).
On CUDA cuDNN has slow kernels for grouped convolutions with channels last
(https://github.com/pytorch/pytorch/issues/34977)."""


class StackIndex:
    """Rows of the stacked weights that the entries of a stacked feature are computed with.

    Attributes:
        count: Number of entries V in the present features.
        rows: Row of the stacked weights for each entry, [V] int64. None: each row once, in order.
    """

    count: int = 0
    rows: Tensor | None = None

    def select_all(self, count: int) -> None:
        """Select each of the `count` rows once, in order."""
        self.count, self.rows = count, None

    def select_rows(self, rows: Tensor) -> None:
        """Select these rows, in this order; a row may occur several times."""
        self.count, self.rows = len(rows), rows

    def gather(self, weight: Tensor) -> Tensor:  # [rows, …] -> [V, …]
        """Return the selected rows of a stacked weight."""
        return weight if self.rows is None else weight.index_select(0, self.rows)


def is_image(x: Tensor) -> bool:
    """Return whether a feature is an image, and so stacked along its channels."""
    return x.ndim == 4


def broadcast_per_entry(values: Tensor, x: Tensor) -> Tensor:  # [V] and a stacked feature -> broadcasts against it
    """Reshape one number per entry so that it broadcasts against the stacked feature `x`."""
    if is_image(x):
        return values.repeat_interleave(x.shape[1] // len(values))[None, :, None, None]
    return values.repeat_interleave(x.shape[0] // len(values)).view(-1, *[1] * (x.ndim - 1))


def stack_inputs(x: Tensor, count: int) -> Tensor:  # [V·B, …], entry by entry -> a stacked feature
    """Bring the inputs of `count` entries into the layout of stacked features."""
    if not is_image(x):
        return x
    # In memory as `CHANNELS_LAST` says, whatever the single host prefers.
    if not CHANNELS_LAST[x.device.type]:
        return x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)
    return x.unflatten(0, (count, -1)).permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def columns_to_rows(x: Tensor, count: int) -> Tensor:  # [B, V·C] -> [V·B, C]
    """Bring a flattened image feature, stacked along its columns, into the layout of other features."""
    return x.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


def rows_to_columns(x: Tensor, count: int) -> Tensor:  # [V·B, C] -> [B, V·C]
    """Invert `columns_to_rows`."""
    return x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1)


def unstack_outputs(x: Tensor, count: int, samples: int) -> Tensor:  # -> [V·B, …], entry by entry
    """Bring outputs into the layout [V·B, …]: those computed from images are still stacked along their second axis."""
    return columns_to_rows(x, count) if x.shape[0] == samples and count > 1 else x


def unflatten_entries(x: Tensor, count: int) -> tuple[Tensor, int]:
    """Return a view of a stacked feature with a separate axis for the entries, and the index of that axis."""
    if not is_image(x):
        return x.unflatten(0, (count, -1)), 0
    if not CHANNELS_LAST[x.device.type]:
        return x.unflatten(1, (count, -1)), 1
    return x.permute(0, 2, 3, 1).unflatten(3, (count, -1)), 3


def flatten_entries(x: Tensor, axis: int) -> Tensor:
    """Invert `unflatten_entries`."""
    return x.flatten(3).permute(0, 3, 1, 2) if axis == 3 else x.flatten(axis, axis + 1)


def select_entries(x: Tensor, count: int, entries: Tensor) -> Tensor:
    """Return some entries of a stacked feature of `count` entries, as a stacked feature."""
    unflattened, axis = unflatten_entries(x, count)
    return flatten_entries(unflattened.index_select(axis, entries), axis)


def split(x: Tensor, sizes: Sequence[int], entries: Tensor | None = None) -> list[Tensor]:
    """Split a stacked feature into parts of `sizes` entries, after selecting `entries` if given."""
    unflattened, axis = unflatten_entries(x, sum(sizes))
    unflattened = unflattened if entries is None else unflattened.index_select(axis, entries)
    return [flatten_entries(part, axis) for part in unflattened.split(sizes, axis)]


def merge(parts: Sequence[Tensor], sizes: Sequence[int], entries: Tensor | None = None) -> Tensor:
    """Merge stacked features of `sizes` entries into one, and select `entries` of it if given."""
    unflattened = [unflatten_entries(part, size) for part, size in zip(parts, sizes, strict=True)]
    axis = unflattened[0][1]
    whole = torch.cat([part for part, _ in unflattened], axis)
    return flatten_entries(whole if entries is None else whole.index_select(axis, entries), axis)
