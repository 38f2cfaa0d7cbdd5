"""Function for Python programs that grows a network of your own; a policy is trained by a Trainer."""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Grow
from esper_lightning.callbacks.grow import Decider
from esper_lightning.callbacks.measuring import reachable
from esper_lightning.growth.stages import OCCUPIED
from esper_lightning.runtime.console import print_status, quieter_lightning
from esper_lightning.runtime.nested import copy_module


class GrownNetwork(NamedTuple):
    """Result of `grow`."""

    network: nn.Module
    """The network with its seeds; it is the object that was given."""
    accuracy: list[float]
    """Validation accuracy after each epoch, 0 … 1."""
    seeds: dict[str, str]
    """Blueprint and stage of the seed in each slot that has one."""
    controls: dict[str, list[float]]
    """Validation accuracy after each epoch of the controls, by name; see `grow`."""
    best: nn.Module
    """The network, or that of the control that ends with a higher validation accuracy."""


class _Classifier(LightningModule):
    """LightningModule of a network that classifies."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], lr: float) -> None:
        super().__init__()
        self.network, self.loss, self.lr = network, loss, lr
        self.accuracy: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs, classes = self.network(batch[0]), batch[1]
        positions = outputs.shape[:1] + outputs.shape[2:]  # axis 1 has the classes
        fits = outputs.ndim > 1 and outputs.shape[1] > 1 and positions == classes.shape
        if not fits or (classes.is_floating_point() and bool((classes != classes.round()).any())):
            raise ValueError(
                f"grow: accuracy needs outputs [B, classes] and class indices [B], got {list(outputs.shape)} and "
                f"{list(classes.shape)}; for other tasks give the callback Grow to your own Trainer"
            )
        labelled = (classes >= 0) & (classes < outputs.shape[1])  # losses ignore others, such as the -100 of padding
        if labelled.any():
            accuracy = (outputs.argmax(1) == classes)[labelled].float().mean()
            measured = {"val_acc": accuracy, "val_loss": self.loss(outputs, classes)}
            self.log_dict(measured, batch_size=int(labelled.sum()), on_epoch=True)

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.accuracy.append(float(self.trainer.callback_metrics["val_acc"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.network.parameters(), lr=self.lr)


def loader_of(batches: Iterable[Any]) -> Iterable[Any]:
    """Return minibatches as one loader: Lightning would take a list of them for one loader per element."""
    if isinstance(batches, list | tuple | Iterator):
        # Its own generator, because a DataLoader draws a random number in each epoch.
        return DataLoader(list(batches), batch_size=None, generator=torch.Generator())  # pyright: ignore[reportArgumentType]  # a list is a dataset
    return batches


@quieter_lightning()
def grow(
    network: nn.Module,
    training: Iterable[tuple[Tensor, Tensor]],
    validation: Iterable[tuple[Tensor, Tensor]],
    slots: Sequence[str],
    *,
    epochs: int = 12,
    controller: str | Decider = "heuristic",
    blueprints: list[str] | None = None,
    lr: float = 0.001,
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    controls: bool = False,
    folder: str | Path | None = None,
    accelerator: str = "auto",
    rng_seed: int = 0,
) -> GrownNetwork:
    """Train a network of your own with Adam while a controller grows it.

    For another optimizer, metric or data of another form, give the callback `Grow` to your own Trainer.

    Args:
        network: Network that classifies; it is changed in place, and trained in training mode.
        training: Minibatches of inputs and classes of one epoch, as a list or a DataLoader.
        validation: Minibatches on which seeds are judged, of the same form.
        slots: Names of its modules, as in `named_modules`, behind which seeds may grow.
        epochs: Epochs of training; after each, the controller chooses one action.
        controller: `tamiyo`, a rule, an import path, a file (.json, .ckpt, .safetensors), an object, or `wait`.
        blueprints: Kinds of seeds, by name or import path. None: all of this package that fit.
        lr: Learning rate.
        loss: Function of outputs and targets.
        controls: Train copies of the network as it is given, too, on the same data. `ungrown`: nothing grows. `built
            in`: all seeds of the end are in it from the first batch on. `…, equal FLOPs`: the same
            control, trained with as many FLOPs as the grown network. `best` of the result is never below `ungrown`.
        folder: Folder for a CSV log of each training, of which `report` makes a page. None: nothing is written.
        accelerator: Device, as Lightning's Trainer names it.
        rng_seed: RNG seed of the order of data and of the seeds' weights.

    Returns the network after the last epoch, which need not be the best one. Raises ValueError if nothing can grow as
    it is asked for, or if the trained network's weights or loss are not finite.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    batches = loader_of(training), loader_of(validation)
    generators = [value for value in reachable(batches) if isinstance(value, torch.Generator)]
    first_states = [generator.get_state() for generator in generators]

    def train(name: str, network: nn.Module, decider: str | Decider, max_steps: int = -1) -> tuple[Grow, list[float]]:
        """Train a network, for `max_steps` batches (-1: all epochs); return its callback and the accuracy by epoch."""
        seed_everything(rng_seed, verbose=False)
        for generator, state in zip(generators, first_states, strict=True):  # the same order of data in each training
            generator.set_state(state)
        network.train()  # Lightning keeps the mode that it finds, and in evaluation mode no seed would learn
        module = _Classifier(network, loss, lr)
        callback = Grow(
            slots,
            network="network",
            blueprints=blueprints,
            decider=decider,
            loss="val_loss",
            horizon=None if max_steps == -1 else epochs,
            rng_seed=rng_seed,
        )
        limits = {"max_epochs": epochs} if max_steps == -1 else {"max_steps": max_steps, "max_epochs": -1}
        logger: Any = False if folder is None else CSVLogger(folder, name=name.replace(", ", " ").replace(" ", "_"))
        off: dict[str, Any] = dict.fromkeys(
            ("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
        )
        trainer = Trainer(accelerator=accelerator, devices=1, callbacks=[callback], logger=logger, **limits, **off)
        handler = signal.getsignal(signal.SIGINT)
        try:
            trainer.fit(module, *batches)
        except SystemExit as end:  # at Ctrl-C Lightning exits and ignores further ones; a program may want to go on
            if not isinstance(end.__context__, KeyboardInterrupt):
                raise
            signal.signal(signal.SIGINT, handler)
            raise end.__context__ from None
        if max_steps != -1:  # the last epoch may have ended before its validation
            trainer.validate(module, batches[1], verbose=False)
        weights_are_finite = all(bool(parameter.isfinite().all()) for parameter in network.parameters())
        if not (weights_are_finite and bool(trainer.callback_metrics["val_loss"].isfinite())):
            raise ValueError(
                f"grow: the training has diverged: weights or loss are not finite; lower lr, which is {lr:g}"
            )
        return callback, module.accuracy

    original = copy_module(network) if controls else network
    callback, accuracy = train("grown", network, controller)
    occupied = {name: slot for name, slot in callback.growing.slots.items() if slot.stage in OCCUPIED}
    seeds = {name: f"{slot.blueprint} {slot.stage.name}" for name, slot in occupied.items()}
    networks, curves = {"grown": network}, {"grown": accuracy}
    for name, decider in callback.controls.items() if controls else ():
        lengths, affordable = {name: -1}, callback.affordable_batches[name]
        if affordable not in (0, callback.batches_seen):  # FLOPs are not known, or nothing has grown
            lengths[f"{name}, equal FLOPs"] = affordable
        for control, max_steps in lengths.items():
            print_status(f"control: {control}")
            networks[control] = copy_module(original)
            _, curves[control] = train(control, networks[control], decider, max_steps)
    if controls:
        for name, values in curves.items():
            print_status(f"{name}: validation accuracy {values[-1]:.4f}")
    best = max(curves, key=lambda name: curves[name][-1])  # the first of equal ones, so the grown one
    del curves["grown"]
    return GrownNetwork(network, accuracy, seeds, curves, networks[best])
