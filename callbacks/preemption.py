"""Callback that saves a checkpoint when the process is asked to stop."""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from esper_lightning.module import TamiyoModule

SIGNALS = (signal.SIGTERM, signal.SIGINT)

SHOW_CURSOR = b"\x1b[?25h"


class Preemption(Checkpoint):
    """Saves a checkpoint at the end of the tick on SIGTERM or Ctrl-C, and exits with 143 or 130.

    A second signal ends the process at once. Lightning alone would exit with 0 and save nothing in the middle of a
    rollout. The class derives from `Checkpoint` so that Lightning calls it last, after telemetry and the other
    checkpoints have processed this tick.

    Args:
        filename: Name of the checkpoint, without `.ckpt`; it is written to the folder of the other checkpoints.
    """

    def __init__(self, filename: str = "latest") -> None:
        self.filename = filename
        self._received: int | None = None
        self._previous_handlers: dict[int, object] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Not earlier: Lightning has installed its own handlers by now, and these must replace them.
        self._previous_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}
        if trainer.received_sigterm:  # noted by Lightning's handler before this one was installed
            self._on_signal(signal.SIGTERM, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if sys.stdout.isatty():  # progress bars hide the cursor, and after a second signal it is too late to show it
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
        for signal_number in SIGNALS:
            signal.signal(signal_number, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if not trainer.is_last_batch:  # after the last tick, on_train_epoch_end saves
            self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        if self._received is None:
            return
        folder = next(c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        path = Path(folder) / f"{self.filename}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        command = f"esper-lightning fit --config {path.parent.parent / 'config.yaml'} --ckpt_path {path}"
        print(f"stopped by {signal.Signals(self._received).name}; go on with: {command}", flush=True)
        raise SystemExit(128 + self._received)

    def on_train_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._restore_handlers()  # training is over, so later signals may interrupt as usual
        self._stop_if_asked(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
