"""Callback that records what a run is, and lets no other run write to its folder."""

import json
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from lightning import Callback, LightningModule, Trainer

from esper_lightning.datamodules import HostPoolData
from esper_lightning.runtime.machine import provenance
from esper_lightning.runtime.serialization import replace_and_keep
from esper_lightning.telemetry.events import EventLog

RUN_FILE, LOCK_FILE = "run.json", "run.lock"
"""Files in a run folder: what the latest process of the run is, and the lock that it holds."""


def write_run_record(folder: Path, trainer: Trainer) -> None:
    """Write `run.json` about this process. The file of an earlier process is kept as `run.1.json` and so on."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # Lightning sets it without declaring it
    executor, precision = "", str(trainer.precision)
    if isinstance(data, HostPoolData):
        executor, precision = data.pool.executor_choice, data.precision
    record = provenance(getattr(data, "seed", None), trainer.strategy.root_device, executor, precision=precision)
    record["processes"] = trainer.world_size
    replace_and_keep(folder / RUN_FILE, json.dumps(record, indent=1) + "\n")


def open_events(trainer: Trainer, file: str) -> EventLog | None:
    """Open a file of events in the folder of the first logger that has one. None: none has, or no first process."""
    # Lightning wants folders to be read on every rank.
    folder = next(filter(None, [getattr(logger, "log_dir", None) for logger in trainer.loggers]), None)
    if folder is None or not trainer.is_global_zero:
        return None
    Path(folder).mkdir(parents=True, exist_ok=True)
    return EventLog(Path(folder) / file)


class RunRecord(Callback):
    """Writes `run.json` into the run folder: command, machine, device, versions and revision of the code.

    The file of an earlier start of the same run is kept as `run.1.json` and so on. While `fit` runs, it locks the
    folder; the system releases the lock when the process ends, whatever ends it.
    """

    _lock: FileLock | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lock the run folder. Raises ValueError if another process writes to it."""
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # Lightning wants it to be read on every rank
        if not trainer.is_global_zero or trainer.fast_dev_run:  # pyright: ignore[reportAttributeAccessIssue]
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(folder / LOCK_FILE)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            self._lock = None
            raise ValueError(
                f"another process writes to {str(folder)!r}; wait for it, or name another folder"
            ) from None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._lock is None:
            return
        write_run_record(Path(self._lock.lock_file).parent, trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")  # a program may go on, and Lightning calls no teardown then

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None
