"""Lightning's Trainer with the commands `evaluate` and `information`, and one-line errors.

Refused starts, interrupts and disk failures end the program with one line instead of a traceback.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from esper_lightning.data import HostPoolData, say
from esper_lightning.endings import (
    BAD_INPUT,
    DISK_FAILED,
    INTERRUPTED,
    NO_MEMORY,
    disk_failure,
    fail,
    one_line_errors,
    removed_file,
)
from esper_lightning.envs.failure import is_out_of_memory
from esper_lightning.evaluation.comparison import RACERS, Comparison
from esper_lightning.evaluation.information import InformationConfig, value_of_information
from esper_lightning.evaluation.information_report import print_information, write_information
from esper_lightning.evaluation.learned import load_tamiyos, load_travellers, other_settings
from esper_lightning.evaluation.publish import compare
from esper_lightning.growth.reading import NOT_TENSORS
from esper_lightning.module import TamiyoModule

UNUSABLE = (*NOT_TENSORS, RecursionError, MisconfigurationException)
"""Exceptions that restoring a damaged checkpoint has been seen to raise."""


EVALUATION_FOLDER, TRANSFER_FOLDER = "evaluation", "transfer"
"""Subfolders of a run folder for the results of `evaluate`, without and with transfer to other hosts."""

COMPARISON_LOST = "trained, but not compared; for the table resume from the run's latest.ckpt"


class EsperTrainer(Trainer):
    """Trainer with the commands `fit`, `evaluate` and `information`.

    Errors before training starts are attributed to the checkpoint and reported in one line; later ones keep their
    traceback.

    Attributes:
        begun: True once the checkpoint is restored and training has started.
    """

    begun = False

    def fit(
        self,
        model: LightningModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        datamodule: LightningDataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
    ) -> None:
        """Train the policy, resuming from `ckpt_path` if it is given."""
        folder = Path(self.log_dir or self.default_root_dir)
        with nothing_left_of_a_refusal(folder):
            try:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            except UNUSABLE as error:
                if (failure := disk_failure(error)) is not None:
                    fail(self._way_on(failure), DISK_FAILED)
                if self.begun and (missing := removed_file(error, folder)) is not None:
                    fail(f"{str(missing)!r} was removed while the run wrote to it; start again", DISK_FAILED)
                if not self.begun and is_out_of_memory(error):
                    fail(NO_MEMORY)
                if self.begun or ckpt_path is None:
                    raise
                reason = str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}"
                fail(f"checkpoint {str(ckpt_path)!r} cannot be continued: {reason:.400}; give another one")
            except SystemExit as ended:
                if isinstance(ended.__context__, KeyboardInterrupt):  # during training Preemption handles it
                    fail(COMPARISON_LOST if self.begun else "interrupted before training began", INTERRUPTED)
                raise

    def evaluate(
        self,
        model: TamiyoModule,
        datamodule: HostPoolData,
        ckpt_path: str | Path | None = None,
        more: str | list[str] | None = None,
        out: str | Path | None = None,
        weights_only: bool | None = None,
        transfer: bool = False,
        stand_ins: dict[str, str] | None = None,
    ) -> None:
        """Compare a trained policy with baselines, fixed schedules and static networks on fresh hosts.

        Args:
            ckpt_path: Checkpoint of the policy; `latest`: that of the newest run. Without --config the settings are
                those of the config.yaml in its run folder.
            more: Checkpoints of the same settings trained with other RNG seeds. Results are then reported for each
                training run and for all together.
            out: Folder for tables and figures. None: `evaluation`, or `transfer`, in the run folder of the first
                checkpoint.
            weights_only: See `fit`.
            transfer: Evaluate on other hosts than those of the training, as given by --config. Their slots are paired
                in order with those of the training hosts, and there may be fewer of them.
            stand_ins: Blueprints of the new hosts that replace blueprints of the training hosts, by the name of the
                replaced one; for transfer.
        """
        comparison = next(callback for callback in self.callbacks if isinstance(callback, Comparison))
        paths = [str(ckpt_path), *([more] if isinstance(more, str) else more or [])]
        usual = TRANSFER_FOLDER if transfer else EVALUATION_FOLDER
        folder = Path(out) if out is not None else run_folder(paths[0]) / usual
        self.datamodule = datamodule
        if stand_ins and not transfer:
            fail("stand_ins apply only to transfer to other hosts; set --transfer true")
        try:
            with one_line_errors():
                if transfer:
                    tamiyos = load_travellers(paths, stand_ins or {}, datamodule)
                else:
                    tamiyos = load_tamiyos(model, datamodule, paths)
                say(*other_settings(paths))
                folder.mkdir(parents=True, exist_ok=True)
            compare(comparison, datamodule, tamiyos, folder, self.record())
        except KeyboardInterrupt:
            fail("interrupted before the comparison was over", INTERRUPTED)
        except OSError as error:
            if (failure := disk_failure(error)) is None:
                raise
            fail(f"{described(failure)}; free some space and start again, or name another folder by --out", DISK_FAILED)

    def information(
        self,
        model: TamiyoModule,
        datamodule: HostPoolData,
        look: InformationConfig = InformationConfig(),
        out: str | Path | None = None,
    ) -> None:
        """Estimate, before any training, the value of knowing the variables in which the hosts of a family differ.

        Args:
            look: Settings of the estimate.
            out: Folder for the table, the best schedule and the settings. None: they are only printed.
        """
        self.datamodule = datamodule
        folder = None if out is None else Path(out)
        with one_line_errors():
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
            found = value_of_information(datamodule.make_pool(RACERS), look)
        print_information(found)
        if folder is not None:
            write_information(found, folder, self.record())

    def record(self) -> dict[str, Any]:
        """Return the settings of this run and the provenance of this process: command, device, software versions."""
        from esper_lightning.provenance import RunRecord, provenance  # imported late: a circular import

        records = [callback for callback in self.callbacks if isinstance(callback, RunRecord)]
        data = self.datamodule
        return {
            "settings": records[0].settings if records else {},
            "run": provenance(data.seed, self.strategy.root_device, str(data.pool.choice)),
        }

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        self.begun = True  # also if there was nothing left to train
        return result

    def _way_on(self, failure: OSError) -> str:
        """Return an error message for a disk failure that says how to go on."""
        run = Path(self.log_dir or self.default_root_dir)
        latest = run / "checkpoints" / "latest.ckpt"
        what = described(failure)
        if not latest.is_file():
            return f"{what}; free some space and start again: there is no checkpoint yet to go on from"
        return (
            f"{what}; the last checkpoint is whole: free some space and go on with esper-lightning fit "
            f"--config {run / 'config.yaml'} --ckpt_path {latest}"
        )


def described(failure: OSError) -> str:
    """Return the reason of a disk failure and the name of the file."""
    where = f" ({failure.filename})" if failure.filename else ""
    return f"{failure.strerror or failure}{where}"


def run_folder(checkpoint: str | Path) -> Path:
    """Return the folder of the run that wrote a checkpoint."""
    folder = Path(checkpoint).resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@contextmanager
def nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """Create a run folder, and restore its previous state if the start is refused (exit code for bad input)."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    before = set(_loggers_files(folder))
    with one_line_errors():
        folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except SystemExit as ended:
        if ended.code == BAD_INPUT:
            for path in set(_loggers_files(folder)) - before:
                path.unlink()
            for path in made:
                if not any(path.iterdir()):
                    path.rmdir()
        raise


def _loggers_files(folder: Path) -> list[Path]:
    """Return the files that the logger creates at every start, even at a refused one."""
    return [*folder.glob("events.*"), *folder.glob("hparams.yaml")]
