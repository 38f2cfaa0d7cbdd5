"""Callbacks that tell what happens in a run: in its loggers, in events.jsonl, and in a line for each rollout."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

# protobuf makes these classes at run time, and there are no stubs.
from tensorboard.compat.proto import event_pb2
from torch.utils.tensorboard import SummaryWriter

from esper_lightning.envs.actions import relevance_table
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.limits import share_of_training
from esper_lightning.telemetry import metrics as metrics_of
from esper_lightning.telemetry.anomalies import AnomalyDetector
from esper_lightning.telemetry.events import EVENTS_FILE, Event, EventLog, Updated
from esper_lightning.telemetry.observer import Observer, join, observe, started

if TYPE_CHECKING:
    from esper_lightning.module import TamiyoModule


class Telemetry(Callback):
    """Writes metrics, histograms and events to the trainer's loggers and to events.jsonl, and prints anomalies.

    docs/reference/telemetry.md explains every plot, event and rule. Processes send what they see of their hosts to
    rank 0, which alone has statistics and writes.

    Args:
        every_n_ticks: Ticks between two writes of the hosts' metrics and of the mean seconds per tick.
        ignore: Names of the rules for anomalies that are not applied.
    """

    def __init__(self, *, every_n_ticks: int = 1, ignore: Sequence[str] = ()) -> None:
        if every_n_ticks < 1:
            raise ValueError(f"Telemetry.every_n_ticks must be at least 1, got {every_n_ticks}")
        self.every_n_ticks = every_n_ticks
        self.detector = AnomalyDetector(ignore)
        self.events: EventLog | None = None
        self.writers: list[SummaryWriter] = []
        self._restored: dict[str, Any] = {}  # state of a checkpoint, until the observer exists

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = state_dict

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        """Begin to observe the environments; rank 0 opens files and discards what an interrupted run wrote later."""
        self.collector, self.module = pl_module.collector, pl_module
        pool, ranks = self.collector.pool, self.collector.ranks
        self.observer = Observer(pool.space.slot, pool.space.blueprint, horizon=pool.horizon, n_envs=ranks.total)
        if "observer" in self._restored:
            self.observer.load_state_dict(self._restored["observer"])
            self.detector.load_state_dict(self._restored["detector"])
        # Totals of the present rollout, and of the ticks whose seconds are not written yet.
        self._rollout_start = (time.perf_counter(), self.collector.ticks)
        self._rollout_seconds: Counter[str] = Counter()
        self._unwritten_seconds: Counter[str] = Counter()
        self._last_written_tick = self.collector.ticks
        pool.clock.take_seconds()
        pool.clock.profile = trainer.profiler.profile
        # Not in on_train_batch_end: an earlier callback may save a checkpoint of the tick before it.
        self.collector.listeners.append(self._observe)
        folder = trainer.log_dir  # Lightning wants it to be read on every rank
        if ranks.rank == 0:
            tick = self.collector.ticks
            self.writers = [logger.experiment for logger in trainer.loggers if isinstance(logger, TensorBoardLogger)]
            for writer in self.writers:
                is_resumed = self._restored and len(list(Path(writer.log_dir).glob("events.out.tfevents.*"))) > 1
                if tick:  # makes readers drop what an earlier process wrote later
                    start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                    writer.file_writer.add_event(event_pb2.Event(step=tick + 1, session_log=start))
                if not is_resumed:
                    writer.add_custom_scalars(metrics_of.CUSTOM_SCALARS)
            if folder is not None and trainer.loggers:
                Path(folder).mkdir(parents=True, exist_ok=True)
                self.events = EventLog(Path(folder) / EVENTS_FILE)
                self.events.discard_after(tick)
            self._write_events([started(pool, tick=tick, hosts=ranks.total)])
        self._restored = {}

    def _write_events(self, events: Iterable[Event]) -> None:
        if self.events is not None:
            self.events.write(events)

    def _observe(self) -> None:
        """Process the environment step that was just taken."""
        collector, ranks = self.collector, self.collector.ranks
        with collector.pool.clock.measure("telemetry"):
            tick = observe(collector.pool, collector.last_step, collector.ticks, ranks.own)
            if ticks := ranks.gather(tick):
                self._tick = join(ticks, ranks)
                self._write_events(self.observer.update(self._tick))

    def on_train_batch_end(self, trainer: Trainer, pl_module: "TamiyoModule", *_: object) -> None:
        """Write the metrics of this tick, and at the end of a rollout its metrics, to the loggers."""
        collector, clock = self.collector, self.collector.pool.clock
        seconds = clock.take_seconds()
        self._rollout_seconds.update(seconds)
        self._unwritten_seconds.update(seconds)
        with clock.measure("telemetry"):
            written: dict[str, float] = {}
            if collector.ticks % self.every_n_ticks == 0 and collector.ranks.rank == 0:
                written |= metrics_of.tick_metrics(self._tick, self.observer.slots)
                ticks = collector.ticks - self._last_written_tick
                for phase, phase_seconds in self._unwritten_seconds.items():
                    written[f"time/{clock.name}.{phase}"] = phase_seconds / ticks
                self._unwritten_seconds, self._last_written_tick = Counter(), collector.ticks
            if trainer.is_last_batch:
                written |= self._rollout_metrics(trainer)
            # The module logs some of them itself, so that a Trainer without this callback has them, too.
            logged_by_module = pl_module.metrics if trainer.is_last_batch else {}
            logged = {tag: value for tag, value in written.items() if tag not in logged_by_module}
            for logger in trainer.loggers if logged else ():
                logger.log_metrics(logged, step=collector.ticks)

    def _rollout_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Write events, histograms and anomalies of the finished rollout, and return its metrics; {} on other ranks."""
        collector, report = self.collector, self.module.report
        pool, buffer, ranks, tick = collector.pool, collector.buffer, collector.ranks, collector.ticks
        assert report is not None, "the rollout has ended with an update"
        steps, relevant = buffer.steps, relevance_table(pool.device)
        actions = metrics_of.choice_metrics(steps.action, steps.masks, pool.space, relevant=relevant)
        means = actions | metrics_of.lstm_metrics(collector.state)
        ratios = torch.cat([ratio.flatten() for ratio in report.ratios])
        sent = {"means": means, "ratio": ratios, "advantage": report.summary.advantages.flatten()}
        sent_by_ranks = ranks.gather(sent)
        if not sent_by_ranks:
            return {}
        # Ranks have equal numbers of hosts, so the mean over ranks of a mean over hosts is the mean over all hosts.
        metrics = {tag: sum(sent["means"][tag] for sent in sent_by_ranks) / ranks.world for tag in means}
        update = trainer.current_epoch + 1
        self._write_events([Updated(tick, update, report.metrics)])
        # `self._tick` has the hosts of all ranks; `task_slices` counts those of this rank.
        spans = {task: slice(s.start * ranks.world, s.stop * ranks.world) for task, s in pool.task_slices.items()}
        metrics |= metrics_of.episode_metrics(self._tick, spans) | self.observer.metrics()
        metrics |= metrics_of.return_metrics(report.summary.returns)
        metrics |= {f"train/{name}": value for name, value in report.metrics.items()}
        now, (start, start_tick) = time.perf_counter(), self._rollout_start
        speed = (tick - start_tick) / (now - start)
        metrics |= {"time/ticks_per_second": speed, "time/env_steps_per_second": speed * ranks.total}
        metrics |= metrics_of.phase_shares(self._rollout_seconds, now - start)
        metrics |= metrics_of.memory_metrics(pool.device)
        self._rollout_start, self._rollout_seconds = (now, tick), Counter()
        blended = self._tick.slots["contribution"][self._tick.slots["blended"]]
        values = {name: torch.cat([sent[name] for sent in sent_by_ranks]) for name in ("ratio", "advantage")}
        values["contribution"] = torch.from_numpy(blended).float()
        for writer in self.writers:
            for name, numbers in values.items():
                if (finite := numbers[torch.isfinite(numbers)]).numel():
                    writer.add_histogram(f"histograms/{name}", finite, tick)
        readings = {tag.removeprefix("rollout/").replace("memory/", "memory."): value for tag, value in metrics.items()}
        readings |= report.metrics
        changes = self.detector.observe(readings, tick=tick, update=update, progress=self.module.progress)
        for change in changes:
            print_status(str(change))
        self._write_events(changes)
        states = self.detector.states.items()
        return metrics | {f"anomaly/{name}": float(state.raised) for name, state in states if state.occurred}

    def state_dict(self) -> dict[str, Any]:
        if not hasattr(self, "observer"):  # nothing has been trained
            return {}
        return {"detector": self.detector.state_dict(), "observer": self.observer.state_dict()}

    def on_exception(self, trainer: Trainer, pl_module: "TamiyoModule", exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: "TamiyoModule", stage: str) -> None:
        if self.events is not None:
            self.events.close()
        self.events, self.writers = None, []


class ProgressLines(Callback):
    """Prints one line for each rollout: means over hosts, speed, and the time that is left."""

    def on_train_start(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        self._start, self._first_tick = time.perf_counter(), pl_module.collector.ticks

    def on_train_epoch_end(self, trainer: Trainer, pl_module: "TamiyoModule") -> None:
        """Print the line of a rollout; the end of the run is estimated from the share of the training that is over."""
        rollout, collector = trainer.current_epoch + 1, pl_module.collector
        share = share_of_training(trainer, int(trainer.num_training_batches))
        # With `max_steps` Lightning ends the saved epoch again on resume: no rollout of this process is over.
        if not trainer.is_global_zero or not pl_module.metrics:
            return
        means = ", ".join(
            f"{name} {pl_module.metrics[tag]:.3f}"
            for name in ("objective", "score", "return")
            if (tag := f"rollout/{name}") in pl_module.metrics
        )
        speed = (collector.ticks - self._first_tick) / (time.perf_counter() - self._start)  # ticks per second
        left = total = ""
        if share > 0.0:
            last = max(rollout, round(rollout / share))
            left = f", {timedelta(seconds=round((last - rollout) * collector.buffer.ticks / speed))} left"
            total = f" of {last}"
        print_status(f"rollout {rollout}{total}: {means}, {speed * collector.ranks.total:.0f} host epochs/s{left}")
