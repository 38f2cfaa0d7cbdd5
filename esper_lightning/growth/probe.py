"""Gate G0: can this blueprint grow in this slot at all? Found out once, on a throw-away network."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import get, names
from esper_lightning.growth.alpha import FULL
from esper_lightning.growth.network import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot

PROBE_SEED = 0


def probe_seeds(
    network: nn.Module, blueprints: Iterable[str], loss_of: Callable[[nn.Module], Tensor]
) -> dict[tuple[str, str], list[str]]:
    """Grows each blueprint in every slot of `network`, once, and returns the reasons against (slot, blueprint).

    Args:
        network: A host with empty slots. It is used up.
        blueprints: Names to try.
        loss_of: Runs a network on a batch of training data and returns its loss, with a graph.
    """
    slots = slots_of(network)
    generator = torch.Generator(next(network.parameters()).device).manual_seed(PROBE_SEED)
    reasons: dict[tuple[str, str], list[str]] = {}
    network.train()
    for blueprint in blueprints:
        get(blueprint)  # an unknown name ends it here
        shapes: dict[str, tuple[torch.Size, torch.Size]] = {}

        def watch(slot: SeedSlot, x: Tensor, shapes: dict[str, tuple[torch.Size, torch.Size]] = shapes) -> Tensor:
            if slot.occupied:
                shapes[slot.name] = (x.shape, slot.seed(x.detach()).shape)
                if shapes[slot.name][0] != shapes[slot.name][1]:
                    return x
            return slot.express(x)

        for slot in slots.values():
            slot.empty()
            slot.branch = watch
            if blueprint in names(slot.layout):
                germinate(slot, blueprint, FULL, generator)
        loss_of(network).backward()
        for slot in slots.values():
            reasons[slot.name, blueprint] = _reasons(slot, shapes.get(slot.name))
    return reasons


def _reasons(slot: SeedSlot, shapes: tuple[torch.Size, torch.Size] | None) -> list[str]:
    if not slot.occupied:
        return [f"does not grow on {slot.layout} features"]
    if shapes is None:
        return ["the host's forward pass does not reach the slot"]
    before, after = shapes
    if before != after:
        return [f"changes the feature's shape from {tuple(before)} to {tuple(after)}"]
    if count_parameters(slot.seed) == 0:
        return ["has no parameters"]
    if not any(p.grad is not None and p.grad.any() for p in slot.seed.parameters()):
        return ["its first gradient is zero: it could never learn"]
    return []
