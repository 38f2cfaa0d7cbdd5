"""stack and Stack on networks of transformers and timm, with tiny configurations and random weights."""

import copy
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import timm
import torch
import transformers as hf
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Stack
from esper_lightning.growth import stack
from tests.callbacks.gpt import DropoutByBatch, trainer
from tests.tiers import rest_is_slow

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


@pytest.mark.parametrize("order", rest_is_slow(["stack", "interleave"], {"interleave"}))
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
