"""Page of a run: one HTML file with what ran, what grew, and what it was worth. Needs the extra [report].

A run is a folder of a Lightning logger. Its numbers are those of the files in it: `events.jsonl`, `stack.jsonl`,
`run.json`, `evaluation/`, and the curves of TensorBoard or `metrics.csv`.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import numpy as np
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from vl_convert import javascript_bundle

from esper_lightning.callbacks.run_record import RUN_FILE
from esper_lightning.envs import HostVerdict
from esper_lightning.evaluation.report import EVALUATION_FOLDER, RESULTS_FILE, SUMMARY_FILE
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth import SeedEvent, Stage
from esper_lightning.growth.stages import LIVE
from esper_lightning.runtime.serialization import replace_file
from esper_lightning.telemetry import charts
from esper_lightning.telemetry.events import (
    EVENTS_FILE,
    STACK_FILE,
    AnomalyChanged,
    Contributed,
    HostsMeasured,
    Stacked,
    Started,
    Validated,
    read_events,
)
from esper_lightning.telemetry.observer import SeedStats, count_seed

TEMPLATE = Path(__file__).with_suffix(".html")

MAX_POINTS = 400
"""Most points of a line: more cannot be told apart at the width of a page."""

MAX_ROLLED_BACK = 3
"""Most episodes with a rollback that are shown, the latest ones."""

CURVES = {"objective": ("rollout/objective", "val/objective"), "score": ("rollout/score",)}
"""Curves of a policy's training: lines by the title of their chart."""

HOST_FAULTS = {"rolled_back", "gradient_health", "dead_seeds"}
"""Anomalies of the hosts, from which no policy can learn."""

MAX_METRICS = 6
"""Most metrics of a network of the user's that are shown."""


class Moment(NamedTuple):
    """One host after one tick."""

    op: str  # empty where ops are not recorded
    score: float | None
    loss: float | None
    objective: float | None
    parameters: int
    slots: dict[str, tuple[str, str]]  # stage and blueprint of each slot that is not empty
    rollback: str  # its cause; empty: none


class Episode(NamedTuple):
    """The training of one host."""

    rollout: int  # from 1
    host: int
    moments: list[Moment]


@dataclass
class Run:
    """Content of a run's folder."""

    name: str
    record: dict[str, Any]  # run.json
    summary: dict[str, Any]  # evaluation.json
    outcomes: list[dict[str, str]]  # rows of evaluation.csv
    config: dict[str, Any]  # config.yaml
    scalars: dict[str, list[tuple[int, float]]]  # (step, value) by tag
    started: Started | None = None
    episodes: list[Episode] = field(default_factory=list)  # of the last rollout; one for a network of the user's
    rolled_back: list[Episode] = field(default_factory=list)
    seeds: SeedStats | None = None  # over the run, [blueprints, slots] each
    events: dict[type, list[Any]] = field(default_factory=lambda: defaultdict(list))
    """By class: rollbacks, validations, growth in depth, anomalies; contributions if there is one host."""

    def worth(self) -> list[dict[str, Any]]:
        """Return the rows of the chart of what blueprints were worth."""
        if self.started is None or self.seeds is None:
            return []
        return charts.worth_rows(self.seeds, self.started.blueprints, self.started.slots)


def write_page(folders: Sequence[Path], out: Path, changed_settings: Callable[[Mapping[str, Any]], str]) -> None:
    """Write the page of one run, or of several side by side. Raises ValueError if a folder holds no run.

    `changed_settings` returns the settings of a config that differ from their defaults, as text.
    """
    runs = [read_run(folder) for folder in folders]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ends": format_ends, "chart": embed, "worth": charts.worth}
    environment.globals |= {part.__name__: part for part in (lead, anomalies, facts, cost, hosts, blocks)}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        title=" and ".join(run.name for run in runs),
        library=javascript_bundle(),  # pyright: ignore[reportCallIssue]  # its stub lacks the default
        stages={stage: colour for stage, (colour, _) in charts.STAGES.items()},
        runs=runs,
        settings=[(run.name, text) for run in runs if (text := changed_settings(run.config))],
        curves=list(curves_of(runs)),
        differences=list(differences(runs)),
    )
    replace_file(out, lambda draft: draft.write_text(text, encoding="utf-8"))


# What a folder holds.


def read_run(folder: Path) -> Run:
    """Return the content of a run's folder. Raises ValueError if it holds no run."""
    evaluation, config = folder / EVALUATION_FOLDER, folder / "config.yaml"
    summary = read_json(evaluation / SUMMARY_FILE)
    run = Run(
        name="/".join(folder.absolute().parts[-2:]),
        record=read_json(folder / RUN_FILE) or summary.get("run", {}),
        summary=summary,
        outcomes=read_rows(evaluation / RESULTS_FILE),
        config=yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else {},
        scalars=read_scalars(folder),
    )
    events, stack_events = folder / EVENTS_FILE, folder / STACK_FILE
    if not (events.is_file() or stack_events.is_file() or run.scalars or summary):
        raise ValueError(
            f"report: {str(folder)!r} holds no run: no {EVENTS_FILE}, no curves and no {EVALUATION_FOLDER}; name the "
            f"folder of a logger, as runs/digits/version_0"
        )
    if events.is_file():
        read_growth(events, run)
    if stack_events.is_file():
        # Where `Grow` ran beside `Stack`, both have recorded the same validations.
        kinds = (Stacked,) if run.events[Validated] else (Stacked, Validated)
        for event in read_events(stack_events):
            if isinstance(event, kinds):
                run.events[type(event)].append(event)
    return run


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file; nothing if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a file of values with commas; none if there is no file."""
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def read_growth(path: Path, run: Run) -> None:
    """Add the events of a policy's training or of `Grow` to the run, one rollout after the other."""
    events = read_events(path)
    started = next(events, None)
    if not isinstance(started, Started):  # the process ended before its first line was whole
        return
    stats = SeedStats(*np.zeros((len(SeedStats._fields), len(started.blueprints), len(started.slots))))
    last_contributions = np.full((started.hosts, len(started.slots)), np.nan)
    seeds: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)  # of the present rollout, by host and slot
    episodes: dict[int, Episode] = {}
    causes: dict[int, str] = {}

    def record(rollout: int, rows: Iterable[Sequence[Any]]) -> None:
        for host, numbers in enumerate(rows):
            moment = Moment(*numbers, slots=dict(seeds[host]), rollback=causes.get(host, ""))
            episodes.setdefault(host, Episode(rollout, host, [])).moments.append(moment)
        causes.clear()

    for event in events:
        match event:
            case SeedEvent():
                count_seed(event, stats, last_contributions, slots=started.slots, blueprints=started.blueprints)
                seeds[event.host][event.slot] = (event.after.name, event.blueprint)
                if event.after is Stage.DORMANT:
                    del seeds[event.host][event.slot]
            case Contributed():
                last_contributions[event.host, [started.slots.index(slot) for slot in event.slot]] = event.points
                if started.hosts == 1:
                    run.events[Contributed].append(event)
            case HostsMeasured():
                rollout, ticks_before = divmod(event.tick - 1, started.horizon)
                if ticks_before == 0:
                    episodes = {}
                record(rollout + 1, zip(*event[1:], strict=True))
                if ticks_before == started.horizon - 1:
                    struck = [e for e in episodes.values() if any(moment.rollback for moment in e.moments)]
                    run.rolled_back = [*run.rolled_back, *struck][-MAX_ROLLED_BACK:]
                    seeds.clear()
            case HostVerdict() | Validated() | AnomalyChanged():
                run.events[type(event)].append(event)
                if isinstance(event, HostVerdict):
                    causes[event.host] = event.cause
                elif isinstance(event, Validated):
                    record(1, [("", event.metrics.get(started.score), None, None, event.parameters)])
    run.started, run.seeds, run.episodes = started, stats, list(episodes.values())


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a logger by tag, from TensorBoard's files or from metrics.csv."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    if any(folder.glob("events.out.tfevents.*")):
        board = EventAccumulator(str(folder), size_guidance={"scalars": 10 * MAX_POINTS}).Reload()
        scalars = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    for row in read_rows(folder / "metrics.csv"):
        for tag in row.keys() - {"step", "epoch"}:
            if row[tag]:
                scalars.setdefault(tag, []).append((int(row["step"]), float(row[tag])))
    return scalars


# What the page says of one run.


def embed(chart: Any, description: str) -> str:
    """Return the JSON of a chart, to be embedded in a page."""
    return json.dumps(charts.styled(chart, description).to_dict(), separators=(",", ":")).replace("<", "\\u003c")


def distinct(names: Iterable[str]) -> list[str]:
    """Return the names in their order, each once."""
    return list(dict.fromkeys(names))


def raised(run: Run) -> dict[str, list[AnomalyChanged]]:
    """Return the anomalies that were raised, by rule."""
    by_rule: dict[str, list[AnomalyChanged]] = defaultdict(list)
    for change in run.events[AnomalyChanged]:
        if change.level == "raised":
            by_rule[change.name.partition(".")[0]].append(change)
    return by_rule


def lead(run: Run) -> str:
    """Return in a sentence how a comparison ended; empty if there was none."""
    if not run.summary:
        return ""
    (name, first), *others = run.summary["controllers"].items()
    relations: dict[str, list[str]] = {"ahead of": [], "level with": [], "behind": []}
    for other, row in others:
        low, high = row["ahead"]["low"], row["ahead"]["high"]
        is_level = None in (low, high) or low <= 0.0 <= high
        relations["level with" if is_level else "ahead of" if low > 0.0 else "behind"].append(other)
    said = [f"{name}: objective {format_ends(first['objective'])} on test data"]
    said += [f"{relation} {' / '.join(names)}" for relation, names in relations.items() if names]
    if HOST_FAULTS & raised(run).keys():
        said.append("the comparison tells little until what went wrong is mended")
    return "; ".join(said) + "."


def anomalies(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each rule that was raised: its name, the first update, and what it says; states of one rule together."""
    # Hosts that diverge come first: whatever else is seen may follow from it.
    for rule, changes in sorted(raised(run).items(), key=lambda pair: pair[0] != "rolled_back"):
        parts = distinct(change.name.partition(".")[2] for change in changes)
        first = changes[0]
        measured = "not finite" if first.value is None else f"{first.value:.3g}"
        yield {
            "rule": rule,
            "told": f"{measured} where the bound is {first.threshold:.3g}, after rollout {first.update}",
            "cause": first.cause.replace(parts[0], ", ".join(parts)) if parts[0] else first.cause,
            "settings": ", ".join(name + present(run.config, name) for name in first.settings),
        }


def present(config: Mapping[str, Any], name: str) -> str:
    """Return ` (now 0.6)` for a setting of a config, by its path; empty if it has none there."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = {key: part for key, part in value.items() if part}
    return "" if value is None or value == {} else f" (now {json.dumps(value)})"


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what ran."""
    if record := run.record:
        yield "command", " ".join([Path(record["command"][0]).name, *record["command"][1:]])
        if record["seed"] is not None:
            yield "RNG seed", str(record["seed"])
        yield "machine", f"{record['platform']}, {record['device']}, {record['threads']} threads per operator"
        yield "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        if record.get("git"):
            yield "revision", record["git"]["commit"][:10] + (" with changes" if record["git"]["changed"] else "")
    speed, started, validations = run.scalars.get("time/ticks_per_second", []), run.started, run.events[Validated]
    if speed and started:
        yield "training", f"{len(speed)} rollouts of {started.hosts} hosts and {started.horizon} ticks each"
        yield "seconds of training", f"{sum(started.horizon / value for _, value in speed):.0f}"
    elif validations:
        first, last = validations[0], validations[-1]
        yield "seconds of training", f"{last.seconds:.0f} since the process began"
        yield "parameters", f"{first.parameters:,} at first, {last.parameters:,} at last"
        if last.flops:
            unit = "" if run.events[Stacked] else " for one sample in each batch"
            yield "training FLOPs", f"{last.flops:.4g}{unit}"
    if rollbacks := run.events[HostVerdict]:
        yield "rollbacks by the Governor", str(len(rollbacks))


def format_ends(interval: Mapping[str, float | None]) -> str:
    """Return `0.573 [0.556, 0.590]`; empty where a number is missing."""
    if None in interval.values():
        return ""
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def cost(run: Run) -> Any:
    """Return the chart of score against training FLOPs."""
    rows = []
    for name, row in run.summary["controllers"].items():
        x, y = row["flops"], row["score"]
        if None not in (*x.values(), *y.values()) and x["low"] > 0:
            ends = {"x": x["mean"], "x_low": x["low"], "x_high": x["high"]}
            ends |= {"y": y["mean"], "y_low": y["low"], "y_high": y["high"]}
            rows.append({"name": name, **ends})
    return charts.scatter(rows, x="training FLOPs of a host", y="test score")


def hosts(run: Run) -> list[dict[str, Any]]:
    """Return the hosts to show, for the template: worst, median, best of the last rollout, and rolled back ones."""
    episodes = run.episodes
    if run.events[Validated] or not episodes:  # a network of the user's
        has_seeds = run.started is not None and run.started.blueprints
        return [host_view(run, "the network", episode) for episode in episodes if has_seeds]
    last = [episode.moments[-1].objective for episode in episodes]
    typical = charts.typical_hosts(np.array([-np.inf if objective is None else objective for objective in last]))
    shown = [(f"{title} host of rollout {episodes[i].rollout}", episodes[i]) for title, i in typical.items()]
    others = [episode for episode in run.rolled_back if episode not in [episode for _, episode in shown]]
    shown += [(f"rolled back in rollout {episode.rollout}", episode) for episode in others]
    return [host_view(run, title, episode) for title, episode in shown]


def host_view(run: Run, title: str, episode: Episode) -> dict[str, Any]:
    """Return one host for the template: timeline, curves, and the network at each tick."""
    started = run.started
    assert started is not None, "the events began with it"
    moments, slots = episode.moments, distinct([*started.behind, *started.slots])
    ops = [moment.op for moment in moments if moment.op]
    states = [[moment.slots.get(slot, ("DORMANT", "")) for slot in slots] for moment in moments]
    ticks = max(len(moments), started.horizon if ops else 1)
    rollbacks = {tick: moment.rollback for tick, moment in enumerate(moments, 1) if moment.rollback}
    label = started.score or "score"

    def curve(columns: Mapping[str, str], y: str, description: str, **look: Any) -> str:
        points = [
            {"x": tick, "y": value, "series": series}
            for column, series in columns.items()
            for tick, moment in enumerate(moments, 1)
            if (value := getattr(moment, column)) is not None
        ]
        return embed(charts.curve(points, x="tick", y=y, ticks=ticks, **look), description)

    life = charts.timeline(ops, states, slots, ticks=ticks, rolled_back=rollbacks)
    marks = [{"x": tick, "what": cause} for tick, cause in rollbacks.items()]
    behind = [started.flops, *started.behind.values(), 0]
    shares = [100 * (a - b) / max(1, started.flops) for a, b in pairwise(behind)]
    return {
        "title": f"{title}: host {episode.host}" if ops else title,
        "told": tell(moments, label),
        "timeline": embed(life, f"Stages of the slots of {title}"),
        "curve": curve({"score": label, "objective": "objective"}, label, f"{label} of {title}", shown="tick"),
        "slots": slots,
        "shares": [f"{share:.0f} %" for share in shares],
        "contributions": contributions_chart(run),
        "loss": curve({"loss": "loss"}, "loss", "validation loss", marks=marks) if marks else None,
        "states": json.dumps(states),
        "parameters": json.dumps([moment.parameters for moment in moments]),
        "ticks": len(moments),
    }


def contributions_chart(run: Run) -> str | None:
    """Return the chart of the seeds' contributions in a network of the user's; None if there were none."""
    points = [
        {"x": event.tick, "y": points, "series": slot}
        for event in run.events[Contributed]
        for slot, points in zip(event.slot, event.points, strict=True)
    ]
    if not points:
        return None
    chart = charts.curve(points, x="tick", y="points", ticks=len(run.events[Validated]))
    return embed(chart, "contribution of the seed in each slot")


def tell(moments: Sequence[Moment], label: str) -> str:
    """Return in a sentence how an episode ended."""
    last = moments[-1]
    kept = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if stage == "FOSSILIZED"]
    tried = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if Stage[stage] in LIVE]
    said = [f"Kept at the end: {', '.join(kept) or 'nothing'}."]
    said += [f"Still on trial, and not counted: {', '.join(tried)}."] if tried else []
    for name, value in ((label, last.score), ("objective", last.objective)):
        said += [] if value is None else [f"{name} {value:.3f}."]
    said += [f"Rolled back at tick {t}: {m.rollback}." for t, m in enumerate(moments, 1) if m.rollback]
    return " ".join(said)


def blocks(run: Run) -> dict[str, Any] | None:
    """Return the blocks of a network that `Stack` grows, for the template: how many there are at each validation."""
    changes, validations = run.events[Stacked], run.events[Validated]
    if not changes or not validations:
        return None
    names = distinct(change.blocks for change in changes)
    most = {change.blocks: change.after for change in changes}  # of the last change: lists only grow
    first = {change.blocks: change.before for change in reversed(changes)}
    depths = [
        first | {change.blocks: change.after for change in changes if change.tick < validation.step}
        for validation in validations
    ]
    return {
        "lists": [(name, most[name]) for name in names],
        "depths": json.dumps([[of_list[name] for name in names] for of_list in depths]),
        "steps": json.dumps([validation.step for validation in validations]),
        "told": [f"{e.blocks}: {e.before} → {e.after} at step {e.tick:,}" for e in changes],
        "validations": len(validations),
    }


# What the page says of all runs together.


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics of networks of the user's in these runs."""
    return distinct(name for run in runs for last in run.events[Validated][-1:] for name in last.metrics)


def curves_of(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Yield title and chart of each curve, with a line for each run."""
    metrics = metrics_of(runs)
    is_of_policy = not metrics and any(tag in run.scalars for run in runs for tags in CURVES.values() for tag in tags)
    names = metrics or distinct(tag for run in runs for tag in run.scalars)
    groups = CURVES if is_of_policy else {name: (name,) for name in names[:MAX_METRICS]}
    for title, tags in groups.items():
        having = [run for run in runs if any(points_of(run, tag, "step") for tag in tags)]
        has_flops = all(points_of(run, tag, "training FLOPs") for run in having for tag in tags)
        for axis in ("step", "training FLOPs") if has_flops else ("step",):
            points, marks = [], []
            for run in runs:
                for tag in tags:
                    name = " ".join([*([run.name] if len(runs) > 1 else []), *([tag] if len(tags) > 1 else [])]) or tag
                    line = points_of(run, tag, axis)
                    points += [{"x": x, "y": y, "series": name} for x, y in line[:: max(1, len(line) // MAX_POINTS)]]
                for event in run.events[Stacked]:
                    if (x := position(run, event.tick, axis)) is not None:
                        marks.append({"x": x, "what": f"{run.name}: {event.blocks} {event.before} → {event.after}"})
            if points:
                x = "ticks of the run" if is_of_policy else axis
                description = f"{title} over {x}"
                yield description, embed(charts.curve(points, x=x, y=title, marks=marks), description)


def points_of(run: Run, tag: str, axis: str) -> Sequence[tuple[float, float]]:
    """Return the line of a metric over steps or FLOPs; empty if it is not known there."""
    measured = [(v, y) for v in run.events[Validated] if (y := v.metrics.get(tag)) is not None]
    if axis == "step":
        return [(v.step, y) for v, y in measured] or run.scalars.get(tag, [])
    return [(v.flops, y) for v, y in measured if v.flops > 0]


def position(run: Run, step: int, axis: str) -> float | None:
    """Return the place of a step on an axis."""
    if axis == "step":
        return step
    steps, flops = ([getattr(v, name) for v in run.events[Validated]] for name in ("step", "flops"))
    return float(np.interp(step, [0, *steps], [0.0, *flops])) if any(flops) else None


def differences(runs: Sequence[Run]) -> Iterator[tuple[str, str, str]]:
    """Yield how the first run differs from each other one: name of the other, what is compared, and the difference."""
    first, *others = runs
    for other in others:
        ours, theirs = outcomes_by_host(first), outcomes_by_host(other)
        for controller in distinct(controller for controller, _ in ours):
            hosts = sorted(host for name, host in ours.keys() & theirs.keys() if name == controller)
            if len(hosts) > 1:
                paired = np.array([[ours[controller, host] - theirs[controller, host] for host in hosts]])
                interval = mean_interval(paired)._asdict()
                yield other.name, f"objective of {controller}, {len(hosts)} hosts, paired", format_ends(interval)
        for name in metrics_of(runs):
            a, b = points_of(first, name, "step"), points_of(other, name, "step")
            if a and b:
                yield other.name, f"last {name}", f"{a[-1][1]:.4g} − {b[-1][1]:.4g} = {a[-1][1] - b[-1][1]:+.4g}"


def outcomes_by_host(run: Run) -> dict[tuple[str, str], float]:
    """Return the objective of each controller on each host, by their names; means over training seeds."""
    objectives: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in run.outcomes:
        objectives[row["controller"], row["host_seed"]].append(float(row["objective"]))
    return {key: float(np.mean(values)) for key, values in objectives.items()}
