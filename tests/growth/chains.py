"""Chains of layers with a slot between them, and checks of their folding."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.blueprints import initialise
from esper_lightning.growth.blend import BlendStyle, Ramp
from esper_lightning.growth.fold import FoldResult, fold
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from tests.growth.grown import generator_of, grow

WIDTH = 6


PRECISION = {torch.float32: 1e-5, torch.float64: 1e-10}


class Chain(nn.Module):
    """Chain of layer, function, slot, function and layer."""

    def __init__(
        self,
        layout: Layout,
        before: nn.Module,
        behind: nn.Module,
        into: nn.Module | None = None,
        out_of: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.before, self.into = before, into or nn.Identity()
        self.slot = SeedSlot("place", layout, WIDTH)
        self.out_of, self.behind = out_of or nn.Identity(), behind

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.behind(self.out_of(self.slot(self.into(self.before(x))))))


def chain(layout: Layout, into: nn.Module | None = None, out_of: nn.Module | None = None) -> Chain:
    """Return a chain of layers with biases; convolutions are 3×3, the second one without padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if layout == "image":
            return Chain(layout, nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3), into, out_of)
        return Chain(layout, nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4), into, out_of)


def example(layout: Layout, samples: int = 4) -> Tensor:
    shape = {"image": (3, 8, 8), "sequence": (7, 5), "vector": (5,)}[layout]
    return torch.randn(samples, *shape, generator=generator_of(5))


def fossilize_seed(
    slot: SeedSlot, blueprint: str, ramp: Ramp = Ramp(), style: BlendStyle = "add", bias: bool = True
) -> None:
    """Put a fossilized seed in `slot`; without `bias`, its biases are zero."""
    grow(slot, Stage.FOSSILIZED, blueprint, ramp, style=style)
    if not bias:
        for name, parameter in slot.seed.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


def fold_and_check(network: nn.Module, x: Any, tolerance: float = 1e-5) -> list[FoldResult]:
    """Fold `network`, and check that outputs and modes are unchanged."""
    modes = [network.get_submodule(name).training for name, _ in network.named_modules() if "seed" not in name]
    was_training = network.training
    reference = network.eval()(x).detach()
    network.train(was_training)
    foldings = fold(network, x)
    kept = [network.get_submodule(name).training for name, _ in network.named_modules() if "seed" not in name]
    assert all(mode == was_training for mode in (*modes, *kept))
    assert relative_change(network.eval()(x), reference) < tolerance
    network.train(was_training)
    for folding in foldings:
        slot = slots_of(network)[folding.slot]
        assert (folding.target_layer is None) == (slot.stage is Stage.FOSSILIZED) == bool(folding.reason)
        assert slot.occupied == (folding.target_layer is None)
    return foldings


def relative_change(output: Tensor, reference: Tensor) -> float:
    return ((output - reference).abs().max() / reference.abs().max()).item()


def unchanged_by_folding(network: nn.Module, x: Any) -> list[FoldResult]:
    """Fold `network`, and check that nothing was folded and it is unchanged bit for bit."""
    before, state = network.eval()(x).detach(), deepcopy(network.state_dict())
    stages = {name: slot.stage for name, slot in slots_of(network).items()}
    foldings = fold(network, x)
    assert list(network.state_dict()) == list(state)
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert {name: slot.stage for name, slot in slots_of(network).items()} == stages
    assert torch.equal(network(x), before)
    assert all(folding.target_layer is None and folding.reason for folding in foldings)
    return foldings


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(5, WIDTH, bias)


class UsedElsewhere(nn.Module):
    """Network in which the output of the layer before the slot is used a second time; fixed weights."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.before, self.slot = nn.Linear(5, WIDTH), SeedSlot("place", "vector", WIDTH)
        self.behind, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.both = both
        initialise(self, generator_of())

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        made = self.before(x)
        grown = self.slot(made)
        answer = self.behind(grown) + torch.tanh(self.other(made))
        return answer + grown[:, :3].exp() if self.both else answer


precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
