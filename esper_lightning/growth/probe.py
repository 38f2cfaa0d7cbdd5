"""Gate G0: a trial of each blueprint in each slot of a throw-away network, to find those that can grow there."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import Birth, blueprint_names, check_blueprint_name
from esper_lightning.growth.blend import straight_through
from esper_lightning.growth.lifecycle import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot

PROBE_RNG_SEED = 0

ZERO_WEIGHT_NOISE_STD = 0.01
"""Standard deviation of the noise that replaces zero weights, about the size of one optimizer step."""


def probe_seeds(
    network: nn.Module,
    blueprints: Iterable[str],
    loss_of: Callable[[nn.Module], Tensor],
    *,
    birth: Birth = "identity",
) -> dict[tuple[str, str], list[str]]:
    """Grow each blueprint once in every slot and return the reasons against it by (slot, blueprint); empty if it fits.

    Args:
        network: Host with empty slots; it is modified and must not be used afterwards.
        blueprints: Names of the blueprints to try.
        loss_of: Function that runs a network on a batch of training data and returns its loss, with a graph.
        birth: Initial state of seeds.
    """
    slots = slots_of(network)
    generator = torch.Generator(next(network.parameters()).device).manual_seed(PROBE_RNG_SEED)
    reached: set[str] = set()
    errors: dict[str, str] = {}
    reasons: dict[tuple[str, str], list[str]] = {}

    def run_seed(slot: SeedSlot, x: Tensor) -> Tensor:
        """Run the seed in a slot in place of the slot's forward pass; record an error instead of raising it."""
        reached.add(slot.name)
        if not slot.occupied:
            return x
        try:
            shape = slot.seed_output(x.detach()).shape
        except (RuntimeError, ValueError) as error:  # torch does not accept the feature's shape
            errors[slot.name] = f"cannot run on features of shape {tuple(x.shape)}: {error}"
            return x
        if shape != x.shape:
            errors[slot.name] = f"changes the feature's shape from {tuple(x.shape)} to {tuple(shape)}"
            return x
        return straight_through(x, slot.trial_output(x))

    network.train()
    # A parameter that is all zero (the head of torchvision's VisionTransformer) passes no gradient back before its
    # first update, which would make every earlier slot look unable to learn.
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.requires_grad and not parameter.any():
                parameter.normal_(std=ZERO_WEIGHT_NOISE_STD, generator=generator)
    for blueprint in blueprints:
        check_blueprint_name(blueprint)  # raises ValueError for an unknown name
        reached.clear()
        errors.clear()
        for slot in slots.values():
            slot.empty()
            slot.override = run_seed
            if blueprint in blueprint_names(slot.layout):
                try:
                    germinate(slot, blueprint, generator=generator, birth=birth)
                except ValueError as error:  # the blueprint does not support this birth or width
                    errors[slot.name] = str(error)
        loss_of(network).backward()
        for name, slot in slots.items():
            reasons[name, blueprint] = [errors[name]] if name in errors else _reasons_against(slot, name in reached)
    return reasons


def _reasons_against(slot: SeedSlot, is_reached: bool) -> list[str]:
    if not slot.occupied:
        return [f"does not grow on {slot.layout} features"]
    if not is_reached:
        return ["the host's forward pass does not reach the slot"]
    if count_parameters(slot.seed) == 0:
        return ["has no parameters"]
    if not any(p.grad is not None and p.grad.any() for p in slot.seed.parameters()):
        return ["its first gradient is zero: it could never learn"]
    return []
