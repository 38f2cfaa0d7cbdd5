"""Grow measures a module on copies, whatever the module collects its validation in."""

from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from esper_lightning.callbacks.measuring import isolated_copy
from tests.callbacks.grow.modules import Classifier
from tests.callbacks.grow.trainings import classifier, grow, train
from tests.decisions import germinate


class Collector(Classifier):
    """A classifier that logs its accuracy at the end of an epoch, from what it has collected."""

    def correct(self, batch: list[Tensor]) -> Tensor:
        return (self.net(batch[0]).argmax(1) == batch[1]).float()


class NestedLists(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[Tensor]] = {"validation": []}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.outputs["validation"].append(self.correct(batch))

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", torch.cat(self.outputs["validation"]).mean())
        self.outputs["validation"].clear()


class ClearedAtTheStart(NestedLists):
    def on_validation_epoch_start(self) -> None:
        self.outputs["validation"].clear()

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", torch.cat(self.outputs["validation"]).mean())


class MetricInADict(Collector):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = {"validation": MulticlassAccuracy(10, average="micro")}

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.metrics["validation"].update(self.net(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log("val_acc", self.metrics["validation"].compute())
        self.metrics["validation"].reset()


def contributions(module: Classifier) -> dict[str, float]:
    """Return the contributions of two seeds, and the accuracy, after a training of five epochs."""
    made = train(module, grow({0: germinate(0), 1: germinate(1, 1)}), epochs=5)
    metrics = {name: float(value) for name, value in made.callback_metrics.items()}
    return {name: value for name, value in metrics.items() if "contribution" in name or name == "val_acc"}


@pytest.fixture(scope="module")
def expected() -> dict[str, float]:
    return contributions(classifier())


@pytest.mark.parametrize("kind", [NestedLists, ClearedAtTheStart, MetricInADict])
def test_contributions_do_not_depend_on_how_a_validation_is_collected(
    kind: type[Classifier], expected: dict[str, float]
) -> None:
    module = kind()
    module.load_state_dict(classifier().state_dict(), strict=False)

    found = contributions(module)

    assert len(found) == 3 and max(map(abs, found.values())) > 1.0
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_copy_has_its_own_state_and_the_networks_of_its_module() -> None:
    module: Any = MetricInADict()
    numbers = [1, 2]
    module.state = {"lists": [numbers, deque([3])], "pair": (np.zeros(2), {4}), "network": module.net}
    module.alias = numbers
    module.own = module
    module.extra = nn.ModuleDict({"accuracy": module.accuracy})
    module.register_buffer("seen", torch.zeros(2))
    module.accuracy.update(torch.eye(10), torch.arange(10))

    copied: Any = isolated_copy(module)
    copied.seen += 1
    copied.state["lists"][0].append(5)
    copied.state["lists"][1].append(6)
    copied.state["pair"][0][:] = 7.0
    copied.state["pair"][1].add(8)

    assert module.state["lists"] == [[1, 2], deque([3])] and module.state["pair"][1] == {4}
    assert not module.seen.any() and not module.state["pair"][0].any()
    assert copied.alias is copied.state["lists"][0] and copied.own is copied
    assert copied.net is module.net and copied.state["network"] is module.net
    assert copied.extra["accuracy"] is copied.accuracy is not module.accuracy
    assert float(module.accuracy.compute()) == 1.0 and not copied.accuracy.update_called
