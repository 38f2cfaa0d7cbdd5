"""Checkpoint writer of a Trainer that never leaves a half-written file, and reader that runs no code of a file."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from esper_lightning.checkpointing.validate import read_tensors
from esper_lightning.serialization import replace_durably


class AtomicCheckpointIO(TorchCheckpointIO):
    """Plugin of a Trainer that writes a draft beside a checkpoint, flushes it to disk, and renames it.

    A crash keeps the previous checkpoint. Lightning alone does so only if the folder of temporary files is on the same
    file system as the checkpoint.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        replace_durably(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(self, path: str | Path, *_: object, **__: object) -> dict[str, Any]:
        """Read a checkpoint of plain data and tensors, on the CPU. Raises ValueError, in one line, if it is none."""
        checkpoint = read_tensors(Path(path))
        if not isinstance(checkpoint, dict) or "pytorch-lightning_version" not in checkpoint:
            raise ValueError(f"{str(path)!r} is no checkpoint of Lightning; give the path of a .ckpt file")
        return checkpoint
