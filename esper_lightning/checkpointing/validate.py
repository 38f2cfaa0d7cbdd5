"""Checks of checkpoints: written by this package, complete, and saved by the run that is to be resumed."""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper_lightning.errors import DivergedError
from esper_lightning.growth.nested import iter_tensors
from esper_lightning.machine import CPU
from esper_lightning.serialization import excerpt

SCHEMA = 8
"""Version number of the checkpoint format; increased whenever checkpoints of the previous version cannot be resumed."""

SCHEMA_KEY = "esper_schema"
IDENTITY_KEY = "esper_identity"
MODULE_KEY = "esper_module"
"""Key of the sizes of the policy and the RNG seed of its training."""

RULES_KEY = "esper_rules"
"""Key of the lifecycle, the actions and the observation of the training hosts, for those that the policy is to grow."""

FEATURES_KEY = "observed features"
"""Key of the names of observed features in the identity of a run on hosts."""

MAX_WEIGHT = 1e18
"""Largest weight or statistic of a policy: with larger ones products of two numbers overflow."""

OTHER_RANKS_KEY = "random_of_other_ranks"
"""Key of the random states of all ranks but the first, in the state of the rollout; one rank has none."""

HYPER_PARAMETERS_KEY = "hyper_parameters"
"""Lightning's key of the settings of a module."""

MODULE_PARTS: dict[str, type] = dict.fromkeys(("state_dict", HYPER_PARAMETERS_KEY, IDENTITY_KEY, MODULE_KEY), dict)
"""Parts that restore the policy alone, with the type of each."""

REQUIRED_PARTS: dict[str, type] = MODULE_PARTS | {
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": dict,
    "callbacks": dict,
    "pytorch-lightning_version": str,
}
"""Parts that every resumable checkpoint has, with the type of each."""


def write_identity(checkpoint: dict[str, Any], identity: dict[str, Any], shape: dict[str, Any], *, seed: int) -> None:
    """Write the schema number, the identity of the run and the sizes of its policy into a checkpoint.

    Args:
        checkpoint: Checkpoint that Lightning is about to write.
        identity: Properties that a resumed run must share; see `check_identity`.
        shape: Sizes of the policy, as plain data.
        seed: RNG seed of the run.
    """
    checkpoint[SCHEMA_KEY] = SCHEMA
    checkpoint[IDENTITY_KEY] = identity
    checkpoint[MODULE_KEY] = {"shape": shape, "seed": seed}


def check_schema(checkpoint: dict[str, Any]) -> None:
    """Raise ValueError with the reason unless this version can resume `checkpoint`."""
    check_policy(checkpoint, REQUIRED_PARTS)
    if "RolloutState" not in checkpoint["callbacks"]:
        raise ValueError(
            "it lacks the state of esper_lightning.callbacks.RolloutState, so it was not saved by a full run; give "
            "another one"
        )
    if len(checkpoint["optimizer_states"]) != 1:
        raise ValueError(f"it holds {len(checkpoint['optimizer_states'])} optimizers; the policy has one")


def check_policy(checkpoint: dict[str, Any], parts: Mapping[str, type] = MODULE_PARTS) -> None:
    """Raise ValueError with the reason unless this version can read the policy and the other `parts`."""
    if SCHEMA_KEY not in checkpoint:
        raise ValueError("it was not written by esper-lightning; give one from a run's checkpoints folder")
    schema = checkpoint[SCHEMA_KEY]
    if schema != SCHEMA:
        raise ValueError(
            f"it has schema {excerpt(schema, 20)}, this version reads {SCHEMA}; use the version that wrote it"
        )
    missing = [part for part in parts if part not in checkpoint]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}, so it was not saved by a full run; give another one")
    for part, kind in parts.items():
        if not isinstance(checkpoint[part], kind):
            raise ValueError(f"{part} is a {type(checkpoint[part]).__name__}; give another checkpoint")
    for name, weights in checkpoint["state_dict"].items():
        if not isinstance(weights, Tensor):
            raise ValueError(
                f"{excerpt(name, 80)} is a {type(weights).__name__}, not a tensor; give another checkpoint"
            )
        if weights.is_floating_point() and not weights.isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite")
        if weights.is_floating_point() and weights.numel():
            low, high = (float(number) for number in weights.double().aminmax())
            lowest = 0.0 if str(name).endswith((".var", ".count")) else -MAX_WEIGHT
            if low < lowest or high > MAX_WEIGHT:
                raise ValueError(
                    f"{name} holds numbers from {low:.3g} to {high:.3g}, and {lowest:g} to {MAX_WEIGHT:g} are "
                    f"possible; give another checkpoint"
                )


def read_tensors(path: Path) -> Any:
    """Return the object that `torch.save` wrote to `path`, on the CPU, without running any code in it.

    Raises ValueError, in one line, if the file is missing, truncated or not plain data.
    """
    if not path.is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist; give the path of a .ckpt file")
    try:
        return torch.load(path, map_location=CPU, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"checkpoint {str(path)!r} is truncated, damaged or of another kind ({reason:.200}); give another one"
        ) from error


def open_checkpoint(path: str | Path, check: Callable[[dict[str, Any]], None] = check_schema) -> dict[str, Any]:
    """Return the checkpoint at `path`. Raises ValueError, in one line, unless this package wrote it and `check` accepts
    it."""
    checkpoint = read_tensors(Path(path))
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__}; give a Lightning checkpoint")
    try:
        check(checkpoint)
    except ValueError as error:
        raise ValueError(f"checkpoint {str(path)!r}: {error}") from error
    return checkpoint


@contextmanager
def checkpoint_errors(path: str | Path, use: str) -> Iterator[None]:
    """Turn the errors of a checkpoint that does not fit into one ValueError of one line.

    Args:
        path: Path of the checkpoint.
        use: What the checkpoint is needed for, as in "evaluated".
    """
    try:
        yield
    # For a damaged checkpoint torch raises many kinds of errors: other names, other shapes, missing keys.
    except (ValueError, RuntimeError, LookupError, TypeError) as error:
        raise ValueError(f"checkpoint {str(path)!r} cannot be {use}: {' '.join(str(error).split())}") from error


def check_saved_policy(checkpoint: dict[str, Any]) -> None:
    """Raise DivergedError if policy, normalisers or optimizer state are not finite, because no run could load them."""
    parts = ("state_dict", "optimizer_states")
    tensors = [t for part in parts for t in iter_tensors(checkpoint.get(part)) if t.is_floating_point()]
    # Optimizers may keep the step counts on the CPU. A single transfer for all tensors of a device.
    for device in {tensor.device for tensor in tensors}:
        if not torch.stack([t.isfinite().all() for t in tensors if t.device == device]).all():
            raise DivergedError(
                "the policy, its normalisers or its optimizer are not finite, so they are not saved; lower model.ppo.lr"
            )


def check_identity(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raise ValueError, naming the first difference, unless the run that wrote a checkpoint fits this one.

    Args:
        saved: Identity in the checkpoint.
        identity: Identity of this run, or a part of it; every property in it must be equal.
    """
    for name, value in identity.items():
        saved_value = saved.get(name, "nothing")
        if type(saved_value) is not type(value) or saved_value != value:
            raise ValueError(
                f"{name}: the checkpoint has {excerpt(saved_value)}, this run {excerpt(value)}; give the checkpoint "
                f"the config.yaml of its run"
            )


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return one line for each setting, in nested mappings, that differs between a resumed run and this one."""
    lines = []
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, "nothing"), now.get(name, "nothing")
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            lines += differences(old, new, f"{prefix}{name}.")
        elif old != new:
            lines.append(f"{prefix}{name}: {excerpt(old)} before, {excerpt(new)} now")
    return lines
