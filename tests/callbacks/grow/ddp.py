"""Program of processes that grow one network together; it writes a checkpoint, and what each of them ends with.

Run as `python -m tests.callbacks.grow.ddp FOLDER DEVICES SETTINGS`: settings are the arguments of `train` as JSON, and
`norm`, without which the network has no BatchNorm. All processes together have the batches of a single one.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from lightning import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from tests.callbacks.grow.modules import DigitsData
from tests.callbacks.grow.trainings import QUICK, classifier, grow, train
from tests.decisions import cull, fossilize, germinate

PLAN = {0: germinate(0, 0), 1: germinate(1, 1), 5: cull(1), 6: fossilize(0), 7: germinate(1, 0)}


class SharedDigits(DigitsData):
    """Digits in a fixed order, of which each process has every n-th."""

    def train_dataloader(self) -> DataLoader:
        return self._share(self.train, 64)

    def val_dataloader(self) -> DataLoader:
        return self._share(self.held_out, 80)

    def _share(self, data: Dataset, batch_size: int) -> DataLoader:
        assert self.trainer is not None, "a fit has begun"
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size // self.trainer.world_size, sampler=sampler)


class Write(Callback):
    """Writes the weights of each process at the end of training."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(dict(pl_module.named_parameters()), self.folder / f"rank{trainer.global_rank}.pt")


if __name__ == "__main__":
    folder, devices, text = sys.argv[1:]
    settings = json.loads(text)
    module = classifier("lambda", dropout=0.0)
    if not settings.pop("norm", True):
        module.net[1] = nn.Identity()
    trained = train(
        module,
        grow(PLAN, horizon=9, lifecycle=replace(QUICK, embargo_ticks=0)),
        Write(Path(folder)),
        data=SharedDigits(),
        devices=int(devices),
        strategy="auto" if devices == "1" else "ddp",
        use_distributed_sampler=False,
        gradient_clip_val=1.0,
        **settings,
    )
    trained.save_checkpoint(Path(folder) / "last.ckpt")
