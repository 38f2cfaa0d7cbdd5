"""Seeds in networks that generate text with a cache: with and without it their outputs are the same."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Grow
from esper_lightning.growth import GrowingNetwork, attach_slots, slots_of
from tests.callbacks.grow.trainings import QUICK, trainer

transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 40, (12, 8), generator=torch.Generator().manual_seed(0))


def gpt2() -> Any:
    settings = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 40, "n_positions": 32}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**settings, bos_token_id=0, eos_token_id=1))


PLACE = "transformer.h.0.mlp"


def growing() -> GrowingNetwork:
    torch.manual_seed(0)
    network = gpt2()
    attach_slots(network, [PLACE], {"input_ids": TOKENS})
    return GrowingNetwork(network, torch.optim.Adam(network.parameters()), horizon=9)


def test_attention_is_refused_where_a_cache_would_give_it_the_newest_token_alone() -> None:
    grown = growing()

    with pytest.raises(
        ValueError, match=r"^blueprint 'attention' cannot grow .*other positions.*set use_cache to False.*\Z"
    ):
        grown.germinate(PLACE, "attention")

    assert not slots_of(grown.module)[PLACE].occupied
    grown.module.config.use_cache = grown.module.generation_config.use_cache = False
    grown.germinate(PLACE, "attention")


def test_other_seeds_generate_the_same_with_a_cache() -> None:
    grown = growing()
    grown.germinate(PLACE, "mlp", stage="BLENDING")
    network: Any = grown.module.eval()
    with torch.no_grad():
        for parameter in grown.slots[PLACE].seed.parameters():
            parameter.add_(0.3)
        whole = network(TOKENS).logits[:, -1]
        cache = network(TOKENS[:, :-1], use_cache=True).past_key_values
        newest = network(TOKENS[:, -1:], past_key_values=cache, use_cache=True).logits[:, -1]

    assert torch.allclose(whole, newest, atol=1e-5)


class Writer(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = gpt2()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(input_ids=batch, labels=batch).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def test_grow_leaves_attention_out_of_all_that_fit_and_says_so_or_refuses_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings: dict[str, Any] = {"monitor": "val_loss", "mode": "min", "lifecycle": QUICK}
    callback = Grow(["transformer.h.0"], decider="periodic", **settings)
    loader: DataLoader = DataLoader(list(TOKENS), 6)
    trainer(callback, epochs=3).fit(Writer(), loader, loader)

    assert callback.pool is not None and "attention" not in callback.pool.space.blueprint
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "left out" in line]
    assert line.startswith("left out: attention, because it looks at other positions")
    with pytest.raises(ValueError, match=r"^.*other positions.*name another blueprint.*\Z"):
        named = Grow(["transformer.h.0"], decider="wait", blueprints=["attention"], **settings)
        trainer(named, epochs=3).fit(Writer(), loader, loader)


def test_networks_that_do_not_generate_take_attention() -> None:
    network = nn.Sequential(nn.Embedding(40, 16), nn.Linear(16, 16))
    attach_slots(network, ["0"], TOKENS)

    GrowingNetwork(network, torch.optim.Adam(network.parameters()), horizon=9).germinate("0", "attention")
