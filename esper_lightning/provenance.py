"""What a run leaves so that it can be repeated: its config, and with what software, where and how it was run."""

import json
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jsonargparse import Namespace
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, SaveConfigCallback

from esper_lightning.checkpoint import SETTINGS_KEY, bring_home, check_loops, differences, settle_optimizer
from esper_lightning.data import say
from esper_lightning.module import TamiyoModule
from esper_lightning.trainer import EsperTrainer

PACKAGE = "esper-lightning"

THREADS = "threads_per_operator"

REPORTED = ("seed_everything", THREADS, "model.", "data.", "evaluation.", "trainer.max_epochs")
"""Settings that decide what comes of a run; where it is written and how it is watched do not."""


class RunRecord(SaveConfigCallback):
    """Keeps how a run was made in its folder (`config.yaml`, `run.json`) and its settings in its checkpoints.

    What an earlier start of the same run had saved is kept as `config.1.yaml`, `run.1.json` and so on. Nothing is
    written before everything is restored.

    Attributes:
        settings: That are worth reporting, by dotted name, as texts.
        changed: Those of them that are not the defaults.
    """

    def __init__(self, parser: LightningArgumentParser, config: Namespace, **kwargs: Any) -> None:
        config = config.clone()
        config.ckpt_path = None  # whoever repeats the run must not continue this one
        super().__init__(parser, config, **kwargs)
        self.settings = flat_settings(config.as_dict())
        defaults = flat_settings(parser.get_defaults().as_dict())
        self.changed = {name: value for name, value in self.settings.items() if defaults.get(name) != value}

    def setup(self, trainer: EsperTrainer, pl_module: TamiyoModule, stage: str) -> None:
        """Too early to save anything."""

    def on_save_checkpoint(self, trainer: EsperTrainer, pl_module: TamiyoModule, checkpoint: dict[str, Any]) -> None:
        checkpoint[SETTINGS_KEY] = self.settings

    def on_load_checkpoint(self, trainer: EsperTrainer, pl_module: TamiyoModule, checkpoint: dict[str, Any]) -> None:
        check_loops(checkpoint, trainer.fit_loop.state_dict(), {env.tick for env in trainer.datamodule.pool.envs})
        settle_optimizer(checkpoint, pl_module.configure_optimizers())
        states = checkpoint["callbacks"]
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.state_key in states:
                state = bring_home(states.pop(callback.state_key), str(callback.dirpath))
                if state is not None:
                    states[callback.state_key] = state
        if SETTINGS_KEY in checkpoint:
            before = checkpoint[SETTINGS_KEY]
            say(*differences(before, self.settings))
            if before.get(THREADS) != self.settings[THREADS]:
                say("with other threads sums are rounded otherwise: it goes on within that, not bit for bit")

    def on_train_start(self, trainer: EsperTrainer, pl_module: TamiyoModule) -> None:
        folder = Path(trainer.log_dir)
        set_aside(folder / self.config_filename)
        super().setup(trainer, pl_module, "fit")
        choice = trainer.datamodule.pool.choice
        record = provenance(trainer.datamodule.seed, trainer.strategy.root_device, str(choice))
        set_aside(folder / "run.json").write_text(json.dumps(record, indent=1) + "\n")
        trainer.begun = True


def set_aside(path: Path) -> Path:
    """The path, where nothing is now: what was there is called `name.1.suffix` or the like from now on."""
    if path.exists() or path.is_symlink():  # a link to nothing would be followed
        free = (path.with_name(f"{path.stem}.{n}{path.suffix}") for n in count(1))
        path.rename(next(other for other in free if not (other.exists() or other.is_symlink())))
    return path


def flat_settings(config: Mapping[str, Any]) -> dict[str, str]:
    """The settings that are worth reporting, by dotted name, as texts."""
    settings = {name: str(value) for name, value in _leaves(config)}
    return {name: value for name, value in settings.items() if name.startswith(REPORTED)}


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def provenance(seed: int, device: torch.device, executor: str) -> dict[str, Any]:
    """With what, where and how this process runs; nothing from its environment."""
    return {
        "command": sys.argv,
        "seed": seed,
        "device": str(device),
        "executor": executor,
        "threads": torch.get_num_threads(),
        "python": sys.version,
        "platform": platform.platform(),
        "processor": processor(),
        "versions": versions(),
        "git": revision(Path(__file__)),
    }


def processor() -> str:
    """The name of the processor, and of the GPUs."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([platform.processor() or platform.machine(), *names])


def versions() -> dict[str, str | None]:
    """Of this package and of what it depends on. None: not installed as a package."""
    try:
        needed = [re.split(r"[^\w.-]", one)[0] for one in requires(PACKAGE) or () if "extra ==" not in one]
    except PackageNotFoundError:  # run from a checkout
        needed = ["torch", "lightning", "jsonargparse"]
    return {name: _version(name) for name in sorted({PACKAGE, "numpy", *needed})}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def revision(file: Path) -> dict[str, Any] | None:
    """The commit that `file` is of, and whether tracked files differ from it. None: it is in no repository."""
    asked = (("ls-files", "--error-unmatch", file.name), ("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
    try:
        _, commit, changes = (
            subprocess.run(
                ["git", *ask], cwd=file.parent, capture_output=True, text=True, timeout=10, check=True
            ).stdout
            for ask in asked
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}
