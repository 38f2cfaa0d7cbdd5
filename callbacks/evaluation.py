"""Callback that compares the trained policy with baselines on unseen hosts at the end of training."""

from math import isfinite

from lightning import Callback

from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.comparison import Comparison
from esper_lightning.evaluation.run import run_comparison
from esper_lightning.module import TamiyoModule
from esper_lightning.plugins import PartError
from esper_lightning.trainer import CHECKPOINTS_FOLDER, EVALUATION_FOLDER, EsperTrainer


class Evaluation(Comparison, Callback):
    """Compares controllers when training ends, like the command `evaluate` with a checkpoint; see `Comparison`.

    The policy's further test metrics also go to the trainer's loggers.
    """

    def on_fit_end(self, trainer: EsperTrainer, pl_module: TamiyoModule) -> None:
        if self.hosts == 0 or not trainer.is_global_zero:
            return  # other ranks have ended by the time that rank 0 has compared
        data = trainer.datamodule
        pl_module.to(data.pool.device)  # Lightning moves it to the CPU before this hook
        tamiyo = TrainedPolicy(data.seed, "the run that has just ended", pl_module.policy, pl_module.observation_norm)
        folder = trainer.run_path / EVALUATION_FOLDER
        try:
            results = run_comparison(self, data, [tamiyo], rivals={}, folder=folder, record=trainer.record())
        except PartError as error:
            latest = trainer.run_path / CHECKPOINTS_FOLDER / "latest.ckpt"
            raise PartError(
                f"{error}; the policy is trained and saved, so compare again by esper-lightning evaluate --ckpt_path "
                f"{latest}"
            ) from error
        tags = {task: f"test/{task}/" if len(results) > 1 else "test/" for task in results}
        means = {
            f"{tags[task]}{name}": mean
            for task, result in results.items()
            for name, mean in result.reference.mean_metrics().items()
            if isfinite(mean)
        }
        for logger in trainer.loggers:
            logger.log_metrics(means, step=pl_module.collector.ticks)
