"""EsperTrainer: Lightning's Trainer, with one line where a start is refused, interrupted, or a disk has failed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from esper_lightning.endings import (
    BAD_INPUT,
    DISK_FAILED,
    INTERRUPTED,
    NO_MEMORY,
    disk_failure,
    fail,
    one_line_errors,
)
from esper_lightning.envs.failure import is_out_of_memory
from esper_lightning.growth.reading import NOT_TENSORS

UNUSABLE = (*NOT_TENSORS, RecursionError, MisconfigurationException)
"""What a damaged checkpoint has been seen to raise where it is restored."""


COMPARISON_LOST = "trained, but not compared; for the table resume from the run's latest.ckpt"


class EsperTrainer(Trainer):
    """Until a run has begun, an error is the checkpoint's and ends in one line; after that it is ours.

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
        with nothing_left_of_a_refusal(Path(self.log_dir or self.default_root_dir)):
            try:
                super().fit(model, train_dataloaders, val_dataloaders, datamodule, ckpt_path, weights_only)
            except UNUSABLE as error:
                if (failure := disk_failure(error)) is not None:
                    fail(self._way_on(failure), DISK_FAILED)
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

    def _run_stage(self) -> Any:
        result = super()._run_stage()
        self.begun = True  # where there was nothing left to train
        return result

    def _way_on(self, failure: OSError) -> str:
        """What to say of a failed disk."""
        run = Path(self.log_dir or self.default_root_dir)
        latest = run / "checkpoints" / "latest.ckpt"
        what = failure.strerror or str(failure)
        where = f" ({failure.filename})" if failure.filename else ""
        if not latest.is_file():
            return f"{what}{where}; free some space and start again: there is no checkpoint yet to go on from"
        return (
            f"{what}{where}; the last checkpoint is whole: free some space and go on with esper-lightning fit "
            f"--config {run / 'config.yaml'} --ckpt_path {latest}"
        )


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
