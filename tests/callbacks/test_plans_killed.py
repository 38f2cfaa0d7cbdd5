"""A GPT-2 of transformers is grown by each plan, and its training is killed at twenty random moments."""

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import Progress
from tests.callbacks.gpt import trainer
from tests.processes import forked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS, KILLS, LENGTH, BATCH = 800, 20, 64, 16

CONFIG: dict[str, Any] = {"vocab_size": 64, "n_embd": 16, "n_head": 2, "n_positions": LENGTH, "bos_token_id": 0}
CONFIG |= dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)

PLAIN = """
import sys
sys.modules["esper_lightning"] = None
import torch, transformers
depth, width, heads, words, length, checkpoint = sys.argv[1:]
sizes = {"n_layer": int(depth), "n_embd": int(width), "n_head": int(heads)}
config = transformers.GPT2Config(**sizes, vocab_size=int(words), n_positions=int(length), bos_token_id=0)
network = transformers.GPT2LMHeadModel(config)
state = torch.load(checkpoint, weights_only=True)["state_dict"]
network.load_state_dict({name.removeprefix("net."): value for name, value in state.items()})
"""


class Text:
    """Sequences in which each token follows from the one before, most of the time. Goes on where it was saved."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Tensor]:
        while self.position < STEPS:
            self.position += 1
            drawn = torch.randint(64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(self.position))
            yield torch.where(drawn < 50, 5, drawn).cumsum(1) % 64

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Lit(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = hf.GPT2LMHeadModel(
            hf.GPT2Config(**CONFIG, n_layer=4, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.003)


class Written(Callback):
    """Writes the parameters at the end of a training."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        optimizer = trainer.optimizers[0].state_dict()["state"]
        torch.save([pl_module.state_dict(), optimizer], self.path)


def by_the_loss(progress: Progress) -> int:
    return 1 + int(progress.share >= 0.2) + 2 * int(progress.flops_spent > 5e10)


def run(folder: Path, plan: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    saved = ModelCheckpoint(folder, save_last=True, every_n_train_steps=20, save_on_train_epoch_end=False)
    callbacks = [Stack("net.transformer.h", start=1, **plan), saved, Written(folder / "end.pt")]
    made = trainer(*callbacks, enable_checkpointing=True, max_epochs=-1, max_steps=STEPS)
    last = folder / "last.ckpt"
    made.fit(Lit(), Text(), ckpt_path=last if last.exists() else None)
    made.save_checkpoint(folder / "end.ckpt")


@pytest.mark.parametrize(
    "plan",
    [{"at": {0.3: 2, 0.6: 4}}, {"plan": "scaling"}, {"plan": "tamiyo_depth"}, {"plan": by_the_loss}],
    ids=["at", "scaling", "tamiyo_depth", "function"],
)
def test_a_training_killed_at_twenty_random_moments_ends_as_the_whole_one(plan: Any, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.perf_counter()
    with forked(lambda: run(whole, plan)) as fork:
        assert fork.wait() == 0
    seconds, chance = time.perf_counter() - began, random.Random(0)

    for _ in range(KILLS):
        with forked(lambda: run(killed, plan)):
            time.sleep(chance.uniform(0.02, 0.25) * seconds)
    with forked(lambda: run(killed, plan)) as fork:
        assert fork.wait() == 0

    (weights, state), (others, their_state) = (torch.load(each / "end.pt") for each in (whole, killed))
    depth = len({name.split(".")[3] for name in weights if ".h." in name})
    assert depth > 1 and list(weights) == list(others)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert all(torch.equal(state[i][name], their_state[i][name]) for i in state for name in state[i])
    sizes = [str(number) for number in (depth, *(CONFIG[k] for k in ("n_embd", "n_head", "vocab_size")), LENGTH)]
    subprocess.run([sys.executable, "-c", PLAIN, *sizes, str(killed / "end.ckpt")], check=True)
