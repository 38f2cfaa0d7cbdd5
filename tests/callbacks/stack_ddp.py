"""Program that trains and grows a GPT in one or two processes, and writes a checkpoint and the weights of each process.

Run as `python -m tests.callbacks.stack_ddp FOLDER PROCESSES [CHECKPOINT]`.
"""

import sys
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer

from esper_lightning.callbacks import Stack
from tests.callbacks.gpt import make, train

SAVED = 7
"""Steps after which a checkpoint is written; the network has grown after the sixth."""


class Write(Callback):
    """Writes a checkpoint on the way and the weights of each process at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == SAVED:
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.state_dict(), self.folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    folder, processes, *checkpoint = sys.argv[1:]
    module = make().double()  # Lightning loads a checkpoint before it converts a module
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = 0.0  # one process draws other numbers for a batch than two do
    several = {"devices": 2, "strategy": "ddp"} if processes == "2" else {}
    train(
        module,
        Stack("net.blocks", start=2, at=0.6),
        Write(Path(folder)),
        resume_from=Path(checkpoint[0]) if checkpoint else None,
        precision="64-true",  # Adam enlarges the rounding of gradients that are zero, such as those of key biases
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        **several,
    )
