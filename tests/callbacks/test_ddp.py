"""Grow and Stack in two processes of DistributedDataParallel, which train the network that one process trains."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import Shares
from esper_lightning.growth.blend import Isolation
from tests.callbacks import gpt
from tests.callbacks.grow.trainings import QUICK, DigitsData, classifier, grow, train
from tests.callbacks.test_stack import Eager, Patient, Rich
from tests.decisions import cull, fossilize, germinate
from tests.ranks import start_ranks

pytestmark = pytest.mark.slow

Weights = dict[str, Tensor]

PLAN = {0: germinate(0, 0), 1: germinate(1, 1), 5: cull(1), 6: fossilize(0), 7: germinate(1, 0)}

SAVED = 7
"""Steps after which the stacked network is saved; it has grown by then."""


class Write(Callback):
    """Writes the weights of each process at the end, and a checkpoint at the end or on the way."""

    def __init__(self, folder: Path, saved_after: int | None = None) -> None:
        self.folder, self.saved_after = folder, saved_after

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self.saved_after:
            trainer.save_checkpoint(self.folder / "saved.ckpt")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(dict(pl_module.named_parameters()), self.folder / f"rank{trainer.global_rank}.pt")
        if self.saved_after is None:
            trainer.save_checkpoint(self.folder / "saved.ckpt")


class SharedDigits(DigitsData):
    """Digits in a fixed order, of which each process has every n-th: together they have the batches of one."""

    def train_dataloader(self) -> DataLoader:
        return self._share(self.train, 64)

    def val_dataloader(self) -> DataLoader:
        return self._share(self.held_out, 80)

    def _share(self, data: Dataset, batch_size: int) -> DataLoader:
        assert self.trainer is not None, "a fit has begun"
        sampler = DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size // self.trainer.world_size, sampler=sampler)


def weights(folder: Path, processes: int, run: Callable[..., object]) -> list[Weights]:
    """Run a training in forks of this process and return the parameters that each of them ends with."""
    folder.mkdir()
    several: dict[str, Any] = {"use_distributed_sampler": False, "gradient_clip_val": 1.0}
    several |= {"devices": processes, "strategy": "ddp"} if processes > 1 else {}
    with ExitStack() as stack:
        codes = [fork.wait() for fork in start_ranks(stack, processes, lambda: run(folder, **several))]
    assert codes == [0] * processes
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(processes)]


def grown(
    folder: Path,
    processes: int = 2,
    *beside: Callback,
    norm: bool = True,
    isolation: Isolation = "proximal",
    **settings: Any,
) -> list[Weights]:
    """Return the parameters of a CNN that was grown."""

    def run(folder: Path, **several: Any) -> None:
        module = classifier("lambda", dropout=0.0)
        if not norm:  # BatchNorm has statistics of its own in each process
            module.net[1] = nn.Identity()
        growth = grow(PLAN, horizon=9, lifecycle=replace(QUICK, embargo_ticks=0, isolation=isolation))
        train(module, growth, Write(folder), *beside, data=SharedDigits(), **settings, **several)

    return weights(folder, processes, run)


def stacked(
    folder: Path, processes: int, plan: Any, *beside: Callback, resume_from: Path | None = None
) -> list[Weights]:
    """Return the parameters of a GPT that was stacked."""

    def run(folder: Path, **several: Any) -> None:
        module = gpt.make().double()  # Lightning loads a checkpoint before it converts a module
        for part in module.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0  # one process draws other numbers for a batch than two do
        # Adam enlarges the rounding of gradients that are zero, such as those of key biases.
        settings = {"resume_from": resume_from, "precision": "64-true", **several}
        gpt.train(module, Stack("net.blocks", start=2, plan=plan()), Write(folder, SAVED), *beside, **settings)

    return weights(folder, processes, run)


def difference(one: Weights, other: Weights) -> float:
    """Return the largest difference of two networks with the same parameters."""
    assert list(one) == list(other)
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


@pytest.mark.parametrize(("precision", "accumulated"), [("32-true", 1), ("bf16-mixed", 2)])
def test_two_processes_grow_the_same_network_and_go_on_from_a_checkpoint(
    precision: str, accumulated: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulated}
    whole, other = grown(tmp_path / "whole", epochs=9, **settings)
    at_the_checkpoint, _ = grown(tmp_path / "half", epochs=4, **settings)
    resumed = grown(tmp_path / "rest", epochs=9, resume_from=str(tmp_path / "half" / "saved.ckpt"), **settings)

    assert len(at_the_checkpoint) > len(whole)  # one of its two seeds is culled later
    assert [difference(whole, of_rank) for of_rank in (other, *resumed)] == [0.0] * 3


def test_two_processes_train_what_one_trains_with_the_batches_of_both(tmp_path: Path) -> None:
    """The proximal gradient of a seed is that of each process's part of a batch, which is not the same."""
    settings: dict[str, Any] = {"epochs": 9, "norm": False, "isolation": "straight_through"}
    (alone,) = grown(tmp_path / "alone", 1, **settings)
    together, _ = grown(tmp_path / "together", **settings)

    assert difference(together, alone) < 1e-5


@pytest.mark.parametrize("plan", [lambda: Shares(0.6), Eager, Rich, Patient], ids=["at", "rule", "policy", "object"])
def test_two_processes_stack_the_network_of_one_and_go_on_from_a_checkpoint(plan: Any, tmp_path: Path) -> None:
    (alone,) = stacked(tmp_path / "alone", 1, plan)
    one, other = stacked(tmp_path / "two", 2, plan)
    resumed, _ = stacked(tmp_path / "resumed", 2, plan, resume_from=tmp_path / "two" / "saved.ckpt")

    assert "net.blocks.3.mlp.0.weight" in alone
    assert difference(one, other) == difference(one, resumed) == 0.0
    assert difference(one, alone) < 1e-7


@pytest.mark.parametrize("epochs", [(), (1, 3)])
def test_a_search_for_the_learning_rate_changes_nothing_in_two_processes(
    epochs: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a search writes a file here, and removes it
    grown_without, _ = grown(tmp_path / "grown", epochs=6)
    grown_with = grown(tmp_path / "grown, searched", 2, gpt.RateSearch(*epochs), epochs=6)
    assert [difference(grown_without, of_rank) for of_rank in grown_with] == [0.0, 0.0]

    stacked_without, _ = stacked(tmp_path / "stacked", 2, lambda: Shares(0.4))
    stacked_with = stacked(tmp_path / "stacked, searched", 2, lambda: Shares(0.4), gpt.RateSearch(*epochs))
    assert [difference(stacked_without, of_rank) for of_rank in stacked_with] == [0.0, 0.0]
