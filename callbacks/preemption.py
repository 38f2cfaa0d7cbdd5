"""Callback that saves a checkpoint when the process is asked to stop."""

import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint

from esper_lightning.runtime.console import print_status

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask the process to stop: `kill`, Ctrl-C, and a terminal that was closed."""


class Preemption(Checkpoint):
    """Saves a checkpoint at the end of the tick on SIGTERM, Ctrl-C or SIGHUP, and exits with 143, 130 or 129.

    A second signal ends the process at once. Lightning alone would exit with 0 and save nothing in the middle of a
    rollout. With several processes a signal to any of them stops all: they agree at the end of every tick. The class
    derives from `Checkpoint` so that Lightning calls it last, after the other callbacks have processed this tick.
    `last.ckpt` in the folder of the first ModelCheckpoint is written.
    """

    def __init__(self) -> None:
        self._received = 0
        self._previous: dict[int, Any] = {}  # handlers that were replaced

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        # Not earlier: Lightning has installed its own handlers by now, and these must replace them.
        if threading.current_thread() is threading.main_thread():  # another one receives no signals
            asked = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._note) for number in asked}
        if trainer.received_sigterm:  # noted by Lightning's handler before this one was installed
            self._received = signal.SIGTERM

    def _note(self, number: int, frame: Any) -> None:
        self._received = number
        for one in self._previous:
            signal.signal(one, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Trainer, pl_module: "TamiyoModule", *_: object) -> None:
        if not trainer.is_last_batch:
            self.on_train_epoch_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        number = self._received
        if pl_module.ranks.world > 1:
            number = int(pl_module.ranks.maximum(torch.tensor(number)))
        if not number:
            return
        folders = [one.dirpath for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
        path = Path(next(filter(None, folders), trainer.log_dir or trainer.default_root_dir)) / "last.ckpt"
        trainer.save_checkpoint(path, weights_only=False)
        if trainer.is_global_zero:
            print_status(f"stopped by {signal.Signals(number).name}; go on from ckpt_path {path}")
        trainer.strategy.barrier()  # the first process to end makes Lightning end the others
        raise SystemExit(128 + number)

    def on_train_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        # Not later: Lightning removes its own handlers before the teardown of callbacks, and they would come back.
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: "TamiyoModule", stage: str) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
