"""Runs of the command line for tests, in this process or in a subprocess with a timeout."""

import csv
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar
from unittest.mock import patch

import pytest
import torch
from lightning import Callback, Trainer
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from esper_lightning.__main__ import main
from esper_lightning.callbacks.resume import STOP_SIGNALS
from esper_lightning.cli.commands import EsperCLI
from esper_lightning.controllers import CONTROLLERS
from esper_lightning.envs.executors import EXECUTORS
from esper_lightning.envs.rewards import REWARDS
from esper_lightning.envs.snapshot import unpack
from esper_lightning.growth.blueprints import registry
from esper_lightning.growth.slot import EXTRA_STATE, decode
from esper_lightning.hosts import CNN
from esper_lightning.module import TamiyoModule

# The machine is shared, and with one thread every process adds up in the same order.
torch.set_num_threads(1)

ROOT = Path(__file__).parent.parent
CONFIGS = ROOT / "configs"

EPOCHS, HORIZON = 3, 5
TINY = (
    *("--config", str(CONFIGS / "smoke.yaml"), "--trainer.max_epochs", str(EPOCHS), "--data.env.horizon", str(HORIZON)),
    *("--data.env.training.batches", "2", "--model.evaluation.hosts", "0", "--trainer.enable_progress_bar", "false"),
    *("--data.env.executor", "loop"),  # the reference
)
"""2 hosts, 3 rollouts of 5 ticks, two minibatches per tick: one second once torch is imported."""


def tiny_host(input_shape: Sequence[int], outputs: int) -> nn.Module:
    """The host of configs/smoke.yaml with its slots in their usual positions."""
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, channels_last=False)


class Run:
    """Contents of a run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoints = folder / "checkpoints"
        self.last = self.checkpoints / "last.ckpt"

    def scalars(self) -> dict[str, list[tuple[int, float]]]:
        """Return TensorBoard's points (step, value) by tag, without tags whose points are all NaN."""
        events = EventAccumulator(str(self.folder), size_guidance={"scalars": 0}).Reload()
        tags = sorted(tag for tag in events.Tags()["scalars"] if events.Scalars(tag))
        return {tag: [(point.step, point.value) for point in events.Scalars(tag)] for tag in tags}


def measured(run: Run) -> dict[str, list[tuple[int, float]]]:
    """Return what a run wrote to TensorBoard, but for speed, memory and the metric of hyperparameters.

    At every start TensorBoardLogger writes the last one with the value -1.
    """
    return {tag: points for tag, points in run.scalars().items() if not tag.startswith(("time/", "memory/", "hp_m"))}


def csv_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file, without columns of durations."""
    with path.open(newline="") as file:
        return [{name: text for name, text in row.items() if "seconds" not in name} for row in csv.DictReader(file)]


def only_run(root: Path) -> Run:
    """Return the only run folder below `root`."""
    (folder,) = root.iterdir()
    return Run(folder)


class SharedParserCLI(EsperCLI):
    """Command line with a parser that is built once per process, since building it takes most of a short start."""

    built: ClassVar[dict[str, dict[str, Any]]] = {}  # by what is asked for: with subcommands or without

    def setup_parser(self, *args: Any) -> None:
        asked = repr(args[:2])
        if asked not in self.built:
            super().setup_parser(*args)
            parts = ("parser", "_subcommand_parsers", "_subcommand_method_arguments")
            self.built[asked] = {name: getattr(self, name) for name in parts if hasattr(self, name)}
        vars(self).update(self.built[asked])


def remembered(find: Callable[..., Any]) -> Callable[..., Any]:
    """jsonargparse's search for an action, but once for each key: a start asks some 4,700 times for a few hundred.

    A parser keeps its own answers, so that they go with it, and they hold for as many actions as it had by then. A
    sixth of the time of a tiny run.
    """

    def find_once(parser: Any, dest: str, exclude: Any = None) -> Any:
        found = vars(parser).setdefault("_found", {})
        asked = len(parser._actions), dest, exclude
        if asked not in found:
            found[asked] = find(parser, dest, exclude)
        return found[asked]

    return find_once


def cli(*args: str) -> EsperCLI:
    """Run `esper-lightning fit` in this process and return its CLI object."""
    built: list[EsperCLI] = []

    class Kept(SharedParserCLI):
        def before_fit(self) -> None:
            built.append(self)
            super().before_fit()

    # Lightning warns of arguments of the process that differ from those it was given.
    with patch("esper_lightning.cli.commands.EsperCLI", Kept), patch.object(sys, "argv", sys.argv[:1]):
        main(["fit", *args])
    return built[0]


def command(*args: str) -> None:
    with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process that differ from these
        main([*args])


def refusal(capsys: pytest.CaptureFixture[str], run: Callable[[], object], code: int = 2) -> str:
    """Return the line on stderr with which a command ends; it is the only one, and the exit code is `code`."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        run()
    said = capsys.readouterr().err
    assert ended.value.code == code, said
    (line,) = [line for line in said.splitlines() if "Trainer.fit" not in line]
    assert line.startswith("error: ")
    return line


def make_trainer(root: Path, *callbacks: Callback, **settings: Any) -> Trainer:
    """Return a Trainer for two rollouts on the CPU that prints nothing but what callbacks do."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu", "log_every_n_steps": 1}
    usual = {"max_epochs": 2, "default_root_dir": root, "num_sanity_val_steps": 0, **quiet}
    return Trainer(callbacks=list(callbacks), **usual | settings)


def fit(root: Path, *args: str) -> EsperCLI:
    """Run a tiny training in this process, with its run folder below `root`."""
    return cli(*TINY, "--trainer.default_root_dir", str(root), *args)


@contextmanager
def forgotten_parts() -> Iterator[None]:
    """Forget at the end of the context what has been registered and imported in it."""
    tables: list[Any] = [registry._BLUEPRINTS]
    for parts in (REWARDS, CONTROLLERS, EXECUTORS):
        tables += [parts, parts.registered]
    with ExitStack() as stack:
        for table in tables:
            stack.enter_context(patch.dict(table))
        yield


@contextmanager
def guarded_signals() -> Iterator[None]:
    """Fail the test at an unhandled signal, which would otherwise end pytest."""

    def raise_unhandled(number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"no handler took {signal.Signals(number).name}")

    before = {number: signal.signal(number, raise_unhandled) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def with_callback(callback: type[Callback], **init_args: Any) -> tuple[str]:
    """Return the flag that adds `callback` to a run."""
    path = f"{callback.__module__}.{callback.__qualname__}"
    return (f"--trainer.callbacks+={json.dumps({'class_path': path, 'init_args': init_args})}",)


class SaveEveryTick(Callback):
    """Callback that saves `tick1.ckpt`, `tick2.ckpt` … beside the other checkpoints; the last at the epoch's end."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if not trainer.is_last_batch:
            self._save(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        trainer.save_checkpoint(Path(trainer.log_dir) / "checkpoints" / f"tick{pl_module.collector.ticks}.ckpt")


def fit_saving_ticks(root: Path, *args: str) -> Run:
    fit(root, *args, *with_callback(SaveEveryTick))
    return only_run(root)


class SignalAt(Callback):
    """Callback that sends the signal `number` to the process of a rank at the end of tick `tick`."""

    def __init__(self, tick: int, number: int = int(signal.SIGTERM), rank: int = 0) -> None:
        self.tick, self.number, self.rank = tick, number, rank

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if pl_module.collector.ticks == self.tick and trainer.global_rank == self.rank:
            os.kill(os.getpid(), self.number)


def load(path: Path) -> dict[str, Any]:
    """Load a checkpoint as strictly as torch can."""
    return torch.load(path, map_location="cpu", weights_only=True)


def tick_of(checkpoint: Path) -> int:
    """Return the number of ticks that a run had done when it was saved."""
    return load(checkpoint)["callbacks"]["RolloutState"]["loop"]["ticks"]


def saved_stages(checkpoint: Path) -> set[str]:
    """Return the stages of the slots of all hosts in a checkpoint."""
    networks = [unpack(host)["growing"]["network"] for host in load(checkpoint)["HostPoolData"]["pool"]["envs"]]
    states = [state for network in networks for name, state in network.items() if name.endswith(EXTRA_STATE)]
    return {decode(state)["stage"] for state in states}


def continuation(path: Path) -> dict[str, Any]:
    """Return a checkpoint without the path of the run folder, the only part in which equal runs may differ."""
    checkpoint = load(path)
    callbacks = checkpoint["callbacks"].items()
    checkpoint["callbacks"] = {name: state for name, state in callbacks if not name.startswith("ModelCheckpoint")}
    return checkpoint


def differences(a: Any, b: Any, where: str = "") -> list[str]:
    """Return the paths at which two nested structures differ; tensors must be equal bit for bit."""
    if type(a) is not type(b):
        return [f"{where}: {type(a).__name__} and {type(b).__name__}"]
    if isinstance(a, torch.Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return [f"{where}: {a.dtype} {tuple(a.shape)} and {b.dtype} {tuple(b.shape)}"]
        same = a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes()
        return [] if same else [f"{where}: up to {(a.double() - b.double()).abs().max().item():.3g} apart"]
    if isinstance(a, Mapping):
        if list(a) != list(b):
            return [f"{where}: keys {list(a)} and {list(b)}"]
        return [found for key in a for found in differences(a[key], b[key], f"{where}.{key}")]
    if isinstance(a, Sequence) and not isinstance(a, str | bytes):
        if len(a) != len(b):
            return [f"{where}: lengths {len(a)} and {len(b)}"]
        return [found for i in range(len(a)) for found in differences(a[i], b[i], f"{where}[{i}]")]
    return [] if a == b else [f"{where}: {a!r} and {b!r}"]
