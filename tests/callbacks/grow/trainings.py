"""LightningModules of users who know nothing of growth, and short trainings of them, with and without Grow."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from esper_lightning.callbacks import Grow
from esper_lightning.envs import Action, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_pool import SinglePool
from esper_lightning.growth.gates import LifecycleConfig
from tests.callbacks import gpt
from tests.decisions import WAIT, Row, cull, decide, germinate

torch.set_num_threads(1)

TRAIN, VALIDATION = 320, 160
"""Numbers of samples: five training batches and two validation batches."""


class DigitsData(L.LightningDataModule):
    """Handwritten digits in a fixed order."""

    def setup(self, stage: str) -> None:
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        images = images.float().div(16.0).view(-1, 1, 8, 8)
        self.train = TensorDataset(images[:TRAIN], labels[:TRAIN])
        self.held_out = TensorDataset(images[-VALIDATION:], labels[-VALIDATION:])

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, 64)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, 80)

    test_dataloader = val_dataloader


SCHEDULERS: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.1),
}


class Classifier(L.LightningModule):
    """CNN for digits with automatic optimization, a torchmetric and a scheduler."""

    def __init__(self, scheduler: str | None = None, lr: float = 3e-3, dropout: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Flatten(),
            nn.Linear(128, 10),
        )
        self.accuracy = MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        images, labels = batch
        outputs = self.net(images)
        self.accuracy(outputs, labels)
        self.log("val_acc", self.accuracy)
        self.log("val_loss", F.cross_entropy(outputs, labels), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])
        name = self.hparams["scheduler"]
        if name is None:
            return optimizer
        scheduler = {"scheduler": SCHEDULERS[name](optimizer), "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class TwoOptimizers(Classifier):
    """Manual optimization: a body and a head, each with an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        body = [nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()]
        self.net = nn.Sequential(nn.Sequential(*body), nn.Linear(16, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in optimizers:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        return loss

    def configure_optimizers(self) -> Any:
        body, head = (torch.optim.Adam(part.parameters(), lr=0.01) for part in self.net)
        return [body, head], [lr_scheduler.LambdaLR(body, lambda epoch: 0.9**epoch)]


QUICK = LifecycleConfig(training_ticks=1, min_contribution=None, auto_cull=False, min_gradient_health=0.0)
"""Seeds are blended after one tick, and kept whatever they contribute."""

LIFE = {0: germinate(0, 0), 1: germinate(1, 1), 6: decide(Op.FOSSILIZE, slot=0), 7: cull(1)}
"""conv_light lives in the first slot until it is kept, and bottleneck in the second one until it is removed."""


class Plan:
    """Decider of a user: actions by tick; in all others it waits. It has no state of its own."""

    def __init__(self, actions: dict[int, Row] | None = None) -> None:
        self.actions = actions or {}

    def reset(self, pool: SinglePool) -> None:
        self.seen: list[int] = []

    def act(self, pool: SinglePool) -> Action:
        tick = pool.envs[0].tick
        self.seen.append(tick)
        return to_action([self.actions.get(tick, WAIT)], pool.device)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, pool: SinglePool, state: dict[str, Any]) -> None:
        self.reset(pool)


def trainer(*callbacks: Callback, epochs: int = 6, **settings: Any) -> Trainer:
    return gpt.trainer(*callbacks, **{"max_epochs": epochs, "log_every_n_steps": 5, **settings})


def equal(one: LightningModule, other: LightningModule) -> bool:
    return gpt.equal(one.state_dict(), other.state_dict())


def classifier(scheduler: str | None = None, kind: type[Classifier] = Classifier, **settings: Any) -> Classifier:
    """Return a classifier with the same weights every time."""
    L.seed_everything(0, verbose=False)
    return kind(scheduler, **settings)


def train(
    module: LightningModule,
    *callbacks: Callback,
    resume_from: Path | str | None = None,
    data: LightningDataModule | None = None,
    **settings: Any,
) -> Trainer:
    """Train a module on digits; weights and dropout depend on nothing else than the arguments."""
    made = trainer(*callbacks, **settings)
    L.seed_everything(1, verbose=False)
    made.fit(module, data or DigitsData(), ckpt_path=resume_from)
    return made


def grow(plan: dict[int, Row] | None = None, **settings: Any) -> Grow:
    """Return a Grow that follows a plan in two slots of the classifier."""
    defaults: dict[str, Any] = {
        "slots": ["3", "5"],
        "blueprints": ["conv_light", "bottleneck"],
        "decider": Plan(plan),
        "lifecycle": QUICK,
        "batches": 2,
    }
    return Grow(**{**defaults, **settings})
