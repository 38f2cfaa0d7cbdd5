"""Grow saves its state in every way, goes on from it, and finds networks that are built late or run compiled code."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from esper_lightning.callbacks import Grow
from esper_lightning.growth import attach_from_state_dict, slots_of
from esper_lightning.growth.stages import Stage
from tests.callbacks.grow import trainings
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


def test_a_callback_saves_nothing_of_another_network_that_is_validated(tmp_path: Path) -> None:
    callback = grow(LIFE)
    train(classifier(), callback, epochs=2)

    made = trainer(callback)
    made.validate(classifier(), DigitsData(), verbose=False)
    made.save_checkpoint(tmp_path / "plain.ckpt")

    assert callback.state_dict() == {}
    assert not any("seed." in name for name in torch.load(tmp_path / "plain.ckpt", weights_only=True)["state_dict"])


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


# Networks that are built late.


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


# Compiled code.


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
    ended = train(module, grow(trainings.LIFE, slots=["layers.3", "layers.5"]), epochs=8)
    return module, {name: float(value) for name, value in ended.callback_metrics.items()}


@pytest.mark.slow
def test_a_training_with_compiled_code_is_bit_for_bit_the_uncompiled_one() -> None:
    (compiled, metrics), (expected, expected_metrics) = grown(CompiledTraining), grown(Plain)

    assert [slot.stage for slot in slots_of(compiled).values()] == [Stage.FOSSILIZED, Stage.CULLED]
    assert metrics == expected_metrics
    assert equal(compiled, expected)


def test_a_scheduler_on_a_plateau_that_is_stepped_in_some_epochs_alone_goes_on_as_if_uninterrupted(
    tmp_path: Path,
) -> None:
    class Seldom(Classifier):
        def configure_optimizers(self) -> Any:
            configured = super().configure_optimizers()
            return configured | {"lr_scheduler": configured["lr_scheduler"] | {"frequency": 2}}

    def rates(module: Classifier, **settings: Any) -> list[float]:
        seen: list[float] = []
        note = LambdaCallback(
            on_train_epoch_start=lambda trainer, _: seen.append(trainer.optimizers[0].param_groups[0]["lr"])
        )
        train(
            module,
            grow(),
            note,
            ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1, monitor="val_loss"),
            enable_checkpointing=True,
            **settings,
        )
        return seen

    whole = rates(classifier("plateau", Seldom, lr=1e-6), epochs=6)
    assert len(set(whole)) > 1

    assert rates(Seldom("plateau", lr=1e-6), epochs=6, resume_from=tmp_path / "epoch=0.ckpt") == whole[1:]
