"""EsperTrainer: Lightning's Trainer, with one line where a start is refused, interrupted, or a disk has failed.

It trains, it evaluates what was trained, and it says whether there is anything to gain.
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
"""What a damaged checkpoint has been seen to raise where it is restored."""


EVALUATION_FOLDER, TRANSFER_FOLDER = "evaluation", "transfer"
"""Of a run's folder: what comparisons leave."""

COMPARISON_LOST = "trained, but not compared; for the table resume from the run's latest.ckpt"


class EsperTrainer(Trainer):
    """Trains, compares and looks into families.

    Until a run has begun, an error is the checkpoint's and ends in one line; after that it is ours.

    Attributes:
        begun: All is restored: set when training starts.
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
        """Trains, from `ckpt_path` on if that is given."""
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
                if isinstance(ended.__context__, KeyboardInterrupt):  # while training, Preemption takes it
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
        """Compares a trained Tamiyo with rules, schedules and static controls on fresh hosts, and reports.

        Args:
            ckpt_path: Her checkpoint; `latest`: the newest run's. Without --config the settings are those of the
                config.yaml in its run folder.
            more: Checkpoints of further training seeds of the same settings: then she is reported seed by seed and for
                all seeds together.
            out: Folder for tables and figures. None: `evaluation`, or `transfer`, in the run folder of the first
                checkpoint.
            weights_only: As for `fit`.
            transfer: She was trained on other hosts than those of --config: show these to her as the places and seeds
                that she knows. They may have fewer slots, and their slots are paired with hers in order.
            stand_ins: Blueprints, by those that she knows, that take their place where she is a stranger.
        """
        comparison = next(callback for callback in self.callbacks if isinstance(callback, Comparison))
        paths = [str(ckpt_path), *([more] if isinstance(more, str) else more or [])]
        usual = TRANSFER_FOLDER if transfer else EVALUATION_FOLDER
        folder = Path(out) if out is not None else run_folder(paths[0]) / usual
        self.datamodule = datamodule
        if stand_ins and not transfer:
            fail("stand_ins are for hosts that she was not trained on; set --transfer true")
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
        """Says what it is worth to know the facts in which the hosts of a family differ, before anybody trains there.

        Args:
            look: How closely.
            out: Folder for the table, the best schedule and the settings as files. None: they are only printed.
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
        """With what settings and software, where and how this process runs."""
        from esper_lightning.provenance import RunRecord, provenance  # which imports this module

        records = [callback for callback in self.callbacks if isinstance(callback, RunRecord)]
        data = self.datamodule
        return {
            "settings": records[0].settings if records else {},
            "run": provenance(data.seed, self.strategy.root_device, str(data.pool.choice)),
        }

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        self.begun = True  # where there was nothing left to train
        return result

    def _way_on(self, failure: OSError) -> str:
        """What to say of a failed disk."""
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
    """What went wrong with a disk, and with which file."""
    where = f" ({failure.filename})" if failure.filename else ""
    return f"{failure.strerror or failure}{where}"


def run_folder(checkpoint: str | Path) -> Path:
    """Of the run that wrote a checkpoint."""
    folder = Path(checkpoint).resolve().parent
    return folder.parent if folder.name == "checkpoints" else folder


@contextmanager
def nothing_left_of_a_refusal(folder: Path) -> Iterator[None]:
    """Makes a run's folder. If what follows is refused, the folder is as it was, or not there as before."""
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
    """What the logger begins whatever follows."""
    return [*folder.glob("events.*"), *folder.glob("hparams.yaml")]
