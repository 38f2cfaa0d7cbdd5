"""Grown networks as files: folded into fewer layers with the same outputs, and exported by torch.export."""

import os
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.ops import StochasticDepth

from esper_lightning.cli.commands import export_network
from esper_lightning.growth import export as export_module
from esper_lightning.growth.attach import attach_slots, detach_slots
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import Residual, get_blueprint, initialise, registry
from esper_lightning.growth.export import ONNX_PACKAGES, FoldResult, affine_map_of, export, fold, load, save
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import count_parameters, germinate, slots_of
from esper_lightning.growth.slot import Layout, SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, MLP
from tests.growth.grown import LIFE, SIMPLE, add_noise, generator_of, grow, slot_named
from tests.growth.test_blueprints import EVERYTHING
from tests.runs import ROOT
from tests.tiers import rest_is_slow

# Folding.


WIDTH = 6

NO_LAYER = "no linear layer before or behind the slot can take it"

FOLDABLE: list[tuple[Layout, str]] = [("image", "conv_small"), ("image", "conv_light"), ("vector", "lora")]
FOLDABLE += [("sequence", "lora"), ("sequence", "lora_large")]

precisions = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)


class Chain(nn.Module):
    """Chain of layer, function, slot, function and layer."""

    def __init__(self, layout: Layout, before: nn.Module, behind: nn.Module, *around: nn.Module | None) -> None:
        super().__init__()
        self.before, self.behind = before, behind
        self.into, self.out_of = ((part or nn.Identity()) for part in around or (None, None))
        self.slot = SeedSlot("place", layout, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.behind(self.out_of(self.slot(self.into(self.before(x))))))


def chain(layout: Layout, into: nn.Module | None = None, out_of: nn.Module | None = None) -> Chain:
    """Return a chain of layers with biases; convolutions are 3×3, the second one without padding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if layout == "image":
            return Chain(layout, nn.Conv2d(3, WIDTH, 3, padding=1), nn.Conv2d(WIDTH, 4, 3), into, out_of)
        return Chain(layout, nn.Linear(5, WIDTH), nn.Linear(WIDTH, 4), into, out_of)


def example(layout: Layout, dtype: torch.dtype = torch.float32) -> Tensor:
    shape = {"image": (3, 8, 8), "sequence": (7, 5), "vector": (5,)}[layout]
    return torch.randn(4, *shape, generator=generator_of(5)).to(dtype)


def fossilize_seed(slot: SeedSlot, blueprint: str, bias: bool = True) -> None:
    """Put a fossilized seed in `slot`; without `bias`, its biases are zero."""
    grow(slot, Stage.FOSSILIZED, blueprint)
    if not bias:
        for name, parameter in slot.seed.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


def fold_and_check(network: nn.Module, x: Any, tolerance: float = 1e-5) -> list[FoldResult]:
    """Fold `network`, and check that outputs and modes are unchanged."""
    modes = {name: module.training for name, module in network.named_modules() if "seed" not in name}
    was_training = network.training
    reference = network.eval()(x).detach()
    foldings = fold(network.train(was_training), x)
    assert {name: network.get_submodule(name).training for name in modes} == modes
    change = (network.eval()(x) - reference).abs().max() / reference.abs().max()
    assert change.item() < tolerance
    network.train(was_training)
    for folding in foldings:
        slot = slots_of(network)[folding.slot]
        assert (folding.target_layer is None) == (slot.stage is Stage.FOSSILIZED) == bool(folding.reason)
    return foldings


def unchanged_by_folding(network: nn.Module, x: Any) -> list[FoldResult]:
    """Fold `network`, and check that nothing was folded and it is unchanged bit for bit."""
    before, state = network.eval()(x).detach(), deepcopy(network.state_dict())
    foldings = fold(network, x)
    assert list(network.state_dict()) == list(state)
    assert all(torch.equal(network.state_dict()[key], value) for key, value in state.items())
    assert torch.equal(network(x), before)
    assert all(folding.target_layer is None and folding.reason for folding in foldings)
    return foldings


@precisions
@pytest.mark.parametrize(("layout", "blueprint"), FOLDABLE)
def test_outputs_stay_and_the_seeds_parameters_go(
    layout: Layout, blueprint: str, dtype: torch.dtype, tolerance: float
) -> None:
    network, x = chain(layout).to(dtype), example(layout, dtype)
    alone = count_parameters(network)
    fossilize_seed(network.slot, blueprint)
    grown = deepcopy(network)
    assert not torch.allclose(network(x), chain(layout).to(dtype)(x), rtol=0.01)  # the seed has an effect

    into = "place" if blueprint == "conv_light" else "before"
    assert fold_and_check(network, x, tolerance) == [FoldResult("place", into, "")]

    # A 3×3 seed is replaced by one 3×3 convolution; any other seed adds no layer.
    added = get_blueprint(blueprint, layout).parameters(WIDTH) if into == "place" else 0
    assert count_parameters(network) == alone + added
    assert {parameter.dtype for parameter in network.parameters()} == {dtype}
    other = 3.0 * torch.randn(5, *x.shape[1:], generator=generator_of(9)).to(dtype)
    torch.testing.assert_close(network(other), grown(other), rtol=tolerance, atol=10 * tolerance)


linear, conv, next_conv = partial(nn.Linear, 5, WIDTH), partial(nn.Conv2d, 3, WIDTH), partial(nn.Conv2d, WIDTH, 4)


def shielded(layer: nn.Module) -> nn.Module:
    """Return the layer with a non-linear function between it and the slot."""
    return nn.Sequential(layer, nn.Tanh())


@pytest.mark.parametrize(
    ("layout", "before", "behind", "bias", "into"),
    [
        ("vector", shielded(linear()), nn.Linear(WIDTH, 4, bias=False), True, "behind"),
        ("vector", shielded(linear()), nn.Tanh(), True, None),
        ("sequence", shielded(linear()), nn.Linear(WIDTH, 4), True, "behind"),
        ("image", conv(5, stride=2, padding=2, padding_mode="circular"), nn.Tanh(), True, "before"),
        ("image", conv(3, bias=False), nn.Tanh(), True, "place"),
        ("image", conv(3, bias=False), nn.Tanh(), False, "before"),
        ("image", conv(3, groups=3), nn.Tanh(), True, "place"),
        ("image", shielded(conv(3)), next_conv(1, stride=2), True, "behind"),
        ("image", shielded(conv(3)), next_conv(1, bias=False), True, "place"),
        ("image", shielded(conv(3)), next_conv(1, bias=False), False, "behind"),
        ("image", shielded(conv(3)), next_conv(3, padding=1), True, "place"),  # the padding has no bias
        ("image", shielded(conv(3)), next_conv(3, padding=1), False, "behind"),
        ("image", shielded(conv(3)), next_conv(3, padding="same"), True, "place"),
        ("image", shielded(conv(3)), next_conv(1, groups=2), True, "place"),
        ("image", shielded(conv(3)), nn.ConvTranspose2d(WIDTH, 4, 3), True, "place"),
        ("image", nn.ConvTranspose2d(3, WIDTH, 3), nn.Tanh(), True, "place"),
    ],
)
def test_where_a_map_of_channels_goes(
    layout: Layout, before: nn.Module, behind: nn.Module, bias: bool, into: str | None
) -> None:
    network, x = deepcopy(Chain(layout, before, behind)).double(), example(layout, torch.float64)
    fossilize_seed(network.slot, "conv_small" if layout == "image" else "lora", bias=bias)
    assert fold_and_check(network, x, 1e-10) == [FoldResult("place", into, "" if into else NO_LAYER)]


@pytest.mark.parametrize(
    ("layout", "blueprint"),
    [case for case in EVERYTHING if case not in FOLDABLE],
)
def test_a_seed_that_is_not_linear_is_left_alone(layout: Layout, blueprint: str) -> None:
    network = chain(layout)
    fossilize_seed(network.slot, blueprint)
    (folding,) = unchanged_by_folding(network, example(layout))
    assert folding.reason == f"{blueprint} is not an affine map of its input"


@pytest.mark.parametrize("stage", LIFE[:-1])
def test_live_seeds_and_empty_slots_are_left_alone(stage: Stage) -> None:
    network = chain("image")
    assert unchanged_by_folding(network, example("image")) == []
    grow(network.slot, stage, "conv_small")
    assert unchanged_by_folding(network, example("image")) == []


# Neighbours.


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
        (nn.ReLU(inplace=True), True),
        (nn.Sequential(nn.Flatten(), nn.Sequential(nn.Identity())), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_are_no_neighbours_across_what_passes_a_tensor_on_in_evaluation_alone(
    passes_on: nn.Module, hides: bool
) -> None:
    def into(before: nn.Module, behind: nn.Module) -> str | None:
        network = chain("vector", into=before, out_of=behind)
        fossilize_seed(network.slot, "lora")
        (folding,) = fold_and_check(network, example("vector"))
        return folding.target_layer

    assert into(passes_on, nn.Identity()) == ("behind" if hides else "before")
    assert into(nn.Tanh(), passes_on) == (None if hides else "behind")


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


class Again(Chain):
    """Network in which the data meets a slot twice."""

    def __init__(self) -> None:
        super().__init__("vector", nn.Linear(5, WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        return self.behind(self.slot(torch.tanh(self.slot(self.before(x)))))


class Tied(nn.Module):
    """Language model whose embedding shares its weights with the layer behind the slot."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.slot = nn.Embedding(11, WIDTH), SeedSlot("place", "sequence", WIDTH)
        self.head = nn.Linear(WIDTH, 11)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:  # [B, T, 5] -> [B, T, 11]
        return self.head(self.slot(self.tokens(x.abs().sum(-1).long() % 11)))


@pytest.mark.parametrize(
    ("make", "layout", "scale", "into"),
    [
        (UsedElsewhere, "vector", 1.0, "behind"),
        (lambda: UsedElsewhere(both=True), "vector", 1.0, None),
        (lambda: UsedElsewhere(both=True), "vector", 0.01, None),  # a small change shows, too
        (Again, "vector", 1.0, None),
        (Tied, "sequence", 1.0, None),
        *((lambda: chain("vector"), "vector", scale, "before") for scale in (1e-2, 1e-4, 0.0)),
    ],
)
@precisions
def test_a_neighbour_that_others_need_too_is_passed_over(
    make: Callable[[], Any], layout: Layout, scale: float, into: str | None, dtype: torch.dtype, tolerance: float
) -> None:
    network, x = make().to(dtype), example(layout, dtype)
    fossilize_seed(network.slot, "lora")
    for parameter in network.slot.seed.parameters():
        parameter.data.mul_(scale)
    if into is None:
        assert unchanged_by_folding(network, x) == [FoldResult("place", None, NO_LAYER)]
    else:
        assert fold_and_check(network, x, tolerance) == [FoldResult("place", into, "")]


# Networks.


def test_a_folded_slot_learns_grows_and_is_folded_again() -> None:
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image", torch.float64)
    slot = network.slot
    for blueprint in ("conv_light", "conv_small"):
        fossilize_seed(slot, blueprint)
        assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]
    assert slot.folded.kernel_size == (3, 3)
    network.train()(x).square().sum().backward()
    assert all(parameter.grad.any() for parameter in network.parameters())
    fossilize_seed(slot, "conv_light")  # two 3×3 convolutions have a larger receptive field than one
    assert unchanged_by_folding(network, x) == [FoldResult("place", None, NO_LAYER)]


def test_a_growing_network_goes_on_in_a_folded_slot() -> None:
    network, x = chain("vector"), example("vector")
    optimizer = torch.optim.Adam(network.parameters(), lr=0.1)
    growing = GrowingNetwork(network, optimizer, horizon=9)
    growing.germinate("place", "lora")
    for stage in LIFE[1:]:
        network.slot.move_to(stage)
    network(x).square().sum().backward()
    optimizer.step()
    assert [folding.target_layer for folding in fold(network, x)] == ["before"]
    growing.germinate("place", "lora")
    held = [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in network.parameters())
    assert {id(parameter) for parameter in optimizer.state} <= set(held)


def test_seeds_in_a_users_network_are_folded_saved_and_loaded(tmp_path: Any) -> None:
    def resnet() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=3)

    network, x = resnet(), torch.randn(2, 3, 32, 32, generator=generator_of())
    places = ["layer1.0.conv1", "layer1.0.conv2", "layer2", "avgpool", "fc"]
    slots = attach_slots(network, places, x)
    for place, blueprint in zip(places, ["conv_small", "conv_small", "conv_small", "conv_heavy", "lora"], strict=True):
        fossilize_seed(slots[place], blueprint, bias=place != "layer1.0.conv2")
    into = {folding.slot: folding.target_layer for folding in fold_and_check(network, x)}
    assert into == dict(zip(places, places, strict=True)) | {"avgpool": None}
    kernels = {name: slot.folded and slot.folded.kernel_size for name, slot in slots.items()}
    # Into a new layer in the slot, because the convolution of that name has no bias.
    assert kernels == dict.fromkeys(places) | {"layer1.0.conv1": (1, 1), "layer2": (1, 1)}
    grow(slots["layer2"], Stage.BLENDING, "conv_heavy")  # a new seed in a folded slot
    save(network, tmp_path / "grown")
    load(copy := resnet(), tmp_path / "grown")
    assert torch.equal(copy.eval()(x), network.eval()(x))


@pytest.mark.parametrize(
    ("build", "kernel"),
    [
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 1)), 1),
        (lambda c: Residual(nn.Conv2d(c, 4, 1, bias=False), nn.Conv2d(4, c, 3, padding=1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 3, padding=1), nn.Conv2d(4, c, 1)), 3),
        (lambda c: Residual(nn.Conv2d(c, 4, 1), nn.Conv2d(4, c, 3, padding=1)), None),  # padding drops the bias
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=2, dilation=2)), None),
        (lambda c: Residual(nn.Conv2d(c, c, 3, padding=1, padding_mode="circular")), None),
        (lambda c: Residual(nn.Conv2d(c, c, 1, groups=2)), None),
        (lambda c: Residual(nn.Dropout(0.5), nn.Conv2d(c, c, 1)), None),
        (lambda c: nn.Conv2d(c, c, 1), None),
    ],
)
def test_a_blueprint_of_ones_own_folds_where_it_is_one_small_convolution(
    monkeypatch: pytest.MonkeyPatch, build: Callable[[int], nn.Module], kernel: int | None
) -> None:
    monkeypatch.setattr(registry, "_BLUEPRINTS", dict(registry._BLUEPRINTS))
    registry.register("own", {"image"}, parameters=lambda c: 0, flops=lambda c, n: 0)(build)
    network, x = chain("image", nn.Tanh(), nn.Tanh()).double(), example("image", torch.float64)
    germinate(network.slot, "own", generator=generator_of(), birth="random")
    add_noise(network.slot.seed)
    for stage in LIFE[1:]:
        network.slot.move_to(stage)
    affine = affine_map_of(network.slot)
    if kernel is None:
        assert affine is None
        unchanged_by_folding(network, x)
        return
    feature = torch.randn(2, WIDTH, 5, 5, generator=generator_of(), dtype=torch.float64)
    whole = nn.functional.conv2d(feature, *affine, padding=kernel // 2)
    torch.testing.assert_close(whole, network.slot(feature), rtol=1e-10, atol=1e-12)
    assert fold_and_check(network, x, 1e-10) == [FoldResult("place", "place", "")]


# Export.


def gpt() -> nn.Module:
    return GPT((6,), 11, width=8, blocks=3, heads=2, context=8, slots=["layer1", "layer2", "layer3"])


def mlp() -> nn.Module:
    return MLP((5,), 3, width=6, layers=3)


def resnet() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = models.resnet18(num_classes=3)
    attach_slots(network, ["layer1", "layer2.0.conv1", "fc"], images(2))
    return network


def tokens(samples: int) -> Tensor:
    return torch.randint(11, (samples, 6), generator=generator_of(samples))


def vectors(samples: int) -> Tensor:
    return torch.randn(samples, 5, generator=generator_of(samples))


def images(samples: int) -> Tensor:
    return torch.randn(samples, 3, 32, 32, generator=generator_of(samples))


def grown(network: nn.Module) -> nn.Module:
    """Return a network with three seeds, the second at alpha 1/2."""
    stages = [Stage.FOSSILIZED, Stage.BLENDING, Stage.FOSSILIZED]
    for slot, stage in zip(slots_of(network).values(), stages, strict=True):
        grow(slot, stage, SIMPLE[slot.layout], Ramp(2))
    return network.eval()


def resnet_with_a_kept_and_a_folded_seed() -> nn.Module:
    network = resnet()
    network(images(8))  # moves BatchNorm's statistics
    grow(slot_named(network, "layer1"), Stage.FOSSILIZED, "norm")
    grow(slot_named(network, "layer2.0.conv1"), Stage.FOSSILIZED, "conv_light")
    assert [result.target_layer for result in fold(network.eval(), images(4))] == [None, "layer2.0.conv1"]
    return network


PROGRAM_ALONE = """
import sys
sys.modules["esper_lightning"] = None  # as if it were not installed
import numpy, torch
torch.set_num_threads(1)
outputs = torch.export.load("grown.pt2").module()(torch.from_numpy(numpy.load("inputs.npy")))
numpy.save("outputs.npy", outputs.detach().numpy())
"""

MODEL_ALONE = """
import sys
sys.modules["esper_lightning"] = sys.modules["torch"] = None  # as if they were not installed
import numpy, onnxruntime
session = onnxruntime.InferenceSession("grown.onnx")
(outputs,) = session.run(None, {session.get_inputs()[0].name: numpy.load("inputs.npy")})
numpy.save("outputs.npy", outputs)
"""


def outputs_of(program: str, inputs: Tensor, folder: Path) -> Tensor:
    """Return the outputs of a Python program in a process that cannot import this package."""
    np.save(folder / "inputs.npy", inputs.numpy())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and Path(path) != ROOT]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-P", "-c", program], cwd=folder, env=environment, check=True, timeout=240)
    return torch.from_numpy(np.load(folder / "outputs.npy"))


def test_weights_fit_the_plain_architecture_once_all_seeds_are_folded_into_it() -> None:
    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)).eval()

    network, fresh = plain(), plain()
    grow(attach_slots(network, ["1"], vectors(2))["1"], Stage.FOSSILIZED, "lora")
    assert [result.target_layer for result in fold(network, vectors(4))] == ["2"]
    detach_slots(network)
    fresh.load_state_dict(network.state_dict())
    assert torch.equal(fresh(vectors(5)), network(vectors(5)))


NETWORKS = {
    "resnet": (resnet_with_a_kept_and_a_folded_seed, images),
    "gpt": (lambda: grown(gpt()), tokens),
    "mlp": (lambda: grown(mlp()), vectors),
}


@pytest.mark.parametrize("name", rest_is_slow(NETWORKS, {"mlp"}))
def test_an_exported_program_says_the_same_on_batches_of_any_size(name: str, tmp_path: Path) -> None:
    build, inputs = NETWORKS[name]
    network = build()
    export(network, inputs(3), tmp_path / "grown.pt2", "pt2")
    loaded = torch.export.load(tmp_path / "grown.pt2").module()
    for samples in (1, 3, 8):
        torch.testing.assert_close(loaded(inputs(samples)), network(inputs(samples)), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "to"), [("resnet", "pt2"), *((name, "onnx") for name in NETWORKS)])
def test_an_exported_network_runs_without_this_package_and_a_model_of_onnx_without_torch(
    name: str, to: Any, tmp_path: Path
) -> None:
    if to == "onnx":
        for package in ONNX_PACKAGES:
            pytest.importorskip(package)
    build, inputs = NETWORKS[name]
    network = build()
    export(network, inputs(3), tmp_path / f"grown.{to}", to)
    for samples in (1, 5):
        outputs = outputs_of(PROGRAM_ALONE if to == "pt2" else MODEL_ALONE, inputs(samples), tmp_path)
        torch.testing.assert_close(outputs, network(inputs(samples)), rtol=1e-4, atol=1e-5)


def test_a_missing_package_for_onnx_is_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "find_spec", lambda name: None if name == "onnxscript" else find_spec("json"))
    with pytest.raises(ValueError, match=r"^to onnx needs the extra \[onnx\] of this package: pip install onnxscript$"):
        export(mlp(), vectors(2), tmp_path / "grown.onnx", "onnx")
    with pytest.raises(ValueError, match=r"^to onnx needs the extra \[onnx\]"):
        export_network("no folder", "onnx")  # before anything is read


class Chooses(nn.Module):
    """Network whose path depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda path: export(mlp(), vectors(2), path, "onxn"), "unknown format 'onxn'; did you mean 'onnx'"),
        (lambda path: export(mlp(), vectors(1), path, "pt2"), "on at least 2 inputs, got 1"),
        (lambda path: export(Chooses(), vectors(2), path, "pt2"), "the network cannot be exported: "),
    ],
)
def test_what_cannot_be_exported_is_refused_in_one_line(
    attempt: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        attempt(tmp_path / "grown")
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_gives_other_outputs_is_refused_and_the_earlier_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_wrongly(program: torch.export.ExportedProgram, path: Path) -> Callable[[Tensor], Any]:
        path.write_text("wrong")
        return lambda x: program.module()(x) + 0.01

    (tmp_path / "grown.pt2").write_text("earlier")
    monkeypatch.setattr(export_module, "_write_pt2", write_wrongly)
    with pytest.raises(ValueError, match=r"gives other outputs: 0\.01 off"):
        export(mlp(), vectors(2), tmp_path / "grown.pt2", "pt2")
    assert (tmp_path / "grown.pt2").read_text() == "earlier"
    assert len([*tmp_path.iterdir()]) == 1
