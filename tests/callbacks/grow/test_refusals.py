"""What Grow cannot work with is refused before training, in one line that says why and what to do."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.grow import find_network
from esper_lightning.envs import ActionConfig
from esper_lightning.growth import attach_slots
from esper_lightning.growth.depth import depth_slots
from tests.callbacks.grow.trainings import Classifier, DigitsData, grow, trainer
from tests.decisions import germinate

Change = Callable[[Classifier], Any]
"""A change of a user's module. It may return another module, as torch.compile does."""


def with_part(name: str, make: Change) -> Change:
    return lambda module: setattr(module, name, make(module))


def with_optimizer(make: Change) -> Change:
    return with_part("configure_optimizers", lambda module: lambda: make(module))


def deepening(module: Classifier) -> None:
    module.net.append(nn.Sequential(nn.Identity()))
    module.net.extend(depth_slots(module.net, str(len(module.net) - 1), 2, width=1))


def nothing(module: Classifier) -> None:
    pass


def evaluating(module: Classifier) -> None:
    module.net.eval()


def held_out_by(loaders: Callable[[DigitsData], Any]) -> DigitsData:
    """Return digits with validation loaders of their own."""
    return type("HeldOut", (DigitsData,), {"val_dataloader": loaders})()


def logs(value: float, every: int = 1) -> Change:
    """Let a module's validations log a constant accuracy, one in so many epochs."""

    def validation_step(module: Classifier, batch: Any, batch_idx: int) -> None:
        module.net(batch[0])
        if module.current_epoch % every == 0:
            module.log("val_acc", torch.tensor(value))

    return with_part("validation_step", lambda module: partial(validation_step, module))


AVERAGED = with_part("average", lambda module: AveragedModel(module.net))
OTHER = with_part("other", lambda module: nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)]))
LBFGS = with_optimizer(lambda module: torch.optim.LBFGS(module.parameters()))
FUSED = with_optimizer(lambda module: torch.optim.AdamW(module.parameters(), fused=True))
MUON = with_optimizer(lambda module: torch.optim.SGD([{"params": module.parameters(), "use_muon": True}]))
ELSEWHERE = with_optimizer(lambda module: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
OF_LOADERS = with_part("validation_step", lambda module: lambda batch, batch_idx, dataloader_idx=0: None)

compiled = partial(torch.compile, backend="eager")
SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
TWO_LOADERS = {"data": held_out_by(lambda data: [DataLoader(data.held_out, 80)] * 2), "num_sanity_val_steps": 0}
ONE_BY_ONE = {"data": held_out_by(lambda data: DataLoader(data.held_out, 1)), "limit_val_batches": 2}

COMPILED = "is compiled, which hides its parts; compile .*training_step, or a function"

REFUSED: dict[str, tuple[Change, dict[str, Any], dict[str, Any], str]] = {
    "AveragedModel": (AVERAGED, {}, {"network": "net"}, "AveragedModel.*second run"),
    "two networks": (OTHER, {}, {}, r"'net', 'other'; give .*into a module of their own"),
    "unknown network": (nothing, {}, {"network": "nett"}, "unknown network 'nett'; did you mean 'net'"),
    "unknown slot": (nothing, {}, {"slots": ["33"]}, "in 'net', the network has no module '33'"),
    "LBFGS": (LBFGS, {}, {}, "LBFGS cannot hold parameter groups that come and go; use SGD"),
    "fused": (FUSED, {"plugins": SCALED}, {}, "fused optimizer under 16-mixed hides .* make it with fused=False"),
    "depth": (deepening, {}, {}, "'stack1' is for depth, which the callback Stack grows"),
    "no optimizer": (ELSEWHERE, {}, {}, "no optimizer trains the parameters of 'net'"),
    "no validation": (nothing, {"limit_val_batches": 0}, {}, "this run has none; define validation_step"),
    "two validation loaders": (OF_LOADERS, TWO_LOADERS, {}, "one validation loader, there are 2; give one"),
    "one sample": (nothing, ONE_BY_ONE, {}, "first validation batch has one sample; give the loader a batch_size of 2"),
    "unknown metric": (nothing, {}, {"monitor": "val_accuracy"}, "logs no 'val_accuracy'.*val_acc"),
    "percent in mode max": (logs(87.0), {}, {}, "must be a share from 0 to 1; scale it"),
    "a metric of some epochs": (
        logs(0.8, every=2),
        {},
        {},
        "this validation has logged no 'val_acc', .*; .*set every=",
    ),
    "evaluation mode": (evaluating, {}, {"plan": {0: germinate(0)}}, "'3' is in evaluation mode.* put 'net' into"),
    "no length": (nothing, {"max_steps": 5}, {}, r"give Grow\(horizon=…\), in validations"),
    "weight averaging": (nothing, {"callbacks": [WeightAveraging()]}, {}, "WeightAveraging averages parameters"),
    "SWA": (nothing, {"callbacks": [StochasticWeightAveraging(0.1)]}, {}, "StochasticWeightAveraging averages"),
    "finetuning": (nothing, {"callbacks": [BackboneFinetuning()]}, {}, "BackboneFinetuning rearranges"),
    "a compiled network": (with_part("net", lambda module: compiled(module.net)), {}, {}, COMPILED),
    "a network compiled in place": (lambda module: module.net.compile(backend="eager"), {}, {}, COMPILED),
    "a compiled forward": (
        lambda module: setattr(module.net, "forward", compiled(module.net.forward)),
        {},
        {},
        COMPILED,
    ),
    "matrices first": (MUON, {}, {}, "its first group, whose options seeds take, is for matrices alone; put it last"),
    "a module compiled in place": (lambda module: module.compile(backend="eager"), {}, {}, COMPILED),
    "a compiled module": (compiled, {}, {}, COMPILED),
}


@pytest.mark.parametrize(("change", "settings", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_grow_is_refused_in_one_line(
    change: Change, settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    settings, module = dict(settings), Classifier()
    callbacks, data = settings.pop("callbacks", []), settings.pop("data", DigitsData())
    changed = change(module)

    with pytest.raises(ValueError, match=message) as refusal:
        trainer(grow(**options), *callbacks, epochs=2, **settings).fit(module if changed is None else changed, data)

    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decider": "climing"}, "unknown controller 'climing'; did you mean 'climbing'"),
        ({"decider": object()}, "object has no method 'reset'"),
        ({"decider": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"decider": "nowhere.ckpt"}, "nowhere.ckpt"),
        ({"batches": 0}, "batches must be at least 1"),
        ({"mode": "min", "score": len}, "a score grows with quality"),
        ({"monitor": "val_loss"}, "by its name val_loss falls with quality; give mode='min', or 'max' if it rises"),
        ({"monitor": "val/BCE_epoch"}, "by its name val/BCE_epoch falls with quality"),
        ({"monitor": "l1_error"}, "by its name l1_error falls with quality"),
        ({"blueprints": ["conv_lite"]}, "did you mean 'conv_light'"),
        ({"blueprints": "conv_lite"}, "did you mean 'conv_light'"),
        ({"blueprints": ["norm"], "actions": ActionConfig(blueprints=["norm"])}, "named twice"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grow(["3"], **options)


@pytest.mark.parametrize("options", [{"monitor": "val_loss", "mode": "max"}, {"monitor": "gloss/maestro_acc"}])
def test_a_metric_may_have_any_name(options: dict[str, Any]) -> None:
    assert Grow(["3"], **options).mode == "max"


def test_of_two_networks_the_one_that_has_the_slots_already_is_found() -> None:
    module = Classifier()
    attach_slots(module.net, ["5"], torch.zeros(2, 1, 8, 8))
    module.other = nn.Linear(2, 2)

    name, network = find_network(module, None, ["5"])

    assert (name, network) == ("net", module.net)
