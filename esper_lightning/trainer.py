"""Lightning's Trainer with the commands `evaluate` and `information`, and one-line errors.

Refused starts, interrupts and disk failures end the program with one line instead of a traceback.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from lightning import Callback, LightningDataModule, LightningModule, Trainer
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint

from esper_lightning.checkpointing.policy_file import names_policy_alone
from esper_lightning.checkpointing.run_lock import lock_folder
from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.console import EXIT_BAD_INPUT, exit_with_error, print_status
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import Overseer
from esper_lightning.envs.seeding import EVALUATION, episode_rng_seeds
from esper_lightning.errors import (
    EXIT_DIVERGED,
    EXIT_INTERRUPTED,
    EXIT_LOST_RANK,
    EXIT_SYSTEM_FAILED,
    OUT_OF_MEMORY_MESSAGE,
    DivergedError,
    describe_system_error,
    find_system_error,
    find_unusable_path,
    is_out_of_memory,
    one_line_errors,
    one_line_system_errors,
)
from esper_lightning.evaluation.checkpoints import (
    load_policies,
    load_rivals,
    load_transferred,
    path_list,
    setting_differences,
)
from esper_lightning.evaluation.comparison import SEARCH_ENVS, Comparison
from esper_lightning.evaluation.growing import find_controller, grow_host
from esper_lightning.evaluation.run import run_comparison
from esper_lightning.evaluation.search.report import print_information, write_information
from esper_lightning.evaluation.search.value_of_information import InformationConfig, value_of_information
from esper_lightning.module import TamiyoModule
from esper_lightning.process import BEFORE_TRAINING, WATCH_INTERVAL, silent_threads, watch_parent
from esper_lightning.provenance import RunRecord, provenance
from esper_lightning.ranks import is_lost_rank
from esper_lightning.serialization.replace import make_folder, replace_durably
from esper_lightning.serialization.safe_load import READ_ERRORS
from esper_lightning.user_code import find_user_part

RESTORE_ERRORS = (*READ_ERRORS, RecursionError, MisconfigurationException)
"""Exceptions that restoring a damaged checkpoint has been seen to raise."""


CHECKPOINTS_FOLDER = "checkpoints"
"""Subfolder of a run folder in which Lightning saves checkpoints."""

EVALUATION_FOLDER, TRANSFER_FOLDER = "evaluation", "transfer"
"""Subfolders of a run folder for the results of `evaluate`, without and with transfer to other hosts."""

GROWN_FOLDER = "grown"
"""Subfolder for the network of `grow`."""

LOST_RANK_MESSAGE = "another process of the run has ended; find out why"

SECONDS_TO_END = 60.0
"""Seconds that the other processes of a run have to end after the first one."""

WAY_OUT = "start again, or name another folder by --out"
"""Ending of the line about a disk that fails under a command that writes results."""

IN_TRAINING = "in training; the last checkpoint is whole"
AFTER_TRAINING = "after training; if the table is missing, resume from the run's latest.ckpt"
"""Endings of the line about an interrupt that comes in training or after it."""


class EsperTrainer(Trainer):
    """Trainer with the commands `fit`, `evaluate`, `information` and `grow`.

    Errors before training starts are attributed to the checkpoint and reported in one line; later ones keep their
    traceback.
    """

    opened: Mapping[str, dict[str, Any]] = MappingProxyType({})
    """Contents of checkpoints that the command line has read, by path; others are read when they are needed."""

    run_path: Path
    """Folder of the run, during `fit`; on other ranks than the first only once `log_dir` was read."""

    _parent_watch: Thread | None = None
    _stage_has_ended = False
    _started_ranks: Sequence["subprocess.Popen[bytes]"] = ()
    callbacks: list[Callback]  # set by Lightning, which does not declare it

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train the policy.

        Args:
            ckpt_path: Checkpoint to resume from; `latest`: that of the newest run. None: a new run.
            weights_only: Read a checkpoint without running any code in it. It cannot be switched off.
        """
        with self._locked_run_folder() as folder, silent_threads("tensorboard"):
            self._watch_parent()
            try:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            except DivergedError as error:
                self._end(str(error), EXIT_DIVERGED)
            except RESTORE_ERRORS as error:
                if self.world_size > 1 and is_lost_rank(error):
                    if self._parent_watch is not None:  # it ends this process if rank 0 is the one that has gone
                        self._parent_watch.join(3.0 * WATCH_INTERVAL)
                    self._end(LOST_RANK_MESSAGE, EXIT_LOST_RANK)
                if (failure := find_system_error(error)) is not None:
                    self._end(describe_system_error(failure), EXIT_SYSTEM_FAILED)
                if self.training_started and (found := find_unusable_path(error, folder)) is not None:
                    path, cause = found
                    if isinstance(cause, PermissionError):
                        self._end(f"{str(path)!r} may not be written; permit it", EXIT_SYSTEM_FAILED)
                    exit_with_error(
                        f"{str(path)!r} was removed or replaced while the run wrote to it; start again",
                        EXIT_SYSTEM_FAILED,
                    )
                if not self.training_started and is_out_of_memory(error):
                    exit_with_error(OUT_OF_MEMORY_MESSAGE)
                if self.training_started or ckpt_path is None or find_user_part(error) is not None:
                    raise
                reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                exit_with_error(f"checkpoint {str(ckpt_path)!r} cannot be continued: {reason:.400}; give another one")
            except SystemExit as ended:
                if isinstance(ended.__context__, KeyboardInterrupt):  # during training Preemption handles it
                    exit_with_error(f"interrupted {self.moment}", EXIT_INTERRUPTED)
                raise
            finally:
                self._await_started_ranks()

    def evaluate(
        self,
        model: TamiyoModule,
        datamodule: HostPoolData,
        ckpt_path: str | Path | None = None,
        *,
        more: str | list[str] | None = None,
        rivals: str | list[str] | None = None,
        out: str | Path | None = None,
        weights_only: bool | None = None,
        transfer: bool = False,
        stand_ins: dict[str, str] | None = None,
        save_networks: int = 0,
    ) -> None:
        """Compare a trained policy with rivals, baselines, fixed schedules and static networks on fresh hosts.

        Args:
            ckpt_path: Checkpoint of the policy; `latest`: that of the newest run; or with --transfer true and --config
                a safetensors file, or `tamiyo`, the policy of the package. Without --config the settings are those of
                the config.yaml in the checkpoint's run folder. None: baselines and schedules are compared alone, on
                the hosts of --config.
            more: Checkpoints of the same settings trained with other RNG seeds, as a list or with commas. Results are
                then reported for each training run and for all together.
            rivals: Checkpoints trained on the same hosts in another way, such as with another reward mode or another
                observation, as a list or with commas. Each is a further controller on the same hosts.
            out: Folder for tables and figures. None: `evaluation`, or `transfer`, in the run folder of the first
                checkpoint; without a run folder in trainer.default_root_dir.
            weights_only: See `fit`.
            transfer: Evaluate on other hosts than those of the training, as given by --config. A policy over sets plays
                on any slots. For another policy slots are paired in order, and there may be fewer of them than in its
                training.
            stand_ins: Blueprints of the new hosts that replace blueprints of the training hosts, by the name of the
                replaced one; for transfer.
            save_networks: Number of hosts to save as grown networks, in `networks` in the folder: those of the policy,
                or without one of the first controller compared, that have the best objective.
        """
        comparison = next(callback for callback in self.callbacks if isinstance(callback, Comparison))
        paths = [] if ckpt_path is None else [str(ckpt_path), *path_list(more)]
        parent = run_folder(paths[0]) if paths and not names_policy_alone(paths[0]) else Path(self.default_root_dir)
        folder = Path(out) if out is not None else parent / (TRANSFER_FOLDER if transfer else EVALUATION_FOLDER)
        self.datamodule = datamodule
        self._set_up_overseer(model, "evaluate")
        if stand_ins and not transfer:
            exit_with_error("stand_ins apply only to transfer to other hosts; set --transfer true")
        if save_networks < 0:
            exit_with_error(f"save_networks must be at least 0, got {save_networks}")
        try:
            with one_line_errors():
                checkpoints = self._read(paths)
                if transfer:
                    policies = load_transferred(checkpoints, stand_ins or {}, datamodule)
                else:
                    policies = load_policies(model, datamodule, checkpoints)
                rival_checkpoints = self._read(path_list(rivals))
                loaded_rivals = load_rivals(rival_checkpoints, paths, datamodule)
                print_status(*setting_differences(checkpoints | rival_checkpoints))
                make_folder(folder)
            with one_line_system_errors(WAY_OUT):
                run_comparison(
                    comparison,
                    datamodule,
                    policies,
                    rivals=loaded_rivals,
                    folder=folder,
                    record=self.record(),
                    save_networks=save_networks,
                )
        except KeyboardInterrupt:
            exit_with_error("interrupted before the comparison was over", EXIT_INTERRUPTED)

    def information(
        self,
        model: TamiyoModule,
        datamodule: HostPoolData,
        *,
        look: InformationConfig = InformationConfig(),
        out: str | Path | None = None,
    ) -> None:
        """Estimate, before any training, the value of knowing the variables in which the hosts of a family differ.

        Args:
            look: Settings of the estimate.
            out: Folder for the table, the best schedule and the settings. None: they are only printed.
        """
        self.datamodule = datamodule
        self._set_up_overseer(model, "information")
        folder = None if out is None else Path(out)
        with one_line_errors():
            if folder is not None:
                make_folder(folder)
            result = value_of_information(datamodule.make_pool(SEARCH_ENVS), look)
        print_information(result)
        if folder is not None:
            with one_line_system_errors(WAY_OUT):
                write_information(result, folder, self.record())

    def grow(
        self, model: TamiyoModule, datamodule: HostPoolData, *, controller: str, out: str | Path | None = None
    ) -> None:
        """Train one host while a controller grows it, and save the network for use in other programs.

        Args:
            controller: A rule (`periodic`, `climbing`, `heuristic` …), the name or import path of your own, the file of
                a schedule (.json), a trained policy (.ckpt or .safetensors), or `tamiyo`, the one of the package.
            out: Folder for the network, its exported program, the network with folded seeds, accuracies and a figure.
                None: `grown` in trainer.default_root_dir.
        """
        comparison = next(callback for callback in self.callbacks if isinstance(callback, Comparison))
        folder = Path(out) if out is not None else Path(self.default_root_dir) / GROWN_FOLDER
        self.datamodule = datamodule
        self._set_up_overseer(model, "grow")
        try:
            with one_line_errors():
                chosen = find_controller(controller, comparison.make_controllers(), datamodule.pool.device)
                pool = datamodule.make_pool(1, sight=getattr(chosen, "sight", None))  # that of a policy over sets
                chosen.reset(pool)  # raises ValueError now if the hosts do not fit
                make_folder(folder)
            with one_line_system_errors(WAY_OUT):
                (rng_seed,) = episode_rng_seeds(datamodule.seed, EVALUATION, 0, n_envs=1)
                grow_host(pool, controller, chosen, rng_seed=rng_seed, folder=folder)
                text = json.dumps(self.record(), indent=1) + "\n"
                replace_durably(folder / "run.json", lambda file: file.write(text.encode()))
        except KeyboardInterrupt:
            exit_with_error("interrupted before the network was grown", EXIT_INTERRUPTED)
        print_status(f"written to {folder}")

    def _read(self, paths: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Return the content of checkpoints by path, without reading again those that are open."""
        return {path: self.opened.get(path) or open_checkpoint(path) for path in paths}

    def _set_up_overseer(self, model: LightningModule, command: str) -> None:
        """Call `setup` of the callback that watches the hosts; in `fit` Lightning calls that of every callback."""
        for callback in self.callbacks:
            if isinstance(callback, Overseer):
                callback.setup(self, model, command)

    def record(self) -> dict[str, Any]:
        """Return the settings of this run and the provenance of this process: command, device, software versions."""
        data, records = self.datamodule, self._run_records()
        return {
            "settings": dict(records[0].settings) if records else {},
            "run": provenance(
                data.seed, self.strategy.root_device, str(data.pool.executor_choice), precision=data.precision
            ),
        }

    @property
    def moment(self) -> str:
        """Return the part of the line about an interrupt that names the moment at which it came."""
        if self._stage_has_ended:
            return AFTER_TRAINING
        return IN_TRAINING if self.training_started else BEFORE_TRAINING

    @property
    def training_started(self) -> bool:
        """True once the checkpoint is restored and training has started, also if there was nothing left to train."""
        return self._stage_has_ended or any(record.training_started for record in self._run_records())

    def _run_records(self) -> list[RunRecord]:
        return [callback for callback in self.callbacks if isinstance(callback, RunRecord)]

    @contextmanager
    def _locked_run_folder(self) -> Iterator[Path]:
        """Create the run folder and lock it with all other folders that the run saves to; only rank 0 writes there.

        Restores the previous state of the folder if the start is refused (exit code for bad input).
        """
        if not self.is_global_zero:
            self.run_path = Path(self.default_root_dir)
            yield self.run_path
            return
        created: list[Path] = []
        try:
            with ExitStack() as locks:
                with one_line_errors():
                    root = Path((self.logger and self.logger.save_dir) or self.default_root_dir)
                    existing = {path for path in (root, *root.parents, *root.glob("*")) if path.exists()}
                    folder = Path(self.log_dir or self.default_root_dir)  # the default logger creates a new folder now
                    dirpaths = [c.dirpath for c in self.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
                    others = {Path(path) for path in dirpaths if path is not None}
                    outside = [path for path in others if not path.is_relative_to(folder.resolve())]
                    created += [path for path in (folder, *folder.parents) if path not in existing]
                    created += {path for other in outside for path in (other, *other.parents) if not path.exists()}
                    for path in (folder, *outside):
                        path.mkdir(parents=True, exist_ok=True)
                        locks.enter_context(lock_folder(path))
                earlier_files = set(_logger_files(folder))
                try:
                    yield folder
                except SystemExit as ended:
                    if ended.code == EXIT_BAD_INPUT:
                        for path in set(_logger_files(folder)) - earlier_files:
                            path.unlink()
                    raise
        except SystemExit as ended:
            if ended.code == EXIT_BAD_INPUT:
                for path in sorted(created, reverse=True):  # a folder before the one that holds it
                    if path.is_dir() and not any(path.iterdir()):
                        path.rmdir()
            raise

    def _run_stage(self) -> Any:
        if self.strategy.root_device.type == "cpu":
            # Between CPUs the next exchange fails if a process has died; between GPUs it could wait for ever.
            self.release_started_ranks()
        result = super()._run_stage()
        self._stage_has_ended = True
        return result

    @property
    def log_dir(self) -> str | None:
        """Folder of the run. Lightning sends it to all ranks, so it must be read on all of them or on none."""
        folder = super().log_dir
        self.run_path = Path(folder or self.default_root_dir)
        return folder

    def _teardown(self) -> None:
        super()._teardown()
        if torch.distributed.is_initialized():  # what follows training is done by rank 0 alone
            torch.distributed.destroy_process_group()

    def release_started_ranks(self) -> None:
        """Let the processes that this one has started end with any exit code.

        Otherwise Lightning kills all processes of a run, this one included, once one of them has ended with an error.
        """
        processes: list[subprocess.Popen[bytes]] | None = getattr(self.strategy.launcher, "procs", None)
        if processes:
            self._started_ranks = list(processes)
            processes.clear()  # the list that Lightning's thread looks at

    def _await_started_ranks(self) -> None:
        """Wait until the processes that this one has started have ended; kill those that do not end soon."""
        self.release_started_ranks()
        for process in self._started_ranks:
            try:
                process.wait(SECONDS_TO_END)
            except subprocess.TimeoutExpired:
                process.kill()

    def _watch_parent(self) -> None:
        """End this process if rank 0, which has started it, has died: torch would wait for it up to half an hour."""
        if self.local_rank == 0 or not isinstance(
            getattr(self.strategy, "cluster_environment", None), LightningEnvironment
        ):
            return

        def end() -> None:
            if self.local_rank == 1:  # one of several speaks
                print(f"error: {self._recovery_hint(LOST_RANK_MESSAGE)}", file=sys.stderr, flush=True)
            os._exit(EXIT_LOST_RANK)

        self._parent_watch = watch_parent(end)

    def _end(self, problem: str, code: int) -> NoReturn:
        """End the program; rank 0 prints one line on what happened and how to go on."""
        if self.is_global_zero:
            exit_with_error(self._recovery_hint(problem), code)
        raise SystemExit(code)

    def _recovery_hint(self, problem: str) -> str:
        """Return the problem that ended the run, which says what to do about it, and how to go on after that."""
        run = self.run_path
        latest = run / CHECKPOINTS_FOLDER / "latest.ckpt"
        if not latest.is_file():
            return f"{problem}, and start again: there is no checkpoint yet to go on from"
        return f"{problem}, and go on from the last checkpoint, which is whole: {resume_command(latest)}"

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Any | None = None
    ) -> None:
        """Save a checkpoint; one that a ModelCheckpoint has chosen by a score holds the weights that were scored."""
        module = self.lightning_module
        assert isinstance(module, TamiyoModule), "that of the command line"
        saved_by = [callback for callback in self.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
        module.saves_scored = any(one.monitor is not None and str(filepath) in one.best_k_models for one in saved_by)
        self.datamodule.saved_to = Path(filepath)
        try:
            super().save_checkpoint(filepath, weights_only, storage_options)
        finally:
            module.saves_scored, self.datamodule.saved_to = False, None


def resume_command(checkpoint: Path) -> str:
    """Return what goes on from a checkpoint: a command, or a call if Python started the run, which has no config."""
    config = checkpoint.parent.parent / "config.yaml"
    if config.is_file():
        return f"esper-lightning fit --config {config} --ckpt_path {checkpoint}"
    return f"esper_lightning.train(…, resume={str(checkpoint)!r})"


def run_folder(checkpoint: str | Path) -> Path:
    """Return the run folder in which a checkpoint lies. A linked checkpoint counts where its link lies."""
    folder = Path(checkpoint).parent.absolute()
    return folder.parent.resolve() if folder.name == CHECKPOINTS_FOLDER else folder


def _logger_files(folder: Path) -> list[Path]:
    """Return the files that the logger creates at every start, even at a refused one."""
    return [*folder.glob("events.*"), *folder.glob("hparams.yaml")]
