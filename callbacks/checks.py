"""Checks before a network grows in a training of the user: `Grow` and `Stack` refuse what cannot grow in one line."""

from collections.abc import Callable, Mapping
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import AveragedModel


def is_validation_of_fit(trainer: Trainer) -> bool:
    """Return True if a validation is one of a training, and no trial before it."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def check_trainer(name: str, trainer: Trainer, module: LightningModule, conflicting: Mapping[type, str]) -> None:
    """Raise ValueError, which begins with `name`, if a part of the training does not follow a network that grows.

    `conflicting` are the classes of callbacks that do not, each with the reason.
    """
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise ValueError(
            f"{name}: {type(trainer.strategy).__name__} keeps parameters in a form that cannot grow; use one device, "
            f"or strategy='ddp'"
        )
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for kind, reason in conflicting.items():
            if isinstance(callback, kind):
                raise ValueError(f"{name}: {type(callback).__name__} {reason}; leave one of the two callbacks out")
    if any(isinstance(part, AveragedModel) for part in module.modules()):
        raise ValueError(
            f"{name}: the module holds an AveragedModel, which does not grow along; average the grown network in a "
            f"second run, or use EMAWeightAveraging where the callback allows it"
        )


def after_setup(trainer: Trainer, module: LightningModule, then: Callable[[], None]) -> None:
    """Call `then` once, right after the module's own `setup` and `configure_model`, in which it may build its network.

    Lightning calls `setup` of callbacks before that of the module. It calls `configure_model` after both, and so a
    second time, which its documentation asks a module to be prepared for.
    """
    setup = module.setup

    def setup_first(*args: Any, **settings: Any) -> None:
        vars(module).pop("setup", None)
        setup(*args, **settings)
        _call_configure_model(trainer)
        then()

    vars(module)["setup"] = setup_first
