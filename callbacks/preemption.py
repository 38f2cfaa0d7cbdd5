"""Preemption: a stopped run is a saved run."""

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
    """On SIGTERM or Ctrl-C, saves at the end of the tick and exits with 143 or 130. A second signal ends at once.

    Lightning alone would exit with 0 and save nothing in the middle of a rollout. It is a Checkpoint so that Lightning
    calls it last, after telemetry and the other checkpoints have had this tick.

    Args:
        filename: Name, without `.ckpt`, of the checkpoint to write beside the others.
    """

    def __init__(self, filename: str = "latest") -> None:
        self.filename = filename
        self._received: int | None = None
        self._before: dict[int, object] = {}

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        # Here and not earlier: Lightning has installed its own handlers by now, and ours must win.
        self._before = {number: signal.signal(number, self._receive) for number in SIGNALS}
        if trainer.received_sigterm:  # by Lightning's handler, while the run was made ready
            self._receive(signal.SIGTERM, None)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = number
        if sys.stdout.isatty():  # bars have hidden the cursor, and a second signal gives nobody time to show it
            os.write(sys.stdout.fileno(), SHOW_CURSOR)
        for either in SIGNALS:
            signal.signal(either, signal.SIG_DFL)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if not trainer.is_last_batch:  # on the last tick the epoch's end is the right place: see below
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
        self._give_back()  # what follows may be interrupted as usual: there is nothing left to lose
        self._stop_if_asked(trainer)

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self._give_back()

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
