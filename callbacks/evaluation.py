"""Callback that compares the trained policy with baselines on unseen hosts at the end of training."""

from pathlib import Path

from lightning import Callback

from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.comparison import Comparison
from esper_lightning.evaluation.run import run_comparison
from esper_lightning.module import TamiyoModule
from esper_lightning.trainer import EVALUATION_FOLDER, EsperTrainer


class Evaluation(Comparison, Callback):
    """Compares controllers when training ends, like the command `evaluate` with a checkpoint; see `Comparison`."""

    def on_fit_end(self, trainer: EsperTrainer, pl_module: TamiyoModule) -> None:
        if self.hosts == 0:
            return
        data = trainer.datamodule
        tamiyo = TrainedPolicy(data.seed, "the run that has just ended", pl_module.policy, pl_module.observation_norm)
        folder = Path(trainer.log_dir or trainer.default_root_dir) / EVALUATION_FOLDER
        run_comparison(self, data, [tamiyo], folder=folder, record=trainer.record())
