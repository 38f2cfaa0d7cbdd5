"""Descriptions of slots and blueprints by size, compute and layers, relative to the host and without their names.

K slots, B blueprints. Every number is approximately within [-1, 1].
"""

import math
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.spaces.observation import LOG_SIZE_SCALE, clip
from esper_lightning.growth.blueprints import blueprint_names, get_blueprint
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.slot import ABSENT, Layout, SeedSlot

LAYOUTS = get_args(Layout)

LAYERS_SCALE, INNER_WIDTH_SCALE = 4.0, 3.0
"""Divisors of a seed's number of layers, and of the logarithm of its inner width over the width of the feature."""

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

SLOT_DESCRIPTION = ("depth", *LAYOUTS, "width", "positions")
"""Names of the numbers that describe a slot. depth: share of the host's FLOPs before it; then the layout as one-hot,
the width of the feature, and its number of positions (pixels or tokens)."""

LAYER_KINDS = ("kernel", "dense_kernel", "channel_mixing", "norm", "gating", "nonlinear")
"""Names of the kinds of layers that a seed has or not. kernel, dense_kernel: a convolution over several positions, one
that mixes channels, too."""

BLUEPRINT_DESCRIPTION = (
    *("parameters", "flops", "size"),
    *LAYER_KINDS,
    *("position_exponent", "layers", "widest", "narrowest"),
)
"""Names of the numbers that describe a blueprint in a slot. parameters and flops: growth of the host by such a seed;
size: its parameters; position_exponent: power with which FLOPs grow with the number of positions, 0 for a seed that
acts on their mean and more than 1 for attention; layers: linear layers and convolutions; widest, narrowest: widths
between its layers."""


class HostDescription(NamedTuple):
    """Numbers of one host that stay the same in all its episodes."""

    slots: Tensor  # [K, len(SLOT_DESCRIPTION)]
    blueprints: Tensor  # [K, B, len(BLUEPRINT_DESCRIPTION)]; 0 where the blueprint has no module for the layout
    parameters: Tensor  # [K, B] parameters of a seed


def describe(env: GrowthRecord) -> HostDescription:
    """Return numbers that describe each slot, and each blueprint in each slot.

    They let one policy read any host.
    """
    described = [[_describe_blueprint(env, slot, blueprint) for blueprint in env.space.blueprint] for slot in env.slots]
    return HostDescription(
        slots=torch.tensor([_describe_slot(env, slot) for slot in env.slots]),
        blueprints=torch.tensor([[numbers for numbers, _ in row] for row in described]),
        parameters=torch.tensor([[float(parameters) for _, parameters in row] for row in described]),
    )


def _describe_slot(env: GrowthRecord, slot: SeedSlot) -> list[float]:
    depth = 1.0 - env.flops.behind.get(slot.name, 0) / max(env.flops.host, 1)
    layout = [float(slot.layout == layout) for layout in LAYOUTS]
    return [depth, *layout, math.log(slot.width) / LOG_SIZE_SCALE, math.log(_positions(env, slot)) / LOG_SIZE_SCALE]


def _positions(env: GrowthRecord, slot: SeedSlot) -> int:
    """Return the largest number of positions with which the forward pass reaches a slot; 1 if it does not."""
    return max(env.flops.positions.get(slot.name) or [1])


def _describe_blueprint(env: GrowthRecord, slot: SeedSlot, name: str) -> tuple[list[float], int]:
    """Return the description of a blueprint in a slot, and the parameters of such a seed."""
    if slot.layout == ABSENT or name not in blueprint_names(slot.layout):
        return [0.0] * len(BLUEPRINT_DESCRIPTION), 0
    width, n, parameters = slot.width, _positions(env, slot), slot.seed_parameters(name)
    if isinstance(slot, DepthSlot):
        flops, exponent = slot.count * env.flops.blocks.get(slot.name, 0), 1.0
        kinds, widths = read_layers(slot.found.blocks[0].modules())
        widths = widths * slot.count
    else:
        flops_of_pass = get_blueprint(name, slot.layout).flops
        flops = sum(flops_of_pass(width, positions) for positions in env.flops.positions.get(slot.name, ()))
        once, twice = flops_of_pass(width, n), flops_of_pass(width, 2 * n)
        exponent = math.log2(twice / once) if once else 0.0
        kinds, widths = layers_of_blueprint(name, slot.layout, width)
    numbers = [
        math.log1p(parameters / env.host_parameters) / LOG_SIZE_SCALE,
        math.log1p(flops / max(env.flops.host, 1)) / LOG_SIZE_SCALE,
        math.log1p(parameters) / (2 * LOG_SIZE_SCALE),
        *(float(kinds[kind]) for kind in LAYER_KINDS),
        exponent,
        len(widths) / LAYERS_SCALE,
        math.log(max(widths, default=width) / width) / INNER_WIDTH_SCALE,
        math.log(min(widths, default=width) / width) / INNER_WIDTH_SCALE,
    ]
    return [clip(number, 2.0) for number in numbers], parameters


@cache
def layers_of_blueprint(name: str, layout: str, width: int) -> tuple[dict[str, bool], list[int]]:
    """Return `read_layers` of a blueprint's module, which is built on the meta device, without memory."""
    with torch.device("meta"):
        return read_layers(get_blueprint(name, layout).build(width).modules())


def read_layers(parts: Iterable[nn.Module]) -> tuple[dict[str, bool], list[int]]:
    """Return the kinds of layers in a seed, and the width behind each linear layer or convolution."""
    modules = list(parts)
    convs = [module for module in modules if isinstance(module, CONVOLUTIONS)]
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    spatial = [conv for conv in convs if max(conv.kernel_size) > 1]
    kinds = {
        "kernel": bool(spatial),
        "dense_kernel": any(conv.groups == 1 for conv in spatial),
        "channel_mixing": bool(linear) or any(conv.groups == 1 for conv in convs),
        "norm": any(isinstance(module, NORMS) for module in modules),
        "gating": any(isinstance(module, nn.GLU) for module in modules),
        "nonlinear": any(type(module).__module__ == "torch.nn.modules.activation" for module in modules),
    }
    return kinds, [conv.out_channels for conv in convs] + [layer.out_features for layer in linear]
