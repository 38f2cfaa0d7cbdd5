"""Grow finds a network that the module's own `setup` or `configure_model` builds, and restores it from a checkpoint."""

from pathlib import Path

import pytest
import torch

from tests.callbacks.grow.trainings import Classifier, DigitsData, classifier, grow, train, trainer
from tests.decisions import germinate


class Late(Classifier):
    """Classifier whose network is built by a hook of Lightning, with the same weights every time."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = (classifier().net,)
        self.built: list[str] = []
        del self.net

    def build(self, hook: str) -> None:
        self.built.append(hook)
        (self.net,) = self.hidden


@pytest.mark.parametrize("hook", ["setup", "configure_model"])
def test_a_network_that_is_built_late_grows_and_is_built_once(hook: str, tmp_path: Path) -> None:
    kind: type[Late] = type("BuiltByHook", (Late,), {hook: lambda self, **_: self.build(hook)})
    plan = {0: germinate(0)}
    module, callback, again = kind(), grow(plan), grow(plan)
    made, early = train(module, callback, epochs=3), train(classifier(), grow(plan), epochs=3)

    assert module.built == [hook]
    assert not {"setup", "configure_model"} & set(vars(module))
    assert callback.growing.module is module.net
    assert made.callback_metrics["val_loss"] == early.callback_metrics["val_loss"]

    made.save_checkpoint(tmp_path / "grown.ckpt")
    train(kind(), again, epochs=5, resume_from=tmp_path / "grown.ckpt")

    assert again.growing.slots["3"].blended


def test_a_training_that_failed_early_leaves_nothing_behind() -> None:
    module = classifier()

    with pytest.raises(ValueError, match="unknown network"):
        train(module, grow(network="nett"))
    module.setup = lambda stage: setattr(module, "stage", stage)  # type: ignore[method-assign]
    train(module, grow(), epochs=1)

    assert module.stage == "fit" and "configure_model" not in vars(module)


def test_a_network_that_is_validated_is_saved_with_grow_among_the_callbacks(tmp_path: Path) -> None:
    made = trainer(grow())
    made.validate(classifier(), DigitsData(), verbose=False)

    made.save_checkpoint(tmp_path / "plain.ckpt")

    assert isinstance(torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"], dict)
