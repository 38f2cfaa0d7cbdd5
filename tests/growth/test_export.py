"""Export of grown networks by torch.export, for batches of any size."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchvision import models

from esper_lightning.cli.commands import export_network
from esper_lightning.growth import export as export_module
from esper_lightning.growth.attach import attach_slots, detach_slots
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.export import ONNX_PACKAGES, export, fold
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT, MLP
from tests.growth.grown import SIMPLE, generator_of, grow, slot_named
from tests.runs import ROOT
from tests.tiers import rest_is_slow


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


@pytest.mark.parametrize("name", rest_is_slow(NETWORKS, {"gpt", "mlp"}))
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
