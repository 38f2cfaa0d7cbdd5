"""Saved networks that a test takes apart and writes again, damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor


def read_saved(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the JSON in the metadata and the state dict of a saved network."""
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["growth"]), {name: file.get_tensor(name) for name in list(file.keys())}


def write_saved(path: Path, growth: Any, weights: dict[str, Tensor]) -> None:
    path.write_bytes(safetensors.torch.save(weights, {"growth": json.dumps(growth)}))


def edit_growth(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the JSON of a saved network in place."""
    growth, weights = read_saved(path)
    change(growth)
    write_saved(path, growth, weights)
