"""Gate G0: a trial of each blueprint in each slot of a throw-away network, to find those that can grow there."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth.blend import straight_through
from esper_lightning.growth.blueprints import Birth, blueprint_names, build_seed, check_blueprint_name
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.runtime.nested import BATCH_LENGTH_ERRORS, is_equal_up_to_rounding

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
            shape = slot.seed(x.detach()).shape
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
            gradients = [parameter.grad for parameter in slot.grown_parameters()]
            if name in errors:
                against = [errors[name]]
            elif not slot.occupied:
                against = [f"does not grow on {slot.layout} features"]
            elif slot.is_judged and name not in reached:
                against = ["the host's forward pass does not reach the slot"]
            elif not gradients:
                against = ["has no parameters"]
            elif not any(gradient is not None and gradient.any() for gradient in gradients):
                against = ["its first gradient is zero: it could never learn"]
            else:
                against = []
            reasons[name, blueprint] = against + (reasons_of_cache(network, slot, blueprint) if slot.occupied else [])
    return reasons


def reasons_of_cache(network: nn.Module, slot: SeedSlot, blueprint: str) -> list[str]:
    """Return why a blueprint cannot grow in a slot of a network that generates with a cache; empty if it can."""
    if slot.layout == "sequence" and generates_with_cache(network) and looks_at_other_positions(blueprint, slot.width):
        return [
            "it looks at other positions, and the network generates with a cache, which gives it the newest one alone; "
            "name another blueprint, or set use_cache to False in config and generation_config"
        ]
    return []


def generates_with_cache(network: nn.Module) -> bool:
    """Return True if a part of the network can generate text with a cache of keys and values, as in transformers."""
    parts = list(network.modules())
    takes = any({"use_cache", "past_key_values"} & inspect.signature(part.forward).parameters.keys() for part in parts)
    configs: list[Any] = [getattr(part, name, None) for part in parts for name in ("config", "generation_config")]
    uses = [config.use_cache is not False for config in configs if hasattr(config, "use_cache")]
    generates = any(getattr(part, "generation_config", None) is not None for part in parts)
    return (takes or generates) and (any(uses) or not uses)


@torch.no_grad()
def looks_at_other_positions(blueprint: str, width: int) -> bool:
    """Return True if the output of a seed for one position of a sequence depends on other positions."""
    generator = torch.Generator().manual_seed(PROBE_RNG_SEED)
    seed = build_seed(blueprint, "sequence", width, device=torch.device("cpu"), generator=generator, birth="random")
    x = torch.randn(1, 4, width, generator=generator)  # [B, T, C]
    try:
        return not is_equal_up_to_rounding(seed.eval()(x)[:, -1:], seed(x[:, -1:]))
    except BATCH_LENGTH_ERRORS:
        return True
