"""Fossils folded into the host: the same outputs from fewer layers, and what cannot be folded is left as it was."""

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.ops import StochasticDepth

from esper_lightning.blueprints import Residual, get, initialise, names, registry
from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.attach import attach_slots
from esper_lightning.growth.blend import Style
from esper_lightning.growth.fold import Folding, affine_of, fold
from esper_lightning.growth.growing import GrowingNetwork
from esper_lightning.growth.network import count_parameters, germinate, slots_of
from esper_lightning.growth.saving import load, save
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, MLP
from tests.growth.grown import LIFE, STYLES, grow, seeded, slot_named, small_batch, small_cnn, stir

WIDTH = 6

FOLDABLE: list[tuple[Layout, str]] = [
    ("image", "conv_small"),
    ("image", "conv_light"),
    ("sequence", "lora"),
    ("sequence", "lora_large"),
    ("vector", "lora"),
]

PRECISION = {torch.float32: 1e-5, torch.float64: 1e-10}


class Chain(nn.Module):
    """Layer, function, slot, function, layer."""

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
    """A chain of layers with biases; the convolutions are 3×3, the second one without padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if layout == "image":
            return Chain(layout, nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3), into, out_of)
        return Chain(layout, nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4), into, out_of)


def example(layout: Layout, samples: int = 4) -> Tensor:
    shape = {"image": (3, 8, 8), "sequence": (7, 5), "vector": (5,)}[layout]
    return torch.randn(samples, *shape, generator=seeded(5))


def keep(slot: SeedSlot, blueprint: str, ramp: Ramp = FULL, style: Style = "add", bias: bool = True) -> None:
    """A fossil; without `bias`, its biases are zero."""
    grow(slot, Stage.FOSSILIZED, blueprint, ramp, style=style)
    if not bias:
        for name, parameter in slot.seed.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


def folded(network: nn.Module, x: Any, tolerance: float = 1e-5) -> list[Folding]:
    """Folds `network`, and checks what holds of every fold: outputs stay, modes stay."""
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
        assert (folding.into is None) == (slot.stage is Stage.FOSSILIZED) == bool(folding.why)
        assert slot.occupied == (folding.into is None)
    return foldings


def relative_change(output: Tensor, reference: Tensor) -> float:
    return ((output - reference).abs().max() / reference.abs().max()).item()


def unchanged_by_folding(network: nn.Module, x: Any) -> list[Folding]:
    """Folds `network`, of which nothing can be folded: it is as it was, bit for bit."""
    before, state = network.eval()(x).detach(), deepcopy(network.state_dict())
    stages = {name: slot.stage for name, slot in slots_of(network).items()}
    foldings = fold(network, x)
    assert list(network.state_dict()) == list(state)
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert {name: slot.stage for name, slot in slots_of(network).items()} == stages
    assert torch.equal(network(x), before)
    assert all(folding.into is None and folding.why for folding in foldings)
    return foldings


@pytest.mark.parametrize("dtype", PRECISION, ids=str)
@pytest.mark.parametrize("target", [0.5, 1.0])
@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_outputs_stay_and_the_seeds_parameters_go(
    layout: Layout, blueprint: str, target: float, dtype: torch.dtype
) -> None:
    network, x = chain(layout).to(dtype), example(layout).to(dtype)
    alone = count_parameters(network)
    keep(network.slot, blueprint, Ramp(0.0, target, 1, "linear"))
    assert relative_change(network(x), chain(layout).to(dtype)(x)) > 0.01  # the seed does matter

    foldings = folded(network, x, PRECISION[dtype])

    into = "place" if blueprint == "conv_light" else "before"
    assert foldings == [Folding("place", into, "")]
    # A 3×3 convolution takes the place of a 3×3 convolution; else nothing is left.
    assert count_parameters(network) - alone == (get(blueprint, layout).parameters(WIDTH) if into == "place" else 0)
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    other = torch.randn(3, *x.shape[1:], generator=seeded(9)).to(dtype)
    assert torch.isfinite(network(other)).all()


@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_a_fold_holds_for_other_inputs_than_the_example(layout: Layout, blueprint: str) -> None:
    network, x = chain(layout).double(), example(layout).double()
    keep(network.slot, blueprint)
    grown = deepcopy(network)
    fold(network, x)
    other = 3.0 * torch.randn(5, *x.shape[1:], generator=seeded(9), dtype=torch.float64)
    torch.testing.assert_close(network(other), grown(other), rtol=1e-10, atol=1e-12)


def shielded(layer: nn.Module) -> nn.Module:
    """The layer, and something that is not linear between it and the slot."""
    return nn.Sequential(layer, nn.Tanh())


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(5, WIDTH, bias)


def conv(kernel: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, WIDTH, kernel, **options)


def next_conv(kernel: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(WIDTH, 4, kernel, **options)


@pytest.mark.parametrize(
    ("layout", "before", "behind", "bias", "into"),
    [
        ("vector", linear(), nn.Tanh(), True, "before"),
        ("vector", linear(bias=False), nn.Tanh(), True, "before"),  # lora has no bias
        ("vector", shielded(linear()), nn.Linear(WIDTH, 4), True, "behind"),
        ("vector", shielded(linear()), nn.Linear(WIDTH, 4, bias=False), True, "behind"),
        ("vector", shielded(linear()), nn.Tanh(), True, None),
        ("sequence", linear(), nn.Tanh(), True, "before"),
        ("sequence", shielded(linear()), nn.Linear(WIDTH, 4), True, "behind"),
        ("sequence", shielded(linear()), nn.Tanh(), True, None),
        ("image", conv(padding=1), nn.Tanh(), True, "before"),
        ("image", conv(5, stride=2, padding=2, padding_mode="circular"), nn.Tanh(), True, "before"),
        ("image", conv(bias=False), nn.Tanh(), True, "place"),
        ("image", conv(bias=False), nn.Tanh(), False, "before"),
        ("image", conv(groups=3), nn.Tanh(), True, "place"),
        ("image", shielded(conv()), next_conv(1), True, "behind"),
        ("image", shielded(conv()), next_conv(1, stride=2), True, "behind"),
        ("image", shielded(conv()), next_conv(1, bias=False), True, "place"),
        ("image", shielded(conv()), next_conv(1, bias=False), False, "behind"),
        ("image", shielded(conv()), next_conv(3), True, "behind"),
        ("image", shielded(conv()), next_conv(3, padding="valid"), True, "behind"),
        ("image", shielded(conv()), next_conv(3, padding=1), True, "place"),  # the padding has no bias
        ("image", shielded(conv()), next_conv(3, padding=1), False, "behind"),
        ("image", shielded(conv()), next_conv(3, padding="same"), True, "place"),
        ("image", shielded(conv()), next_conv(1, groups=2), True, "place"),
        ("image", shielded(conv()), nn.ConvTranspose2d(WIDTH, 4, 3), True, "place"),
        ("image", nn.ConvTranspose2d(3, WIDTH, 3), nn.Tanh(), True, "place"),
    ],
)
def test_where_a_map_of_channels_goes(
    layout: Layout, before: nn.Module, behind: nn.Module, bias: bool, into: str | None
) -> None:
    network, x = deepcopy(Chain(layout, before, behind)).double(), example(layout).double()
    alone = count_parameters(network)
    keep(network.slot, "conv_small" if layout == "image" else "lora", bias=bias)
    seed = count_parameters(network.slot.seed)
    (folding,) = folded(network, x, 1e-10)
    assert folding.into == into
    assert count_parameters(network) - alone == (0 if into in ("before", "behind") else seed)
    if into is None:
        assert folding.why == "no linear layer before or behind the slot can take it"


def test_not_even_a_small_bias_is_lost_to_a_layer_without() -> None:
    network, x = Chain("image", conv(bias=False), next_conv(1, bias=False)).double(), example("image").double()
    keep(network.slot, "conv_small")
    network.slot.seed.body[-1].bias.data.mul_(1e-4)
    assert folded(network, x, 1e-10) == [Folding("place", "place", "")]
    assert network.before.bias is None
    assert network.behind.bias is None


@pytest.mark.parametrize("style", STYLES[1:])
@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_a_seed_that_scales_or_chooses_is_left_alone(layout: Layout, blueprint: str, style: Style) -> None:
    network = chain(layout)
    keep(network.slot, blueprint, style=style)
    (folding,) = unchanged_by_folding(network, example(layout))
    assert folding.why == f"{blueprint} ({style}) is no affine map of its input"


@pytest.mark.parametrize(
    ("layout", "blueprint"),
    [
        (layout, name)
        for layout in ("image", "sequence", "vector")
        for name in names(layout, torch.device("cpu"))
        if (layout, name) not in FOLDABLE
    ],
)
def test_a_seed_that_is_not_linear_is_left_alone(layout: Layout, blueprint: str) -> None:
    network = chain(layout)
    keep(network.slot, blueprint)
    (folding,) = unchanged_by_folding(network, example(layout))
    assert folding.why == f"{blueprint} (add) is no affine map of its input"


@pytest.mark.parametrize("stage", [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY])
def test_a_live_seed_is_left_alone(stage: Stage) -> None:
    network = chain("image")
    grow(network.slot, stage, "conv_small")
    assert unchanged_by_folding(network, example("image")) == []


def test_a_network_in_which_nothing_grew_has_nothing_to_fold() -> None:
    assert unchanged_by_folding(chain("image"), example("image")) == []
    assert unchanged_by_folding(nn.Sequential(nn.Linear(5, 3)), example("vector")) == []


class UsedElsewhere(nn.Module):
    """The layer before the slot is also seen by a second reader; always the same weights."""

    def __init__(self, both: bool = False) -> None:
        super().__init__()
        self.before, self.slot = nn.Linear(5, WIDTH), SeedSlot("place", "vector", WIDTH)
        self.behind, self.other = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.both = both
        initialise(self, seeded())

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        made = self.before(x)
        grown = self.slot(made)
        answer = self.behind(grown) + torch.tanh(self.other(made))
        return answer + grown[:, :3].exp() if self.both else answer


precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@precisions
def test_a_neighbour_that_others_need_too_is_passed_over(dtype: torch.dtype) -> None:
    network = UsedElsewhere().to(dtype)
    keep(network.slot, "lora")
    before = network.before.weight.clone()
    assert folded(network, example("vector").to(dtype)) == [Folding("place", "behind", "")]
    assert torch.equal(network.before.weight, before)


class Masked(nn.Module):
    """Never chooses the third class, as a policy masks what is impossible."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = UsedElsewhere(both=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).masked_fill(torch.tensor([False, False, True]), float("-inf"))


def test_infinite_outputs_hide_no_change_of_the_others() -> None:
    network, x = Masked(), example("vector")
    keep(network.inner.slot, "lora")
    before = network(x)
    fold(network, x)
    torch.testing.assert_close(network(x), before, rtol=1e-5, atol=1e-5)


class Chooses(nn.Module):
    """Says the best class alone."""

    def __init__(self) -> None:
        super().__init__()
        self.chain = chain("vector")

    def forward(self, x: Tensor) -> Tensor:
        return self.chain(x).argmax(1)


def test_where_no_output_can_be_compared_the_fossil_stays() -> None:
    network, x = Chooses(), example("vector")
    keep(network.chain.slot, "lora")
    with suppress(ValueError):
        fold(network, x)
    assert network.chain.slot.stage is Stage.FOSSILIZED


@precisions
def test_a_seed_between_neighbours_that_others_need_too_stays(dtype: torch.dtype) -> None:
    network = UsedElsewhere(both=True).to(dtype)
    keep(network.slot, "lora")
    (folding,) = unchanged_by_folding(network, example("vector").to(dtype))
    assert folding.why == "no linear layer before or behind the slot can take it"


def test_an_activation_in_place_hides_the_layer_before_it() -> None:
    network = chain("image", into=nn.ReLU(inplace=True), out_of=nn.Tanh())
    keep(network.slot, "conv_small")
    assert folded(network, example("image")) == [Folding("place", "place", "")]


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
    keep(network.slot, "lora")
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
    keep(network.slot, "conv_small")
    assert folded(network, example("image")) == [Folding("place", "place", "")]


def test_a_folded_slot_may_grow_and_be_folded_again() -> None:
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image").double()
    slot = network.slot
    keep(slot, "conv_light")
    assert folded(network, x, 1e-10) == [Folding("place", "place", "")]
    size = count_parameters(network)
    for target in (1.0, 0.5):
        keep(slot, "conv_small", Ramp(0.0, target, 1, "linear"))
        assert folded(network, x, 1e-10) == [Folding("place", "place", "")]
        assert count_parameters(network) == size
    assert slot.folded.kernel_size == (3, 3)
    keep(slot, "conv_light")  # two 3×3 convolutions see further than one
    before = network(x)
    (folding,) = folded(network, x, 1e-10)
    assert folding == Folding("place", None, "no linear layer before or behind the slot can take it")
    assert torch.equal(network(x), before)


def test_seeds_that_follow_each_other_go_into_the_same_layer() -> None:
    network = nn.Sequential(
        nn.Linear(5, WIDTH), *(SeedSlot(name, "vector", WIDTH) for name in "abc"), nn.Tanh(), nn.Linear(WIDTH, 2)
    ).double()
    for slot in slots_of(network).values():
        if slot.name != "b":  # an empty slot is no obstacle
            keep(slot, "lora")
    assert folded(network, example("vector").double(), 1e-10) == [Folding("a", "0", ""), Folding("c", "0", "")]
    assert [name for name, _ in network.named_parameters()] == ["0.weight", "0.bias", "5.weight", "5.bias"]


def test_a_layer_that_took_a_seeds_place_takes_the_next_seed_in() -> None:
    network = nn.Sequential(
        nn.Tanh(), SeedSlot("a", "image", 3), SeedSlot("b", "image", 3), nn.Tanh(), nn.Conv2d(3, 2, 1)
    )
    for slot in slots_of(network).values():
        keep(slot, "conv_small")
    assert folded(network, example("image")) == [Folding("a", "a", ""), Folding("b", "1.folded", "")]


def test_what_was_folded_goes_on_learning() -> None:
    network, x = chain("image", nn.Tanh()), example("image")
    keep(network.slot, "conv_light")
    fold(network, x)
    network.train()(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in network.parameters())
    assert network.slot.folded in list(network.modules())


def test_a_folded_network_is_saved_and_loaded(tmp_path: Path) -> None:
    network, x = small_cnn(["block1", "block2.pool"]), small_batch()[0]
    keep(slot_named(network, "block1"), "conv_light")
    keep(slot_named(network, "block2.pool"), "conv_small")
    assert all(folding.into for folding in folded(network, x))
    grow(slot_named(network, "block1"), Stage.BLENDING, "conv_heavy")  # something new in a folded place
    save(network, tmp_path)
    copy = small_cnn(["block1", "block2.pool"], seed=99)
    load(copy, tmp_path)
    assert torch.equal(copy.eval()(x), network.eval()(x))
    assert [slot_named(copy, name).folded.kernel_size for name in ("block1", "block2.pool")] == [(3, 3), (1, 1)]


def test_seeds_in_a_foreign_network_are_folded_saved_and_loaded(tmp_path: Path) -> None:
    def resnet() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)

    network, x = resnet(), torch.randn(2, 3, 32, 32, generator=seeded())
    places = ["layer1.0.conv1", "layer1.0.conv2", "layer2", "avgpool", "fc"]
    slots = attach_slots(network, places, x)
    keep(slots["layer1.0.conv1"], "conv_small")
    keep(slots["layer1.0.conv2"], "conv_small", bias=False)
    keep(slots["layer2"], "conv_small")
    keep(slots["avgpool"], "conv_heavy")
    keep(slots["fc"], "lora")
    into = {folding.slot: folding.into for folding in folded(network, x)}
    assert into == {
        "layer1.0.conv1": "layer1.0.conv1",  # in the slot's place: the convolution of that name has no bias
        "layer1.0.conv2": "layer1.0.conv2",  # into the convolution
        "layer2": "layer2",
        "avgpool": None,
        "fc": "fc",
    }
    kernels = {name: slot.folded and slot.folded.kernel_size for name, slot in slots.items()}
    assert kernels == dict.fromkeys(places) | {"layer1.0.conv1": (1, 1), "layer2": (1, 1)}
    save(network, tmp_path)
    copy = resnet()
    load(copy, tmp_path)
    assert torch.equal(copy.eval()(x), network.eval()(x))


def test_our_cnn_takes_seeds_in_where_its_layers_touch_them() -> None:
    places = ["block1", "block1.pool", "block2", "block3.pool"]
    network, x = small_cnn(places), small_batch()[0]
    network(x)  # moves BatchNorm's statistics
    keep(slot_named(network, "block1"), "conv_light")
    keep(slot_named(network, "block1.pool"), "conv_small", bias=False)
    keep(slot_named(network, "block2"), "conv_small", Ramp(0.0, 0.5, 1, "linear"))
    keep(slot_named(network, "block3.pool"), "attention")
    into = {folding.slot: folding.into for folding in folded(network, x)}
    assert into == {"block1": "block1", "block1.pool": "convs.1", "block2": "block2", "block3.pool": None}


def test_our_mlp_takes_low_rank_seeds_into_the_next_layer() -> None:
    network, x = MLP((5,), 3, width=WIDTH, layers=2), example("vector")
    size = count_parameters(network)
    for slot in slots_of(network).values():
        keep(slot, "lora")
    assert folded(network, x) == [Folding("layer1", "layers.1", ""), Folding("layer2", "head", "")]
    assert count_parameters(network) == size


def test_between_the_residual_blocks_of_our_gpt_nothing_can_take_a_seed() -> None:
    network = GPT((6,), 11, width=8, blocks=2, heads=2, context=8, slots=["layer1", "layer2"])
    for slot, blueprint in zip(slots_of(network).values(), ["lora", "lora_large"], strict=True):
        keep(slot, blueprint)
    foldings = unchanged_by_folding(network, torch.arange(12).view(2, 6) % 11)
    assert [folding.slot for folding in foldings] == ["layer1", "layer2"]


@pytest.mark.parametrize(
    ("build", "kernel"),
    [
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)), 1),
        (lambda c: Residual(nn.Conv2d(c, 4, 1, bias=False), nn.Conv2d(4, c, 3, padding=1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 3, padding=1), nn.Conv2d(4, c, 1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 3, padding=1)), None),  # padding cuts the bias off
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=2, dilation=2)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1, padding_mode="circular")), None),
        (lambda c: Residual(nn.Conv2d(c, c, 1, groups=2)), None),
        (lambda c: Residual(nn.Dropout(0.5), nn.Conv2d(c, c, 1)), None),
        (lambda c: nn.Conv2d(c, c, 1), None),
    ],
    ids=[
        "1x1 1x1",
        "1x1 without bias, 3x3",
        "3x3 1x1",
        "1x1 with bias, 3x3",
        "3x3 3x3",
        "dilated",
        "circular",
        "grouped",
        "dropout",
        "no residual",
    ],
)
def test_a_blueprint_of_ones_own_folds_where_it_is_one_small_convolution(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[int], nn.Module], kernel: int | None
) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("own", {"image"}, lambda c: 0, lambda c, n: 0)(build)
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image").double()
    germinate(network.slot, "own", FULL, seeded(), birth="random")
    stir(network.slot.seed)
    for stage in LIFE[1:]:
        network.slot.move_to(stage)
    affine = affine_of(network.slot)
    assert (affine.kernel.shape[-1] if affine else None) == kernel
    if kernel is None:
        unchanged_by_folding(network, x)
    else:
        feature = torch.randn(2, WIDTH, 5, 5, generator=seeded(), dtype=torch.float64)
        whole = nn.functional.conv2d(feature, affine.kernel, affine.bias, padding=kernel // 2)
        torch.testing.assert_close(whole, network.slot(feature), rtol=1e-10, atol=1e-12)
        assert folded(network, x, 1e-10) == [Folding("place", "place", "")]


@pytest.mark.parametrize("example_input", [(torch.ones(2, 5), 2.0), {"x": torch.ones(2, 5), "scale": 2.0}], ids=type)
def test_an_example_may_be_several_arguments(example_input: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.chain = chain("vector")

        def forward(self, x: Tensor, scale: float) -> dict[str, Tensor]:
            return {"scores": self.chain(scale * x)}

    network = Scaled()
    keep(network.chain.slot, "lora")
    assert fold(network, example_input) == [Folding("place", "chain.before", "")]


class TwoAnswers(nn.Module):
    """The second answer is the layer before the slot itself."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.slot = nn.Linear(5, WIDTH), SeedSlot("place", "vector", WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.before(x)
        return torch.tanh(self.slot(made)), made


def test_every_output_stays() -> None:
    network, x = TwoAnswers(), example("vector")
    keep(network.slot, "lora")
    before = network(x)
    fold(network, x)
    for ours, theirs in zip(network(x), before, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_a_layer_may_be_called_by_keyword() -> None:
    class ByKeyword(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.behind(input=self.slot(self.before(x))))

    network = ByKeyword("vector", nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4))
    keep(network.slot, "lora")
    fold(network, example("vector"))


def test_a_fold_does_not_cross_what_only_training_shows() -> None:
    outputs = []
    for fold_it in (False, True):
        network, x = chain("vector", into=nn.Dropout(0.5)), example("vector")
        keep(network.slot, "lora")
        if fold_it:
            assert folded(network, x) == [Folding("place", "behind", "")]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            outputs.append(network.train()(x))
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)


class Sometimes(nn.Module):
    """Does something in training alone."""

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
        keep(network.slot, "lora")
        (folding,) = folded(network, example("vector"))
        return folding.into

    assert into(passes_on, nn.Identity()) == ("behind" if hides else "before")
    assert into(nn.Tanh(), passes_on) == (None if hides else "behind")
    assert into(nn.Identity(), passes_on) == "before"
    assert into(passes_on, nn.Tanh()) == (None if hides else "before")


@pytest.mark.parametrize("scale", [0.1, 0.01])
def test_a_small_seed_is_not_given_to_a_neighbour_that_others_need_too(scale: float) -> None:
    network, x = UsedElsewhere(both=True).double(), example("vector").double()
    keep(network.slot, "lora")
    for parameter in network.slot.seed.parameters():
        parameter.data.mul_(scale)
    unchanged_by_folding(network, x)


@precisions
@pytest.mark.parametrize("scale", [1e-2, 1e-4, 0.0])
def test_a_small_seed_is_folded_where_it_can_be(scale: float, dtype: torch.dtype) -> None:
    network, x = chain("vector").to(dtype), example("vector").to(dtype)
    keep(network.slot, "lora")
    for parameter in network.slot.seed.parameters():
        parameter.data.mul_(scale)
    assert folded(network, x, PRECISION[dtype]) == [Folding("place", "before", "")]


def test_a_growing_network_goes_on_in_a_folded_slot() -> None:
    network, x = chain("vector"), example("vector")
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    growing = GrowingNetwork(network, optimizer, horizon=9)
    growing.germinate("place", "lora")
    for stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED):
        network.slot.move_to(stage)
    network(x).square().sum().backward()
    optimizer.step()
    assert [folding.into for folding in fold(network, x)] == ["before"]
    growing.germinate("place", "lora")
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in network.parameters())
    assert {id(parameter) for parameter in optimizer.state} <= set(held)
    assert [group.get("name", "") for group in optimizer.param_groups] == ["", "seed.place"]
