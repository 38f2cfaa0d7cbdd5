"""Layers that cannot absorb a fossilized seed are unchanged."""

from contextlib import suppress

import torch
from torch import Tensor, nn

from esper_lightning.growth.fold import FoldResult, fold
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.chains import (
    WIDTH,
    UsedElsewhere,
    chain,
    example,
    fold_and_check,
    fossilize_seed,
    precisions,
    unchanged_by_folding,
)


@precisions
def test_a_neighbour_that_others_need_too_is_passed_over(dtype: torch.dtype) -> None:
    network = UsedElsewhere().to(dtype)
    fossilize_seed(network.slot, "lora")
    before = network.before.weight.clone()
    assert fold_and_check(network, example("vector").to(dtype)) == [FoldResult("place", "behind", "")]
    assert torch.equal(network.before.weight, before)


class Masked(nn.Module):
    """Network that masks its third class, as a policy masks invalid actions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = UsedElsewhere(both=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).masked_fill(torch.tensor([False, False, True]), float("-inf"))


def test_infinite_outputs_hide_no_change_of_the_others() -> None:
    network, x = Masked(), example("vector")
    fossilize_seed(network.inner.slot, "lora")
    before = network(x)
    fold(network, x)
    torch.testing.assert_close(network(x), before, rtol=1e-5, atol=1e-5)


class Chooses(nn.Module):
    """Network that returns only the index of the best class."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = chain("vector")

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x).argmax(1)


def test_where_no_output_can_be_compared_the_fossil_stays() -> None:
    network, x = Chooses(), example("vector")
    fossilize_seed(network.chain.slot, "lora")
    with suppress(ValueError):
        fold(network, x)
    assert network.chain.slot.stage is Stage.FOSSILIZED


@precisions
def test_a_seed_between_neighbours_that_others_need_too_stays(dtype: torch.dtype) -> None:
    network = UsedElsewhere(both=True).to(dtype)
    fossilize_seed(network.slot, "lora")
    (folding,) = unchanged_by_folding(network, example("vector").to(dtype))
    assert folding.reason == "no linear layer before or behind the slot can take it"


def test_a_slot_that_the_data_meets_twice_keeps_its_seed() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.slot = nn.Linear(5, WIDTH), SeedSlot("place", "vector", WIDTH)
            self.behind = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
            return self.behind(self.slot(torch.tanh(self.slot(self.before(x)))))

    network = Again()
    fossilize_seed(network.slot, "lora")
    (folding,) = unchanged_by_folding(network, example("vector"))
    assert folding.reason == "no linear layer before or behind the slot can take it"


def test_an_activation_in_place_hides_the_layer_before_it() -> None:
    network = chain("image", into=nn.ReLU(inplace=True), out_of=nn.Tanh())
    fossilize_seed(network.slot, "conv_small")
    assert fold_and_check(network, example("image")) == [FoldResult("place", "place", "")]


def test_a_layer_that_shares_its_weights_is_passed_over() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.slot = nn.Embedding(11, WIDTH), SeedSlot("place", "sequence", WIDTH)
            self.head = nn.Linear(WIDTH, 11)
            self.head.weight = self.tokens.weight

        def forward(self, x: Tensor) -> Tensor:  # [B, T] -> [B, T, 11]
            return self.head(self.slot(self.tokens(x)))

    network = Tied()
    fossilize_seed(network.slot, "lora")
    unchanged_by_folding(network, torch.arange(10).view(2, 5))


def test_what_happens_in_place_between_a_layer_and_the_slot_is_noticed() -> None:
    class Shortcut(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.slot = nn.Conv2d(3, 3, 1), SeedSlot("place", "image", 3)

        def forward(self, x: Tensor) -> Tensor:
            made = self.before(x)
            made += x
            return torch.tanh(self.slot(made))

    network = Shortcut()
    fossilize_seed(network.slot, "conv_small")
    assert fold_and_check(network, example("image")) == [FoldResult("place", "place", "")]
