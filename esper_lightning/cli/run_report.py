"""Page of a run: one HTML file with what ran, what grew, and what it was worth. Needs the extra [report].

A run is a folder of a Lightning logger, whose files have the numbers. Charts are of Vega-Altair; colours of text and
lines are those of the page.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import altair as alt
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

MAX_POINTS, MAX_METRICS, MAX_ROLLED_BACK = 400, 6, 3
"""Most points of a line, metrics of a network of the user's, and latest episodes with a rollback that are shown."""

CURVES = {"objective": ("rollout/objective", "val/objective"), "score": ("rollout/score",)}
"""Curves of a policy's training: lines by the title of their chart."""

HOST_FAULTS = {"rolled_back", "gradient_health", "dead_seeds"}
"""Anomalies of the hosts, from which no policy can learn."""

STAGES = {
    "DORMANT": ("#ffffff", ""),
    "GERMINATED": ("#d9f0d3", "G"),
    "TRAINING": ("#a6dba0", "T"),
    "BLENDING": ("#fee08b", "B"),
    "PROBATIONARY": ("#fdae61", "P"),
    "FOSSILIZED": ("#9ecae1", "F"),
    "CULLED": ("#f4a6a6", "×"),
    "EMBARGOED": ("#e0e0e0", "E"),
}
"""Colour and mark of each stage."""

OPS = {"WAIT": ("#f2f2f2", "·"), "GERMINATE": ("#74c476", "+"), "CULL": ("#f4a6a6", "×"), "FOSSILIZE": ("#9ecae1", "F")}
"""Colour and mark of each op."""

LINE_COLOURS = ["#3182bd", "#e6550d", "#31a354", "#756bb1", "#d6616b", "#8c6d31", "#17becf", "#969696"]
"""Colours of series, to be told apart on white and on black."""

SHAPES = ["circle", "square", "triangle-up", "cross", "diamond", "triangle-right", "triangle-down", "triangle-left"]

AXIS_WIDTH = 96
"""Pixels left of every plot, so that plots below each other share their horizontal axis."""

Row = Mapping[str, Any]
"""One record of a chart's data: plain values by column."""


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


def write_page(folders: Sequence[Path], out: Path, changed_settings: Callable[[Mapping[str, Any]], str]) -> None:
    """Write the page of one run, or of several side by side. Raises ValueError if a folder holds no run.

    `changed_settings` returns the settings of a config that differ from their defaults, as text.
    """
    runs = [read_run(folder) for folder in folders]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"ends": format_ends, "chart": embed, "worth": worth}
    functions = (lead, anomalies, facts, cost, hosts, blocks, worth_rows)
    environment.globals |= {function.__name__: function for function in functions}
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    text = template.render(
        title=" and ".join(run.name for run in runs),
        library=javascript_bundle(),  # pyright: ignore[reportCallIssue]  # its stub lacks the default
        stages={stage: colour for stage, (colour, _) in STAGES.items()},
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
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines())) if path.is_file() else []


def read_growth(path: Path, run: Run) -> None:
    """Add the events of a policy's training or of `Grow` to the run, one rollout after the other."""
    events = read_events(path)
    started = next(events, None)
    if not isinstance(started, Started):  # the process ended before its first line was whole
        return
    stats = SeedStats(*np.zeros((len(SeedStats._fields), len(started.blueprints), len(started.slots))))
    last_contributions = np.full((started.hosts, len(started.slots)), np.nan)
    # Of the present rollout, by host: stage and blueprint of the seed in each slot, and the moments so far.
    seeds: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)
    episodes: dict[int, Episode] = {}
    causes: dict[int, str] = {}  # of rollbacks since the last moment, by host

    def add_moments(rollout: int, *columns: Sequence[Any]) -> None:
        """Add a moment for each host, given the values of all hosts: op, score, loss, objective and parameters."""
        for host, (op, score, loss, objective, parameters) in enumerate(zip(*columns, strict=True)):
            seeds_of_host, cause = dict(seeds[host]), causes.get(host, "")
            moment = Moment(op, score, loss, objective, parameters, slots=seeds_of_host, rollback=cause)
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
                add_moments(rollout + 1, event.op, event.score, event.loss, event.objective, event.parameters)
                if ticks_before == started.horizon - 1:
                    with_rollback = [one for one in episodes.values() if any(tick.rollback for tick in one.moments)]
                    run.rolled_back = [*run.rolled_back, *with_rollback][-MAX_ROLLED_BACK:]
                    seeds.clear()
            case HostVerdict() | Validated() | AnomalyChanged():
                run.events[type(event)].append(event)
                if isinstance(event, HostVerdict):
                    causes[event.host] = event.cause
                elif isinstance(event, Validated):
                    add_moments(1, [""], [event.metrics.get(started.score)], [None], [None], [event.parameters])
    run.started, run.seeds, run.episodes = started, stats, list(episodes.values())


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a logger by tag, from TensorBoard's files or from metrics.csv."""
    scalars: dict[str, list[tuple[int, float]]] = {}
    if any(folder.glob("events.out.tfevents.*")):
        board = EventAccumulator(str(folder), size_guidance={"scalars": 10 * MAX_POINTS}).Reload()
        for tag in board.Tags()["scalars"]:
            scalars[tag] = [(point.step, point.value) for point in board.Scalars(tag)]
    for row in read_rows(folder / "metrics.csv"):
        for tag in row.keys() - {"step", "epoch"}:
            if row[tag]:
                scalars.setdefault(tag, []).append((int(row["step"]), float(row[tag])))
    return scalars


# What the page says of one run.


def distinct(names: Iterable[str]) -> list[str]:
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
    (name, results), *others = run.summary["controllers"].items()
    relations: dict[str, list[str]] = {"ahead of": [], "level with": [], "behind": []}
    for other, results_of_other in others:
        low, high = results_of_other["ahead"]["low"], results_of_other["ahead"]["high"]
        relation = "level with"
        if None not in (low, high) and not low <= 0.0 <= high:
            relation = "ahead of" if low > 0.0 else "behind"
        relations[relation].append(other)
    clauses = [f"{name}: objective {format_ends(results['objective'])} on test data"]
    clauses += [f"{relation} {' / '.join(names)}" for relation, names in relations.items() if names]
    if HOST_FAULTS & raised(run).keys():
        clauses.append("the comparison tells little until what went wrong is mended")
    return "; ".join(clauses) + "."


def anomalies(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each rule that was raised, for the template: its name, the first measured value, cause and settings."""
    # Hosts that diverge come first: whatever else is seen may follow from it.
    for rule, changes in sorted(raised(run).items(), key=lambda pair: pair[0] != "rolled_back"):
        first = changes[0]
        measured = "not finite" if first.value is None else f"{first.value:.3g}"
        # One rule may be raised for several heads or blueprints, whose names follow the rule's.
        suffixes = distinct(change.name.partition(".")[2] for change in changes)
        yield {
            "rule": rule,
            "measured": f"{measured} where the bound is {first.threshold:.3g}, after rollout {first.update}",
            "cause": first.cause.replace(suffixes[0], ", ".join(suffixes)) if suffixes[0] else first.cause,
            "settings": ", ".join(name + present(run.config, name) for name in first.settings),
        }


def present(config: Mapping[str, Any], name: str) -> str:
    """Return ` (now 0.6)` for a setting of a config, by its path; empty if the config lacks the setting."""
    value: Any = config
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = {key: nested for key, nested in value.items() if nested}
    return "" if value is None or value == {} else f" (now {json.dumps(value)})"


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield name and value of each fact about what ran: command, machine, length, and size of the network."""
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
        least = min([first.parameters, *(change.parameters for change in run.events[Stacked])])
        yield "parameters", f"{least:,} at first, {last.parameters:,} at last"
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
    """Return the chart of score against training FLOPs, on a logarithmic axis, with intervals both ways."""
    rows = []
    for name, results in run.summary["controllers"].items():
        flops, score = results["flops"], results["score"]
        if None not in (*flops.values(), *score.values()) and flops["low"] > 0:
            x = {"x": flops["mean"], "x_low": flops["low"], "x_high": flops["high"]}
            rows.append({"name": name, **x, "y": score["mean"], "y_low": score["low"], "y_high": score["high"]})
    names = [row["name"] for row in rows]
    scale = alt.Scale(type="log", nice=False, padding=12)
    base = plot(rows).encode(
        x=alt.X("x:Q", title="training FLOPs of a host", scale=scale, axis=alt.Axis(format="~s", tickCount=4)),
        y=alt.Y("y:Q", title="test score", scale=alt.Scale(zero=False)),
        color=alt.Color("name:N", title=None, scale=colours_of(names)),
        tooltip=["name:N", alt.Tooltip("x:Q", format=".4~s"), alt.Tooltip("y:Q", format=".4f")],
    )
    shape = alt.Shape("name:N", title=None, scale=shapes_of(names))
    return alt.layer(
        base.mark_rule(opacity=0.6).encode(y="y_low:Q", y2="y_high:Q"),
        base.mark_rule(opacity=0.6).encode(x=alt.X("x_low:Q", scale=scale), x2="x_high:Q"),
        base.mark_point(size=80, strokeWidth=2).encode(shape=shape),
    ).properties(height=280, width="container")


def hosts(run: Run) -> list[dict[str, Any]]:
    """Return the hosts to show, for the template: worst, median, best of the last rollout, and rolled back ones."""
    episodes = run.episodes
    if run.events[Validated] or not episodes:  # a network of the user's
        has_seeds = run.started is not None and run.started.blueprints
        return [host_view(run, "the network", episode) for episode in episodes if has_seeds]
    objectives = [episode.moments[-1].objective for episode in episodes]
    ranked = np.argsort([-np.inf if objective is None else objective for objective in objectives], kind="stable")
    typical = {"worst": ranked[0], "median": ranked[len(ranked) // 2], "best": ranked[-1]}
    titled = [(f"{rank} host of rollout {episodes[i].rollout}", episodes[i]) for rank, i in typical.items()]
    others = [episode for episode in run.rolled_back if episode not in [shown for _, shown in titled]]
    titled += [(f"rolled back in rollout {episode.rollout}", episode) for episode in others]
    return [host_view(run, title, episode) for title, episode in titled]


def host_view(run: Run, title: str, episode: Episode) -> dict[str, Any]:
    """Return one host for the template: timeline, curves, and the network at each tick."""
    started = run.started
    assert started is not None, "the events began with it"
    moments, slots = episode.moments, distinct([*started.behind, *started.slots])
    ops = [moment.op for moment in moments if moment.op]
    states = [[moment.slots.get(slot, ("DORMANT", "")) for slot in slots] for moment in moments]
    ticks = max(len(moments), started.horizon if ops else 1)
    rollbacks = {tick: moment.rollback for tick, moment in enumerate(moments, 1) if moment.rollback}
    score_name = started.score or "score"

    def curve_of(columns: Mapping[str, str], y: str, description: str, **look: Any) -> str:
        """Return the chart of fields of `Moment`, each with the name of its line, over ticks."""
        points = [
            {"x": tick, "y": value, "series": series}
            for column, series in columns.items()
            for tick, moment in enumerate(moments, 1)
            if (value := getattr(moment, column)) is not None
        ]
        return embed(curve(points, x="tick", y=y, ticks=ticks, **look), description)

    contributions = [
        {"x": event.tick, "y": points, "series": slot}
        for event in run.events[Contributed]
        for slot, points in zip(event.slot, event.points, strict=True)
    ]
    points_of_seeds = curve(contributions, x="tick", y="points", ticks=len(run.events[Validated]))
    stages = timeline(ops, states, slots, ticks=ticks, rolled_back=rollbacks)
    marks = [{"x": tick, "what": cause} for tick, cause in rollbacks.items()]
    scores = {"score": score_name, "objective": "objective"}
    # Of the host's FLOPs, those before the first slot, between two slots, and behind the last one.
    flops_left = [started.flops, *started.behind.values(), 0]
    shares = [100 * (left - left_behind) / max(1, started.flops) for left, left_behind in pairwise(flops_left)]
    return {
        "title": f"{title}: host {episode.host}" if ops else title,
        "summary": describe_end(moments, score_name),
        "timeline": embed(stages, f"Stages of the slots of {title}"),
        "curve": curve_of(scores, score_name, f"{score_name} of {title}", shown="tick"),
        "slots": slots,
        "shares": [f"{share:.0f} %" for share in shares],
        "contributions": embed(points_of_seeds, "contribution of the seed in each slot") if contributions else None,
        "loss": curve_of({"loss": "loss"}, "loss", "validation loss", marks=marks) if marks else None,
        "states": json.dumps(states),
        "parameters": json.dumps([moment.parameters for moment in moments]),
        "ticks": len(moments),
    }


def worth_rows(run: Run) -> list[dict[str, Any]]:
    """Return a row for each blueprint in each slot: seeds, share kept, mean contribution in points (None: unknown)."""
    rows, stats = [], run.seeds
    if run.started is None or stats is None:
        return []
    for b, k in zip(*np.nonzero(stats.germinated), strict=True):
        points = float(stats.mean_contribution[b, k])
        seeds, kept = int(stats.germinated[b, k]), float(stats.fossilized[b, k] / stats.germinated[b, k])
        row = {"blueprint": run.started.blueprints[b], "slot": run.started.slots[k], "seeds": seeds, "kept": kept}
        rows.append(row | {"points": points if np.isfinite(points) else None})
    return sorted(rows, key=lambda row: (row["blueprint"], row["slot"]))


def describe_end(moments: Sequence[Moment], score_name: str) -> str:
    """Return in a few sentences how an episode ended."""
    last = moments[-1]
    kept = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if stage == "FOSSILIZED"]
    tried = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if Stage[stage] in LIVE]
    sentences = [f"Kept at the end: {', '.join(kept) or 'nothing'}."]
    if tried:
        sentences.append(f"Still on trial, and not counted: {', '.join(tried)}.")
    measured = {score_name: last.score, "objective": last.objective}
    sentences += [f"{name} {value:.3f}." for name, value in measured.items() if value is not None]
    for tick, moment in enumerate(moments, 1):
        if moment.rollback:
            sentences.append(f"Rolled back at tick {tick}: {moment.rollback}.")
    return " ".join(sentences)


def blocks(run: Run) -> dict[str, Any] | None:
    """Return the blocks of a network that `Stack` grows, for the template: how many there are at each validation."""
    changes, validations = run.events[Stacked], run.events[Validated]
    if not changes or not validations:
        return None
    names = distinct(change.blocks for change in changes)
    most = {change.blocks: change.after for change in changes}  # by list, of its last change: lists only grow
    first = {change.blocks: change.before for change in reversed(changes)}
    depths = []  # number of blocks of each list, for each validation
    for validation in validations:
        depth = first | {change.blocks: change.after for change in changes if change.tick < validation.step}
        depths.append([depth[name] for name in names])
    return {
        "lists": [(name, most[name]) for name in names],
        "depths": json.dumps(depths),
        "steps": json.dumps([validation.step for validation in validations]),
        "changes": [f"{one.blocks}: {one.before} → {one.after} at step {one.tick:,}" for one in changes],
        "validations": len(validations),
    }


# What the page says of all runs together.


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics of networks of the user's in these runs."""
    return distinct(name for run in runs for last in run.events[Validated][-1:] for name in last.metrics)


def curves_of(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Yield description and chart of each curve, over steps and, if they are known, over training FLOPs."""
    metrics = metrics_of(runs)
    is_of_policy = not metrics and any(tag in run.scalars for run in runs for tags in CURVES.values() for tag in tags)
    names = metrics or distinct(tag for run in runs for tag in run.scalars)
    groups = CURVES if is_of_policy else {name: (name,) for name in names[:MAX_METRICS]}
    for title, tags in groups.items():
        measuring = [run for run in runs if any(points_of(run, tag, "step") for tag in tags)]
        has_flops = all(points_of(run, tag, "training FLOPs") for run in measuring for tag in tags)
        for axis in ("step", "training FLOPs") if has_flops else ("step",):
            points, marks = [], []
            for run, tag in product(runs, tags):
                name = " ".join([run.name] * (len(runs) > 1) + [tag] * (len(tags) > 1)) or tag
                line = points_of(run, tag, axis)
                points += [{"x": x, "y": y, "series": name} for x, y in line[:: max(1, len(line) // MAX_POINTS)]]
            for run in runs:
                for event in run.events[Stacked]:
                    if (x := position(run, event.tick, axis)) is not None:
                        marks.append({"x": x, "what": f"{run.name}: {event.blocks} {event.before} → {event.after}"})
            if points:
                x = "ticks of the run" if is_of_policy else axis
                description = f"{title} over {x}"
                yield description, embed(curve(points, x=x, y=title, marks=marks), description)


def points_of(run: Run, tag: str, axis: str) -> Sequence[tuple[float, float]]:
    """Return the points (x, y) of a metric over steps or FLOPs; empty if it was not measured, or FLOPs are unknown."""
    measured = [event for event in run.events[Validated] if event.metrics.get(tag) is not None]
    if axis == "step":
        return [(event.step, event.metrics[tag]) for event in measured] or run.scalars.get(tag, [])
    return [(event.flops, event.metrics[tag]) for event in measured if event.flops > 0]


def position(run: Run, step: int, axis: str) -> float | None:
    """Return the place of a step on an axis, `step` or `training FLOPs`. None: FLOPs are unknown."""
    if axis == "step":
        return step
    validations = run.events[Validated]
    steps, flops = [event.step for event in validations], [event.flops for event in validations]
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
            our_points, their_points = points_of(first, name, "step"), points_of(other, name, "step")
            if our_points and their_points:
                (_, a), (_, b) = our_points[-1], their_points[-1]
                yield other.name, f"last {name}", f"{a:.4g} − {b:.4g} = {a - b:+.4g}"


def outcomes_by_host(run: Run) -> dict[tuple[str, str], float]:
    """Return the objective of each controller on each host, by their names; means over training seeds."""
    objectives: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in run.outcomes:
        objectives[row["controller"], row["host_seed"]].append(float(row["objective"]))
    return {key: float(np.mean(values)) for key, values in objectives.items()}


# Charts.


def embed(chart: Any, description: str) -> str:
    """Return the JSON of a chart in the style of the page, with a description for readers who cannot see it."""
    text = {"labelColor": "currentColor", "titleColor": "currentColor"}
    lines = {"gridColor": "#8883", "domainColor": "#888", "tickColor": "#888"}
    chart = chart.properties(description=description, background="transparent")
    chart = chart.configure_axis(**text, **lines, labelLimit=AXIS_WIDTH - 16, titleFontWeight="normal")
    chart = chart.configure_axisY(minExtent=AXIS_WIDTH - 24, maxExtent=AXIS_WIDTH - 24)
    chart = chart.configure_legend(**text, orient="bottom", columns=4, symbolStrokeWidth=2)
    chart = chart.configure_view(stroke="#8886").configure_title(color="currentColor")
    return json.dumps(chart.to_dict(), separators=(",", ":")).replace("<", "\\u003c")


def timeline(
    ops: Sequence[str],
    stages: Sequence[Sequence[tuple[str, str]]],
    slots: Sequence[str],
    *,
    ticks: int,
    rolled_back: Iterable[int] = (),
) -> Any:
    """Return the life of one host: op before each tick, and each slot's stage after it, by colour and by mark.

    `ops` are empty if they are not known; `stages` are stage and blueprint in each slot, after each tick.
    """
    rows, looks = [*(["action"] if ops else []), *slots], {**STAGES, **OPS}
    cells = []
    for tick, of_slots in enumerate(stages, 1):
        of_op = [(op, "") for op in ops[tick - 1 : tick]]
        for row, (state, blueprint) in zip(rows, [*of_op, *of_slots], strict=True):
            _, mark = looks[state]
            cells.append({"tick": tick, "row": row, "state": state, "blueprint": blueprint, "mark": mark})
    seen = [name for name in looks if any(cell["state"] == name for cell in cells)]
    x = alt.X("tick:O", title="tick", axis=alt.Axis(labelAngle=0, labelOverlap=True), scale=ordinal(ticks))
    y = alt.Y("row:N", sort=rows, title=" ")  # as wide as a title
    colour = alt.Color("state:N", title=None).scale(domain=seen, range=[looks[name][0] for name in seen])
    base = plot(cells).encode(x=x, y=y, tooltip=["tick:O", "row:N", "state:N", "blueprint:N"])
    layers = [
        base.mark_rect(stroke="#8886", strokeWidth=1).encode(color=colour),
        base.mark_text(fontSize=11, color="#222").encode(text="mark:N"),
    ]
    marks = [{"tick": tick, "row": rows[0], "what": "rolled back"} for tick in rolled_back]
    if marks:
        point = plot(marks).mark_point(shape="triangle-down", filled=True, size=90, yOffset=-12)
        shape = alt.Shape("what:N", title=None, scale=alt.Scale(range=["triangle-down"]))
        layers.append(point.encode(x=x, y=y, shape=shape, color=alt.value("#d62728"), tooltip="what:N"))
    return alt.layer(*layers).properties(height=26 * len(rows), width="container")


def plot(rows: Sequence[Row]) -> Any:
    return alt.Chart(alt.Data(values=list(rows)))


def ordinal(ticks: int) -> Any:
    """Return the horizontal scale of an episode, on which a tick is a cell."""
    return alt.Scale(domain=list(range(1, ticks + 1)))


def colours_of(names: Sequence[str]) -> Any:
    """Return the colours of series in this order; they repeat."""
    return alt.Scale(domain=list(names), range=LINE_COLOURS)


def shapes_of(names: Sequence[str]) -> Any:
    """Return the marks of series in this order; with the colours no two of 64 look alike."""
    shapes = [SHAPES[(i + i // len(SHAPES)) % len(SHAPES)] for i in range(len(names))]
    return alt.Scale(domain=list(names), range=shapes)


def curve(
    points: Sequence[Row],
    *,
    x: str,
    y: str,
    marks: Sequence[Row] = (),
    ticks: int | None = None,
    shown: str | None = None,
) -> Any:
    """Return the chart of lines over a common axis, given `points` with `x`, `y` and `series`, the name of the line.

    `x` and `y` are the titles of the axes. `marks`, with `x` and a text `what`, are vertical lines. `ticks` of an
    episode give the horizontal axis of `timeline`; None: an axis of numbers. The page moves a vertical line by the
    parameter called `shown`; None: there is no such line.
    """
    names = distinct(point["series"] for point in points)
    axis = alt.Axis(labelAngle=0, labelOverlap=True) if ticks else alt.Axis(format="~s")
    position = alt.X(
        "x:O" if ticks else "x:Q", title=x, axis=axis, scale=ordinal(ticks) if ticks else alt.Scale(zero=False)
    )
    legend = alt.Legend(symbolType="stroke") if len(names) > 1 else None
    lines = plot(points).encode(
        x=position,
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4)),
        color=alt.Color("series:N", title=None, sort=names, legend=legend, scale=colours_of(names)),
        strokeDash=alt.StrokeDash("series:N", sort=names, legend=None),
        tooltip=["series:N", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y, format=".4~g")],
    )
    layers = [lines.mark_line(point={"size": 18} if len(points) <= 60 * len(names) else False)]
    if marks:
        rule = plot(marks).mark_rule(strokeDash=[2, 2], color="#888", strokeWidth=2)
        layers.append(rule.encode(x=position, tooltip="what:N"))
    if shown:
        chosen = alt.param(name=shown, value=ticks)
        line = alt.Chart(alt.sequence(1, (ticks or 0) + 1, as_="x")).mark_rule(color="currentColor", opacity=0.6)
        layers.append(line.encode(x=position).transform_filter(f"datum.x == {shown}").add_params(chosen))
    return alt.layer(*layers).properties(height=150, width="container")


def worth(rows: Sequence[Row]) -> Any:
    """Return the chart of `worth_rows`: a larger mark stands for more seeds."""
    slots, blueprints = (distinct(row[column] for row in rows) for column in ("slot", "blueprint"))
    return (
        plot(rows)
        .mark_point(filled=True, opacity=0.9)
        .encode(
            x=alt.X("points:Q", title="mean contribution of a seed, in points", axis=alt.Axis(format="+~g")),
            y=alt.Y("blueprint:N", title=" "),
            color=alt.Color("slot:N", title=None, scale=colours_of(slots)),
            shape=alt.Shape("slot:N", title=None, scale=shapes_of(slots)),
            size=alt.Size("seeds:Q", scale=alt.Scale(range=[30, 260], type="sqrt"), legend=None),
            tooltip=["blueprint:N", "slot:N", "seeds:Q", alt.Tooltip("kept:Q", format=".0%"), "points:Q"],
        )
        .properties(height=24 * len(blueprints), width="container")
    )
