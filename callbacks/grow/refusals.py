"""Trainers, modules and optimizers that cannot grow: each is refused in one line, before training begins."""

from collections.abc import Iterator

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

PRECISIONS = ("32-true", "bf16-true", "16-mixed", "bf16-mixed")

AVERAGES = "averages parameters by their place, which growth changes"

CONFLICTING_CALLBACKS = {
    WeightAveraging: AVERAGES,
    StochasticWeightAveraging: AVERAGES,
    BaseFinetuning: "rearranges the optimizer's parameter groups when a run is resumed",
}


def check_trainer(trainer: Trainer, module: LightningModule) -> None:
    """Raise ValueError if a part of the trainer or of the module does not follow a network that grows."""
    for refusal in _refusals(trainer, module):
        raise ValueError(f"Grow: {refusal}")


def _refusals(trainer: Trainer, module: LightningModule) -> Iterator[str]:
    if type(trainer.strategy) not in (SingleDeviceStrategy, DDPStrategy):
        name = type(trainer.strategy).__name__
        yield f"{name} keeps parameters in a form that cannot grow; use one device, or strategy='ddp'"
    if module._compiler_ctx is not None or _is_compiled(module):
        yield (
            f"{type(module).__name__} is compiled, which hides its parts; compile its training_step, or a function "
            f"that calls the network"
        )
    if trainer.precision not in PRECISIONS:
        yield f"precision {trainer.precision!r} cannot grow; use one of {', '.join(PRECISIONS)}"
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for conflicting, reason in CONFLICTING_CALLBACKS.items():
            if isinstance(callback, conflicting):
                yield f"{type(callback).__name__} {reason}; leave one of the two callbacks out"
    if any(isinstance(part, AveragedModel) for part in module.modules()):
        yield f"the module holds an AveragedModel, which {AVERAGES}; average the grown network in a second run"
    if not trainer.enable_validation:
        yield (
            "each validation is followed by a decision, and this run has none; define validation_step and "
            "val_dataloader, and leave limit_val_batches above 0"
        )


def _is_compiled(module: nn.Module) -> bool:
    """Return True if torch.compile made the module, or compiled it in place."""
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def check_network(network: nn.Module, name: str) -> None:
    """Raise ValueError if the network or a part of it is compiled."""
    for part_name, part in network.named_modules():
        if _is_compiled(part):
            where = f"{name}.{part_name}" if part_name else name
            raise ValueError(
                f"Grow: {where!r} is compiled, which hides its parts; compile training_step, or a function that calls "
                f"the network"
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
    refusals = {name: _slot_refusal(child, slots) for name, child in children.items()}
    fitting = {name: child for name, child in children.items() if refusals[name] is None}
    # Single layers are no networks.
    networks = {name: child for name, child in children.items() if any(True for _ in child.children())}
    if slots and networks and not fitting:
        for name, child in children.items():
            check_network(child, name)  # a compiled network hides the names of its modules
        raise ValueError(
            f"Grow: {'; '.join(f'in {name!r}, {refusals[name]}' for name in networks)} (slots are named within the "
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


def _slot_refusal(network: nn.Module, slots: list[str]) -> str | None:
    """Return the reason why a network cannot have these slots, or None if it can, or has them already."""
    existing = slots_of(network)
    missing = [name for name in slots if name not in existing]
    if not missing:
        return None if existing else "no slot is named"
    try:
        parse_slot_names(network, missing)
    except ValueError as error:
        return str(error)
    return None


def find_optimizer(trainer: Trainer, network: nn.Module, name: str) -> Optimizer:
    """Return the optimizer that trains the network.

    Raises ValueError if there is none, if several train a part of it, or if its kind cannot grow.
    """
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
