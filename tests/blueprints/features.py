"""Features and blueprints of every layout, for tests."""

import torch
from torch import Tensor

from esper_lightning.blueprints import blueprint_names

CPU = torch.device("cpu")

LAYOUTS = ["image", "sequence", "vector"]

EVERYTHING = [(layout, name) for layout in LAYOUTS for name in blueprint_names(layout)]
"""Pairs of every layout and blueprint."""

HERE = [(layout, name) for layout in LAYOUTS for name in blueprint_names(layout, CPU)]
"""Pairs of layout and blueprint that run on a CPU."""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def feature(layout: str, width: int, samples: int = 3, positions: tuple[int, int] = (5, 7)) -> Tensor:
    """Draw a feature [B, C, H, W], [B, T, C] with T = H·W, or [B, C], of mean 0.5 and standard deviation 2."""
    height, length = positions
    shapes = {
        "image": (samples, width, height, length),
        "sequence": (samples, height * length, width),
        "vector": (samples, width),
    }
    return 2.0 * torch.randn(shapes[layout], generator=seeded(width)) + 0.5
