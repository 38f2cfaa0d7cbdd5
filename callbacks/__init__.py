"""Lightning callbacks, one task each: they decide when something happens, and call the package to do it."""

from typing import Any

from lightning import Callback

from esper_lightning.callbacks.governor import Governor
from esper_lightning.callbacks.grow import Grow
from esper_lightning.callbacks.resume import Preemption, RolloutState
from esper_lightning.callbacks.run_record import RunRecord
from esper_lightning.callbacks.stack import Stack
from esper_lightning.callbacks.telemetry import ProgressLines, Telemetry
from esper_lightning.runtime.registry import import_object

__all__ = [
    "Governor",
    "Grow",
    "Preemption",
    "ProgressLines",
    "RolloutState",
    "RunRecord",
    "Stack",
    "Telemetry",
    "default_callbacks",
]

MODEL_CHECKPOINT = "lightning.pytorch.callbacks.ModelCheckpoint"

DEFAULT_CALLBACKS: list[dict[str, Any]] = [
    *(
        {"class_path": f"esper_lightning.callbacks.{name}"}
        for name in ("RunRecord", "RolloutState", "Governor", "Telemetry", "ProgressLines")
    ),
    # Two, because one that tracks the best does not save the last epoch unless it is the best. This order matters: the
    # last checkpoint holds the current state of the best one.
    {
        "class_path": MODEL_CHECKPOINT,
        "init_args": {"filename": "best", "monitor": "val/objective", "mode": "max", "enable_version_counter": False},
    },
    {
        "class_path": MODEL_CHECKPOINT,
        "init_args": {"filename": "last", "save_on_train_epoch_end": True, "enable_version_counter": False},
    },
    {"class_path": "esper_lightning.callbacks.Preemption"},
]
"""Callbacks of a run of the command line that names none, as in a config."""


def default_callbacks() -> list[Callback]:
    """Return new callbacks as a run of the command line has them; give them to `lightning.Trainer(callbacks=…)`."""
    return [import_object(entry["class_path"], "callback")(**entry.get("init_args", {})) for entry in DEFAULT_CALLBACKS]
