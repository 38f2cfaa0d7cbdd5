"""What a host's forward pass costs: floating-point operations, of the host by counting, of its seeds by arithmetic."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from esper_lightning.blueprints import get
from esper_lightning.growth.blend import GatedSeed
from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import SeedSlot


class Compute(NamedTuple):
    """Of one sample."""

    host: int
    """Floating-point operations of the host with empty slots."""
    positions: dict[str, list[int]]
    """Positions of the feature in each slot, once for every time that it passes there."""

    def of(self, slot: SeedSlot) -> int:
        """Floating-point operations of the seed in `slot`, its gate included."""
        if not slot.occupied:
            return 0
        passes = self.positions[slot.name]
        flops = get(slot.blueprint, slot.layout).flops
        of_gate = 0
        if isinstance(slot.seed, GatedSeed):
            of_gate = 2 * sum(weight.numel() for weight in slot.seed.gate.parameters() if weight.ndim == 2)
        return sum(flops(slot.width, positions) + of_gate for positions in passes)


@torch.no_grad()
def measure_compute(host: nn.Module, inputs: Tensor) -> Compute:
    """Counts on a host with empty slots, which is put in evaluation mode; `inputs` [1, …] is one sample."""
    slots = slots_of(host).values()
    positions: dict[str, list[int]] = {slot.name: [] for slot in slots}

    def look(slot: SeedSlot, x: Tensor) -> Tensor:
        positions[slot.name].append(x[0].numel() // slot.width)
        return x

    host.eval()
    for slot in slots:
        slot.branch = look
    try:
        # Attention as plain matrix products: not every PyTorch counts its fused kernel on a CPU.
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            host(inputs)
    finally:
        for slot in slots:
            slot.branch = None
    return Compute(counter.get_total_flops(), positions)
