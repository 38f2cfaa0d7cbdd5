"""Features and blueprints of every layout, for tests."""

import torch
from torch import Tensor, nn

from esper_lightning.growth.blueprints import Birth, blueprint_names, build_seed
from tests.growth.grown import CPU, generator_of

EVERYTHING = [(layout, name) for layout in ("image", "sequence", "vector") for name in blueprint_names(layout)]
"""Pairs of layout and blueprint."""


def seed_of(name: str, layout: str, width: int = 8, *, rng_seed: int = 0, birth: Birth = "random") -> nn.Module:
    return build_seed(name, layout, width, device=CPU, generator=generator_of(rng_seed), birth=birth)


def feature(layout: str, width: int = 8, samples: int = 3, positions: tuple[int, int] = (5, 7)) -> Tensor:
    """Draw a feature [B, C, H, W], [B, T, C] with T = H·W, or [B, C], of mean 0.5 and standard deviation 2."""
    height, length = positions
    shapes = {
        "image": (samples, width, height, length),
        "sequence": (samples, height * length, width),
        "vector": (samples, width),
    }
    return 2.0 * torch.randn(shapes[layout], generator=generator_of(width)) + 0.5
