"""Page of a run: one HTML file with what ran, what grew, and what it was worth. Needs the extra [report].

A run is a folder of a Lightning logger. Its numbers are those of the files in it: `events.jsonl`, `stack.jsonl`,
`run.json`, `evaluation/`, and the curves of TensorBoard or `metrics.csv`.
"""

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from esper_lightning.callbacks.run_record import RUN_FILE
from esper_lightning.envs import HostVerdict
from esper_lightning.evaluation.report import EVALUATION_FOLDER, RESULTS_FILE, SUMMARY_FILE
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.serialization import replace_file
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


class Run(NamedTuple):
    """Content of a run's folder."""

    name: str
    record: dict[str, Any]  # run.json
    started: Started | None
    episodes: list[Episode]  # of the last rollout, by objective; one for a network of the user's
    rolled_back: list[Episode]
    rollbacks: int
    seeds: SeedStats | None  # over the run, [blueprints, slots] each
    contributions: list[Contributed]  # of a network of the user's
    validations: list[Validated]
    stacked: list[Stacked]
    anomalies: list[AnomalyChanged]
    scalars: dict[str, list[tuple[int, float]]]  # (step, value) by tag
    summary: dict[str, Any]  # evaluation.json
    outcomes: list[dict[str, str]]  # rows of evaluation.csv
    config: dict[str, Any]  # config.yaml


def write_page(folders: Sequence[Path], out: Path, changed_settings: Callable[[Mapping[str, Any]], str]) -> None:
    """Write the page of one run, or of several side by side.

    `changed_settings` returns the settings of a config that differ from their defaults, as text.

    Raises ValueError if a folder holds no run, or if the extra is missing.
    """
    try:
        import jinja2
        from vl_convert import javascript_bundle
    except ImportError as error:
        raise ValueError(f"report: {error.name} is missing; pip install 'esper-lightning[report]'") from None
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    sections = [{"run": run, "settings": changed_settings(run.config), **section(run)} for run in runs]
    text = template.render(
        title=" and ".join(names),
        library=javascript_bundle(),  # pyright: ignore[reportCallIssue]  # its stub lacks the default
        stages={stage: colour for stage, (colour, _) in charts.STAGES.items()},
        sections=sections,
        curves=list(curves_of(runs)),
        differences=list(differences(runs)),
    )
    replace_file(out, lambda draft: draft.write_text(text, encoding="utf-8"))


# What a folder holds.


def read_run(folder: Path) -> Run:
    """Return the content of a run's folder. Raises ValueError if it holds no run."""
    scalars, summary = read_scalars(folder), read_json(folder / EVALUATION_FOLDER / SUMMARY_FILE)
    events, stack_events = folder / EVENTS_FILE, folder / STACK_FILE
    if not (events.is_file() or stack_events.is_file() or scalars or summary):
        raise ValueError(
            f"report: {str(folder)!r} holds no run: no {EVENTS_FILE}, no curves and no {EVALUATION_FOLDER}; name the "
            f"folder of a logger, as runs/digits/version_0"
        )
    found: dict[str, Any] = {"started": None, "rollbacks": 0, "seeds": None}
    for name in ("episodes", "rolled_back", "contributions", "validations", "stacked", "anomalies"):
        found[name] = []
    if events.is_file():
        read_growth(events, found)
    if stack_events.is_file():
        of_stack = list(read_events(stack_events))
        found["stacked"] = [event for event in of_stack if isinstance(event, Stacked)]
        # Where `Grow` ran beside `Stack`, both have recorded the same validations.
        found["validations"] = found["validations"] or [event for event in of_stack if isinstance(event, Validated)]
    outcomes: list[dict[str, str]] = []
    if (path := folder / EVALUATION_FOLDER / RESULTS_FILE).is_file():
        with path.open(newline="") as rows:
            outcomes = list(csv.DictReader(rows))
    config = {}
    if (path := folder / "config.yaml").is_file():
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    name = "/".join(folder.absolute().parts[-2:])
    record = read_json(folder / RUN_FILE) or summary.get("run", {})
    return Run(name, record, scalars=scalars, summary=summary, outcomes=outcomes, config=config, **found)


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a file; nothing if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def read_growth(path: Path, found: dict[str, Any]) -> None:
    """Add the events of a policy's training or of `Grow` to what was found of a run, one rollout after the other."""
    events = read_events(path)
    started = next(events, None)
    if not isinstance(started, Started):  # the process ended before its first line was whole
        return
    stats = SeedStats(*np.zeros((len(SeedStats._fields), len(started.blueprints), len(started.slots))))
    last_contributions = np.full((started.hosts, len(started.slots)), np.nan)
    places: dict[int, dict[str, tuple[str, str]]] = defaultdict(dict)  # of the present rollout, by host
    episodes: dict[int, Episode] = {}
    causes: dict[int, str] = {}

    def record(rollout: int, rows: Iterable[Sequence[Any]]) -> None:
        for host, numbers in enumerate(rows):
            moment = Moment(*numbers, slots=dict(places[host]), rollback=causes.get(host, ""))
            episodes.setdefault(host, Episode(rollout, host, [])).moments.append(moment)
        causes.clear()
        found["episodes"] = list(episodes.values())

    for event in events:
        match event:
            case SeedEvent():
                names = {"slots": started.slots, "blueprints": started.blueprints}
                count_seed(event, stats, last_contributions, **names)
                places[event.host][event.slot] = (event.after.name, event.blueprint)
                if event.after is Stage.DORMANT:
                    del places[event.host][event.slot]
            case Contributed():
                last_contributions[event.host, [started.slots.index(slot) for slot in event.slot]] = event.points
                if started.hosts == 1:
                    found["contributions"].append(event)
            case HostVerdict():
                causes[event.host] = event.cause
                found["rollbacks"] += 1
            case Validated():
                found["validations"].append(event)
                record(1, [("", event.metrics.get(started.score), None, None, event.parameters)])
            case HostsMeasured():
                rollout, ticks_before = divmod(event.tick - 1, started.horizon)
                if ticks_before == 0:
                    episodes = {}
                record(rollout + 1, zip(*event[1:], strict=True))
                if ticks_before == started.horizon - 1:
                    struck = [e for e in episodes.values() if any(moment.rollback for moment in e.moments)]
                    found["rolled_back"] = [*found["rolled_back"], *struck][-MAX_ROLLED_BACK:]
                    places.clear()
            case AnomalyChanged():
                found["anomalies"].append(event)
    found |= {"started": started, "seeds": stats}


def read_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the curves of a logger by tag, from TensorBoard's files or from metrics.csv."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[tuple[int, float]]] = {}
    if any(folder.glob("events.out.tfevents.*")):
        board = EventAccumulator(str(folder), size_guidance={"scalars": 10 * MAX_POINTS}).Reload()
        found = {tag: [(e.step, e.value) for e in board.Scalars(tag)] for tag in board.Tags()["scalars"]}
    if (path := folder / "metrics.csv").is_file():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                for tag, value in row.items():
                    if value and tag not in ("step", "epoch"):
                        found.setdefault(tag, []).append((int(row["step"]), float(value)))
    return found


# What the page says of one run.


def section(run: Run) -> dict[str, Any]:
    """Return the parts of the page that tell about one run, for the template."""
    rows: list[dict[str, Any]] = []
    if run.started is not None and run.seeds is not None:
        rows = charts.worth_rows(run.seeds, run.started.blueprints, run.started.slots)
    rows.sort(key=lambda row: (row["blueprint"], row["slot"]))
    return {
        "lead": lead(run),
        "facts": list(facts(run)),
        "results": list(results(run)),
        "cost": chart_of(cost(run), "Score against training FLOPs by controller") if run.summary else None,
        "hosts": [host_view(run, title, episode) for title, episode in chosen(run)],
        "stack": stack_view(run),
        "worth": chart_of(charts.worth(rows), "What blueprints were worth") if rows else None,
        "worth_rows": rows,
        "anomalies": list(anomalies(run)),
    }


def chart_of(chart: Any, description: str) -> str:
    """Return the JSON of a chart, to be embedded in a page."""
    return json.dumps(charts.styled(chart, description).to_dict(), separators=(",", ":")).replace("<", "\\u003c")


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
    if HOST_FAULTS & {change.name.partition(".")[0] for change in run.anomalies if change.level == "raised"}:
        said.append("the comparison tells little until what went wrong is mended")
    return "; ".join(said) + "."


def anomalies(run: Run) -> Iterator[dict[str, Any]]:
    """Yield each rule that was raised: its name, the first update, and what it says; states of one rule together."""
    raised: dict[str, list[AnomalyChanged]] = defaultdict(list)
    for change in run.anomalies:
        if change.level == "raised":
            raised[change.name.partition(".")[0]].append(change)
    # Hosts that diverge come first: whatever else is seen may follow from it.
    for rule, changes in sorted(raised.items(), key=lambda pair: pair[0] != "rolled_back"):
        parts = list(dict.fromkeys(change.name.partition(".")[2] for change in changes))
        worst = changes[0]
        cause = worst.cause.replace(parts[0], ", ".join(parts)) if parts[0] else worst.cause
        measured = "not finite" if worst.value is None else f"{worst.value:.3g}"
        told = f"{measured} where the bound is {worst.threshold:.3g}, after rollout {worst.update}"
        settings = [name + present(run.config, name) for name in worst.settings]
        yield {"rule": rule, "told": told, "cause": cause, "settings": ", ".join(settings)}


def present(config: Mapping[str, Any], name: str) -> str:
    """Return ` (now 0.6)` for a setting of a config, by its path; empty if it has none there."""
    value: Any = config
    for part in name.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        value = {key: each for key, each in value.items() if each}
    return "" if value is None or value == {} else f" (now {json.dumps(value)})"


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Yield what ran."""
    record = run.record
    if record:
        yield "command", " ".join([Path(record["command"][0]).name, *record["command"][1:]])
        if record["seed"] is not None:
            yield "RNG seed", str(record["seed"])
        yield "machine", f"{record['platform']}, {record['device']}, {record['threads']} threads per operator"
        yield "versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        if record.get("git"):
            yield "revision", record["git"]["commit"][:10] + (" with changes" if record["git"]["changed"] else "")
    speed, started = run.scalars.get("time/ticks_per_second", []), run.started
    if speed and started:
        yield "training", f"{len(speed)} rollouts of {started.hosts} hosts and {started.horizon} ticks each"
        yield "seconds of training", f"{sum(started.horizon / value for _, value in speed):.0f}"
    elif run.validations:
        last = run.validations[-1]
        yield "seconds of training", f"{last.seconds:.0f} since the process began"
        yield "parameters", f"{run.validations[0].parameters:,} at first, {last.parameters:,} at last"
        if last.flops:
            yield "training FLOPs", f"{last.flops:.4g}" + ("" if run.stacked else " for one sample in each batch")
    if run.rollbacks:
        yield "rollbacks by the Governor", str(run.rollbacks)


def results(run: Run) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the comparison: controller, score, objective, lead, parameters, MFLOP."""
    for name, row in run.summary.get("controllers", {}).items():
        intervals = (format_ends(row[column]) for column in ("score", "objective", "ahead"))
        sizes = f"{row['parameters']['mean'] or np.nan:,.0f}", f"{(row['flops']['mean'] or np.nan) / 1e6:,.4g}"
        yield (name, *intervals, *sizes)


def format_ends(interval: Mapping[str, float | None]) -> str:
    """Return `0.573 [0.556, 0.590]`; empty where a number is missing."""
    if None in interval.values():
        return ""
    return f"{interval['mean']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def cost(run: Run) -> Any:
    """Return the chart of score against training FLOPs."""
    rows = []
    for name, row in run.summary["controllers"].items():
        ends = {
            f"{axis}{suffix}": row[column][end]
            for axis, column in (("x", "flops"), ("y", "score"))
            for suffix, end in (("", "mean"), ("_low", "low"), ("_high", "high"))
        }
        if None not in ends.values() and ends["x_low"] > 0:
            rows.append({"name": name, **ends})
    return charts.scatter(rows, x="training FLOPs of a host", y="test score")


def chosen(run: Run) -> list[tuple[str, Episode]]:
    """Return the episodes to show with their titles: worst, median, best of the last rollout, and rolled back ones."""
    episodes = [e for e in run.episodes if e.moments]
    if run.validations or not episodes:  # a network of the user's
        return [("the network", episode) for episode in episodes if run.started and run.started.blueprints]
    last = [e.moments[-1].objective for e in episodes]
    typical = charts.typical_hosts(np.array([-np.inf if objective is None else objective for objective in last]))
    found = [(f"{name} host of rollout {episodes[i].rollout}", episodes[i]) for name, i in typical.items()]
    shown = {(episode.rollout, episode.host) for _, episode in found}
    struck = [episode for episode in run.rolled_back if (episode.rollout, episode.host) not in shown]
    return found + [(f"rolled back in rollout {episode.rollout}", episode) for episode in struck]


def host_view(run: Run, title: str, episode: Episode) -> dict[str, Any]:
    """Return one host for the template: timeline, curve, and the network at each tick."""
    started = run.started
    assert started is not None, "the events began with it"
    moments, slots = episode.moments, [*started.behind] + [name for name in started.slots if name not in started.behind]
    has_ops = any(moment.op for moment in moments)
    states = [[moment.slots.get(slot, ("DORMANT", "")) for slot in slots] for moment in moments]
    ticks = max(len(moments), started.horizon if has_ops else 1)
    rolled_back = [tick for tick, moment in enumerate(moments, 1) if moment.rollback]
    label = started.score or "score"
    points = [
        {"x": tick, "y": getattr(moment, column), "series": name}
        for name, column in ((label, "score"), ("objective", "objective"))
        for tick, moment in enumerate(moments, 1)
        if getattr(moment, column) is not None
    ]
    ops = [moment.op for moment in moments] if has_ops else []
    life = charts.timeline(ops, states, slots, ticks=ticks, rolled_back=rolled_back)
    behind = [started.flops, *(started.behind.get(slot, 0) for slot in started.behind), 0]
    shares = [100 * (a - b) / max(1, started.flops) for a, b in pairwise(behind)]
    return {
        "title": f"{title}: host {episode.host}" if has_ops else title,
        "told": tell(moments, label),
        "timeline": chart_of(life, f"Stages of the slots of {title}"),
        "curve": chart_of(charts.curve(points, x="tick", y=label, ticks=ticks, shown="tick"), f"{label} of {title}"),
        "slots": slots,
        "shares": [f"{share:.0f} %" for share in shares],
        "contributions": contributions_chart(run),
        "loss": loss_chart(moments, ticks) if rolled_back else None,
        "states": json.dumps(states),
        "parameters": json.dumps([moment.parameters for moment in moments]),
        "ticks": len(moments),
    }


def loss_chart(moments: Sequence[Moment], ticks: int) -> str:
    """Return the chart of the validation loss of a host that was rolled back."""
    points = [{"x": t, "y": m.loss, "series": "loss"} for t, m in enumerate(moments, 1) if m.loss is not None]
    marks = [{"x": t, "what": m.rollback} for t, m in enumerate(moments, 1) if m.rollback]
    return chart_of(charts.curve(points, x="tick", y="loss", marks=marks, ticks=ticks), "validation loss")


def contributions_chart(run: Run) -> str | None:
    """Return the chart of the seeds' contributions in a network of the user's; None if there were none."""
    points = [
        {"x": event.tick, "y": points, "series": slot}
        for event in run.contributions
        for slot, points in zip(event.slot, event.points, strict=True)
    ]
    told = "contribution of the seed in each slot"
    return chart_of(charts.curve(points, x="tick", y="points", ticks=len(run.validations)), told) if points else None


def tell(moments: Sequence[Moment], label: str) -> str:
    """Return in a sentence how an episode ended."""
    last = moments[-1]
    kept = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if stage == "FOSSILIZED"]
    tried = [f"{blueprint} in {slot}" for slot, (stage, blueprint) in last.slots.items() if Stage[stage] in LIVE]
    said = [f"Kept at the end: {', '.join(kept) or 'nothing'}."]
    said += [f"Still on trial, and not counted: {', '.join(tried)}."] if tried else []
    for name, value in ((label, last.score), ("objective", last.objective)):
        if value is not None:
            said.append(f"{name} {value:.3f}.")
    said += [f"Rolled back at tick {t}: {m.rollback}." for t, m in enumerate(moments, 1) if m.rollback]
    return " ".join(said)


def stack_view(run: Run) -> dict[str, Any] | None:
    """Return the blocks of a network that `Stack` grows, for the template: how many there are at each validation."""
    if not run.stacked or not run.validations:
        return None
    lists = list(dict.fromkeys(event.blocks for event in run.stacked))
    depths = []
    for validation in run.validations:
        now = {event.blocks: event.before for event in reversed(run.stacked)}
        now |= {event.blocks: event.after for event in run.stacked if event.tick < validation.step}
        depths.append([now[name] for name in lists])
    most = [max(event.after for event in run.stacked if event.blocks == name) for name in lists]
    told = [f"{e.blocks}: {e.before} → {e.after} at step {e.tick:,}" for e in run.stacked]
    steps = [validation.step for validation in run.validations]
    return {
        "lists": list(zip(lists, most, strict=True)),
        "depths": json.dumps(depths),
        "steps": json.dumps(steps),
        "told": told,
        "validations": len(steps),
    }


# What the page says of all runs together.


def curves_of(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """Yield title and chart of each curve, with a line for each run."""
    own = [metric for run in runs for validation in run.validations[-1:] for metric in validation.metrics]
    if own or not any(tag in run.scalars for run in runs for tags in CURVES.values() for tag in tags):
        tags = own or [tag for run in runs for tag in run.scalars]
        groups = {tag: (tag,) for tag in dict.fromkeys(tags)}
        groups = {tag: groups[tag] for tag in list(groups)[:MAX_METRICS]}
    else:
        groups = CURVES
    for title, tags in groups.items():
        having = [run for run in runs if any(points_of(run, tag, "step") for tag in tags)]
        has_flops = all(points_of(run, tag, "training FLOPs") for run in having for tag in tags)
        for axis in ("step", "training FLOPs") if has_flops else ("step",):
            points, marks = [], []
            for run in runs:
                for tag in tags:
                    name = " ".join([*([run.name] if len(runs) > 1 else []), *([tag] if len(tags) > 1 else [])]) or tag
                    line = points_of(run, tag, axis)
                    every = max(1, len(line) // MAX_POINTS)
                    points += [{"x": x, "y": y, "series": name} for x, y in line[::every]]
                marks += [
                    {"x": x, "what": f"{run.name}: {event.blocks} {event.before} → {event.after}"}
                    for event in run.stacked
                    if (x := position(run, event.tick, axis)) is not None
                ]
            if points:
                x = "ticks of the run" if groups is CURVES else axis
                told = f"{title} over {x}"
                yield told, chart_of(charts.curve(points, x=x, y=title, marks=marks), told)


def points_of(run: Run, tag: str, axis: str) -> Sequence[tuple[float, float]]:
    """Return the line of a metric over steps or FLOPs; empty if it is not known there."""
    if axis == "step":
        own = [(v.step, y) for v in run.validations if (y := v.metrics.get(tag)) is not None]
        return own or run.scalars.get(tag, [])
    return [(v.flops, y) for v in run.validations if v.flops > 0 and (y := v.metrics.get(tag)) is not None]


def position(run: Run, step: int, axis: str) -> float | None:
    """Return the place of a step on an axis."""
    if axis == "step":
        return step
    steps, flops = ([getattr(v, name) for v in run.validations] for name in ("step", "flops"))
    return float(np.interp(step, [0, *steps], [0.0, *flops])) if any(flops) else None


def differences(runs: Sequence[Run]) -> Iterator[tuple[str, str, str]]:
    """Yield how the first run differs from each other one: name of the other, what is compared, and the difference."""
    first, *others = runs
    for other in others:
        ours, theirs = (outcomes_by_host(run) for run in (first, other))
        for controller in [name for name in ours if name in theirs]:
            hosts = sorted(ours[controller].keys() & theirs[controller].keys())
            if len(hosts) > 1:
                paired = np.array([[ours[controller][host] - theirs[controller][host] for host in hosts]])
                told = format_ends(mean_interval(paired)._asdict())
                yield other.name, f"objective of {controller}, {len(hosts)} hosts, paired", told
        for (name, a), (_, b) in zip(*(last_metrics(run, runs) for run in (first, other)), strict=True):
            if a is not None and b is not None:
                yield other.name, f"last {name}", f"{a:.4g} − {b:.4g} = {a - b:+.4g}"


def outcomes_by_host(run: Run) -> dict[str, dict[str, float]]:
    """Return the objective of each controller on each host, means over training seeds."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in run.outcomes:
        found[row["controller"]][row["host_seed"]].append(float(row["objective"]))
    return {name: {host: float(np.mean(values)) for host, values in of.items()} for name, of in found.items()}


def last_metrics(run: Run, runs: Sequence[Run]) -> list[tuple[str, float | None]]:
    """Return the last value of each metric that a network of the user's has in one of the runs."""
    names = dict.fromkeys(metric for each in runs for one in each.validations[-1:] for metric in one.metrics)
    return [(name, line[-1][1] if (line := points_of(run, name, "step")) else None) for name in names]
