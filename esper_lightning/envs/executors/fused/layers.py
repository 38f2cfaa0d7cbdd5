"""Stacked layers: the weights of V hosts are stacked, and one kernel computes all of them.

The code of hosts and seeds runs unchanged on stacked features; only the layers that own weights are replaced by these.
Weights are plain tensors [rows, …], bound from outside. V stack entries, B samples, C and D channels of one host.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints.conv import GroupNorm, group_norm
from esper_lightning.blueprints.residual import LearnedNorm
from esper_lightning.envs.executors.fused.stacking import CHANNELS_LAST, StackIndex, broadcast_per_entry, is_image
from esper_lightning.growth.blend import SampleGate, sample_gates
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.hosts.transformer import PositionEmbedding, TokenEmbedding

MAX_BMM_HOSTS: dict[str, float] = {"cpu": 4, "cuda": math.inf}
"""Most hosts for which a 1×1 convolution is a batched matrix product where no method is set, by type of device.

On the CPU it then takes 50 to 150 instead of 100 to 260 µs, forward and backward, on small features of 4 to 16
channels. On CUDA a batched product is one kernel for any number of hosts, while grouped convolutions have few fast
ones."""


class StackedLayer(nn.Module):
    """One layer of many hosts.

    Args:
        layer: The layer of one host.
        stack_index: The stack's selection of weight rows.

    Attributes:
        bound: The layer's own parameters by name, with one more axis in front, [rows, …]. Buffers are registered as
            buffers, so that a search for buffers finds them. Between epochs there are neither.

    Raises ValueError if the layer's settings are not supported.
    """

    required_settings: ClassVar[dict[str, object]] = {}
    """Values that the layer's attributes must have."""

    def __init__(self, layer: nn.Module, stack_index: StackIndex) -> None:
        super().__init__()
        for name, value in self.required_settings.items():
            if getattr(layer, name) != value:
                raise ValueError(f"a {type(layer).__name__} with {name} = {getattr(layer, name)!r}")
        self.stack_index = stack_index
        self.parameter_names = [name for name, _ in layer.named_parameters(recurse=False)]
        self.buffer_names = [name for name, _ in layer.named_buffers(recurse=False)]
        self.release()

    def release(self) -> None:
        """Drop all weights and buffers."""
        self.bound: dict[str, Tensor] = {}
        for name in self.buffer_names:
            self.register_buffer(name, None)

    def per_entry(self, name: str) -> Tensor | None:  # [V, …]
        """Return a parameter or buffer of each stack entry; None if the layer has none of this name."""
        value = self.bound.get(name, self._buffers.get(name))
        return None if value is None else self.stack_index.gather(value)

    def concatenated(self, name: str) -> Tensor | None:  # [V·C, …]
        """Return the same as `per_entry`, concatenated along the first axis of a single host's tensor."""
        value = self.per_entry(name)
        return None if value is None else value.flatten(0, 1)


class StackedConv2d(StackedLayer):
    """Convolution of many hosts, [B, V·C, H, W] -> [B, V·D, H', W'].

    It is one grouped convolution, or one batched product of weights and patches, as `StackIndex.convolutions` says.
    Layers with groups of their own, or whose padding has a name, are always grouped convolutions.
    """

    required_settings: ClassVar[dict[str, object]] = {"padding_mode": "zeros"}

    def __init__(self, layer: nn.Conv2d, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        # Any: torch declares the function for padding of either type, but not for one that is not known.
        self.conv_options: tuple[Any, Any, Any] = (layer.stride, layer.padding, layer.dilation)
        self.kernel_size, self.groups = layer.kernel_size, layer.groups
        self.can_be_product = layer.groups == 1 and not isinstance(layer.padding, str)
        self.pointwise = layer.kernel_size == layer.stride == (1, 1) and layer.padding == (0, 0) and layer.groups == 1

    def forward(self, x: Tensor) -> Tensor:
        if self._is_product(x.device.type):
            return self._pixel_product(x) if self.pointwise else self._patch_product(x)
        weight = self.concatenated("weight")
        assert weight is not None
        return F.conv2d(
            x,
            weight,
            self.concatenated("bias"),
            *self.conv_options,
            self.stack_index.count * self.groups,
        )

    def _is_product(self, device_type: str) -> bool:
        """Return whether the convolution of the present entries is a batched product."""
        count, method = self.stack_index.count, self.stack_index.convolutions
        if method is None:
            return self.pointwise and count <= MAX_BMM_HOSTS[device_type]
        # Patches take memory and time, and save nothing where there is one host.
        return method == "products" and self.can_be_product and (self.pointwise or count > 1)

    def _pixel_product(self, x: Tensor) -> Tensor:  # [B, V·C, H, W] -> [B, V·D, H, W]
        """Compute a 1×1 convolution, without a change of the memory format."""
        if not CHANNELS_LAST[x.device.type]:
            return self._product(x)
        count, weight = self.stack_index.count, self.per_entry("weight")
        assert weight is not None
        pixels = x.permute(0, 2, 3, 1).unflatten(3, (count, -1)).flatten(0, 2).transpose(0, 1)  # [V, B·H·W, C]
        y = _linear(pixels, weight.flatten(2), self.per_entry("bias"))
        return y.transpose(0, 1).reshape(x.shape[0], *x.shape[2:], -1).permute(0, 3, 1, 2)

    def _patch_product(self, x: Tensor) -> Tensor:  # [B, V·C, H, W] -> [B, V·D, H', W']
        """Compute a convolution as a 1×1 convolution whose channels are the patch of each output pixel."""
        if x.dtype is torch.float32 and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))  # the product rounds to it anyway
        stride, padding, dilation = self.conv_options
        # All samples as channels of one, because on CUDA torch launches a kernel for each sample.
        columns = F.unfold(x.flatten(0, 1)[None], self.kernel_size, dilation, padding, stride)
        sizes = zip(x.shape[2:], self.kernel_size, stride, padding, dilation, strict=True)
        height, width = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return self._product(columns.view(x.shape[0], -1, height, width))

    def _product(self, x: Tensor) -> Tensor:  # [B, V·C, H, W] contiguous -> [B, V·D, H, W]
        """Compute a 1×1 convolution. The result has the device's memory format."""
        pixels = x.unflatten(1, (self.stack_index.count, -1)).permute(1, 2, 0, 3, 4).flatten(2)  # [V, C, B·H·W]
        weight, bias = self.per_entry("weight"), self.per_entry("bias")
        assert weight is not None
        y = torch.bmm(weight.flatten(2), pixels)  # weight: [V, D, C]
        y = (y if bias is None else y + bias[:, :, None].to(y.dtype)).unflatten(2, (x.shape[0], *x.shape[2:]))
        if CHANNELS_LAST[x.device.type]:
            return y.permute(2, 3, 4, 0, 1).flatten(3).permute(0, 3, 1, 2)
        return y.permute(2, 0, 1, 3, 4).flatten(1, 2).contiguous()


class StackedBatchNorm2d(StackedLayer):
    """BatchNorm over stacked channels, whose statistics are those of each host, [B, V·C, H, W] -> same shape."""

    required_settings: ClassVar[dict[str, object]] = {"track_running_stats": True}

    def __init__(self, layer: nn.BatchNorm2d, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
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


class StackedGroupNorm(StackedLayer):
    """GroupNorm with V times as many groups, [B, V·C, H, W] -> same shape."""

    def __init__(self, layer: nn.GroupNorm, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        self.groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        return group_norm(
            x,
            self.stack_index.count * self.groups,
            weight=self.concatenated("weight"),
            bias=self.concatenated("bias"),
            eps=self.eps,
        )


class _RowwiseLayer(StackedLayer):
    """Layer that acts on the last axis, C = `features`.

    The input is [V·B, …, C] with the entries along the batch, or [B, V·C] with the channels of all entries side by
    side, as after flattening an image.
    """

    features: int

    def forward(self, x: Tensor) -> Tensor:
        count = self.stack_index.count
        if x.ndim == 2 and count > 1 and x.shape[1] == count * self.features:
            return self.transform(x.unflatten(1, (count, -1)).transpose(0, 1)).transpose(0, 1).flatten(1)
        rows = x.reshape(count, -1, x.shape[-1])
        return self.transform(rows).view(*x.shape[:-1], -1)

    @abstractmethod
    def transform(self, x: Tensor) -> Tensor:  # [V, rows, C] -> [V, rows, D]
        """Apply the weights of entry v to the rows `x[v]`."""


class StackedLinear(_RowwiseLayer):
    """Linear layer, [V·B, …, C] -> [V·B, …, D], or [B, V·C] -> [B, V·D]."""

    def __init__(self, layer: nn.Linear, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        self.features = layer.in_features

    def transform(self, x: Tensor) -> Tensor:
        weight = self.per_entry("weight")
        assert weight is not None
        return _linear(x, weight, self.per_entry("bias"))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # [V, rows, C], [V, D, C], [V, D]
    if bias is None:
        return torch.bmm(x, weight.transpose(1, 2))
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


class StackedLayerNorm(_RowwiseLayer):
    """LayerNorm over the last axis, [V·B, …, C] or [B, V·C] -> same shape."""

    def __init__(self, layer: nn.LayerNorm, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        if len(layer.normalized_shape) != 1:
            raise ValueError("a LayerNorm over several axes")
        self.features, self.eps = layer.normalized_shape[0], layer.eps

    def transform(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, (self.features,), eps=self.eps)
        weight, bias = self.per_entry("weight"), self.per_entry("bias")
        if weight is None:
            return y
        return y * weight[:, None] if bias is None else torch.addcmul(bias[:, None], y, weight[:, None])


class StackedRMSNorm(_RowwiseLayer):
    """RMSNorm over the last axis, [V·B, …, C] or [B, V·C] -> same shape."""

    def __init__(self, layer: nn.RMSNorm, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        if len(layer.normalized_shape) != 1:
            raise ValueError("an RMSNorm over several axes")
        self.features, self.eps = layer.normalized_shape[0], layer.eps

    def transform(self, x: Tensor) -> Tensor:
        y, weight = F.rms_norm(x, (self.features,), eps=self.eps), self.per_entry("weight")
        return y if weight is None else y * weight[:, None]


class StackedEmbedding(StackedLayer):
    """Embedding in one table that concatenates the tables of all entries, [V·B, …] int64 -> [V·B, …, C]."""

    required_settings: ClassVar[dict[str, object]] = {
        "padding_idx": None,
        "max_norm": None,
        "scale_grad_by_freq": False,
    }

    def __init__(self, layer: nn.Embedding, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        self.num_embeddings = layer.num_embeddings

    def forward(self, x: Tensor) -> Tensor:
        count = self.stack_index.count
        first_rows = torch.arange(
            0, count * self.num_embeddings, self.num_embeddings, device=x.device
        )  # first row of each entry's table
        weight = self.concatenated("weight")
        assert weight is not None
        return F.embedding((x.reshape(count, -1) + first_rows[:, None]).view(x.shape), weight)


class StackedTokenEmbedding(StackedEmbedding):
    """Token embedding with tied output logits. T tokens."""

    def logits(self, x: Tensor) -> Tensor:  # [V·B, T, C] -> [V·B, T, vocabulary]
        """Return the logits of the next token."""
        rows = x.reshape(self.stack_index.count, -1, x.shape[-1])
        weight = self.per_entry("weight")
        assert weight is not None
        return _linear(rows, weight, None).view(*x.shape[:-1], -1)


class StackedPositions(StackedLayer):
    """Learned positions, added to a sequence of T tokens, [V·B, T, C] -> same shape."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(0, (self.stack_index.count, -1))
        weight = self.per_entry("weight")
        assert weight is not None
        return (rows + weight[:, None, : x.shape[1]]).flatten(0, 1)


class StackedNorm(StackedLayer):
    """Normalisation with a learned strength per host, any stacked feature -> same shape."""

    def __init__(self, layer: LearnedNorm, stack_index: StackIndex) -> None:
        super().__init__(layer, stack_index)
        self.norm = stack_layers(layer.norm, stack_index)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.per_entry("scale")
        assert scale is not None
        return LearnedNorm.interpolate(x, self.norm(x), broadcast_per_entry(scale, x))


class StackedSampleGate(nn.Module):
    """Gate per sample, [B, V·C, H, W] -> [B, V·C, 1, 1]; other features [V·B, …, C] -> [V·B, 1, …]."""

    def __init__(self, gate: SampleGate, stack_index: StackIndex) -> None:
        super().__init__()
        self.channel_axis = gate.channel_axis
        self.layers = stack_layers(gate.layers, stack_index)

    def forward(self, h: Tensor) -> Tensor:
        gates = sample_gates(self.layers, self.channel_axis, h)
        return gates.repeat_interleave(h.shape[1] // gates.shape[1], 1) if is_image(h) else gates


STACKED_TYPES: dict[type[nn.Module], Callable[..., nn.Module]] = {
    nn.Conv2d: StackedConv2d,
    nn.BatchNorm2d: StackedBatchNorm2d,
    nn.GroupNorm: StackedGroupNorm,
    GroupNorm: StackedGroupNorm,
    nn.Linear: StackedLinear,
    nn.LayerNorm: StackedLayerNorm,
    nn.RMSNorm: StackedRMSNorm,
    nn.Embedding: StackedEmbedding,
    TokenEmbedding: StackedTokenEmbedding,
    PositionEmbedding: StackedPositions,
    LearnedNorm: StackedNorm,
    SampleGate: StackedSampleGate,
}
"""Stacked layer for each layer type. The exact type counts, because a subclass may compute something else."""


def stack_layers(module: nn.Module, stack_index: StackIndex) -> nn.Module:
    """Replace all layers that own weights by stacked layers. Returns `module`, changed in place, or its replacement.

    Raises ValueError with the type of the first layer that cannot be stacked.
    """
    if (stacked_type := STACKED_TYPES.get(type(module))) is not None:
        return stacked_type(module, stack_index)
    if isinstance(module, StackedLayer | SeedSlot):
        return module
    own_tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if own_tensors:
        raise ValueError(f"a {type(module).__name__} with weights of its own")
    for name, child in module.named_children():
        setattr(module, name, stack_layers(child, stack_index))
    return module


def find_stacked_layers(module: nn.Module) -> dict[str, StackedLayer]:
    """Return the stacked layers by path, which is also the path of the layer in a single host or seed."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, StackedLayer)}
