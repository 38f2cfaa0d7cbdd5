"""Functions for Python programs: they train a policy, compare it, or grow a network of your own.

All of them can be imported from `esper_lightning`. They raise ValueError where the command line ends with one line.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from esper_lightning.callbacks import Governor, Grow, Telemetry, default_callbacks
from esper_lightning.callbacks.measuring import Decider
from esper_lightning.checkpoint import AtomicCheckpointIO
from esper_lightning.cli import CHECKPOINTS_FOLDER, run_logger
from esper_lightning.console import print_status, quieter_lightning
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.comparison import ComparisonResult, EvaluationConfig
from esper_lightning.evaluation.report import compare
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.growth.nested import copy_module
from esper_lightning.growth.stages import OCCUPIED
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.losses import PPOConfig
from esper_lightning.tamiyo.policy import PolicyConfig

ALONE: dict[str, Any] = {"devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
"""Arguments of a Trainer in one process that prints nothing by itself."""


class TrainedRun(NamedTuple):
    """Run of `train`."""

    folder: Path
    """Folder with checkpoints, events and TensorBoard's files."""
    module: TamiyoModule
    """Trained policy."""
    data: HostPoolData
    """Hosts on which it was trained."""
    metrics: dict[str, float]
    """Numbers that TensorBoard shows at the end of the last rollout, by tag: `rollout/…`, `train/…`, `reward/…` and so
    on."""

    @property
    def checkpoint(self) -> Path:
        """Checkpoint of the last rollout."""
        return self.folder / CHECKPOINTS_FOLDER / "last.ckpt"


@quieter_lightning()
def train(
    data: HostPoolData,
    *,
    rollouts: int = 30,
    policy: PolicyConfig = PolicyConfig(),
    ppo: PPOConfig = PPOConfig(),
    governor: GovernorConfig | None = GovernorConfig(),
    folder: str | Path = "runs",
    callbacks: Sequence[Callback] = (),
    accelerator: str = "auto",
    resume: str | Path | None = None,
) -> TrainedRun:
    """Train a policy that grows hosts, with a Trainer that has the callbacks of `esper-lightning fit`.

    Args:
        data: Hosts; `data.seed` is the RNG seed of the run.
        rollouts: Rollouts, each an episode of every host and one update of the policy.
        policy: Architecture of the policy.
        ppo: Settings of PPO.
        governor: When a host counts as diverged and is rolled back. None: hosts are not watched.
        folder: Folder in which the run makes a folder of its own.
        callbacks: Further Lightning callbacks.
        accelerator: Device of policy and hosts, as Lightning's Trainer names it.
        resume: Checkpoint of a run with the same settings to go on from, in its folder. `rollouts` counts those before
            it, too.

    Raises ValueError if the settings do not fit together, or if no rollout is left to resume.
    """
    if rollouts < 1:
        raise ValueError(f"rollouts must be at least 1, got {rollouts}")
    for name in ("gamma", "horizon_is_end"):
        ours, theirs = getattr(data.env.reward, name), getattr(ppo, name)
        if ours != theirs:
            raise ValueError(f"RewardConfig.{name} is {ours} and PPOConfig.{name} {theirs}; give both the same")
    seed_everything(data.seed, verbose=False)
    module = TamiyoModule(policy, ppo)
    watched = [] if governor is None else [Governor(governor)]
    usual = [*watched, *(one for one in default_callbacks() if not isinstance(one, Governor))]
    trainer = Trainer(
        accelerator=accelerator,
        max_epochs=rollouts,
        logger=run_logger(folder, resume),
        callbacks=[*callbacks, *usual],
        plugins=[AtomicCheckpointIO()],
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **ALONE,
    )
    trainer.fit(module, datamodule=data, ckpt_path=resume)
    telemetry = next(one for one in usual if isinstance(one, Telemetry))
    if not telemetry.last_rollout:
        raise ValueError(f"the run of {str(resume)!r} has had its {rollouts} rollouts already; give more rollouts")
    assert trainer.log_dir is not None, "the run was logged"
    return TrainedRun(Path(trainer.log_dir), module, data, telemetry.last_rollout | module.metrics)


def evaluate(
    policy: TrainedRun | str | Path | None,
    data: HostPoolData | None = None,
    config: EvaluationConfig = EvaluationConfig(controls=False),
    *,
    task: str | None = None,
    governor: GovernorConfig | None = GovernorConfig(),
    folder: str | Path | None = None,
) -> ComparisonResult:
    """Compare a policy with other controllers on fresh hosts and test data, and print the tables.

    Args:
        policy: Run of `train`, path of a checkpoint or a policy (`x.safetensors`), or `tamiyo`, the policy of the
            package. None: the other controllers are compared alone.
        data: Hosts; they need not be built. None: those of the run.
        config: Settings of the comparison.
        task: Name of the task whose result is returned, where the data have several.
        governor: When a host counts as diverged and is rolled back. None: hosts are not watched.
        folder: Folder for tables. None: they are only printed.

    Raises ValueError if a controller or the task is unknown, or if the checkpoint is damaged or of other hosts.
    """
    if data is None:
        if not isinstance(policy, TrainedRun):
            raise ValueError("evaluate needs hosts; give data")
        data = policy.data
    data.build(torch.device("cpu"))
    if task not in data.pools and (task is not None or len(data.pools) > 1):
        raise ValueError(f"evaluate returns the result of one task; give task: {', '.join(data.pools)}")
    own: TrainedPolicy | None = None
    if isinstance(policy, TrainedRun) and data is policy.data:
        module = policy.module.to(data.pool.device)
        own = TrainedPolicy(data.seed, str(policy.checkpoint), module.policy, module.observation_norm)
    else:
        path = policy.checkpoint if isinstance(policy, TrainedRun) else policy
        config = replace(config, policies=[] if path is None else [str(path)])
    data.oversee(governor)
    try:
        out = None if folder is None else Path(folder)
        results = compare(config, data, own, folder=out, settings=dict(data.hparams))
    finally:
        data.oversee(None)
    return results[task or next(iter(results))]


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


class _Classifier(LightningModule):
    """LightningModule of a network that classifies."""

    def __init__(self, network: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], lr: float) -> None:
        super().__init__()
        self.network, self.loss, self.lr = network, loss, lr
        self.accuracy: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.network(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        outputs = self.network(batch[0])
        measured = {"val_acc": (outputs.argmax(1) == batch[1]).float().mean(), "val_loss": self.loss(outputs, batch[1])}
        self.log_dict(measured, batch_size=len(batch[1]), on_epoch=True)

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
        controller: `tamiyo`, the policy that comes with the package; the name of a rule; an import path; a schedule
            (`x.json`); a policy of your own (`x.ckpt` or `x.safetensors`); an object; or `wait`: nothing grows.
        blueprints: Kinds of seeds, by name or import path. None: all of this package that fit.
        lr: Learning rate.
        loss: Function of outputs and targets.
        controls: Train copies of the network as it is given, too, with the same data in the same order, and print how
            they end. `ungrown`: nothing grows. `built in`: the seeds that the network ends with are in it from the
            first batch on. `built in, equal FLOPs`: the same, for as many batches as have the training FLOPs of
            growth; its last value is that of the end.
        folder: Folder for a CSV log of each training (`grown`, `ungrown` …), of which `report` makes a page. None:
            nothing is written.
        accelerator: Device, as Lightning's Trainer names it.
        rng_seed: RNG seed of the order of data and of the seeds' weights.

    Returns the network after the last epoch, which need not be the best one.

    Raises ValueError if a slot or a blueprint does not exist, if nothing can grow there, or if the trained network's
    weights or loss are not finite.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    batches = loader_of(training), loader_of(validation)

    def train(
        name: str, network: nn.Module, decider: str | Decider, *, max_steps: int = -1
    ) -> tuple[Grow, list[float]]:
        seed_everything(rng_seed, verbose=False)
        network.train()  # Lightning keeps the mode that it finds, and in evaluation mode no seed would learn
        module = _Classifier(network, loss, lr)
        growing = Grow(
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
        files: dict[str, Any] = {"logger": logger, "enable_checkpointing": False}
        trainer = Trainer(accelerator=accelerator, callbacks=[growing], **limits, **files, **ALONE)
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
        return growing, module.accuracy

    original = copy_module(network) if controls else network
    growing, accuracy = train("grown", network, controller)
    filled = {name: slot for name, slot in growing.growing.slots.items() if slot.stage in OCCUPIED}
    seeds = {name: f"{slot.blueprint} {slot.stage.name}" for name, slot in filled.items()}
    found: dict[str, list[float]] = {}
    if controls:
        for name, decider in growing.controls.items():
            print_status(f"control: {name}")
            _, found[name] = train(name, copy_module(original), decider)
            if name == "built in":
                limit, equal = growing.affordable_batches, f"{name}, equal FLOPs"
                print_status(f"control: {equal}")
                _, found[equal] = train(equal, copy_module(original), decider, max_steps=limit)
        for name, values in {"grown": accuracy, **found}.items():
            print_status(f"{name}: validation accuracy {values[-1]:.4f}")
    return GrownNetwork(network, accuracy, seeds, found)
