"""Telemetry: what there is to see of a run, in TensorBoard, over ticks."""

import time
from collections import Counter
from typing import Any

from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.event_pb2 import Event, SessionLog

from esper_lightning.data import say
from esper_lightning.envs.masks import op_frequency
from esper_lightning.growth.restoring import check_parts
from esper_lightning.module import TamiyoModule
from esper_lightning.telemetry.anomalies import AnomalyDetector
from esper_lightning.telemetry.memory import memory_metrics, memory_share
from esper_lightning.telemetry.metrics import growth_metrics, phase_seconds, phase_shares, skipped_metrics, tick_metrics
from esper_lightning.telemetry.readings import GradientWatch, host_readings, state_rms
from esper_lightning.telemetry.rules import AnomalyConfig


class Telemetry(Callback):
    """Writes the hosts' state every tick and the policy's after every rollout to the trainer's loggers, and says when
    what it sees is not as it should be: see docs/anomalies.md.

    Args:
        every_n_ticks: How often the hosts are written, and the seconds that a tick took since the last time.
        anomalies: What counts as one.
    """

    def __init__(self, every_n_ticks: int = 1, anomalies: AnomalyConfig = AnomalyConfig()) -> None:
        if every_n_ticks < 1:
            raise ValueError(f"telemetry.every_n_ticks must be at least 1, got {every_n_ticks}")
        self.every_n_ticks = every_n_ticks
        self.anomalies = anomalies
        self.detector = AnomalyDetector(anomalies)
        self.gradients = GradientWatch()

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        self._follow()  # a callback before this one may save the tick
        return {"anomalies": self.detector.state_dict(), "gradients": self.gradients.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_parts("Telemetry", state_dict, ("anomalies", "gradients"))
        self.detector.load_state_dict(state_dict["anomalies"])
        self.gradients.load_state_dict(state_dict["gradients"])

    def _follow(self) -> None:
        """Takes in the gradients of the last tick, once."""
        loop = self._module.loop
        if self.anomalies.enabled and loop.ticks > self._followed:
            self.gradients.tick(loop.pool.envs)
        self._followed = loop.ticks

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        self._followed = pl_module.loop.ticks
        self._since = (time.perf_counter(), pl_module.loop.ticks)
        self._in_rollout: Counter[str] = Counter()  # seconds by phase
        self._unwritten: Counter[str] = Counter()
        self._written = pl_module.loop.ticks
        pl_module.loop.pool.clock.take()
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and pl_module.loop.ticks:
                # Points that an interrupted run wrote after the checkpoint are void: this makes readers drop them.
                start = SessionLog(status=SessionLog.START)
                logger.experiment.file_writer.add_event(Event(step=pl_module.loop.ticks + 1, session_log=start))

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        loop = pl_module.loop
        clock = loop.pool.clock
        seconds = clock.take()
        self._in_rollout.update(seconds)
        self._unwritten.update(seconds)
        metrics: dict[str, float] = {}
        self._follow()
        if loop.ticks % self.every_n_ticks == 0:
            envs = loop.pool.envs
            metrics |= tick_metrics(loop.last) | growth_metrics(envs) | skipped_metrics(envs)
            metrics |= phase_seconds(self._unwritten, loop.ticks - self._written, clock.timer.name)
            self._unwritten, self._written = Counter(), loop.ticks
        if trainer.is_last_batch:
            metrics |= self._rollout_metrics(pl_module)
            if self.anomalies.enabled:
                metrics |= self._look_for_anomalies(trainer, pl_module)
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=loop.ticks)

    def _rollout_metrics(self, pl_module: TamiyoModule) -> dict[str, float]:
        loop, report = pl_module.loop, pl_module.report
        final = loop.last.metrics
        now, (then, ticks) = time.perf_counter(), self._since
        self._since = (now, loop.ticks)
        speed = (loop.ticks - ticks) / (now - then)
        metrics = {
            "rollout/return": report.rollout.returns.mean().item(),
            "rollout/objective": final.objective.mean().item(),
            "rollout/accuracy": final.accuracy.mean().item(),
            "rollout/parameters": final.parameters.float().mean().item(),
            "time/ticks_per_second": speed,
            "time/env_steps_per_second": speed * loop.pool.n_envs,
        }
        metrics |= memory_metrics(loop.pool.device)
        metrics |= {f"train/{name}": value for name, value in report.metrics.items()}
        chosen = op_frequency(loop.buffer.action.op, loop.buffer.masks)
        metrics |= {f"rollout/op.{op}": share for op, share in chosen.items()}
        shares = phase_shares(self._in_rollout, now - then)
        metrics |= {f"time/share.{phase}": share for phase, share in shares.items()}
        self._in_rollout = Counter()
        return metrics

    def _look_for_anomalies(self, trainer: Trainer, pl_module: TamiyoModule) -> dict[str, float]:
        """Says what was raised or cleared by this rollout and its update; returns what there is to plot."""
        loop, config = pl_module.loop, self.anomalies
        envs = loop.pool.envs
        readings = self.gradients.readings(config.least_seeds) | host_readings(envs, config.most_reliance)
        readings |= state_rms(loop.state)
        memory = memory_share(loop.pool.device)
        ops = op_frequency(loop.buffer.action.op, loop.buffer.masks)
        metrics = pl_module.report.metrics | readings | {f"memory.{name}": share for name, share in memory.items()}
        metrics |= {f"op.{op}": share for op, share in ops.items()}
        progress = trainer.current_epoch / max(1, trainer.max_epochs - 1)
        for change in self.detector.observe(metrics, trainer.current_epoch + 1, progress):
            say(str(change))
        levels = {f"anomaly/{name}": float(level) for name, level in self.detector.levels.items()}
        plotted = {f"rollout/{name}": value for name, value in readings.items()}
        return plotted | {f"memory/{name}": share for name, share in memory.items()} | levels
