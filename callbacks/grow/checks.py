"""Network, optimizer and number of ticks of a training with `Grow`, and checks before it begins.

A training in which the network cannot grow is refused by a ValueError of one line.
"""

import math

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from esper_lightning.blueprints import suggest_name
from esper_lightning.growth.attach import parse_slot_names
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.param_groups import check_optimizer

AVERAGES = "averages parameters by their place, which growth changes"
CONFLICTING_CALLBACKS = {
    WeightAveraging: AVERAGES,
    StochasticWeightAveraging: AVERAGES,
    BaseFinetuning: "rearranges the optimizer's parameter groups when a run is resumed",
}


def check_trainer(trainer: Trainer, module: LightningModule, network: nn.Module, name: str) -> None:
    """Raise ValueError if a part of the trainer or of the module does not follow a network that grows."""
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        raise ValueError(
            f"Grow: {type(trainer.strategy).__name__} keeps parameters in a form that cannot grow; use one device, or "
            f"strategy='ddp'"
        )
    if module._compiler_ctx is not None:
        _refuse_compiled(module, type(module).__name__, always=True)
    _refuse_compiled(module, type(module).__name__)
    for part_name, part in network.named_modules():
        _refuse_compiled(part, f"{name}.{part_name}" if part_name else name)
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for conflicting, reason in CONFLICTING_CALLBACKS.items():
            if isinstance(callback, conflicting):
                raise ValueError(f"Grow: {type(callback).__name__} {reason}; leave one of the two callbacks out")
    if any(isinstance(part, AveragedModel) for part in module.modules()):
        raise ValueError(
            f"Grow: the module holds an AveragedModel, which {AVERAGES}; average the grown network in a second run"
        )
    if not trainer.enable_validation:
        raise ValueError(
            "Grow: each validation is followed by a decision, and this run has none; define validation_step and "
            "val_dataloader, and leave limit_val_batches above 0"
        )


def _refuse_compiled(module: nn.Module, name: str, *, always: bool = False) -> None:
    """Raise ValueError if torch.compile made the module, or compiled it in place."""
    if always or module._compiled_call_impl is not None or hasattr(module, "_orig_mod"):
        raise ValueError(
            f"Grow: {name} is compiled, which hides its parts; compile training_step, or a function that calls the "
            f"network"
        )


def find_network(module: LightningModule, name: str | None, slots: list[str]) -> tuple[str, nn.Module]:
    """Return name and module of the network that grows.

    Args:
        module: LightningModule that holds it.
        name: Its name as in `named_modules`. None: the only child of the module that has parameters and all `slots`.
        slots: Names of slots within the network; if empty, it has slots built in.
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    if name is not None:
        if name not in modules or not name:
            raise ValueError(f"Grow: unknown network {name!r}; {suggest_name(name, [n for n in modules if n])}")
        return name, modules[name]
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    reasons = {name: _reason_against(child, slots) for name, child in children.items()}
    fitting = {name: child for name, child in children.items() if reasons[name] is None}
    # Single layers are no networks.
    networks = {name: child for name, child in children.items() if any(True for _ in child.children())}
    if slots and networks and not fitting:
        for name, child in children.items():
            _refuse_compiled(child, name)  # a compiled network hides the names of its modules
        raise ValueError(
            f"Grow: {'; '.join(f'in {name!r}, {reasons[name]}' for name in networks)} (slots are named within the "
            f"network: 'layer1' for self.net.layer1)"
        )
    candidates = fitting or children
    if len(candidates) != 1:
        names = ", ".join(map(repr, candidates)) or "none"
        raise ValueError(
            f"Grow: the module's parts with parameters are {names}; give Grow(network=…) the name of the one that "
            f"grows (layers of the LightningModule itself cannot grow: put them into a module of their own)"
        )
    return next(iter(candidates.items()))


def _reason_against(network: nn.Module, slots: list[str]) -> str | None:
    """Return the reason why a network cannot have these slots, or None if it can, or has them already."""
    existing = slots_of(network)
    if not (missing := [name for name in slots if name not in existing]):
        return None if existing else "no slot is named"
    try:
        parse_slot_names(network, missing)
    except ValueError as error:
        return str(error)
    return None


def find_optimizer(trainer: Trainer, network: nn.Module, name: str) -> Optimizer:
    """Return the only optimizer that trains the network. Raises ValueError if there is none that can grow."""
    parameters = {id(parameter) for parameter in network.parameters()}
    owners = [
        optimizer
        for optimizer in trainer.optimizers
        if any(id(parameter) in parameters for group in optimizer.param_groups for parameter in group["params"])
    ]
    if len(owners) != 1:
        many = "several optimizers train" if owners else "no optimizer trains"
        raise ValueError(f"Grow: {many} the parameters of {name!r}; name a network that exactly one optimizer trains")
    (optimizer,) = owners
    check_optimizer(optimizer)
    precision = trainer.precision_plugin
    is_scaled = isinstance(precision, MixedPrecision) and precision.scaler is not None
    if is_scaled and getattr(optimizer, "_step_supports_amp_scaling", False):
        raise ValueError(
            "Grow: a fused optimizer under 16-mixed hides the size of gradients, by which seeds are judged; make it "
            "with fused=False"
        )
    return optimizer


def count_ticks(trainer: Trainer, every: int, *, epochs_over: int) -> int:
    """Return the ticks of a training after its first epochs. Raises ValueError if the settings do not tell."""
    if trainer.fast_dev_run:  # type: ignore[attr-defined]
        return 1
    epochs, batches, interval = trainer.max_epochs, trainer.num_training_batches, trainer.val_check_batch
    if epochs is None or epochs < 1 or trainer.max_steps != -1 or interval is None:
        raise ValueError(
            "Grow: the length of the training is unknown without max_epochs, and with max_steps or validations by the "
            "clock; give Grow(horizon=…), in validations"
        )

    def validations_in(epochs: int) -> float:
        if trainer.check_val_every_n_epoch is None:
            return epochs * batches // interval
        return epochs // trainer.check_val_every_n_epoch * (1 if math.isinf(interval) else batches // interval)

    validations = validations_in(epochs) - validations_in(epochs_over)
    if not math.isfinite(validations) or validations < every:
        raise ValueError(
            f"Grow: {epochs - epochs_over} epochs have {validations:g} validations, and a tick takes {every}; train "
            f"for longer, or give Grow(horizon=…)"
        )
    return int(validations) // every
