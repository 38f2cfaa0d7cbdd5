"""What Grow cannot work with is refused before training, in one line that says why and what to do."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.checks import check_trainer
from esper_lightning.callbacks.grow import CONFLICTING_CALLBACKS, find_network
from esper_lightning.envs import ActionConfig
from esper_lightning.growth import attach_slots
from esper_lightning.growth.depth import depth_slots
from tests.callbacks.grow.modules import Classifier, DigitsData
from tests.callbacks.grow.trainings import grow, trainer


def compiled(module: Classifier) -> None:
    module.net = torch.compile(module.net)  # type: ignore[assignment]


def compiled_in_place(module: Classifier) -> None:
    module.net.compile()


def compiled_as_a_whole(module: Classifier) -> None:
    module.compile()


def averaged(module: Classifier) -> None:
    module.average = AveragedModel(module.net)


def two_networks(module: Classifier) -> None:
    module.other = nn.Sequential(*[nn.Linear(2, 2) for _ in range(6)])


def with_optimizer(make: Callable[[Any], Any]) -> Callable[[Classifier], None]:
    def change(module: Classifier) -> None:
        module.configure_optimizers = lambda: make(module)  # type: ignore[method-assign]

    return change


def deepening(module: Classifier) -> None:
    module.net.append(nn.Sequential(nn.Identity()))
    module.net.extend(depth_slots(module.net, str(len(module.net) - 1), 2, width=1))


def nothing(module: Classifier) -> None:
    pass


LBFGS = with_optimizer(lambda module: torch.optim.LBFGS(module.parameters()))

FUSED = with_optimizer(lambda module: torch.optim.AdamW(module.parameters(), fused=True))

SCALED = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))

ELSEWHERE = with_optimizer(lambda module: torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))

COMPILED = "is compiled, which hides its parts; compile .*training_step, or a function"

REFUSED: dict[str, tuple[Callable[[Classifier], None], dict[str, Any], dict[str, Any], str]] = {
    "AveragedModel": (averaged, {}, {"network": "net"}, "AveragedModel.*second run"),
    "two networks": (two_networks, {}, {}, r"'net', 'other'; give Grow\(network=…\)"),
    "unknown network": (nothing, {}, {"network": "nett"}, "unknown network 'nett'; did you mean 'net'"),
    "unknown slot": (nothing, {}, {"slots": ["33"]}, "in 'net', the network has no module '33'"),
    "slot with the name of its network": (nothing, {}, {"slots": ["net.3"]}, "no module 'net.3'.*within the network"),
    "LBFGS": (LBFGS, {}, {}, "LBFGS cannot hold parameter groups that come and go; use SGD"),
    "fused": (FUSED, {"plugins": SCALED}, {}, "fused optimizer under 16-mixed hides .* make it with fused=False"),
    "depth": (deepening, {}, {}, "'stack1' is for depth, which the callback Stack grows"),
    "no optimizer": (ELSEWHERE, {}, {}, "no optimizer trains the parameters of 'net'"),
    "no validation": (nothing, {"limit_val_batches": 0}, {}, "this run has none; define validation_step"),
    "unknown metric": (nothing, {}, {"monitor": "val_accuracy"}, "logs no 'val_accuracy'.*val_acc"),
    "loss in mode max": (nothing, {}, {"monitor": "val_loss"}, "must be a share from 0 to 1; scale it"),
    "no length": (nothing, {"max_steps": 5}, {}, r"give Grow\(horizon=…\), in validations"),
    "weight averaging": (nothing, {"callbacks": [WeightAveraging()]}, {}, "WeightAveraging averages parameters"),
    "SWA": (nothing, {"callbacks": [StochasticWeightAveraging(0.1)]}, {}, "StochasticWeightAveraging averages"),
    "finetuning": (nothing, {"callbacks": [BackboneFinetuning()]}, {}, "BackboneFinetuning rearranges"),
}


def refused(change: Callable[[Classifier], None], settings: dict[str, Any], options: dict[str, Any]) -> str:
    """Return the error of a training that is refused."""
    module = Classifier()
    change(module)
    callbacks = settings.get("callbacks", [])
    made = trainer(grow(**options), *callbacks, epochs=2, **{k: v for k, v in settings.items() if k != "callbacks"})
    with pytest.raises(ValueError) as raised:
        made.fit(module, DigitsData())
    return str(raised.value)


@pytest.mark.parametrize(("change", "settings", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_grow_is_refused_in_one_line(
    change: Callable[[Classifier], None], settings: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    said = refused(change, settings, options)

    assert re.search(message, said) and "\n" not in said


@pytest.mark.slow
@pytest.mark.parametrize("change", [compiled, compiled_in_place, compiled_as_a_whole])
def test_a_compiled_network_is_refused(change: Callable[[Classifier], None]) -> None:
    """Slow, because torch.compile imports its compiler."""
    assert re.search(COMPILED, refused(change, {}, {}))


@pytest.mark.slow
def test_a_compiled_module_is_refused() -> None:
    module: Any = torch.compile(Classifier())

    with pytest.raises(ValueError, match=COMPILED):
        trainer(grow(), epochs=2).fit(module, DigitsData())


@pytest.mark.parametrize(
    "strategy",
    [
        FSDPStrategy(),
        ModelParallelStrategy(),
        DeepSpeedStrategy.__new__(DeepSpeedStrategy),  # its package need not be installed to refuse it
    ],
)
def test_a_strategy_that_shards_parameters_is_refused(strategy: Strategy) -> None:
    """By the check that each training begins with: they start on accelerators only."""
    made = trainer(grow(), epochs=2)
    made._accelerator_connector.strategy = strategy

    with pytest.raises(ValueError, match=f"Grow: {type(strategy).__name__} .* use one device, or strategy='ddp'"):
        check_trainer("Grow", made, Classifier(), CONFLICTING_CALLBACKS)


def test_several_validation_loaders_are_refused() -> None:
    class TwoLoaders(DigitsData):
        def val_dataloader(self) -> Any:
            return [super().val_dataloader()] * 2

    class TwoValidations(Classifier):
        def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
            pass

    with pytest.raises(ValueError, match="one validation loader, there are 2; give one"):
        trainer(grow(), epochs=2, num_sanity_val_steps=0).fit(TwoValidations(), TwoLoaders())


def test_validation_batches_of_one_sample_are_refused() -> None:
    class OneByOne(DigitsData):
        def val_dataloader(self) -> Any:
            return DataLoader(self.held_out, 1)

    with pytest.raises(ValueError, match="first validation batch has one sample; give the loader a batch_size of 2"):
        trainer(grow(), epochs=2, limit_val_batches=2).fit(Classifier(), OneByOne())


def test_layers_of_the_lightning_module_itself_are_no_network() -> None:
    module = Classifier()
    module.net, module.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)  # type: ignore[assignment]

    with pytest.raises(ValueError, match=r"'net', 'head'; .* put them into a module of their own"):
        find_network(module, None, ["net"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decider": "climing"}, "unknown controller 'climing'; did you mean 'climbing'"),
        ({"decider": object()}, "object has no method 'reset'"),
        ({"decider": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"decider": "nowhere.ckpt"}, "nowhere.ckpt"),
        ({"batches": 0}, "batches must be at least 1"),
        ({"mode": "min", "score": len}, "a score grows with quality"),
        ({"blueprints": ["conv_lite"]}, "did you mean 'conv_light'"),
        ({"blueprints": "conv_lite"}, "did you mean 'conv_light'"),
        ({"blueprints": ["norm"], "actions": ActionConfig(blueprints=["norm"])}, "named twice"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Grow(["3"], **options)


def test_of_two_networks_the_one_that_has_the_slots_already_is_found() -> None:
    module = Classifier()
    attach_slots(module.net, ["5"], torch.zeros(2, 1, 8, 8))
    module.other = nn.Linear(2, 2)

    name, network = find_network(module, None, ["5"])

    assert (name, network) == ("net", module.net)
