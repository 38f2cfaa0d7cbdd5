"""Checks of a training of the user before `Grow` or `Stack` changes its network, and the moment at which they run."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.call import _call_configure_model
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.swa_utils import AveragedModel


def is_validation_of_fit(trainer: Trainer) -> bool:
    """Return True if a validation is one of a training, and no trial before it."""
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


def after_setup(trainer: Trainer, module: LightningModule, then: Callable[[], None]) -> None:
    """Call `then` once the module has built its networks: after its `setup` and `configure_model`, before any restore.

    Lightning calls the `setup` of callbacks before that of the module.
    """
    present = vars(module).get("setup")
    if isinstance(present, _Setup):
        if present.trainer is trainer:
            present.waiting.append(then)
            return
        present = present.replaced  # an earlier trainer has failed before it ran
    vars(module)["setup"] = _Setup(trainer, module, present, waiting=[then])


class _Setup:
    """The `setup` of a module in one run: builds all networks, calls what waits for them, and is gone.

    `replaced` is the attribute `setup` that the module had before; None: a method of its class.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, replaced: Any, *, waiting: list[Callable[[], None]]
    ) -> None:
        self.trainer, self.module, self.replaced, self.waiting = trainer, module, replaced, waiting

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Setup":
        return self  # a copy of the module, such as an average, must not copy the trainer

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        _set_attribute(self.module, "setup", self.replaced)
        self.module.setup(*args, **kwargs)
        _call_configure_model(self.trainer)
        for then in self.waiting:
            then()
        present = vars(self.module).get("configure_model")
        # Lightning calls it next; a network that is built a second time would not be the one that was found.
        _set_attribute(self.module, "configure_model", lambda: _set_attribute(self.module, "configure_model", present))


def _set_attribute(module: LightningModule, name: str, value: Any) -> None:
    """Set an attribute of the module itself in place of a method of its class; None removes it."""
    vars(module).pop(name, None)
    if value is not None:
        vars(module)[name] = value


def check_trainer(
    name: str,
    trainer: Trainer,
    module: LightningModule,
    conflicting: Mapping[type, str],
    *,
    strategies: tuple[type, ...] = (),
) -> None:
    """Raise ValueError, which begins with `name`, if a part of the training does not follow a network that grows.

    `conflicting` are the classes of callbacks that do not, each with the reason; `strategies` follow beside one device
    and DDP.
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
