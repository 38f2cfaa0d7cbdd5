"""Record of a run that makes it repeatable: config, software versions, machine, and command."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jsonargparse import Namespace
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from esper_lightning import __version__
from esper_lightning.checkpointing.validate import (
    SETTINGS_KEY,
    adapt_optimizer_state,
    check_loops,
    differences,
    relocate_checkpoint_paths,
)
from esper_lightning.console import print_status
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.module import TamiyoModule, attached_data
from esper_lightning.ranks import local_world
from esper_lightning.serialization.replace import replace_and_keep, replace_durably

PACKAGE_NAME = "esper-lightning"

RUN_FILE = "run.json"
"""File in a run folder that describes the latest process of the run."""

THREADS_SETTING = "threads_per_operator"

REPORTED_PREFIXES = (
    *("seed_everything", THREADS_SETTING, "model.", "data.", "governor.enabled", "governor.rules.", "evaluation."),
    "trainer.max_epochs",
)
"""Prefixes of the settings that affect the results of a run; output folders and logging do not."""


class RunRecord(Callback):
    """Callback that saves `run.json` in the run folder, and fits a checkpoint to this run before it is restored.

    The file of an earlier start of the same run is kept as `run.1.json` and so on. The new file replaces it atomically,
    and nothing is written before a checkpoint is restored completely.

    Attributes:
        settings: Reported settings as strings, by dotted name; empty for a run without a config.
        training_started: True once the checkpoint is restored and training has started.
    """

    settings: Mapping[str, str] = MappingProxyType({})
    training_started = False
    _folder: Path | None = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        data = attached_data(trainer)
        assert isinstance(data, HostPoolData) and isinstance(pl_module, TamiyoModule), "those of a run on hosts"
        check_loops(checkpoint, trainer.fit_loop.state_dict(), {env.tick for env in data.pool.envs})
        adapt_optimizer_state(checkpoint, pl_module.configure_optimizers())
        states = checkpoint["callbacks"]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                state = relocate_checkpoint_paths(states.pop(callback.state_key), str(callback.dirpath))
                if state is not None:
                    states[callback.state_key] = state

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        data = attached_data(trainer)
        assert isinstance(data, HostPoolData), "that of a run on hosts"
        folder = Path(trainer.log_dir or trainer.default_root_dir)  # Lightning wants it to be read on every rank
        if trainer.is_global_zero:
            self._write(trainer, data, folder)
            self._folder = folder
        self.training_started = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note that the run has ended normally, so that torchrun's job does not go on from it."""
        if self._folder is not None and job_name() is not None:
            path = self._folder / RUN_FILE
            record = json.loads(path.read_text()) | {"finished": True}
            replace_durably(path, lambda file: file.write((json.dumps(record, indent=1) + "\n").encode()))

    def _write(self, trainer: Trainer, data: HostPoolData, folder: Path) -> None:
        record = provenance(
            data.seed, trainer.strategy.root_device, str(data.pool.executor_choice), precision=data.precision
        )
        if trainer.world_size > 1 or job_name() is not None:
            record |= {"processes": trainer.world_size, "job": job_name()}
        replace_and_keep(folder / RUN_FILE, json.dumps(record, indent=1) + "\n")


class ConfigRecord(RunRecord, SaveConfigCallback):
    """Record of a run of the command line, which also saves `config.yaml`, and the settings in checkpoints.

    Attributes:
        non_default_settings: Reported settings that differ from the defaults.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        config = config.clone()
        config.ckpt_path = None  # repeating the run must not resume this one
        super().__init__(parser, config, **kwargs)
        self.settings = flat_settings(config.as_dict())
        defaults = flat_settings(parser.get_defaults().as_dict())
        self.non_default_settings = {
            name: value for name, value in self.settings.items() if defaults.get(name) != value
        }

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do nothing: the base class would save the config before the checkpoint is restored."""

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS_KEY] = self.settings

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        if SETTINGS_KEY in checkpoint:
            saved_settings = checkpoint[SETTINGS_KEY]
            print_status(*differences(saved_settings, self.settings))
            if saved_settings.get(THREADS_SETTING) != self.settings[THREADS_SETTING]:
                print_status(
                    "with another number of threads sums round differently: the run does not continue bit for bit"
                )

    def _write(self, trainer: Trainer, data: HostPoolData, folder: Path) -> None:
        replace_and_keep(folder / self.config_filename, self.parser.dump(self.config, skip_unset=False))
        super()._write(trainer, data, folder)


def job_name() -> str | None:
    """Return a name of the job of torchrun to which this process belongs, the same after restarts; None: no such job.

    A job on one machine without a name of its own is named by the process that starts and watches its processes. On
    several machines these processes differ, and the job has no name.
    """
    name = os.environ.get("TORCHELASTIC_RUN_ID")
    if name != "none":
        return name
    is_on_one_machine = int(os.environ.get("WORLD_SIZE", "1")) == local_world()
    return f"{platform.node()}:{os.getppid()}" if is_on_one_machine else None


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the reported settings of a nested config as strings, by dotted name."""
    settings = {name: str(value) for name, value in _leaves(config)}
    return {name: value for name, value in settings.items() if name.startswith(REPORTED_PREFIXES)}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def provenance(rng_seed: int, device: torch.device, executor: str, *, precision: str) -> dict[str, Any]:
    """Return the command, device, software versions and git revision of this process; no environment variables."""
    return {
        "command": sys.argv,
        "seed": rng_seed,
        "device": str(device),
        "executor": executor,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "python": sys.version,
        "platform": platform.platform(),
        "processor": processor(),
        "versions": versions(),
        "git": git_revision(Path(__file__)),
    }


def processor() -> str:
    """Return the names of the processor and the GPUs."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([platform.processor() or platform.machine(), *names])


def versions() -> dict[str, str | None]:
    """Return the versions of this package and its dependencies; None for one that is not installed as a package."""
    try:
        requirements = [re.split(r"[^\w.-]", one)[0] for one in requires(PACKAGE_NAME) or () if "extra ==" not in one]
    except PackageNotFoundError:  # run from a checkout without installation
        requirements = ["torch", "lightning", "jsonargparse"]
    return {PACKAGE_NAME: __version__} | {name: _version(name) for name in sorted({"numpy", *requirements})}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision(file: Path) -> dict[str, Any] | None:
    """Return the git commit of `file` and whether tracked files differ from it, or None outside of a repository."""
    git_commands = (
        ("ls-files", "--error-unmatch", file.name),
        ("rev-parse", "HEAD"),
        ("status", "--porcelain", "-uno"),
    )
    try:
        _, commit, changes = (
            subprocess.run(
                # A killed `git status` would leave a locked index behind, with which the user cannot commit.
                ["git", "--no-optional-locks", *ask],
                cwd=file.parent,
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            for ask in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}
