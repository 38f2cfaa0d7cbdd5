"""Checkpoints: written whole or not at all, and read only if they are ours."""

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from esper_lightning.growth.saving import NOT_TENSORS

SCHEMA = 3
"""Raised whenever a checkpoint of before could no longer be continued."""

SCHEMA_KEY = "esper_schema"
IDENTITY_KEY = "esper_identity"
PARTS = ("state_dict", "optimizer_states", "loops", "callbacks", "HostPoolData", IDENTITY_KEY)


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes beside the target and renames: a crash leaves the last good checkpoint, on any file system."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        for left_over in target.parent.glob(f".{target.name}.*.tmp"):
            left_over.unlink(missing_ok=True)  # of a process that was killed while it wrote
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            with draft.open("wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


def stamp(checkpoint: dict[str, Any], identity: dict[str, Any]) -> None:
    """Marks a checkpoint as ours, and says of what run: see `check_identity`."""
    checkpoint[SCHEMA_KEY] = SCHEMA
    checkpoint[IDENTITY_KEY] = identity


def check_schema(checkpoint: dict[str, Any]) -> None:
    """Raises ValueError, saying what is wrong, unless `checkpoint` is one that this version can continue."""
    if SCHEMA_KEY not in checkpoint:
        raise ValueError("the checkpoint was not written by esper-lightning; give one from a run's checkpoints folder")
    if checkpoint[SCHEMA_KEY] != SCHEMA:
        raise ValueError(
            f"the checkpoint has schema {checkpoint[SCHEMA_KEY]}, this version reads {SCHEMA}; "
            f"resume it with the version that wrote it"
        )
    missing = [part for part in PARTS if part not in checkpoint]
    if not missing and "RolloutState" not in checkpoint["callbacks"]:
        missing = ["RolloutState"]
    if missing:
        raise ValueError(f"the checkpoint lacks {', '.join(missing)}; it was not saved by a full run")


def check_identity(saved: dict[str, Any], identity: dict[str, Any]) -> None:
    """Raises ValueError, naming the first difference, unless the run of `identity` can continue that of `saved`."""
    for name, before in saved.items():
        if before != identity[name]:
            raise ValueError(
                f"{name}: the checkpoint has {before}, this run {identity[name]}; "
                f"resume with the config.yaml in the checkpoint's run folder"
            )


def check_checkpoint(path: str | Path) -> dict[str, Any]:
    """The identity of the checkpoint at `path`. Raises ValueError with one line unless it is whole and ours."""
    if not Path(path).is_file():
        raise ValueError(f"checkpoint {str(path)!r} does not exist; give the path of a .ckpt file")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except NOT_TENSORS as error:
        raise ValueError(
            f"checkpoint {str(path)!r} is truncated or not a checkpoint; give another one ({type(error).__name__})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"checkpoint {str(path)!r} holds a {type(checkpoint).__name__}; give a Lightning checkpoint")
    check_schema(checkpoint)
    return checkpoint[IDENTITY_KEY]
