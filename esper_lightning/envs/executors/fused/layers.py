"""Batched layers: the weights of many hosts lie in one tensor, and one kernel computes them all.

The code of hosts and seeds runs unchanged on batched features; only the layers that own weights are replaced by these.
An *entry* is the part of a batched feature that belongs to one host. Image features are concatenated along their
channels, [B, S·C, H, W], so that torch's grouped convolutions, normalisations and pools compute all entries at once.
All others are concatenated along their first axis, [S·B, …]. S entries, B samples, C and D channels of one host.
`torch.func.vmap` over the layers themselves needs no such classes, but takes 1.2 to 1.5 times as long for a tick.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.blueprints.seeds import GroupNorm, LearnedNorm, group_norm
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.hosts.transformer import PositionEmbedding, TokenEmbedding

MAX_PRODUCT_HOSTS: dict[str, float] = {"cpu": 4, "cuda": math.inf}
"""Most hosts for which a 1×1 convolution is a batched matrix product, by type of device.

On the CPU it then takes 50 to 150 instead of 100 to 260 µs, forward and backward, on small features of 4 to 16
channels. On CUDA a batched product is one kernel for any number of hosts, while grouped convolutions have few fast
ones."""

CHANNELS_LAST: dict[str, bool] = {"cpu": True, "cuda": False}
"""Memory format of batched image features by type of device; True: channels last.

On the CPU grouped convolutions, normalisation and pools are then 1.3 to 8 times as fast (16 hosts of 4 to 16 channels).
On CUDA cuDNN has slow kernels for grouped convolutions with channels last
(https://github.com/pytorch/pytorch/issues/34977)."""


class RowIndex:
    """Rows of the batched weights that the entries of a batched feature are computed with.

    Attributes:
        count: Number of entries S in the present features.
        rows: Row of the batched weights for each entry, [S] int64. None: each row once, in order.
    """

    count: int = 0
    rows: Tensor | None = None

    def select_all(self, count: int) -> None:
        """Select each of the `count` rows once, in order."""
        self.count, self.rows = count, None

    def select_rows(self, rows: Tensor) -> None:
        """Select these rows, in this order; a row may occur several times."""
        self.count, self.rows = len(rows), rows


def is_image(x: Tensor) -> bool:
    return x.ndim == 4


def broadcast_per_entry(values: Tensor, x: Tensor) -> Tensor:  # [S] and a batched feature -> broadcasts against it
    """Reshape one number per entry so that it broadcasts against the batched feature `x`."""
    if is_image(x):
        return values.repeat_interleave(x.shape[1] // len(values))[None, :, None, None]
    return values.repeat_interleave(x.shape[0] // len(values)).view(-1, *[1] * (x.ndim - 1))


def batch_inputs(x: Tensor, count: int) -> Tensor:  # [S·B, …], entry by entry -> a batched feature
    """Bring the inputs of `count` entries into the layout of batched features."""
    if not is_image(x):
        return x
    if not CHANNELS_LAST[x.device.type]:
        return x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1, 2)
    return x.unflatten(0, (count, -1)).permute(1, 3, 4, 0, 2).contiguous().flatten(3).permute(0, 3, 1, 2)


def columns_to_rows(x: Tensor, count: int) -> Tensor:  # [B, S·C] -> [S·B, C]
    """Bring a flattened image feature, whose entries are columns, into the layout of other features."""
    return x.unflatten(1, (count, -1)).transpose(0, 1).flatten(0, 1)


def rows_to_columns(x: Tensor, count: int) -> Tensor:  # [S·B, C] -> [B, S·C]
    """Invert `columns_to_rows`."""
    return x.unflatten(0, (count, -1)).transpose(0, 1).flatten(1)


def unbatch_outputs(x: Tensor, count: int, samples: int) -> Tensor:  # -> [S·B, …], entry by entry
    """Bring outputs into the layout [S·B, …]: those computed from images have their entries along the second axis."""
    return columns_to_rows(x, count) if x.shape[0] == samples and count > 1 else x


def unflatten_entries(x: Tensor, count: int) -> tuple[Tensor, int]:
    """Return a view of a batched feature with a separate axis for the entries, and the index of that axis."""
    if not is_image(x):
        return x.unflatten(0, (count, -1)), 0
    if not CHANNELS_LAST[x.device.type]:
        return x.unflatten(1, (count, -1)), 1
    return x.permute(0, 2, 3, 1).unflatten(3, (count, -1)), 3


def flatten_entries(x: Tensor, axis: int) -> Tensor:
    """Invert `unflatten_entries`."""
    return x.flatten(3).permute(0, 3, 1, 2) if axis == 3 else x.flatten(axis, axis + 1)


def select_entries(x: Tensor, count: int, entries: Tensor) -> Tensor:
    """Return some entries of a batched feature of `count` entries, as a batched feature."""
    unflattened, axis = unflatten_entries(x, count)
    return flatten_entries(unflattened.index_select(axis, entries), axis)


def split(x: Tensor, sizes: Sequence[int], entries: Tensor | None = None) -> list[Tensor]:
    """Split a batched feature into parts of `sizes` entries, after selecting `entries` if given."""
    unflattened, axis = unflatten_entries(x, sum(sizes))
    unflattened = unflattened if entries is None else unflattened.index_select(axis, entries)
    return [flatten_entries(part, axis) for part in unflattened.split(sizes, axis)]


def merge(parts: Sequence[Tensor], sizes: Sequence[int], entries: Tensor | None = None) -> Tensor:
    """Merge batched features of `sizes` entries into one, and select `entries` of it if given."""
    unflattened = [unflatten_entries(part, size) for part, size in zip(parts, sizes, strict=True)]
    axis = unflattened[0][1]
    whole = torch.cat([part for part, _ in unflattened], axis)
    return flatten_entries(whole if entries is None else whole.index_select(axis, entries), axis)


class BatchedLayer(nn.Module):
    """One layer of many hosts, made from the layer of one host.

    Attributes:
        bound: The layer's own parameters by name, with one more axis in front, [rows, …]. Buffers are registered as
            buffers, so that a search for buffers finds them. Between epochs there are neither.

    Raises ValueError if an attribute of the layer has another value than in `required_settings`.
    """

    required_settings: ClassVar[dict[str, object]] = {}

    def __init__(self, layer: nn.Module, index: RowIndex) -> None:
        super().__init__()
        for name, value in self.required_settings.items():
            if getattr(layer, name) != value:
                raise ValueError(f"a {type(layer).__name__} with {name} = {getattr(layer, name)!r}")
        self.index = index
        self.parameter_names = [name for name, _ in layer.named_parameters(recurse=False)]
        self.buffer_names = [name for name, _ in layer.named_buffers(recurse=False)]
        self.release()

    def release(self) -> None:
        """Drop all weights and buffers."""
        self.bound: dict[str, Tensor] = {}
        for name in self.buffer_names:
            self.register_buffer(name, None)

    def of_entries(self, name: str) -> Tensor:  # [S, …]
        """Return a parameter or buffer of each entry."""
        rows = self.bound[name] if name in self.bound else getattr(self, name)
        return rows if self.index.rows is None else rows.index_select(0, self.index.rows)

    def optional(self, name: str) -> Tensor | None:  # [S, …]
        """Return a parameter or buffer of each entry; None if the layer has none of this name."""
        return self.of_entries(name) if name in self.parameter_names or name in self.buffer_names else None

    def concatenated(self, name: str) -> Tensor | None:  # [S·C, …]
        """Concatenate the entries of `optional` along the first axis of a single host's tensor."""
        value = self.optional(name)
        return None if value is None else value.flatten(0, 1)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [S, rows, C], [S, D, C], [S, D]
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class BatchedConv2d(BatchedLayer):
    """Convolution of many hosts, [B, S·C, H, W] -> [B, S·D, H', W']: grouped, or a batched product (1×1 kernels)."""

    required_settings: ClassVar = {"padding_mode": "zeros"}

    def __init__(self, layer: nn.Conv2d, index: RowIndex) -> None:
        super().__init__(layer, index)
        # Any: torch declares the function for padding of either type, but not for one that is not known.
        self.conv_options: tuple[Any, Any, Any] = (layer.stride, layer.padding, layer.dilation)
        self.groups = layer.groups
        self.pointwise = layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0) and layer.groups == 1

    def forward(self, x: Tensor) -> Tensor:
        count = self.index.count
        if self.pointwise and count <= MAX_PRODUCT_HOSTS[x.device.type]:
            return self._pointwise_as_bmm(x)
        weight, bias = self.of_entries("weight").flatten(0, 1), self.concatenated("bias")
        return F.conv2d(x, weight, bias, *self.conv_options, count * self.groups)

    def _pointwise_as_bmm(self, x: Tensor) -> Tensor:  # [B, S·C, H, W] -> [B, S·D, H, W], in the device's memory format
        entries, weight, bias = self.index.count, self.of_entries("weight").flatten(2), self.optional("bias")
        if CHANNELS_LAST[x.device.type]:
            pixels = x.permute(0, 2, 3, 1).unflatten(3, (entries, -1)).flatten(0, 2).transpose(0, 1)  # [S, B·H·W, C]
            y = _linear(pixels, weight, bias)
            return y.transpose(0, 1).reshape(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)
        y = torch.bmm(weight, x.unflatten(1, (entries, -1)).permute(1, 2, 0, 3, 4).flatten(2))  # [S, D, B·H·W]
        y = (y if bias is None else y + bias[:, :, None].to(y.dtype)).unflatten(2, (x.shape[0], *x.shape[2:]))
        return y.permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


class BatchedBatchNorm2d(BatchedLayer):
    """BatchNorm over batched channels, whose statistics are those of each host, [B, S·C, H, W] -> same shape."""

    required_settings: ClassVar = {"track_running_stats": True}

    def __init__(self, layer: nn.BatchNorm2d, index: RowIndex) -> None:
        super().__init__(layer, index)
        if layer.momentum is None:
            raise ValueError("a BatchNorm2d without momentum")
        self.momentum, self.eps = layer.momentum, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked += 1
        # Views in training: updated in place.
        mean, variance = self.concatenated("running_mean"), self.concatenated("running_var")
        weight, bias = self.concatenated("weight"), self.concatenated("bias")
        return F.batch_norm(x, mean, variance, weight, bias, self.training, self.momentum, self.eps)


class BatchedGroupNorm(BatchedLayer):
    """GroupNorm with S times as many groups, [B, S·C, H, W] -> same shape."""

    def __init__(self, layer: nn.GroupNorm, index: RowIndex) -> None:
        super().__init__(layer, index)
        self.groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.concatenated("weight"), self.concatenated("bias")
        return group_norm(x, self.index.count * self.groups, weight=weight, bias=bias, eps=self.eps)


class _RowwiseLayer(BatchedLayer):
    """Layer on the last axis, C = `features`, of [S·B, …, C], or of [B, S·C], as after flattening batched images."""

    features: int

    def forward(self, x: Tensor) -> Tensor:
        count = self.index.count
        if x.ndim == 2 and count > 1 and x.shape[1] == count * self.features:
            return self.transform(x.unflatten(1, (count, -1)).transpose(0, 1)).transpose(0, 1).flatten(1)
        return self.transform(x.reshape(count, -1, x.shape[-1])).view(*x.shape[:-1], -1)

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor: ...  # [S, rows, C] -> [S, rows, D], the rows of each entry


class BatchedLinear(_RowwiseLayer):
    """Linear layer, [S·B, …, C] -> [S·B, …, D], or [B, S·C] -> [B, S·D]."""

    def __init__(self, layer: nn.Linear, index: RowIndex) -> None:
        super().__init__(layer, index)
        self.features = layer.in_features

    def transform(self, x: Tensor) -> Tensor:
        return _linear(x, self.of_entries("weight"), self.optional("bias"))


class BatchedRowNorm(_RowwiseLayer):
    """LayerNorm or RMSNorm over the last axis, [S·B, …, C] or [B, S·C] -> same shape."""

    def __init__(self, layer: nn.LayerNorm | nn.RMSNorm, index: RowIndex) -> None:
        super().__init__(layer, index)
        if len(layer.normalized_shape) != 1:
            raise ValueError(f"a {type(layer).__name__} over several axes")
        self.features, self.eps = layer.normalized_shape[0], layer.eps
        self.normalise: Callable[..., Tensor] = F.layer_norm if isinstance(layer, nn.LayerNorm) else F.rms_norm

    def transform(self, x: Tensor) -> Tensor:
        y = self.normalise(x, (self.features,), eps=self.eps)
        weight, bias = self.optional("weight"), self.optional("bias")
        if weight is None:
            return y
        return y * weight[:, None] if bias is None else torch.addcmul(bias[:, None], y, weight[:, None])


class BatchedEmbedding(BatchedLayer):
    """Embedding in one table that concatenates the tables of all entries, [S·B, …] int64 -> [S·B, …, C]."""

    required_settings: ClassVar = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False}

    def __init__(self, layer: nn.Embedding, index: RowIndex) -> None:
        super().__init__(layer, index)
        self.words = layer.num_embeddings

    def forward(self, x: Tensor) -> Tensor:
        first_rows = torch.arange(0, self.index.count * self.words, self.words, device=x.device)  # of each entry
        rows = (x.reshape(self.index.count, -1) + first_rows[:, None]).view(x.shape)
        return F.embedding(rows, self.of_entries("weight").flatten(0, 1))


class BatchedTokenEmbedding(BatchedEmbedding):
    """Token embedding with tied output logits. T tokens."""

    def logits(self, x: Tensor) -> Tensor:  # [S·B, T, C] -> [S·B, T, vocabulary]
        """Return the logits of the next token."""
        rows = x.reshape(self.index.count, -1, x.shape[-1])
        return _linear(rows, self.of_entries("weight"), None).view(*x.shape[:-1], -1)


class BatchedPositions(BatchedLayer):
    """Learned positions, added to a sequence of T tokens, [S·B, T, C] -> same shape."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (self.index.count, -1))
        return (rows + self.of_entries("weight")[:, None, : x.shape[1]]).flatten(0, 1)


class BatchedNorm(BatchedLayer):
    """Normalisation with a learned strength per host, any batched feature -> same shape."""

    def __init__(self, layer: LearnedNorm, index: RowIndex) -> None:
        super().__init__(layer, index)
        self.norm = batch_layers(layer.norm, index)

    def forward(self, x: Tensor) -> Tensor:
        return LearnedNorm.interpolate(x, self.norm(x), broadcast_per_entry(self.of_entries("scale"), x))


BATCHED_TYPES: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: BatchedConv2d,
    nn.BatchNorm2d: BatchedBatchNorm2d,
    nn.GroupNorm: BatchedGroupNorm,
    GroupNorm: BatchedGroupNorm,
    nn.Linear: BatchedLinear,
    nn.LayerNorm: BatchedRowNorm,
    nn.RMSNorm: BatchedRowNorm,
    nn.Embedding: BatchedEmbedding,
    TokenEmbedding: BatchedTokenEmbedding,
    PositionEmbedding: BatchedPositions,
    LearnedNorm: BatchedNorm,
}
"""Batched layer for each layer type. The exact type counts, because a subclass may compute something else."""


def batch_layers(module: nn.Module, index: RowIndex) -> nn.Module:
    """Replace all layers that own weights by batched layers. Returns `module`, changed in place, or its replacement.

    Raises ValueError with the type of the first layer that cannot be batched.
    """
    if (batched_type := BATCHED_TYPES.get(type(module))) is not None:
        return batched_type(module, index)
    if isinstance(module, BatchedLayer | SeedSlot):
        return module
    if [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
        raise ValueError(f"a {type(module).__name__} with weights of its own")
    for name, child in module.named_children():
        setattr(module, name, batch_layers(child, index))
    return module
