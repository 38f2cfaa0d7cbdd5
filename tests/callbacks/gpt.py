"""A small GPT of a user and its LightningModule, who know nothing of growth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

WORDS, WIDTH, LENGTH = 11, 8, 6

BATCHES = 5
"""Training batches per epoch."""

EPOCHS = 2


class Block(nn.Module):
    """Pre-norm transformer block with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:  # [B, T, C] -> [B, T, C]
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:  # [B, T] -> [B, T, words]
        x = self.tokens(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sentences(seed: int) -> Tensor:  # [B, T + 1]
    """Return sequences in which each word follows from the one before, most of the time."""
    drawn = torch.randint(WORDS, (8, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    steps = torch.where(drawn < 9, 3, drawn)
    return (drawn[:, :1] + steps.cumsum(1)) % WORDS


class LitGPT(L.LightningModule):
    """Language model with AdamW in two groups and a rate that is warmed up by step, and then constant.

    `manual`: it optimizes by hand; `compiled`: the part that is compiled, `net`, `blocks`, or none.
    """

    def __init__(self, depth: int = 4, manual: bool = False, compiled: str = "") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = not manual
        self.net: Any = GPT(depth)
        if compiled == "blocks":
            for block in self.net.blocks:
                block.compile(backend="eager")
        elif compiled == "net":
            self.net = torch.compile(self.net, backend="eager")

    def loss(self, seeds: Sequence[int]) -> Tensor:
        x = torch.cat([sentences(seed) for seed in seeds])
        return F.cross_entropy(self.net(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        # Resumed in the middle of an epoch, Lightning gives the first batches of a loader without a state again.
        first = 1000 * self.current_epoch + 2 * batch_idx
        loss = self.loss([first, first + 1] if self.trainer.world_size == 1 else [first + self.global_rank])
        self.log("train_loss", loss)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            assert isinstance(optimizer, LightningOptimizer)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss([-1 - batch_idx]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        groups = [[p for p in self.parameters() if (p.ndim < 2) == vector] for vector in (False, True)]
        optimizer = AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)
        scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(BATCHES)))

    def val_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.arange(2)))

    test_dataloader = val_dataloader


def make(*args: Any, **settings: Any) -> LitGPT:
    """Return a module with the same weights every time."""
    torch.manual_seed(0)
    return LitGPT(*args, **settings)


def small(depth: int) -> LitGPT:
    """Return a module of fewer blocks with the first weights of the whole one."""
    module = make(depth)
    module.load_state_dict(make().state_dict(), strict=False)
    return module


def trainer(*callbacks: Callback, **settings: Any) -> Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": EPOCHS,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return Trainer(callbacks=list(callbacks), **{**defaults, **settings})


def train(module: Any, *callbacks: Callback, resume_from: Path | None = None, **settings: Any) -> Trainer:
    """Train a module; dropout depends on nothing else than the batch."""
    made = trainer(DropoutByBatch(), *callbacks, **settings)
    made.fit(module, ckpt_path=resume_from)
    return made


class DropoutByBatch(Callback):
    """Sets the random numbers of each batch, which Lightning does not restore when a training is resumed."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(trainer.current_epoch * BATCHES + batch_idx)


class EachBatch(Callback):
    """Notes the number of blocks and the loss of each batch, and saves a checkpoint behind it if a folder is given."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self.depths: list[int] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: object) -> None:
        self.depths.append(len(pl_module.net.blocks))
        self.losses.append(float(trainer.callback_metrics["train_loss"]))
        if self.folder is not None:
            trainer.save_checkpoint(self.path(len(self.depths)))

    def path(self, batches: int) -> Path:
        assert self.folder is not None
        return self.folder / f"{batches}.ckpt"


class RateSearch(LearningRateFinder):
    """Tries learning rates at the beginning of epochs, or without them before the training, and keeps none of them."""

    def __init__(self, *epochs: int, **settings: Any) -> None:
        super().__init__(num_training_steps=7, min_lr=0.01, **{"update_attr": False, **settings})
        self.epochs, self.searches = epochs, 0

    def lr_find(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        self.searches += 1
        super().lr_find(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        if not self.epochs:
            self.lr_find(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch in self.epochs:
            self.lr_find(trainer, pl_module)


class NoFolder(DummyLogger):
    """Logger without a folder of its own, as that of Weights & Biases."""

    log_dir = None


def weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the state of a module, compiled or not."""
    return {name.replace("_orig_mod.", ""): value for name, value in module.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)
