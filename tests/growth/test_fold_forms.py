"""Folding of networks with various forms of input and output, and of seeds with small effects."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from esper_lightning.growth.fold import FoldResult, fold
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.chains import (
    PRECISION,
    WIDTH,
    Chain,
    UsedElsewhere,
    chain,
    example,
    fold_and_check,
    fossilize_seed,
    precisions,
    unchanged_by_folding,
)


@pytest.mark.parametrize("example_input", [(torch.ones(2, 5), 2.0), {"x": torch.ones(2, 5), "scale": 2.0}], ids=type)
def test_an_example_may_be_several_arguments(example_input: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain("vector")

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            return {"scores": self.chain(scale * x)}

    network = Scaled()
    fossilize_seed(network.chain.slot, "lora")
    assert fold(network, example_input) == [FoldResult("place", "chain.before", "")]


class TwoAnswers(nn.Module):
    """Network whose second output is the layer before the slot."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.slot = nn.Linear(5, WIDTH), SeedSlot("place", "vector", WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.before(x)
        return torch.tanh(self.slot(made)), made


def test_every_output_stays() -> None:
    network, x = TwoAnswers(), example("vector")
    fossilize_seed(network.slot, "lora")
    before = network(x)
    fold(network, x)
    for ours, theirs in zip(network(x), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_layer_may_be_called_by_keyword() -> None:
    class ByKeyword(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.behind(input=self.slot(self.before(x))))

    network = ByKeyword("vector", nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4))
    fossilize_seed(network.slot, "lora")
    fold(network, example("vector"))


def test_a_fold_does_not_cross_what_only_training_shows() -> None:
    outputs = []
    for fold_it in (False, True):
        network, x = chain("vector", into=nn.Dropout(0.5)), example("vector")
        fossilize_seed(network.slot, "lora")
        if fold_it:
            assert fold_and_check(network, x) == [FoldResult("place", "behind", "")]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            outputs.append(network.train()(x))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


class Sometimes(nn.Module):
    """Module that is active only in training."""

    def forward(self, x: Tensor) -> Tensor:
        return 2.0 * x if self.training else x


@pytest.mark.parametrize(
    ("passes_on", "hides"),
    [
        (nn.Dropout(0.5), True),
        (nn.Sequential(nn.Identity(), nn.AlphaDropout(0.5)), True),
        (StochasticDepth(0.5, "row"), True),
        (Sometimes(), True),
        (nn.Identity(), False),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Identity())), False),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("training", [True, False])
def test_layers_are_no_neighbours_across_what_passes_a_tensor_on_in_evaluation_alone(
    passes_on: nn.Module, hides: bool, training: bool
) -> None:
    def into(before: nn.Module, behind: nn.Module) -> str | None:
        network = chain("vector", into=before, out_of=behind).train(training)
        fossilize_seed(network.slot, "lora")
        (folding,) = fold_and_check(network, example("vector"))
        return folding.target_layer

    assert into(passes_on, nn.Identity()) == ("behind" if hides else "before")
    assert into(nn.Tanh(), passes_on) == (None if hides else "behind")
    assert into(nn.Identity(), passes_on) == "before"
    assert into(passes_on, nn.Tanh()) == (None if hides else "before")


@pytest.mark.parametrize("scale", [0.1, 0.01])
def test_a_small_seed_is_not_given_to_a_neighbour_that_others_need_too(scale: float) -> None:
    network, x = UsedElsewhere(both=True).double(), example("vector").double()
    fossilize_seed(network.slot, "lora")
    for parameter in network.slot.seed.parameters():
        parameter.data.mul_(scale)
    unchanged_by_folding(network, x)


@precisions
@pytest.mark.parametrize("scale", [1e-2, 1e-4, 0.0])
def test_a_small_seed_is_folded_where_it_can_be(scale: float, dtype: torch.dtype) -> None:
    network, x = chain("vector").to(dtype), example("vector").to(dtype)
    fossilize_seed(network.slot, "lora")
    for parameter in network.slot.seed.parameters():
        parameter.data.mul_(scale)
    assert fold_and_check(network, x, PRECISION[dtype]) == [FoldResult("place", "before", "")]


def test_a_growing_network_goes_on_in_a_folded_slot() -> None:
    network, x = chain("vector"), example("vector")
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    growing = GrowingNetwork(network, optimizer, horizon=9)
    growing.germinate("place", "lora")
    for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
        network.slot.move_to(stage)
    network(x).square().sum().backward()
    optimizer.step()
    assert [folding.target_layer for folding in fold(network, x)] == ["before"]
    growing.germinate("place", "lora")
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in network.parameters())
    assert {id(parameter) for parameter in optimizer.state} <= set(held)
    assert [group.get("name", "") for group in optimizer.param_groups] == ["", "seed.place"]
