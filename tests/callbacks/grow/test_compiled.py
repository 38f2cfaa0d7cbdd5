"""Grow trains a module that runs compiled code exactly as it trains the same module uncompiled."""

from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.growth import slots_of
from esper_lightning.growth.stages import Stage
from tests.callbacks.grow.trainings import LIFE, Classifier, classifier, equal, grow, train


class Whole(nn.Module):
    """Network with a forward pass of its own, which does not run the slots as an nn.Sequential runs its children."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Plain(Classifier):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.net = Whole(self.net)  # type: ignore[assignment]


class CompiledTraining(Plain):
    training_step = torch.compile(Plain.training_step, backend="aot_eager")


def grown(kind: type[Classifier]) -> tuple[Classifier, dict[str, float]]:
    """Return a module and its metrics after a training of 8 epochs."""
    torch.compiler.reset()
    module = classifier(kind=kind)
    ended = train(module, grow(LIFE, slots=["layers.3", "layers.5"]), epochs=8)
    return module, {name: float(value) for name, value in ended.callback_metrics.items()}


def test_a_training_with_compiled_code_is_bit_for_bit_the_uncompiled_one() -> None:
    (compiled, metrics), (expected, expected_metrics) = grown(CompiledTraining), grown(Plain)

    assert [slot.stage for slot in slots_of(compiled).values()] == [Stage.FOSSILIZED, Stage.CULLED]
    assert metrics == expected_metrics
    assert equal(compiled, expected)
