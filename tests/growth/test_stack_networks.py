"""stack and Stack on networks of transformers and timm, with tiny configurations and random weights.

The training of one of them is grown by each plan, and killed at twenty random moments.
"""

import copy
import json
import random
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import transformers as hf
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Stack
from esper_lightning.callbacks.plans import Progress
from esper_lightning.growth import stack
from tests.callbacks.gpt import DropoutByBatch, trainer
from tests.processes import forked

SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
WORDS: dict[str, Any] = {"vocab_size": 96, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def of(network: Any, depth: str = "num_hidden_layers", **settings: Any) -> Callable[[int], Any]:
    """Return a function that builds a network of transformers, whose configuration calls its number of blocks so."""
    return lambda blocks: network(network.config_class(**{depth: blocks}, **settings))


LLAMA = of(hf.LlamaForCausalLM, **SIZES, **WORDS, num_key_value_heads=2, tie_word_embeddings=True)
# Windows in every second block, named for each block in the configuration.
GEMMA = of(hf.Gemma2ForCausalLM, **SIZES, **WORDS, num_key_value_heads=2, head_dim=8, sliding_window=4)
GPT2 = of(hf.GPT2LMHeadModel, "n_layer", **WORDS, n_embd=32, n_head=4, n_positions=64)
BERT = of(hf.BertForMaskedLM, **SIZES, **WORDS)
VIT = of(hf.ViTForImageClassification, **SIZES, image_size=16, patch_size=4, num_labels=5)
T5_SIZES = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_heads": 4}
T5 = of(hf.T5ForConditionalGeneration, "num_layers", **T5_SIZES, decoder_start_token_id=0)


def neo(depth: int) -> Any:
    """Masks that alternate, in buffers that no checkpoint holds."""
    sizes = {"hidden_size": 32, "num_heads": 4, "window_size": 4, "max_position_embeddings": 64}
    types = [[["global", "local"], depth // 2]]
    return of(hf.GPTNeoForCausalLM, "num_layers", **WORDS, **sizes, attention_types=types)(depth)


class TimmViT(nn.Module):
    """A network of timm, called as those of transformers are."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.vit = timm.models.VisionTransformer(16, 4, num_classes=5, embed_dim=32, depth=depth, num_heads=4)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.vit(pixel_values)
        return {"logits": logits, "loss": nn.functional.cross_entropy(logits, labels)}


TEXT = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Case(NamedTuple):
    """A network, and where its blocks are."""

    make: Callable[[int], Any]
    blocks: str
    batch: dict[str, Tensor] = {"input_ids": TEXT, "labels": TEXT}  # noqa: RUF012
    generates: bool = False
    left_out: int = 0

    @property
    def path(self) -> str:
        return self.blocks.split("[")[0]


SEEN = {"pixel_values": IMAGES, "labels": torch.tensor([0, 3])}
CASES = {
    "llama": Case(LLAMA, "model.layers", generates=True),
    "gemma": Case(GEMMA, "model.layers", generates=True),
    "gpt2": Case(GPT2, "transformer.h", generates=True),
    "gpt-neo": Case(neo, "transformer.h", generates=True),
    "bert": Case(BERT, "bert.encoder.layer"),
    "vit": Case(VIT, "vit.layers", SEEN),
    "t5 encoder": Case(T5, "encoder.block[1:]", generates=True, left_out=1),
    "t5 decoder": Case(T5, "decoder.block[1:]", left_out=1),
    "timm": Case(TimmViT, "vit.blocks", SEEN),
}
START, END = 4, 6


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def small(case: Case, depth: int = START) -> Any:
    torch.manual_seed(0)
    return case.make(depth)


@torch.no_grad()
def logits(network: nn.Module, case: Case) -> Tensor:
    return network.eval()(**case.batch)["logits"]


def step(network: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> None:
    optimizer.zero_grad()
    network.train()(**case.batch)["loss"].backward()
    optimizer.step()


def assert_same_with_a_cache(network: Any) -> None:
    settings = {"max_new_tokens": 6, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        cached, plain = (network.eval().generate(TEXT, use_cache=use, **settings) for use in (True, False))
    assert torch.equal(cached.sequences, plain.sequences)
    torch.testing.assert_close(cached.logits, plain.logits, rtol=1e-4, atol=1e-4)


def assert_saved(network: Any, case: Case, folder: Path) -> None:
    """The network is what its class reads from its folder."""
    network.save_pretrained(folder)
    again = type(network).from_pretrained(folder)
    assert len(again.get_submodule(case.path)) == len(network.get_submodule(case.path))
    assert torch.equal(logits(again, case), logits(network, case))


@pytest.mark.parametrize("order", ["stack", "interleave"])
def test_a_grown_network_is_whole_in_a_copy_trains_generates_and_is_read_again(
    case: Case, order: Any, tmp_path: Path
) -> None:
    network = small(case)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    step(network, optimizer, case)

    stack(network, case.blocks, to=END - case.left_out, optimizer=optimizer, order=order)
    torch.save(network, tmp_path / "net.pt")
    for other in (copy.deepcopy(network), torch.load(tmp_path / "net.pt", weights_only=False)):
        assert torch.equal(logits(other, case), logits(network, case))
    step(network, optimizer, case)

    blocks = network.get_submodule(case.path)
    assert len(blocks) == END
    assert all(any(p.grad is not None and p.grad.any() for p in block.parameters()) for block in blocks)
    if hasattr(network, "save_pretrained"):
        tied = network.get_output_embeddings() is not None and network.config.tie_word_embeddings
        assert not tied or network.get_output_embeddings().weight is network.get_input_embeddings().weight
        assert_saved(network, case, tmp_path)
    if case.generates:
        assert_same_with_a_cache(network)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_checkpointed_blocks_stay_checkpointed_and_give_the_same_gradients(name: str) -> None:
    case = CASES[name]
    found = []
    for checkpointed in (True, False):
        network = small(case)
        if checkpointed:
            network.gradient_checkpointing_enable({"use_reentrant": False})
        stack(network, case.blocks, to=END)
        torch.manual_seed(1)
        network.train()(**case.batch)["loss"].backward()
        assert all(getattr(b, "gradient_checkpointing", checkpointed) == checkpointed for b in network.modules())
        found.append([p.grad for p in network.parameters()])
    torch.testing.assert_close(*found)


class Lit(LightningModule):
    """A network of a library in a LightningModule, which saves it as its library does."""

    def __init__(self, case: Case, depth: int = END) -> None:
        super().__init__()
        self.case, self.net = case, small(case, depth)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**self.case.batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(range(6))  # type: ignore[arg-type]


def configuration(network: Any) -> dict[str, Any]:
    """Return what the configuration says of the network; saving it adds the name of the class and the dtype."""
    config = network.config.to_dict() if hasattr(network, "config") else {}
    return {name: value for name, value in config.items() if name not in ("architectures", "dtype")}


def fit(case: Case, *callbacks: Callback, resume_from: Path | None = None) -> Any:
    module = Lit(case)
    growth = Stack(f"net.{case.blocks}", start=START - case.left_out, at=0.5)
    trainer(DropoutByBatch(), growth, *callbacks, max_epochs=1).fit(module, ckpt_path=resume_from)
    return module


def test_stack_keeps_a_network_what_its_class_reads_at_every_moment(case: Case, tmp_path: Path) -> None:
    depths: list[int] = []

    def save(trainer: Trainer, pl_module: Any, *_: object) -> None:
        network = pl_module.net
        depths.append(len(network.get_submodule(case.path)))
        if trainer.global_step in (2, 4):
            if hasattr(network, "save_pretrained"):
                assert_saved(network, case, tmp_path / str(trainer.global_step))
                network.train()
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    module = fit(case, LambdaCallback(on_train_batch_end=save))

    assert depths == [START] * 3 + [END] * 3
    if case.generates:
        assert_same_with_a_cache(module.net)
    plain = case.make(END)
    plain.load_state_dict(module.net.state_dict())
    assert torch.equal(logits(plain, case), logits(module.net, case))
    for batches in (2, 4):
        resumed = fit(case, resume_from=tmp_path / f"{batches}.ckpt")
        assert all(map(torch.equal, resumed.state_dict().values(), module.state_dict().values()))
        assert configuration(resumed.net) == configuration(module.net)


@dataclass(frozen=True)
class Frozen:
    """A configuration that assignments cannot change, with numbers that are no numbers of blocks."""

    n_layer: int = 2
    heads: int = 2
    layer_norm_groups: int = 2
    layer_types: tuple[str, ...] = ("a", "b")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_layers": 2, "width": 2}, {"num_layers": 5, "width": 2}),
        (Frozen(), {"n_layer": 5, "heads": 2, "layer_norm_groups": 2, "layer_types": ("a", "b", "a", "b", "a")}),
        (Namespace(depth=2, end_tokens=[1, 2]), {"depth": 5, "end_tokens": [1, 2]}),
        ({"model": {"n_layer": 2}, "vision": {"n_layer": 2}}, {"model": {"n_layer": 5}, "vision": {"n_layer": 2}}),
        ({"depths": [2, 2], "mlp_only_layers": [1]}, {"depths": [2, 2], "mlp_only_layers": [1, 3]}),
    ],
)
def test_a_number_of_blocks_is_found_in_any_configuration_and_other_numbers_stay(config: Any, expected: Any) -> None:
    network, of_blocks = nn.Module(), Namespace(n_layer=2)
    network.config, network.num_blocks, network.heads = config, 2, 2
    network.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(2))
    for block in network.blocks:
        block.config = of_blocks

    stack(network, "blocks", to=5)

    assert (config if isinstance(config, dict) else vars(config)) == expected
    assert (network.num_blocks, network.heads, of_blocks.n_layer) == (5, 2, 5)
    assert all(block.config is of_blocks for block in network.blocks)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_checkpointing_that_begins_in_the_training_goes_on_in_new_blocks(name: str) -> None:
    def enable(trainer: Trainer, pl_module: Any) -> None:
        pl_module.net.gradient_checkpointing_enable({"use_reentrant": False})

    module = fit(CASES[name], LambdaCallback(on_train_start=enable))

    flags = [part.gradient_checkpointing for part in module.net.modules() if hasattr(part, "gradient_checkpointing")]
    assert len(flags) >= END and all(flags)
    blocks = module.net.get_submodule(CASES[name].path)
    assert len({block._gradient_checkpointing_func for block in blocks}) == 1
    assert all(p.grad is not None for p in blocks[5].parameters())


# Trainings that are killed.

STEPS, KILLS, LENGTH, BATCH = 800, 20, 64, 16

CONFIG: dict[str, Any] = {"n_embd": 16, "n_head": 2, "vocab_size": 64, "n_positions": LENGTH, "bos_token_id": 0}
DROPOUT = dict.fromkeys(("resid_pdrop", "attn_pdrop", "embd_pdrop"), 0.0)

PLAIN = """
import sys
sys.modules["esper_lightning"] = None
import json, torch, transformers
network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**json.loads(sys.argv[1])))
state = torch.load(sys.argv[2], weights_only=True)["state_dict"]
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


class LitText(Lit):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch, labels=batch).loss


def by_the_flops(progress: Progress) -> int:
    return 1 + int(progress.share >= 0.2) + 2 * int(progress.flops_spent > 5e10)


def run(folder: Path, plan: Any) -> None:
    """Train, from the last checkpoint in a folder on, and save the end there with the optimizer."""
    torch.set_num_threads(1)
    saved = ModelCheckpoint(folder, save_last=True, every_n_train_steps=20, save_on_train_epoch_end=False)
    callbacks = [Stack("net.transformer.h", start=1, **plan), saved]
    made = trainer(*callbacks, enable_checkpointing=True, max_epochs=-1, max_steps=STEPS)
    module = LitText(Case(of(hf.GPT2LMHeadModel, "n_layer", **CONFIG, **DROPOUT), "transformer.h"), START)
    last = folder / "last.ckpt"
    made.fit(module, Text(), ckpt_path=last if last.exists() else None)
    made.save_checkpoint(folder / "end.ckpt")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "plan",
    [{"at": {0.3: 2, 0.6: 4}}, {"plan": "scaling"}, {"plan": "tamiyo_depth"}, {"plan": by_the_flops}],
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

    ours, theirs = (torch.load(folder / "end.ckpt", weights_only=True) for folder in (whole, killed))
    weights, states = ours["state_dict"], ours["optimizer_states"][0]["state"]
    depth = len({name.split(".")[3] for name in weights if ".h." in name})
    assert depth > 1 and list(weights) == list(theirs["state_dict"])
    assert all(torch.equal(value, theirs["state_dict"][name]) for name, value in weights.items())
    for i, state in states.items():
        assert all(torch.equal(x, theirs["optimizer_states"][0]["state"][i][name]) for name, x in state.items())
    config = json.dumps({**CONFIG, "n_layer": depth})
    subprocess.run([sys.executable, "-c", PLAIN, config, str(killed / "end.ckpt")], check=True)
