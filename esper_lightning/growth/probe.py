"""Gate G0: a trial of each blueprint in each slot of a throw-away network, to find those that can grow there."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import Birth, blueprint_names, check_blueprint_name
from esper_lightning.growth.alpha import DEFAULT_RAMP
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
    reasons: dict[tuple[str, str], list[str]] = {}
    network.train()
    _perturb_zero_parameters(network, generator)
    for blueprint in blueprints:
        check_blueprint_name(blueprint)  # raises ValueError for an unknown name
        override = _ProbeOverride()
        for slot in slots.values():
            slot.empty()
            slot.override = override
            if blueprint in blueprint_names(slot.layout):
                override.try_germinate(slot, blueprint, generator, birth=birth)
        loss_of(network).backward()
        for slot in slots.values():
            reasons[slot.name, blueprint] = _reasons_against(slot, override)
    return reasons


@torch.no_grad()
def _perturb_zero_parameters(network: nn.Module, generator: torch.Generator) -> None:
    """Replace parameters that are all zero by small noise.

    Such a parameter (for example the head of torchvision's VisionTransformer) passes no gradient back before its first
    update, which would make every earlier slot look unable to learn.
    """
    for parameter in network.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(std=ZERO_WEIGHT_NOISE_STD, generator=generator)


class _ProbeOverride:
    """Override of the slots' forward pass that runs each seed, and records an error instead of raising it."""

    def __init__(self) -> None:
        self.reached_slots: set[str] = set()
        self.errors: dict[str, str] = {}

    def try_germinate(self, slot: SeedSlot, blueprint: str, generator: torch.Generator, *, birth: Birth) -> None:
        """Germinate a seed, or record the error if that is impossible."""
        try:
            germinate(slot, blueprint, DEFAULT_RAMP, generator=generator, birth=birth)
        except ValueError as error:  # the blueprint does not support this birth or width
            self.errors[slot.name] = str(error)

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        self.reached_slots.add(slot.name)
        if not slot.occupied:
            return x
        try:
            output_shape = slot.seed(x.detach()).shape
        except (RuntimeError, ValueError) as error:  # torch does not accept the feature's shape
            self.errors[slot.name] = f"cannot run on features of shape {tuple(x.shape)}: {error}"
            return x
        if output_shape != x.shape:
            self.errors[slot.name] = f"changes the feature's shape from {tuple(x.shape)} to {tuple(output_shape)}"
            return x
        return straight_through(x, slot.trial_output(x))


def _reasons_against(slot: SeedSlot, override: _ProbeOverride) -> list[str]:
    if slot.name in override.errors:
        return [override.errors[slot.name]]
    if not slot.occupied:
        return [f"does not grow on {slot.layout} features on {slot.alpha.device.type}"]
    if slot.name not in override.reached_slots:
        return ["the host's forward pass does not reach the slot"]
    if count_parameters(slot.seed) == 0:
        return ["has no parameters"]
    if not any(p.grad is not None and p.grad.any() for p in slot.seed.parameters()):
        return ["its first gradient is zero: it could never learn"]
    return []
