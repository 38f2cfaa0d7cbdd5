"""Fully connected host with slots after its hidden layers."""

import math
from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.hosts.parts import Slots


class MLP(nn.Module):
    """Hidden layers of linear map, ReLU, slot; then a linear layer.

    Args:
        input_shape: Shape of one input; it is flattened.
        outputs: Number of classes or quantities.
        width: Units of each hidden layer.
        layers: Number of hidden layers.
        slots: Slots in which seeds may grow: `layer1`, `layer2` … None: one after every hidden layer.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`). None: only for images.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        *,
        width: int = 128,
        layers: int = 2,
        slots: list[str] | None = None,
        isolate: bool | None = None,
    ) -> None:
        super().__init__()
        if width < 1 or layers < 1:
            raise ValueError(f"host MLP: width and layers must be positive, got {width}, {layers}")
        widths = [math.prod(input_shape)] + [width] * layers
        self.layers = nn.ModuleList(nn.Linear(c, d) for c, d in pairwise(widths))
        slot_widths = {f"layer{i + 1}": width for i in range(layers)}
        self.slots = Slots(list(slot_widths) if slots is None else slots, slot_widths, layout="vector", isolate=isolate)
        self.head = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:  # [B, …] -> [B, outputs]
        x = x.flatten(1)
        for i, layer in enumerate(self.layers):
            x = self.slots.forward_at(f"layer{i + 1}", F.relu(layer(x)))
        return self.head(x)
