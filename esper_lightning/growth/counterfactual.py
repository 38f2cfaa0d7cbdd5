"""What would the network have said without this seed? Many on/off combinations of seeds in one forward pass.

Rows of the batch are shared up to the first slot where two combinations differ: there the batch splits in two, and what
follows works on a longer batch. A combination that differs from another in no blended seed costs nothing.
Every layer must treat the rows of a batch independently: call it on a network in evaluation mode. A slot must not lie
inside a branch that is later added to one that went around it: the two would differ in length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from esper_lightning.growth.network import slots_of
from esper_lightning.growth.slot import SeedSlot


class _Split:
    """The state of one pass: which combinations each equal part of the batch stands for."""

    def __init__(self, variants: Sequence[frozenset[str]]) -> None:
        self.variants = variants
        self.parts: list[list[int]] = [list(range(len(variants)))]

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        if not slot.blended:
            return x
        on = [[v for v in part if slot.name in self.variants[v]] for part in self.parts]
        off = [[v for v in part if slot.name not in self.variants[v]] for part in self.parts]
        if not any(off):
            return slot.express(x)
        if not any(on):
            return x
        chunks = x.chunk(len(self.parts))
        with_seed = [slot.express(chunk) for chunk, members in zip(chunks, on, strict=True) if members]
        without = [chunk for chunk, members in zip(chunks, off, strict=True) if members]
        self.parts = [members for members in on + off if members]
        return torch.cat(with_seed + without)


def forward_variants(network: nn.Module, variants: Sequence[frozenset[str]], x: Tensor) -> tuple[Tensor, list[int]]:
    """Runs `network` on the batch `x` [B, …] once per distinct combination of active seeds.

    Args:
        variants: For each combination, the names of the slots whose seed takes part. Seeds that are not blended never
            take part.

    Returns:
        Outputs [G·B, …] of the G distinct combinations, one after the other, and for each variant its place in 0 … G-1.
    """
    split = _Split(variants)
    slots = slots_of(network).values()
    for slot in slots:
        slot.branch = split
    try:
        outputs = network(x)
    finally:
        for slot in slots:
            slot.branch = None
    place = {v: part for part, members in enumerate(split.parts) for v in members}
    return outputs, [place[v] for v in range(len(variants))]
