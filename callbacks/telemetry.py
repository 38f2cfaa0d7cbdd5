"""Callback that writes metrics, figures and events of a run to its loggers and to events.jsonl."""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from esper_lightning.data import say
from esper_lightning.disk import AtomicCheckpointIO
from esper_lightning.envs.actions import relevance
from esper_lightning.envs.failure import in_a_line, is_out_of_memory
from esper_lightning.envs.inspection import layer_gradients, share_among_kept
from esper_lightning.envs.masks import op_frequency
from esper_lightning.growth.restoring import check_parts
from esper_lightning.module import TamiyoModule
from esper_lightning.provenance import RunRecord, set_aside
from esper_lightning.telemetry import metrics as numbers
from esper_lightning.telemetry.anomalies import Anomaly, AnomalyDetector
from esper_lightning.telemetry.board import Board
from esper_lightning.telemetry.detail import LEVELS, Detail, Level
from esper_lightning.telemetry.events import (
    SCHEMA,
    AnomalyChanged,
    CheckpointSaved,
    Event,
    EventLog,
    LevelChanged,
    Started,
    Updated,
)
from esper_lightning.telemetry.memory import make_gauge, memory_metrics, memory_share
from esper_lightning.telemetry.observer import Observer
from esper_lightning.telemetry.readings import host_readings, state_rms
from esper_lightning.telemetry.rules import AnomalyConfig

EVENTS = "events.jsonl"
"""Name of the file of events in the run's folder."""


class Telemetry(Callback):
    """Writes metrics, figures and events to the trainer's loggers and to events.jsonl, and prints anomalies.

    docs/reference explains every plot (telemetry.md), every event (events.md) and every rule (anomalies.md).

    Args:
        level: off: nothing. minimal: metrics of each rollout, anomalies, rollbacks. normal: metrics of each tick, every
            event, histograms, figures, the value of each blueprint. debug: every layer's gradient, and the credit of
            the fossilized seeds of all hosts.
        every_n_ticks: Ticks between two writes of the hosts' metrics and of the mean seconds per tick.
        figures_every: Rollouts between figures; the last rollout always has some. 0: no figures.
        credit_hosts: Hosts whose fossilized seeds get Shapley values at the end of an episode. 0: none.
        layer_hosts: Hosts whose layers' gradients are measured in every tick at level debug; each costs one minibatch.
        raised_ticks: Ticks for which an anomaly raises the level to debug, with figures of every rollout. 0: it never
            does.
        anomalies: Bounds of the anomaly rules.
    """

    def __init__(
        self,
        level: Level = "normal",
        every_n_ticks: int = 1,
        figures_every: int = 10,
        credit_hosts: int = 2,
        layer_hosts: int = 2,
        raised_ticks: int = 50,
        anomalies: AnomalyConfig = AnomalyConfig(),
    ) -> None:
        if every_n_ticks < 1:
            raise ValueError(f"telemetry.every_n_ticks must be at least 1, got {every_n_ticks}")
        counts = {"figures_every": figures_every, "credit_hosts": credit_hosts, "layer_hosts": layer_hosts}
        for name, value in (counts | {"raised_ticks": raised_ticks}).items():
            if value < 0:
                raise ValueError(f"telemetry.{name} must not be negative, got {value}")
        self.every_n_ticks = every_n_ticks
        self.figures_every = figures_every
        self.credit_hosts = credit_hosts
        self.layer_hosts = layer_hosts
        self.anomalies = anomalies
        self.detail = Detail(level, raised_ticks)
        self.detector = AnomalyDetector(anomalies)
        self._restored: Any = None  # state of the observer, until the observer exists
        self._introduced = False  # TensorBoard's files of this run already hold what does not change
        self.events: EventLog | None = None
        self.boards: list[Board] = []

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        return {
            "anomalies": self.detector.state_dict(),
            "detail": self.detail.state_dict(),
            "observed": self.observer.state_dict(),
            "introduced": self._introduced,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_parts("Telemetry", state_dict, ("anomalies",))
        self.detector.load_state_dict(state_dict["anomalies"])
        # Checkpoints of earlier versions lack these, and missing telemetry is no reason to refuse a run.
        self.detail.load_state_dict(state_dict.get("detail", [0, 0]))
        self._restored = state_dict.get("observed")
        self._introduced = bool(state_dict.get("introduced", False))

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        loop = pl_module.loop
        self._written = loop.ticks
        self._since = (time.perf_counter(), loop.ticks)
        self._in_rollout: Counter[str] = Counter()  # seconds by phase
        self._unwritten: Counter[str] = Counter()
        self._host_epochs = self._measured = 0  # host epochs, and validations of hosts, in this rollout
        self._most = 0.0  # peak memory of any phase so far, in MiB
        loop.pool.clock.take()
        self.observer = Observer(loop.pool)
        if self._restored is not None:
            self.observer.load_state_dict(self._restored)
            self._restored = None
        # Not in on_train_batch_end: an earlier callback may save a checkpoint of the tick before it.
        loop.watchers.append(self._follow)
        self._forget_what_is_void(trainer, loop.ticks)
        if self.detail.level != "off":
            self._begin(trainer, loop.ticks)

    def _forget_what_is_void(self, trainer: Trainer, tick: int) -> None:
        """Open the outputs, and discard whatever the interrupted run wrote after the checkpoint."""
        self.boards = [Board(one.experiment) for one in trainer.loggers if isinstance(one, TensorBoardLogger)]
        for board in self.boards:
            board.go_on(tick)
        if trainer.log_dir is not None and trainer.loggers:
            self.events = EventLog(Path(trainer.log_dir) / EVENTS)
            try:
                self.events.go_on(tick)
            except ValueError as error:
                set_aside(self.events.path)
                say(f"{error}; the file was renamed, and a new one begins")

    def _begin(self, trainer: Trainer, tick: int) -> None:
        """Write what does not change in a run, and start to listen for checkpoints."""
        records = [callback for callback in trainer.callbacks if isinstance(callback, RunRecord)]
        for board in self.boards:
            if not (self._introduced and board.has_earlier_files):
                board.introduce(records[0].changed if records else {})
        self._introduced = bool(self.boards)
        if self.events is not None:
            self.events.path.parent.mkdir(parents=True, exist_ok=True)
        pool = self._module.loop.pool
        pool.clock.gauge = make_gauge(pool.device)
        slots, blueprints = list(pool.space.slot), list(pool.space.blueprint)
        self._tell([Started(tick, SCHEMA, pool.n_envs, pool.horizon, slots, blueprints, self.detail.level)])
        keeper = trainer.strategy.checkpoint_io
        if isinstance(keeper, AtomicCheckpointIO):
            keeper.listeners.append(self._checkpoint_saved)

    def _tell(self, events: Iterable[Event]) -> None:
        if self.events is not None:
            self.events.write(events)

    def _checkpoint_saved(self, path: Path, seconds: float) -> None:
        if self.events is not None:
            folder = self.events.path.parent
            inside = path.relative_to(folder) if path.is_relative_to(folder) else path
            self._tell([CheckpointSaved(self._module.loop.ticks, str(inside), seconds)])

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        if self.events is not None:
            self.events.close()
        keeper = trainer.strategy.checkpoint_io
        if isinstance(keeper, AtomicCheckpointIO) and self._checkpoint_saved in keeper.listeners:
            keeper.listeners.remove(self._checkpoint_saved)
        self.events, self.boards = None, []

    def _follow(self) -> None:
        """Process the environment step that was just taken."""
        loop = self._module.loop
        if self.detail.level == "off":
            return
        with loop.pool.clock.measure("telemetry"):
            everything = self.detail.includes("normal", loop.ticks)
            self._tell(self.observer.tick(loop.last, loop.pool.envs, loop.ticks, everything))
            alive = sum(not env.ended for env in loop.pool.envs)
            self._host_epochs += alive
            # Fresh hosts are validated once more, before the first tick of an episode.
            self._measured += alive + (loop.pool.n_envs if loop.pool.envs[0].tick == 1 else 0)

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if self.detail.level == "off":
            return
        loop = pl_module.loop
        seconds = loop.pool.clock.take()
        self._in_rollout.update(seconds)
        self._unwritten.update(seconds)
        with loop.pool.clock.measure("telemetry"):
            written: dict[str, float] = {}
            if self.detail.includes("normal", loop.ticks) and loop.ticks % self.every_n_ticks == 0:
                written |= self._tick_metrics()
            if trainer.is_last_batch:
                ops = op_frequency(loop.buffer.action.op, loop.buffer.masks)
                written |= self._rollout_metrics(trainer) | {f"rollout/op.{op}": share for op, share in ops.items()}
                if self.detail.includes("normal", loop.ticks):
                    written |= self._details(trainer)
                if self.anomalies.enabled:
                    written |= self._look_for_anomalies(trainer, ops)
            for logger in trainer.loggers if written else ():
                logger.log_metrics(written, step=loop.ticks)
            if self.detail.changes(loop.ticks):
                cause = "an anomaly was raised" if self.detail.raised(loop.ticks + 1) else "raised_ticks have passed"
                self._tell([LevelChanged(loop.ticks, self.detail.now(loop.ticks + 1), cause)])

    def _tick_metrics(self) -> dict[str, float]:
        loop = self._module.loop
        pool, step = loop.pool, loop.last
        found = numbers.tick_metrics(step) | numbers.growth_metrics(pool.envs) | numbers.skipped_metrics(pool.envs)
        found |= numbers.gradient_metrics(pool.envs)
        if pool.config.governor.enabled:
            found |= numbers.governor_metrics(step, pool.envs)
        found |= numbers.phase_seconds(self._unwritten, loop.ticks - self._written, pool.clock.timer.name)
        self._unwritten, self._written = Counter(), loop.ticks
        if self.detail.includes("debug", loop.ticks):
            found |= self._layers()
        return found

    def _layers(self) -> dict[str, float]:
        """Return the layers' gradient norms of the first hosts whose episodes have not ended."""
        pool = self._module.loop.pool
        alive = [host for host, env in enumerate(pool.envs) if not env.ended and env.failure is None]
        with self._unless_out_of_memory("layer_hosts"):
            return numbers.layer_metrics([layer_gradients(pool, host) for host in alive[: self.layer_hosts]])
        return {}

    @contextmanager
    def _unless_out_of_memory(self, setting: str) -> Iterator[None]:
        """Catch out-of-memory errors of an optional measurement: print the error, and switch `setting` to 0."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            setattr(self, setting, 0)
            say(f"telemetry: {setting} is 0 from now on: {in_a_line(error)}")

    def _rollout_metrics(self, trainer: Trainer) -> dict[str, float]:
        loop, report = self._module.loop, self._module.report
        final = loop.last.metrics
        now, (then, ticks) = time.perf_counter(), self._since
        self._since = (now, loop.ticks)
        speed = (loop.ticks - ticks) / (now - then)
        found = numbers.return_metrics(report.rollout.returns) | {
            "rollout/objective": final.objective.mean().item(),
            "rollout/accuracy": final.accuracy.mean().item(),
            "rollout/parameters": final.parameters.float().mean().item(),
            **numbers.task_metrics(final, loop.pool.tasks),
            "time/ticks_per_second": speed,
            "time/env_steps_per_second": speed * loop.pool.n_envs,
            "telemetry/level": float(LEVELS.index(self.detail.now(loop.ticks))),
        }
        found |= memory_metrics(loop.pool.device)
        found |= {f"train/{name}": value for name, value in report.metrics.items()}
        found |= numbers.throughput(loop.pool, self._in_rollout, self._host_epochs, self._measured)
        self._host_epochs = self._measured = 0
        memory = loop.pool.clock.take_memory()
        self._most = max(self._most, *memory.values())
        found |= {f"memory/phase.{phase}": held for phase, held in memory.items()}
        shares = numbers.phase_shares(self._in_rollout, now - then)
        found |= {f"time/share.{phase}": share for phase, share in shares.items()}
        self._in_rollout = Counter()
        self._tell([Updated(loop.ticks, trainer.current_epoch + 1, report.metrics)])
        return found

    def _details(self, trainer: Trainer) -> dict[str, float]:
        """Return metrics of blueprints, actions and credit for the rollout; write its histograms and figures."""
        loop, report = self._module.loop, self._module.report
        pool, buffer, debug = loop.pool, loop.buffer, self.detail.includes("debug", loop.ticks)
        found = self.observer.scoreboard.metrics() | numbers.lstm_metrics(loop.state)
        found |= numbers.choice_metrics(buffer.action, buffer.masks, pool.space, relevance(pool.device))
        found |= self._credit(pool.n_envs if debug and self.credit_hosts else self.credit_hosts)
        histograms = {
            "ratio": torch.cat([ratio.flatten() for ratio in report.ratios]),
            "advantage": report.rollout.advantages,
            "contribution": torch.tensor(numbers.contribution_values(pool.envs)),
        }
        update = trainer.current_epoch + 1
        due = self.figures_every and (
            update % self.figures_every == 0 or update == trainer.max_epochs or self.detail.raised(loop.ticks)
        )
        for board in self.boards:
            for name, values in histograms.items():
                board.histogram(f"histograms/{name}", values, loop.ticks)
            if due:
                for tag, figure in self.observer.figures(loop.last).items():
                    board.figure(tag, figure, loop.ticks)
                board.text("blueprints", self.observer.scoreboard.table(), loop.ticks)
        return found

    def _credit(self, hosts: int) -> dict[str, float]:
        loop = self._module.loop
        with self._unless_out_of_memory("credit_hosts"):
            credits = share_among_kept(loop.pool, hosts, loop.ticks)
            self._tell(credits)
            return numbers.credit_metrics(credits)
        return {}

    def _look_for_anomalies(self, trainer: Trainer, chosen: dict[str, float]) -> dict[str, float]:
        """Apply the anomaly rules to this rollout and its update, print the changes, and return metrics to plot."""
        loop, config = self._module.loop, self.anomalies
        readings = self.observer.gradients.readings(config.least_seeds)
        readings |= host_readings(loop.pool.envs, config.most_reliance) | state_rms(loop.state)
        memory = {f"memory.{name}": share for name, share in memory_share(loop.pool.device, self._most).items()}
        ops = {f"op.{op}": share for op, share in chosen.items()}
        update = trainer.current_epoch + 1
        progress = trainer.current_epoch / max(1, trainer.max_epochs - 1)
        changes = self.detector.observe(self._module.report.metrics | readings | memory | ops, update, progress)
        for change in changes:
            say(str(change))
        self._tell(as_event(change, loop.ticks) for change in changes)
        if any(change.level != "cleared" for change in changes):
            self.detail.alarm(loop.ticks)
        levels = {f"anomaly/{name}": float(level) for name, level in self.detector.levels.items()}
        plotted = {f"rollout/{name}": value for name, value in readings.items()}
        return plotted | {name.replace(".", "/"): share for name, share in memory.items()} | levels


def as_event(change: Anomaly, tick: int) -> AnomalyChanged:
    """Return the event that records a change of an anomaly."""
    what = (change.name, change.level, change.value, change.threshold, change.cause)
    return AnomalyChanged(tick, change.update, *what, list(change.settings))
