"""Callback that saves a checkpoint when the process is asked to stop."""

import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from esper_lightning.console import printable
from esper_lightning.module import TamiyoModule
from esper_lightning.process import EXIT_OUTPUT_FAILED, STOP_SIGNALS, Output, replace_handlers
from esper_lightning.trainer import EsperTrainer, resume_command

SHOW_CURSOR = b"\x1b[?25h"


class Preemption(Checkpoint):
    """Saves a checkpoint at the end of the tick on SIGTERM, Ctrl-C or SIGHUP, and exits with 143, 130 or 129.

    It does the same, with exit code 141, if nothing reads the output any more. A second signal ends the process at
    once. Lightning alone would exit with 0 and save nothing in the middle of a rollout. With several processes a signal
    to any of them stops all: they agree at the end of every tick. In a thread other than the main one, where Python
    installs no handlers, signals stop nothing. The class derives from `Checkpoint` so that Lightning calls it last,
    after telemetry and the other checkpoints have processed this tick.

    Args:
        filename: Name of the checkpoint, without `.ckpt`; it is written to the folder of the other checkpoints.
    """

    def __init__(self, filename: str = "latest") -> None:
        self.filename = filename
        self._received: int | None = None
        self._previous_handlers: dict[int, Any] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Not earlier: Lightning has installed its own handlers by now, and these must replace them. Python installs
        # handlers in the main thread alone.
        if threading.current_thread() is threading.main_thread():
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
            self._stop_if_asked(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._stop_if_asked(trainer, pl_module)

    def _stop_if_asked(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        """Save and exit if this process is asked to stop, or another one of the run."""
        output = sys.stdout if isinstance(sys.stdout, Output) else None
        failure = output if output is not None and output.failure is not None else None
        own_code = 0
        if self._received is not None:
            own_code = 128 + self._received
        elif failure is not None:
            own_code = failure.exit_code
        code = own_code if pl_module.ranks.world == 1 else int(pl_module.ranks.maximum(torch.tensor(own_code)))
        if code == 0:
            return
        if failure is not None and code == failure.exit_code:
            reason, stream = failure.reason, sys.stderr
        elif code == EXIT_OUTPUT_FAILED:  # that of another process
            reason, stream = "an output that cannot be written", sys.stdout
        else:
            reason, stream = signal.Signals(code - 128).name, sys.stdout
        if isinstance(trainer, EsperTrainer):
            trainer.release_started_ranks()
        folder = next(c.dirpath for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.dirpath)
        path = Path(folder) / f"{self.filename}.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            print(printable(f"stopped by {reason}; go on with: {resume_command(path)}"), file=stream, flush=True)
        raise SystemExit(code)

    def on_train_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._restore_handlers()  # training is over, so later signals may interrupt as usual
        self._stop_if_asked(trainer, pl_module)
        if isinstance(sys.stdout, Output):
            sys.stdout.deferred = False

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._previous_handlers.items():
            signal.signal(number, handler)
        self._previous_handlers = {}
