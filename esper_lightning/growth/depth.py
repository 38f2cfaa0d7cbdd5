"""DepthSlot: the record of a growth in depth, by copies of blocks in their list."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth.blocks import BlockList, depth_in_state, find_blocks
from esper_lightning.growth.blueprints import STACK
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stack import deepen, shorten


class DepthSlot(SeedSlot):
    """Record of one growth of a list of like blocks by copies of its last ones, at once and for good.

    No feature passes through it, because the network runs the list. A state dict gives the list its depth. The largest
    number of blocks is `most`, and `earlier` are the depth slots of the list that are taken before this one.
    """

    is_judged = False  # a deep network comes to rely on each of its blocks

    def __init__(
        self, name: str, width: int, block_list: BlockList, *, most: int, earlier: Sequence["DepthSlot"]
    ) -> None:
        # Before `__init__`, which empties the slot. A tuple hides the modules, which are no children of this slot.
        self.block_list, self.earlier, self.first, self.most = block_list, tuple(earlier), len(block_list.blocks), most
        super().__init__(name, STACK, width, detach_input=False)
        if not earlier:
            block_list.modules.register_load_state_dict_pre_hook(self._fit)

    @property
    def is_open(self) -> bool:
        """True if the list may grow here: slots are taken in turn, for whichever is taken, the network is the same."""
        return super().is_open and all(slot.occupied for slot in self.earlier)

    @property
    def added(self) -> int:
        """Number of blocks that grew here."""
        return self.count if self.occupied else 0

    @property
    def begin(self) -> int:
        """Number of blocks ahead of those that grew here."""
        return self.first + sum(slot.added for slot in self.earlier)

    @property
    def grown(self) -> list[nn.Module]:
        """Blocks that grew here."""
        return self.block_list.blocks[self.begin : self.begin + self.added]

    @property
    def count(self) -> int:
        """Number of blocks that grow here: as many as there were at first, or fewer up to the largest number."""
        return min(self.first, self.most - self.first * (1 + len(self.earlier)))

    def seed_parameters(self, blueprint: str = STACK) -> int:
        return self.count * sum(p.numel() for p in self.block_list.blocks[0].parameters())

    def grown_parameters(self) -> list[nn.Parameter]:
        return [parameter for block in self.grown for parameter in block.parameters()]

    @property
    def size(self) -> int:
        """Number of parameters of the blocks that grew here."""
        return sum(parameter.numel() for parameter in self.grown_parameters())

    def deepen(self, blueprint: str, optimizers: Sequence[Optimizer]) -> None:
        """Add copies of the last blocks to the list, with their state in the optimizers."""
        depth = len(self.block_list.blocks)
        if blueprint != STACK:
            raise ValueError(f"slot {self.name!r} is one of depth, where {STACK!r} grows, and no {blueprint!r}")
        if closed := [slot.name for slot in self.earlier if not slot.occupied]:
            raise ValueError(f"slot {self.name!r}: its list grows by {closed[0]!r} before")
        deepen(self.block_list, [*range(depth), *range(depth - self.count, depth)], optimizers=optimizers)

    def empty(self) -> None:
        """Remove the blocks that grew here, and all blocks behind them."""
        super().empty()
        if len(self.block_list.blocks) > self.begin:
            shorten(self.block_list, self.begin)

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state)
        # The list is loaded already. Blocks behind `end` may be those of later slots, whose states are loaded next.
        depth, end = len(self.block_list.blocks), self.begin + self.added
        if depth < end or depth > (self.most if self.occupied else end):
            raise ValueError(
                f"slot {self.name!r}: {self.block_list.name!r} has {depth} blocks in the state, and {end} by its "
                f"records; load a state that was saved as a whole"
            )

    def _fit(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: Any) -> None:
        """Give the list as many blocks as a state dict has, before their weights are loaded."""
        saved_depth = depth_in_state(self.block_list, state, prefix)
        depth = len(self.block_list.blocks)
        if depth < saved_depth <= self.most:
            # The sources are those of the growths in the state dict, because it does not hold all settings of a block.
            order = list(range(depth))
            while len(order) < saved_depth:
                order += order[-min(self.first, self.most - len(order)) :]
            deepen(self.block_list, order[:saved_depth], optimizers=())
        elif self.first <= saved_depth < depth:
            shorten(self.block_list, saved_depth)


def depths(slots: Iterable[SeedSlot]) -> list[int]:
    """Return the present number of blocks in the list of each depth slot among the slots of a network."""
    return [len(slot.block_list.blocks) for slot in slots if isinstance(slot, DepthSlot)]


def depth_slots(
    network: nn.Module, blocks: str, most: int | None, *, width: int, prefix: str = ""
) -> Sequence[DepthSlot]:
    """Return the depth slots `stack1`, `stack2` … of a list of blocks, for the network that runs it to hold.

    `blocks` is the name of the list, `most` its largest number of blocks (None: the present one, so that there are no
    slots), `width` the channels between blocks, and `prefix` the beginning of the slots' names. Raises ValueError if
    the list cannot grow to this number.
    """
    if most is None:
        return []
    block_list, slots = find_blocks(network, blocks), list[DepthSlot]()
    first = len(block_list.blocks)
    if most < first:
        raise ValueError(f"{blocks!r} has {first} blocks from the start; let it grow to at least as many, got {most}")
    if len(list(block_list.modules.parameters())) < sum(len(list(block.parameters())) for block in block_list.modules):
        raise ValueError(f"the blocks of {blocks!r} share parameters, which a host that grows in depth cannot have")
    if any(isinstance(part, SeedSlot) for part in block_list.modules.modules()):
        raise ValueError(f"the blocks of {blocks!r} have slots, which copies would lack; attach slots from outside")
    while first * (1 + len(slots)) < most:
        slots.append(DepthSlot(f"{prefix}stack{len(slots) + 1}", width, block_list, most=most, earlier=slots))
    return slots
