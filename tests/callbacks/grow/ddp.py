"""Program of two processes that grow one network together; it writes a checkpoint, and what each of them ends with.

Run as `python -m tests.callbacks.grow.ddp FOLDER PRECISION ACCUMULATED_BATCHES EPOCHS [CHECKPOINT]`.
"""

import sys
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer

from esper_lightning.envs import Op
from tests.callbacks.grow.trainings import classifier, grow, train
from tests.decisions import decide, germinate

PLAN = {0: germinate(0, 0), 1: germinate(1, 1), 6: decide(Op.FOSSILIZE, slot=0)}


class Write(Callback):
    """Writes the weights of each process at the end of training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(dict(pl_module.named_parameters()), self.folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    folder, precision, accumulated, epochs, *checkpoint = sys.argv[1:]
    callback = grow(PLAN, horizon=8)
    trained = train(
        classifier("lambda", dropout=0.0),
        callback,
        Write(Path(folder)),
        resume_from=checkpoint[0] if checkpoint else None,
        epochs=int(epochs),
        devices=2,
        strategy="ddp",
        precision=precision,
        accumulate_grad_batches=int(accumulated),
        gradient_clip_val=1.0,
    )
    trained.save_checkpoint(Path(folder) / "last.ckpt")
