"""Callback that saves a checkpoint when the process is asked to stop."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from esper_lightning.console import printable
from esper_lightning.module import TamiyoModule
from esper_lightning.process import STOP_SIGNALS, Output, replace_handlers

SHOW_CURSOR = b"\x1b[?25h"


class Preemption(Checkpoint):
    """Saves a checkpoint at the end of the tick on SIGTERM, Ctrl-C or SIGHUP, and exits with 143, 130 or 129.

    It does the same, with exit code 141, if nothing reads the output any more. A second signal ends the process at
    once. Lightning alone would exit with 0 and save nothing in the middle of a rollout. The class derives from
    `Checkpoint` so that Lightning calls it last, after telemetry and the other checkpoints have processed this tick.

    Args:
        filename: Name of the checkpoint, without `.ckpt`; it is written to the folder of the other checkpoints.
    """

    def __init__(self, filename: str = "latest") -> None:
        self.filename = filename
        self._received: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Not earlier: Lightning has installed its own handlers by now, and these must replace them.
        self._previous_handlers = replace_handlers(self._on_signal)
        if isinstance(sys.stdout, Output):
            sys.stdout.deferred = True
        if trainer.received_sigterm:  # noted by Lightning's handler before this one was installed
            self._on_signal(signal.SIGTERM, None)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if sys.stdout.isatty():  # progress bars hide the cursor, and after a second signal it is too late to show it
            with suppress(OSError):  # the terminal may have gone
                os.write(sys.stdout.fileno(), SHOW_CURSOR)
        for signal_number in STOP_SIGNALS:
            if signal.getsignal(signal_number) is not signal.SIG_IGN:
                signal.signal(signal_number, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if not trainer.is_last_batch:  # after the last tick, on_train_epoch_end saves
            self._stop_if_asked(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._stop_if_asked(trainer)

    def _stop_if_asked(self, trainer: Trainer) -> None:
        output = sys.stdout if isinstance(sys.stdout, Output) else None
        if self._received is not None:
            reason, code, stream = signal.Signals(self._received).name, 128 + self._received, sys.stdout
        elif output is not None and output.failure is not None:
            reason, code, stream = output.reason, output.exit_code, sys.stderr
        else:
            return
        folder = next(c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        path = Path(folder) / f"{self.filename}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        command = f"esper-lightning fit --config {path.parent.parent / 'config.yaml'} --ckpt_path {path}"
        print(printable(f"stopped by {reason}; go on with: {command}"), file=stream, flush=True)
        raise SystemExit(code)

    def on_train_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._restore_handlers()  # training is over, so later signals may interrupt as usual
        self._stop_if_asked(trainer)
        if isinstance(sys.stdout, Output):
            sys.stdout.deferred = False

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
