"""Cache file of the fastest executor for a machine, a kind of host and a number of hosts."""

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from esper_lightning.envs.execution.choice import Choice
from esper_lightning.envs.execution.threads import usable_cores
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.saving import replace_file
from esper_lightning.tasks import TaskData

FORMAT = 1
"""Version of the file format; a file of another version is replaced."""

NO_MATTER = ("lr", "seed_lr_factor", "weight_decay", "momentum", "carry_over", "onednn")
"""Fields of `HostTraining` that do not affect speed, or that belong to the candidates."""


def cache_file() -> Path:
    """Return the path of the cache file, below `XDG_CACHE_HOME` (default: `~/.cache`)."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "esper-lightning" / "executors.json"


def describe(env: HostEnv, data: TaskData, n_envs: int, possible: Sequence[Choice]) -> str:
    """Return the cache key: everything that the speed of `n_envs` new environments like `env` depends on."""
    machine = f"{_processor()}, {usable_cores()} cores, {torch.get_num_threads()} per operator"
    device = {"cuda": torch.cuda.get_device_name}.get(env.device.type, str)(env.device)
    software = f"torch {version('torch')} on {device}"
    kind = hashlib.sha256(repr(_kind(env, data)).encode()).hexdigest()[:12]
    return f"{machine}; {software}; {n_envs} hosts of kind {kind}; {', '.join(map(str, possible))}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _kind(env: HostEnv, data: TaskData) -> list[Any]:
    settings = [(f.name, getattr(env.training, f.name)) for f in fields(HostTraining) if f.name not in NO_MATTER]
    splits = [(tuple(part.shape), part.dtype) for split in (data.train, data.validation) for part in split]
    layers = [_layer(name, module) for name, module in env.network.named_modules()]
    return [layers, settings, splits, env.space.blueprint, env.space.style]


def _layer(name: str, module: nn.Module) -> tuple[str, str, list[Any], list[Any]]:
    """Return name, type, plain attributes, and shapes of the own parameters and buffers of a module."""
    plain = {key: value for key, value in vars(module).items() if isinstance(value, int | float | str | tuple)}
    held = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = [(key, tuple(tensor.shape), tensor.dtype) for key, tensor in held]
    return name, type(module).__qualname__, sorted((k, v) for k, v in plain.items() if k != "training"), shapes


def recall(key: str, possible: Sequence[Choice]) -> tuple[Choice | None, str]:
    """Return the choice cached for `key` (None: no entry), and a note if the file is damaged (empty: it is not)."""
    entries, complaint = _read(cache_file())
    if key not in entries:
        return None, complaint
    by_name = {str(choice): choice for choice in possible}
    known = by_name.get(entries[key].get("fastest"))
    return known, "" if known else f"{cache_file()} was damaged and is mended; "


def remember(key: str, choice: Choice, speeds: Mapping[str, float]) -> str:
    """Write the choice to the cache file, with all measured speeds in environment steps per second.

    Returns a note that names the file, or the reason why it could not be written.
    """
    path = cache_file()
    entry = {"fastest": str(choice), "environment steps per second": {name: round(v, 1) for name, v in speeds.items()}}
    content = {"format": FORMAT, "measured": _read(path)[0] | {key: entry}}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda draft: draft.write_text(json.dumps(content, indent=1) + "\n"))
    except OSError as error:
        return f"not remembered: {path} cannot be written ({error.strerror})"
    return f"remembered in {path}"


def _read(path: Path) -> tuple[dict[str, Any], str]:
    """Return the cached entries by key, and a note if the file is damaged (empty: it is not)."""
    if not path.exists():
        return {}, ""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        return {}, f"{path} could not be read ({type(error).__name__}) and is replaced; "
    entries = content.get("measured") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        return {}, f"{path} was not of format {FORMAT} and is replaced; "
    return entries, ""
