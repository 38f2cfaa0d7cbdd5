"""The state of Grow outlives every way to save, and a checkpoint goes on with the settings that it was saved with."""

from pathlib import Path
from typing import Any

import pytest

from esper_lightning.callbacks import Grow
from esper_lightning.growth import attach_from_state_dict
from esper_lightning.growth.stages import Stage
from tests.callbacks.grow.trainings import Classifier, DigitsData, classifier, equal, grow, train, trainer
from tests.decisions import cull, germinate

LIFE = {0: germinate(0, 0), 1: germinate(1, 1), 7: cull(1)}

HALF, WHOLE = 4, 9
"""Epochs of the first training, and of one that goes on from its checkpoint."""


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of a training that has had all its epochs."""
    path = tmp_path_factory.mktemp("half") / "half.ckpt"
    train(classifier("plateau", dropout=0.0), grow(LIFE), epochs=HALF).save_checkpoint(path)
    return path


def go_on(path: Path) -> tuple[Classifier, Grow]:
    module, callback = Classifier("plateau", dropout=0.0), grow(LIFE)
    train(module, callback, epochs=WHOLE, resume_from=path)
    return module, callback


@pytest.mark.parametrize("is_new", [True, False], ids=["new callback", "callback that has trained another network"])
def test_a_fit_with_no_epoch_left_saves_what_it_has_restored(half: Path, is_new: bool, tmp_path: Path) -> None:
    callback = grow(LIFE)
    if not is_new:
        train(classifier(), callback, epochs=1)
    made = train(Classifier("plateau", dropout=0.0), callback, epochs=HALF, resume_from=half)
    made.save_checkpoint(tmp_path / "again.ckpt")

    (expected, first), (module, second) = go_on(half), go_on(tmp_path / "again.ckpt")

    assert equal(module, expected)
    assert first.growing.measurements == second.growing.measurements


@pytest.mark.parametrize("verb", ["validate", "test"])
def test_a_network_that_is_only_validated_is_saved_with_its_growth(half: Path, verb: str, tmp_path: Path) -> None:
    made = trainer(grow(LIFE))
    getattr(made, verb)(Classifier("plateau"), DigitsData(), ckpt_path=half, verbose=False)
    made.save_checkpoint(tmp_path / "again.ckpt")

    _, callback = go_on(tmp_path / "again.ckpt")

    # Lightning saves neither epochs nor optimizers of such a trainer, so that all epochs are trained once more.
    assert callback.validations == HALF + WHOLE
    first, second = callback.growing.slots.values()
    assert first.age > HALF + 1 and second.stage is Stage.EMBARGOED


def test_a_second_fit_that_trains_nothing_saves_what_the_first_one_grew(tmp_path: Path) -> None:
    module, callback = classifier("plateau", dropout=0.0), grow(LIFE)
    made = train(module, callback, epochs=HALF)
    made.fit(module, DigitsData())
    made.save_checkpoint(tmp_path / "again.ckpt")

    assert go_on(tmp_path / "again.ckpt")[1].validations == WHOLE


def test_a_callback_saves_nothing_of_another_network() -> None:
    callback = grow(LIFE)
    train(classifier(), callback, epochs=2)

    trainer(callback).validate(classifier(), DigitsData(), verbose=False)

    assert callback.state_dict() == {}


def test_a_grown_network_that_was_saved_without_grow_is_refused(tmp_path: Path) -> None:
    class Grown(Classifier):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            attach_from_state_dict(self.net, checkpoint["state_dict"], prefix="net.")

    module = classifier()
    train(module, grow(LIFE), epochs=2)
    train(module, epochs=1).save_checkpoint(tmp_path / "plain.ckpt")

    with pytest.raises(ValueError, match=r"a grown network, and no state of Grow .* begin a new training$"):
        train(Grown(), grow(LIFE), epochs=4, resume_from=tmp_path / "plain.ckpt")
    (scores,) = trainer(grow(LIFE)).validate(Grown(), DigitsData(), ckpt_path=tmp_path / "plain.ckpt", verbose=False)
    assert scores == pytest.approx(trainer().validate(module, DigitsData(), verbose=False)[0])
