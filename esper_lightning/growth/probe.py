"""Gate G0: a trial of each blueprint in each slot of a throw-away network, to find those that can grow there."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import Birth, check_known, names
from esper_lightning.growth.alpha import FULL
from esper_lightning.growth.network import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import SeedSlot

PROBE_SEED = 0

AFTER_A_STEP = 0.01
"""Standard deviation of the noise that replaces zero weights, about the size of one optimizer step."""


def probe_seeds(
    network: nn.Module,
    blueprints: Iterable[str],
    loss_of: Callable[[nn.Module], Tensor],
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
    generator = torch.Generator(next(network.parameters()).device).manual_seed(PROBE_SEED)
    reasons: dict[tuple[str, str], list[str]] = {}
    network.train()
    _leave_zero(network, generator)
    for blueprint in blueprints:
        check_known(blueprint)  # raises ValueError for an unknown name
        trial = _Trial()
        for slot in slots.values():
            slot.empty()
            slot.branch = trial
            if blueprint in names(slot.layout, slot.alpha.device):
                trial.germinate(slot, blueprint, generator, birth)
        loss_of(network).backward()
        for slot in slots.values():
            reasons[slot.name, blueprint] = _reasons(slot, trial)
    return reasons


@torch.no_grad()
def _leave_zero(network: nn.Module, generator: torch.Generator) -> None:
    """Replace parameters that are all zero by small noise.

    Such a parameter (for example the head of torchvision's VisionTransformer) passes no gradient back before its first
    update, which would make every earlier slot look unable to learn.
    """
    for parameter in network.parameters():
        if parameter.requires_grad and not parameter.any():
            parameter.normal_(std=AFTER_A_STEP, generator=generator)


class _Trial:
    """Override of the slots' forward pass that runs each seed, and records an error instead of raising it."""

    def __init__(self) -> None:
        self.reached: set[str] = set()
        self.against: dict[str, str] = {}

    def germinate(self, slot: SeedSlot, blueprint: str, generator: torch.Generator, birth: Birth) -> None:
        try:
            germinate(slot, blueprint, FULL, generator, birth=birth)
        except ValueError as error:  # the blueprint does not support this birth or width
            self.against[slot.name] = str(error)

    def __call__(self, slot: SeedSlot, x: Tensor) -> Tensor:
        self.reached.add(slot.name)
        if not slot.occupied:
            return x
        try:
            after = slot.seed(x.detach()).shape
        except (RuntimeError, ValueError) as error:  # torch does not accept the feature's shape
            self.against[slot.name] = f"cannot run on features of shape {tuple(x.shape)}: {error}"
            return x
        if after != x.shape:
            self.against[slot.name] = f"changes the feature's shape from {tuple(x.shape)} to {tuple(after)}"
            return x
        return slot.express(x)


def _reasons(slot: SeedSlot, trial: _Trial) -> list[str]:
    if slot.name in trial.against:
        return [trial.against[slot.name]]
    if not slot.occupied:
        return [f"does not grow on {slot.layout} features on {slot.alpha.device.type}"]
    if slot.name not in trial.reached:
        return ["the host's forward pass does not reach the slot"]
    if count_parameters(slot.seed) == 0:
        return ["has no parameters"]
    if not any(p.grad is not None and p.grad.any() for p in slot.seed.parameters()):
        return ["its first gradient is zero: it could never learn"]
    return []
