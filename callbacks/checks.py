"""Checks of a training of the user before `Grow` or `Stack` changes its network, and the moment at which they run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim.swa_utils import AveragedModel


def is_validation_of_fit(trainer: Trainer) -> bool:
    """Return True if the validation that runs belongs to a training, and is not Lightning's sanity check before it."""
    return trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking


def ends_trial(trainer: Trainer) -> bool:
    """Return True while a finder of Lightning loads the file of its own that undoes its trial."""
    return Path(trainer.ckpt_path or "").name.startswith((".lr_find_", ".scale_batch_size_"))


def check_resumed(name: str, trainer: Trainer) -> None:
    """Raise ValueError, which begins with `name`, if a finder has kept a checkpoint from being resumed."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            raise ValueError(
                f"{name}: {type(callback).__name__} lets the trainer forget the checkpoint that it resumes; leave it "
                f"out of a resumed run"
            )


def after_setup(trainer: Trainer, module: LightningModule, action: Callable[[], None]) -> None:
    """Call `action` once the module has built its networks in `setup` and `configure_model`, and before any restore.

    Lightning calls the `setup` of callbacks before the module's.
    """
    present = vars(module).get("setup")
    if isinstance(present, _Setup):
        if present.trainer is trainer:
            present.actions.append(action)
            return
        present = present.replaced  # an earlier trainer has failed before it ran
    vars(module)["setup"] = _Setup(trainer, module, replaced=present, actions=[action])


class _Setup:
    """Replacement of a module's `setup` for one run: builds all networks, calls the actions, and puts `setup` back.

    `replaced` is the attribute `setup` that the module had before; None: only the method of its class.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, *, replaced: Any, actions: list[Callable[[], None]]
    ) -> None:
        self.trainer, self.module, self.replaced, self.actions = trainer, module, replaced, actions

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Setup":
        return self  # a copy of the module, such as an average, must not copy the trainer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _set_attribute(self.module, "setup", self.replaced)
        self.module.setup(*args, **kwargs)
        _call_configure_model(self.trainer)
        for action in self.actions:
            action()
        # Lightning calls configure_model next, which does nothing this once: the actions worked on these networks.
        present = vars(self.module).get("configure_model")
        _set_attribute(self.module, "configure_model", lambda: _set_attribute(self.module, "configure_model", present))


def _set_attribute(module: LightningModule, name: str, value: Any) -> None:
    """Set an attribute of the module itself in place of a method of its class; None removes it."""
    vars(module).pop(name, None)
    if value is not None:
        vars(module)[name] = value


def check_processes(name: str, trainer: Trainer) -> None:
    """Raise ValueError if processes that the strategy forks or spawns would keep the grown network to themselves."""
    method = getattr(trainer.strategy, "_start_method", "popen")  # in notebooks Lightning chooses fork
    if method != "popen":
        raise ValueError(
            f"{name}: with strategy='ddp_{method}' what has grown stays in the processes that train; use one device, "
            f"or a script with strategy='ddp'"
        )


def is_copy(one: nn.Module, other: nn.Module) -> bool:
    """Return True if two modules are different objects of one class with equal parameters, as after a deepcopy."""
    if one is other or type(one) is not type(other):
        return False
    ours, theirs = (dict(module.named_parameters()) for module in (one, other))
    if not ours or ours.keys() != theirs.keys():
        return False
    pairs = [(parameter, theirs[name]) for name, parameter in ours.items()]
    if any(is_lazy(x) or x.is_meta for pair in pairs for x in pair):  # without values yet
        return False
    return all(x is not y and x.shape == y.shape and torch.equal(x.cpu(), y.cpu()) for x, y in pairs)


def check_trainer(
    name: str,
    trainer: Trainer,
    module: LightningModule,
    *,
    conflicting: Mapping[type, str],
    strategies: tuple[type, ...] = (),
) -> None:
    """Raise ValueError if a strategy, a callback or an average of the training does not follow a network that grows.

    Messages begin with `name`, the callback that grows the network. `conflicting` has classes of callbacks that do not
    follow, with the reasons; `strategies` are those that follow, besides one device and DDP.
    """
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy, *strategies):
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
