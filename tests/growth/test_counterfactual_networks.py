"""Counterfactual passes through other networks: branches, several inputs and outputs, layers that run twice."""

from collections.abc import Sequence
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.counterfactual import all_variants, forward_variants
from esper_lightning.growth.lifecycle import slots_of
from tests.growth.grown import LastState, add_noise, generator_of, grow
from tests.growth.seeded_cnn import BLENDED, HALF, plain_pass


def attached(network: nn.Module, places: list[str], *example: Tensor, channels_last: Sequence[str] = ()) -> nn.Module:
    """Return the network with blended seeds at `places`, at alpha 1/2, in float64 and evaluation mode."""
    kinds = {"image": "conv_small", "sequence": "lora", "vector": "mlp_small"}
    for number, slot in enumerate(attach_slots(network, places, example, channels_last=channels_last).values()):
        grow(slot, BLENDED[number % 3], kinds[slot.layout], HALF, seed=number)
    return network.double().eval()


def check_family(network: nn.Module, *inputs: Tensor) -> None:
    """Compare every combination in one pass with a separate pass."""
    variants = all_variants(list(slots_of(network)))
    outputs, places = forward_variants(network, variants, *inputs)
    groups = outputs.unflatten(0, (max(places) + 1, -1))
    answers = []
    for variant, place in zip(variants, places, strict=True):
        answers.append(plain_pass(network, variant, *inputs))
        torch.testing.assert_close(groups[place], answers[-1], rtol=1e-9, atol=1e-12)
    assert all(not torch.allclose(one, other) for one, other in combinations(answers, 2))


@pytest.mark.parametrize(
    ("places", "trunk"),
    [
        (["layer2.0.conv1"], [False]),
        (["layer1.0.conv1", "layer2.0.downsample"], [False, False]),
        (["layer1", "layer2.0.conv1", "layer3", "fc"], [True, False, True, True]),
        (["layer1.0.bn1", "layer1", "layer4.1.conv2"], [False, True, False]),
    ],
    ids=str,
)
def test_seeds_in_the_branches_of_a_resnet_equal_one_plain_pass_for_each_combination(
    places: list[str], trunk: list[bool]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.ResNet(models.resnet.BasicBlock, [2, 1, 1, 2], num_classes=3)
    x = torch.randn(3, 3, 32, 32, generator=generator_of())
    attached(network, places, x)
    assert [slot.on_single_path for slot in slots_of(network).values()] == trunk
    check_family(network, x.double())


@pytest.mark.parametrize(
    ("places", "channels_last", "trunk"),
    [
        (["features.1.0.attn"], 1, [False]),
        (["features.0", "features.3.0.mlp", "norm", "flatten"], 3, [True, False, True, True]),
    ],
    ids=["one", "four"],
)
def test_seeds_on_channels_that_come_last_equal_one_plain_pass_for_each_combination(
    places: list[str], channels_last: int, trunk: list[bool]
) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.SwinTransformer([2, 2], 8, [1, 1], [1, 2], [2, 2], num_classes=3)
    add_noise(network, scale=0.05)
    x = torch.randn(3, 3, 16, 24, generator=generator_of())
    attached(network, places, x, channels_last=places[:channels_last])
    assert [slot.on_single_path for slot in slots_of(network).values()] == trunk
    check_family(network, x.double())


class Twice(nn.Module):
    """Network that applies one layer twice, and then another."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.behind, self.head = nn.Linear(5, 5), nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        return self.head(torch.tanh(self.behind(torch.tanh(self.shared(torch.tanh(self.shared(x)))))))


@pytest.mark.parametrize("places", [["shared"], ["behind", "shared"]], ids=" ".join)
def test_a_seed_that_the_data_meets_twice_is_on_or_off_both_times(places: list[str]) -> None:
    x = torch.randn(4, 5, generator=generator_of())
    check_family(attached(Twice(), places, x), x.double())


class TwoInputs(nn.Module):
    """Network of an image and a vector, each processed by its own layer and then combined."""

    def __init__(self) -> None:
        super().__init__()
        self.see, self.read = nn.Conv2d(2, 4, 3), nn.Linear(5, 4)
        self.both, self.head = nn.Linear(8, 6), nn.Linear(6, 3)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:  # [B, 2, H, W], [B, 5] -> [B, 3]
        seen, read = torch.relu(self.see(image)).mean((2, 3)), torch.tanh(self.read(vector))
        return self.head(torch.tanh(self.both(torch.cat([seen, read], 1))))


@pytest.mark.parametrize("places", [["see"], ["read", "both"], ["both"], ["see", "read", "both"]], ids=" ".join)
def test_a_network_of_several_inputs_has_all_of_them_repeated(places: list[str]) -> None:
    image, vector = torch.randn(4, 2, 6, 6, generator=generator_of()), torch.randn(4, 5, generator=generator_of(1))
    network = attached(TwoInputs(), places, image, vector)
    assert {name: slot.on_single_path for name, slot in slots_of(network).items()} == {
        name: name == "both" for name in places
    }
    check_family(network, image.double(), vector.double())


class Remembers(nn.Module):
    """LSTM whose last state is used."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.lstm, self.head = LastState(6, layers), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, 3]
        return self.head(self.lstm(x)[1][0])


@pytest.mark.parametrize("layers", [1, 2])
def test_a_seed_on_the_state_of_an_lstm_equals_one_plain_pass_for_each_combination(layers: int) -> None:
    x = torch.randn(4, 7, 5, generator=generator_of())
    check_family(attached(Remembers(layers), ["lstm[1][0]"], x), x.double())


class TwoAnswers(nn.Module):
    """Network whose second output bypasses everything after the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.late, self.head, self.other = (nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # [B, 5] -> [B, 5], [B, 5]
        x = self.stem(x)
        return self.head(torch.tanh(self.late(x))), self.other(x)


def test_every_output_has_a_row_for_every_combination() -> None:
    x = torch.randn(4, 5, generator=generator_of())
    network = attached(TwoAnswers(), ["late"], x)
    (first, second), places = forward_variants(network, all_variants(["late"]), x.double())
    assert places == [1, 0]
    assert len(first) == len(second) == 8
