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

from esper_lightning.console import print_status
from esper_lightning.envs.executors.out_of_memory import first_line
from esper_lightning.envs.spaces.actions import relevance_table
from esper_lightning.envs.spaces.masks import op_frequency
from esper_lightning.errors import is_out_of_memory
from esper_lightning.evaluation.inspection import credit_fossilized_seeds, layer_gradients
from esper_lightning.module import TamiyoModule
from esper_lightning.ppo.update_watch import RatioRange, UpdateWatch
from esper_lightning.serialization.checks import check_keys
from esper_lightning.serialization.replace import set_aside
from esper_lightning.telemetry import metrics as numbers
from esper_lightning.telemetry.anomalies import Anomaly, AnomalyDetector
from esper_lightning.telemetry.anomaly_metrics import host_anomaly_metrics, state_rms
from esper_lightning.telemetry.anomaly_rules import AnomalyConfig
from esper_lightning.telemetry.episode_terms import EpisodeTerms, join_terms
from esper_lightning.telemetry.events import (
    SCHEMA,
    AnomalyChanged,
    Event,
    EventLog,
    LevelChanged,
    Started,
    Updated,
)
from esper_lightning.telemetry.level import LEVELS, DetailLevel, Level
from esper_lightning.telemetry.memory import make_memory_probe, memory_metrics, memory_share
from esper_lightning.telemetry.observer import Observer
from esper_lightning.telemetry.over_ranks import (
    join_events,
    join_observers,
    metrics_over_ranks,
    split_observer,
    with_global_hosts,
)
from esper_lightning.telemetry.tensorboard import TensorBoardWriter

HOST_READINGS = ("fossils", "rolled_back", "reliance", "state_rms")
"""Names of the readings of `host_anomaly_metrics` and `state_rms`."""

EVENTS_FILE = "events.jsonl"
"""Name of the file of events in the run's folder."""


class Telemetry(Callback):
    """Writes metrics, figures and events to the trainer's loggers and to events.jsonl, and prints anomalies.

    docs/reference explains every plot (telemetry.md), every event (events.md) and every rule (anomalies.md).

    Args:
        level: off: nothing. minimal: metrics of each rollout, anomalies, rollbacks. normal: metrics of each tick, every
            event, histograms, figures, the value of each blueprint. debug: every layer's gradient, of hosts and of the
            policy, transitions whose ratio exploded, and the credit of the fossilized seeds of all hosts.
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
        *,
        every_n_ticks: int = 1,
        figures_every: int = 10,
        credit_hosts: int = 2,
        layer_hosts: int = 2,
        raised_ticks: int = 50,
        anomalies: AnomalyConfig = AnomalyConfig(),
    ) -> None:
        if every_n_ticks < 1:
            raise ValueError(f"Telemetry.every_n_ticks must be at least 1, got {every_n_ticks}")
        counts = {"figures_every": figures_every, "credit_hosts": credit_hosts, "layer_hosts": layer_hosts}
        for name, value in (counts | {"raised_ticks": raised_ticks}).items():
            if value < 0:
                raise ValueError(f"Telemetry.{name} must not be negative, got {value}")
        self.every_n_ticks = every_n_ticks
        self.figures_every = figures_every
        self.credit_hosts = credit_hosts
        self.layer_hosts = layer_hosts
        self.anomalies = anomalies
        self.detail = DetailLevel(level, raised_ticks)
        self.detector = AnomalyDetector(anomalies)
        self._restored_observer: Any = None  # state of the observer, until the observer exists
        self._restored_terms: Any = None  # state of the sums of the reward's terms, until these exist
        self._update_watch: UpdateWatch | None = None  # exists from an update's first optimizer step until its report
        self._static_written = False  # TensorBoard's files of this run already hold what does not change
        self.events: EventLog | None = None
        self.writers: list[TensorBoardWriter] = []
        self.last_rollout: dict[str, float] = {}
        """Metrics written in the last tick of the last rollout, by tag, on rank 0."""

    def setup(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        self._module = pl_module

    def state_dict(self) -> dict[str, Any]:
        ranks, own = self._module.collector.ranks, self.observer.state_dict()
        of_ranks, terms = ranks.gather(own), self.terms.state_dict()
        terms_of_ranks = ranks.gather(terms)
        return {
            "anomalies": self.detector.state_dict(),
            "detail": self.detail.state_dict(),
            "observed": join_observers(of_ranks, ranks) if of_ranks else own,
            "terms": join_terms(terms_of_ranks) if terms_of_ranks else terms,
            "introduced": self._static_written,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        check_keys("Telemetry", state_dict, ("anomalies",))
        self.detector.load_state_dict(state_dict["anomalies"])
        # Checkpoints of earlier versions lack these, and missing telemetry is no reason to refuse a run.
        self.detail.load_state_dict(state_dict.get("detail", [0, 0]))
        self._restored_observer = state_dict.get("observed")
        self._restored_terms = state_dict.get("terms")
        self._static_written = bool(state_dict.get("introduced", False))

    def on_train_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        loop = pl_module.collector
        self._last_written_tick = loop.ticks
        self._rollout_start = (time.perf_counter(), loop.ticks)
        self._rollout_seconds: Counter[str] = Counter()  # seconds by phase
        self._unwritten_seconds: Counter[str] = Counter()
        self._host_epochs = self._host_validations = 0  # host epochs, and validations of hosts, in this rollout
        self._peak_memory = 0.0  # peak memory of any phase so far, in MiB
        loop.pool.clock.take_seconds()
        self.observer = Observer(loop.pool)
        if self._restored_observer is not None:
            self.observer.load_state_dict(split_observer(self._restored_observer, loop.ranks))
            self._restored_observer = None
        self.terms = EpisodeTerms(loop.pool.horizon)
        if self._restored_terms is not None:
            self.terms.load_state_dict(self._restored_terms)
            self._restored_terms = None
        # Not in on_train_batch_end: an earlier callback may save a checkpoint of the tick before it.
        loop.listeners.append(self._process_step)
        self._open_outputs(trainer, loop.ticks)
        if self.detail.level != "off":
            self._write_static(trainer, loop.ticks)

    def _open_outputs(self, trainer: Trainer, tick: int) -> None:
        """Open the outputs of rank 0, and discard whatever the interrupted run wrote after the checkpoint."""
        folder = trainer.log_dir  # Lightning wants it to be read on every rank
        if not trainer.is_global_zero:
            return
        self.writers = [
            TensorBoardWriter(one.experiment) for one in trainer.loggers if isinstance(one, TensorBoardLogger)
        ]
        for writer in self.writers:
            writer.discard_after(tick)
        if folder is not None and trainer.loggers:
            self.events = EventLog(Path(folder) / EVENTS_FILE)
            try:
                self.events.discard_after(tick)
            except ValueError as error:
                set_aside(self.events.path)
                print_status(f"{error}; the file was renamed, and a new one begins")

    def _write_static(self, trainer: Trainer, tick: int) -> None:
        """Write what does not change in a run."""
        for writer in self.writers:
            if not (self._static_written and writer.has_earlier_files):
                writer.write_static()
        self._static_written = bool(self.writers)
        if self.events is not None:
            self.events.path.parent.mkdir(parents=True, exist_ok=True)
        pool = self._module.collector.pool
        pool.clock.memory_probe = make_memory_probe(pool.device)
        slots, blueprints = list(pool.space.slot), list(pool.space.blueprint)
        hosts = self._module.collector.ranks.total
        self._write_events([Started(tick, SCHEMA, hosts, pool.horizon, slots, blueprints, self.detail.level)])

    def _write_events(self, events: Iterable[Event]) -> None:
        if self.events is not None:
            self.events.write(events)

    def _gather_events(self, events: Iterable[Event]) -> list[Event]:
        """Return the events of the hosts of all ranks on rank 0, elsewhere nothing."""
        ranks = self._module.collector.ranks
        if ranks.world == 1:
            return list(events)
        return join_events(ranks.gather(with_global_hosts(events, ranks.own)))

    def on_exception(self, trainer: Trainer, pl_module: TamiyoModule, exception: BaseException) -> None:
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: TamiyoModule, stage: str) -> None:
        if self.events is not None:
            self.events.close()
        self.events, self.writers = None, []

    def _process_step(self) -> None:
        """Process the environment step that was just taken."""
        loop = self._module.collector
        if self.detail.level == "off":
            return
        with loop.pool.clock.measure("telemetry"):
            everything = self.detail.includes("normal", loop.ticks)
            events = self.observer.update(loop.last_step, loop.pool.envs, loop.ticks, all_events=everything)
            self._write_events(self._gather_events(events))
            self.terms.update(loop.last_step.terms, loop.pool.envs[0].tick)
            alive = sum(not env.ended for env in loop.pool.envs)
            self._host_epochs += alive
            # Fresh hosts are validated once more, before the first tick of an episode.
            self._host_validations += alive + (loop.pool.n_envs if loop.pool.envs[0].tick == 1 else 0)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        loop = pl_module.collector
        if self.detail.includes("debug", loop.ticks):  # within the phase `update`; phases cannot be nested
            self._update_watch = self._update_watch or UpdateWatch(loop, loop.pool)
            self._update_watch.before_step()

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        if self.detail.level == "off":
            return
        loop = pl_module.collector
        seconds = loop.pool.clock.take_seconds()
        self._rollout_seconds.update(seconds)
        self._unwritten_seconds.update(seconds)
        with loop.pool.clock.measure("telemetry"):
            own: dict[str, float] = {}  # metrics of the hosts of this rank
            if self.detail.includes("normal", loop.ticks) and loop.ticks % self.every_n_ticks == 0:
                own |= self._tick_metrics()
            if trainer.is_last_batch:
                ops = op_frequency(loop.buffer.action.op, loop.buffer.masks)
                own |= self._rollout_metrics(trainer) | {f"rollout/op.{op}": share for op, share in ops.items()}
                if self.detail.includes("normal", loop.ticks):
                    own |= self._detail_metrics()
                own |= self._watched_metrics(trainer)
                if self.anomalies.enabled:
                    readings = host_anomaly_metrics(loop.pool.envs, self.anomalies.most_reliance)
                    readings |= state_rms(loop.state)
                    own |= {f"rollout/{name}": value for name, value in readings.items()}
            of_ranks = loop.ranks.gather(own) if own else []  # all ranks write in the same ticks
            written = metrics_over_ranks(of_ranks) if of_ranks else {}
            if trainer.is_last_batch:
                observer = self._observer_of_all()
                if self.detail.includes("normal", loop.ticks):
                    written |= self._write_details(trainer, observer)
                if self.anomalies.enabled:
                    written |= self._check_anomalies(trainer, observer, written)
                self.last_rollout = written
            # The module logs some of them itself, so that a Trainer without this callback has them, too.
            own_of_module = self._module.metrics if trainer.is_last_batch else {}
            logged = {tag: value for tag, value in written.items() if tag not in own_of_module}
            for logger in trainer.loggers if logged else ():
                logger.log_metrics(logged, step=loop.ticks)
            if self.detail.changes_after(loop.ticks):
                cause = "an anomaly was raised" if self.detail.is_raised(loop.ticks + 1) else "raised_ticks have passed"
                self._write_events([LevelChanged(loop.ticks, self.detail.level_at(loop.ticks + 1), cause)])

    def _observer_of_all(self) -> Observer | None:
        """Return an observer of the hosts of all ranks on rank 0, elsewhere None."""
        ranks = self._module.collector.ranks
        if ranks.world == 1:
            return self.observer
        of_ranks = ranks.gather(self.observer.state_dict())
        if not of_ranks:
            return None
        observer = Observer(self._module.collector.pool, ranks.total)
        observer.load_state_dict(join_observers(of_ranks, ranks))
        return observer

    def _tick_metrics(self) -> dict[str, float]:
        loop = self._module.collector
        pool, step = loop.pool, loop.last_step
        found = numbers.tick_metrics(step) | numbers.growth_metrics(pool.envs)
        found |= numbers.skipped_step_metrics(pool.envs, self._module.collector.ranks.own)
        found |= numbers.gradient_metrics(pool.envs) | numbers.potential_metrics(pool.envs)
        if pool.governor is not None:
            found |= numbers.governor_metrics(step, pool.envs)
        found |= numbers.phase_seconds(
            self._unwritten_seconds, loop.ticks - self._last_written_tick, pool.clock.timer.name
        )
        self._unwritten_seconds, self._last_written_tick = Counter(), loop.ticks
        if self.detail.includes("debug", loop.ticks):
            found |= self._layer_metrics()
        return found

    def _layer_metrics(self) -> dict[str, float]:
        """Return the layers' gradient norms of the first hosts whose episodes have not ended."""
        pool = self._module.collector.pool
        if self._module.collector.ranks.rank > 0:
            return {}
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
            print_status(f"telemetry: {setting} is 0 from now on: {first_line(error)}")

    def _rollout_metrics(self, trainer: Trainer) -> dict[str, float]:
        loop, report = self._module.collector, self._module.report
        final = loop.last_step.metrics
        now, (start, ticks) = time.perf_counter(), self._rollout_start
        self._rollout_start = (now, loop.ticks)
        speed = (loop.ticks - ticks) / (now - start)
        found = numbers.return_metrics(report.summary.returns) | {
            "rollout/objective": final.objective.mean().item(),
            "rollout/accuracy": final.accuracy.mean().item(),
            "rollout/parameters": final.parameters.float().mean().item(),
            **numbers.task_metrics(final, loop.pool.task_slices),
            **self.terms.metrics(),
            "time/ticks_per_second": speed,
            "time/env_steps_per_second": speed * loop.ranks.total,
            "telemetry/level": float(LEVELS.index(self.detail.level_at(loop.ticks))),
        }
        found |= memory_metrics(loop.pool.device)
        found |= {f"train/{name}": value for name, value in report.metrics.items()}
        found |= numbers.throughput(
            loop.pool, seconds=self._rollout_seconds, trained=self._host_epochs, validated=self._host_validations
        )
        self._host_epochs = self._host_validations = 0
        memory = loop.pool.clock.take_memory()
        self._peak_memory = max(self._peak_memory, *memory.values())
        found |= {f"memory/phase.{phase}": held for phase, held in memory.items()}
        shares = numbers.phase_shares(self._rollout_seconds, now - start)
        found |= {f"time/share.{phase}": share for phase, share in shares.items()}
        self._rollout_seconds = Counter()
        self._write_events([Updated(loop.ticks, trainer.current_epoch + 1, report.metrics)])
        return found

    def _detail_metrics(self) -> dict[str, float]:
        """Return metrics of actions and credit for the rollout of this rank's hosts."""
        loop = self._module.collector
        pool, buffer, debug = loop.pool, loop.buffer, self.detail.includes("debug", loop.ticks)
        found = numbers.lstm_metrics(loop.state)
        found |= numbers.choice_metrics(buffer.action, buffer.masks, pool.space, relevant=relevance_table(pool.device))
        hosts = loop.ranks.total if debug and self.credit_hosts else self.credit_hosts
        return found | self._credit_metrics(sum(host < hosts for host in loop.ranks.own))

    def _write_details(self, trainer: Trainer, observer: Observer | None) -> dict[str, float]:
        """Write histograms and figures of the rollout of all hosts; return metrics of blueprints."""
        loop, report = self._module.collector, self._module.report
        own = {
            "ratio": torch.cat([ratio.flatten() for ratio in report.ratios]),
            "advantage": report.summary.advantages.flatten(),
            "contribution": torch.tensor(numbers.contribution_values(loop.pool.envs)),
        }
        of_ranks = loop.ranks.gather({"histograms": own, "metrics": list(loop.last_step.metrics)})
        if observer is None:
            return {}
        histograms = {name: torch.cat([one["histograms"][name] for one in of_ranks]) for name in own}
        parts = zip(*(one["metrics"] for one in of_ranks), strict=True)
        step = loop.last_step._replace(metrics=type(loop.last_step.metrics)(*map(loop.ranks.join, parts)))
        update = trainer.current_epoch + 1
        due = self.figures_every and (
            update % self.figures_every == 0 or update == trainer.max_epochs or self.detail.is_raised(loop.ticks)
        )
        for writer in self.writers:
            for name, values in histograms.items():
                writer.histogram(f"histograms/{name}", values, loop.ticks)
            if due:
                for tag, figure in observer.figures(step).items():
                    writer.figure(tag, figure, loop.ticks)
                writer.text("blueprints", observer.scoreboard.table(), loop.ticks)
        return observer.scoreboard.metrics()

    def _watched_metrics(self, trainer: Trainer) -> dict[str, float]:
        """Return the policy's gradient norms in the update, if it was watched; write the ratios that exploded."""
        watch, self._update_watch = self._update_watch, None
        if watch is None:
            return {}
        usual = RatioRange(self.anomalies.ratio_low.warning, self.anomalies.ratio_high.warning)
        self._write_events(self._gather_events(watch.exploded_ratios(usual, trainer.current_epoch + 1)))
        return {f"policy/{name}": norm for name, norm in watch.gradient_norms().items()}

    def _credit_metrics(self, hosts: int) -> dict[str, float]:
        loop = self._module.collector
        credit_events = []
        with self._unless_out_of_memory("credit_hosts"):
            credit_events = credit_fossilized_seeds(loop.pool, hosts, loop.ticks)
        self._write_events(self._gather_events(credit_events))
        return numbers.credit_metrics(credit_events)

    def _check_anomalies(
        self, trainer: Trainer, observer: Observer | None, written: dict[str, float]
    ) -> dict[str, float]:
        """Apply the anomaly rules to this rollout of all hosts and its update, and print the changes.

        Returns metrics to plot beside those in `written`.
        """
        loop = self._module.collector
        plotted, is_raised = ({}, False) if observer is None else self._observe_anomalies(trainer, observer, written)
        if loop.ranks.share(is_raised):
            self.detail.raise_level(loop.ticks)
        return plotted

    def _observe_anomalies(
        self, trainer: Trainer, observer: Observer, written: dict[str, float]
    ) -> tuple[dict[str, float], bool]:
        """Return metrics to plot, and whether an anomaly was raised."""
        loop, config = self._module.collector, self.anomalies
        own = observer.gradients.metrics(config.least_seeds)
        of_hosts = {tag.removeprefix("rollout/"): value for tag, value in written.items() if tag.startswith("rollout/")}
        names = [name for name in of_hosts if name in HOST_READINGS or name.startswith("op.")]
        readings = own | {name: of_hosts[name] for name in names}
        memory = {f"memory.{name}": share for name, share in memory_share(loop.pool.device, self._peak_memory).items()}
        update = trainer.current_epoch + 1
        progress = trainer.current_epoch / max(1, trainer.max_epochs - 1)
        changes = self.detector.observe(self._module.report.metrics | readings | memory, update, progress)
        for change in changes:
            print_status(str(change))
        self._write_events(as_event(change, loop.ticks) for change in changes)
        levels = {f"anomaly/{name}": float(level) for name, level in self.detector.levels.items()}
        plotted = {f"rollout/{name}": value for name, value in own.items()}
        plotted |= {name.replace(".", "/"): share for name, share in memory.items()} | levels
        return plotted, any(change.level != "cleared" for change in changes)


def as_event(change: Anomaly, tick: int) -> AnomalyChanged:
    """Return the event that records a change of an anomaly."""
    what = (change.name, change.level, change.value, change.threshold, change.cause)
    return AnomalyChanged(tick, change.update, *what, list(change.settings))
