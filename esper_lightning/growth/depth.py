"""DepthSlot: the record of a growth in depth, by copies of blocks in their list."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.blueprints import COPIES, STACK, Birth
from esper_lightning.growth.blend import BlendStyle
from esper_lightning.growth.blocks import BlockList, find_blocks
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stack import deepen, shorten


class DepthSlot(SeedSlot):
    """Record of one growth of a list of like blocks by copies of its last ones, at once and for good.

    No feature passes through it, because the network runs the list. A state dict gives the list its depth.

    Args:
        name, width: See `SeedSlot`.
        found: The list, as it is before any growth.
        most: Largest number of blocks in it.
        earlier: Depth slots of the list that are taken before this one.
    """

    is_judged = False  # a deep network comes to rely on each of its blocks

    def __init__(self, name: str, width: int, found: BlockList, *, most: int, earlier: Sequence["DepthSlot"]) -> None:
        # Before the slot is emptied. They are no children of it: a tuple hides modules.
        self.found, self.earlier = found, tuple(earlier)
        self.first, self.most = len(found.blocks) - sum(slot.added for slot in earlier), most
        super().__init__(name, STACK, width, detach_input=False)
        self.register_load_state_dict_pre_hook(_refuse_copies_behind_the_list)
        if not earlier:
            found.modules.register_load_state_dict_pre_hook(self._fit)

    @property
    def is_open(self) -> bool:
        """True if a decider may let the list grow: slots of one list are taken in turn, for whichever is taken, the
        network is the same."""
        return super().is_open and all(slot.occupied for slot in self.earlier)

    @property
    def block(self) -> nn.Module:
        """First block of the list; all have parameters of the same shapes."""
        return self.found.blocks[0]

    @property
    def depth(self) -> int:
        """Number of blocks in the list."""
        return len(self.found.blocks)

    @property
    def begin(self) -> int:
        """Number of blocks ahead of those that grew here."""
        return self.first + sum(slot.added for slot in self.earlier)

    @property
    def added(self) -> int:
        """Number of blocks that grew here."""
        return 0 if self.blueprint is None else self.num_blocks(self.blueprint)

    @property
    def grown(self) -> list[nn.Module]:
        """Blocks that grew here."""
        return self.found.blocks[self.begin : self.begin + self.added]

    def num_blocks(self, blueprint: str) -> int:
        """Return the number of blocks that a blueprint adds. Raises ValueError for one that is no copy."""
        if blueprint not in COPIES:
            raise ValueError(f"blueprint {blueprint!r} does not grow in depth slots; these do: {', '.join(COPIES)}")
        return min(self.first, self.most - self.first * (1 + len(self.earlier))) if blueprint == "stack" else 1

    def seed_parameters(self, blueprint: str) -> int:
        return self.num_blocks(blueprint) * sum(parameter.numel() for parameter in self.block.parameters())

    def grown_parameters(self) -> list[nn.Parameter]:
        return [parameter for block in self.grown for parameter in block.parameters()]

    def fill(
        self,
        blueprint: str,
        style: BlendStyle,
        *,
        generator: torch.Generator,
        birth: Birth,
        optimizers: Sequence[Optimizer] = (),
    ) -> None:
        """Add copies of the last blocks to the list, with their state in the optimizers."""
        for slot in self.earlier:
            if not slot.occupied:
                raise ValueError(f"slot {self.name!r}: its list grows by {slot.name!r} before")
        count = self.num_blocks(blueprint)
        deepen(self.found, [*range(self.depth), *range(self.depth - count, self.depth)], optimizers)

    def empty(self) -> None:
        """Remove the blocks that grew here and behind them."""
        super().empty()
        if self.depth > self.begin:
            shorten(self.found, self.begin)

    def set_extra_state(self, state: Tensor) -> None:
        super().set_extra_state(state)
        end = self.begin + self.added  # the weights of the list are loaded already
        if self.depth < end or self.depth > (self.most if self.occupied else end):
            raise ValueError(
                f"slot {self.name!r}: {self.found.name!r} has {self.depth} blocks in the state, and {end} by its "
                f"records; load the state of a host of the same class"
            )

    def _fit(self, _: nn.Module, state: Mapping[str, Any], prefix: str, *__: Any) -> None:
        """Give the list as many blocks as a state dict has, before their weights are loaded."""
        names = {key.removeprefix(prefix).split(".")[0] for key in state if key.startswith(prefix)}
        depth, present = len(names) - self.found.before - self.found.behind, self.depth
        if present < depth <= self.most:
            deepen(self.found, [*range(present), *[present - 1] * (depth - present)], ())
        elif self.first <= depth < present:
            shorten(self.found, depth)


def depths(slots: Iterable[SeedSlot]) -> tuple[int, ...]:
    """Return the present number of blocks in the list of each depth slot among the slots of a network."""
    return tuple(slot.depth for slot in slots if isinstance(slot, DepthSlot))


def depth_slots(
    network: nn.Module, blocks: str, most: int | None, *, width: int, prefix: str = ""
) -> Sequence[DepthSlot]:
    """Return the depth slots `stack1`, `stack2` … of a list of blocks in a network, for the network to hold.

    Args:
        network: Network that runs the list.
        blocks: Name of the list in the network.
        most: Largest number of blocks. None: the present one, so that there are no slots.
        width: Channels of the feature between the blocks.
        prefix: What the names of the slots begin with.

    Raises ValueError if the list cannot grow to this number.
    """
    if most is None:
        return []
    found = find_blocks(network, blocks)
    first = len(found.blocks)
    if most < first:
        raise ValueError(f"{blocks!r} has {first} blocks from the start; let it grow to at least as many, got {most}")
    if any(isinstance(part, SeedSlot) for part in found.modules.modules()):
        raise ValueError(f"the blocks of {blocks!r} have slots, which copies would lack; attach slots from outside")
    slots: list[DepthSlot] = []
    while first * (1 + len(slots)) < most:
        slots.append(DepthSlot(f"{prefix}stack{len(slots) + 1}", width, found, most=most, earlier=slots))
    return slots


def _refuse_copies_behind_the_list(slot: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Raise ValueError for a state of an earlier version, in which copies stand behind the list."""
    if any(key.startswith(f"{prefix}seed.") for key in state):
        assert isinstance(slot, DepthSlot)
        raise ValueError(
            f"slot {slot.name!r}: the state has copies of blocks behind their list, as an earlier version grew them; "
            f"train again: blocks are now added to the list itself, as by the callback Stack"
        )
