"""Charts of growth for the page of a run: Vega-Altair, of the extra [report].

Colours of text and lines are those of the page around a chart.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import altair as alt
import numpy as np

from esper_lightning.telemetry.observer import SeedStats

Row = Mapping[str, Any]
"""One record of a chart's data: plain values by column."""

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

OPS = {
    "WAIT": ("#f2f2f2", "·"),
    "GERMINATE": ("#74c476", "+"),
    "CULL": ("#f4a6a6", "×"),
    "FOSSILIZE": ("#9ecae1", "F"),
}
"""Colour and mark of each op."""

LINE_COLOURS = ["#3182bd", "#e6550d", "#31a354", "#756bb1", "#d6616b", "#8c6d31", "#17becf", "#969696"]
"""Colours of series, to be told apart on white and on black."""

SHAPES = ["circle", "square", "triangle-up", "cross", "diamond", "triangle-right", "triangle-down", "triangle-left"]

AXIS_WIDTH = 96
"""Pixels left of every plot, so that plots below each other share their horizontal axis."""


def styled(chart: Any, description: str) -> Any:
    """Return a chart in the style of all charts, with a description for readers who cannot see it."""
    text = {"labelColor": "currentColor", "titleColor": "currentColor"}
    lines = {"gridColor": "#8883", "domainColor": "#888", "tickColor": "#888"}
    chart = chart.properties(description=description, background="transparent")
    chart = chart.configure_axis(**text, **lines, labelLimit=AXIS_WIDTH - 16, titleFontWeight="normal")
    chart = chart.configure_axisY(minExtent=AXIS_WIDTH - 24, maxExtent=AXIS_WIDTH - 24)
    legend = {"orient": "bottom", "columns": 4, "symbolStrokeWidth": 2}
    return chart.configure_legend(**text, **legend).configure_view(stroke="#8886").configure_title(color="currentColor")


def timeline(
    ops: Sequence[str],
    stages: Sequence[Sequence[tuple[str, str]]],
    slots: Sequence[str],
    *,
    ticks: int,
    rolled_back: Iterable[int] = (),
) -> Any:
    """Return the life of one host: op before each tick, and each slot's stage after it, by colour and by mark.

    Args:
        ops: Op before each tick; empty if ops are not known.
        stages: Stage and blueprint in each slot, after each tick.
        slots: Names of the slots, in the order from above.
        ticks: Ticks of the episode.
        rolled_back: Ticks in which the Governor rolled the host back.
    """
    rows, looks = [*(["action"] if ops else []), *slots], {**STAGES, **OPS}
    cells = [
        {"tick": tick, "row": row, "state": state, "blueprint": blueprint, "mark": looks[state][1]}
        for tick, of_slots in enumerate(stages, 1)
        for row, (state, blueprint) in zip(rows, [*((op, "") for op in ops[tick - 1 : tick]), *of_slots], strict=True)
    ]
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
    """Return an empty chart of these rows."""
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
    """Return lines over a common axis.

    Args:
        points: Rows with `x`, `y` and `series`.
        x, y: Titles of the axes.
        marks: Rows with `x` and `what`, drawn as vertical lines.
        ticks: Ticks of an episode, whose axis is that of `timeline`. None: the axis is a number.
        shown: Name of a parameter by which the page moves a vertical line.
    """
    names = list(dict.fromkeys(point["series"] for point in points))
    axis = alt.Axis(labelAngle=0, labelOverlap=True) if ticks else alt.Axis(format="~s")
    at = alt.X("x:O" if ticks else "x:Q", title=x, axis=axis, scale=ordinal(ticks) if ticks else alt.Scale(zero=False))
    legend = alt.Legend(symbolType="stroke") if len(names) > 1 else None
    lines = plot(points).encode(
        x=at,
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4)),
        color=alt.Color("series:N", title=None, sort=names, legend=legend, scale=colours_of(names)),
        strokeDash=alt.StrokeDash("series:N", sort=names, legend=None),
        tooltip=["series:N", alt.Tooltip("x:Q", title=x), alt.Tooltip("y:Q", title=y, format=".4~g")],
    )
    layers = [lines.mark_line(point={"size": 18} if len(points) <= 60 * len(names) else False)]
    if marks:
        rule = plot(marks).mark_rule(strokeDash=[2, 2], color="#888", strokeWidth=2)
        layers.append(rule.encode(x=at, tooltip="what:N"))
    if shown:
        chosen = alt.param(name=shown, value=ticks)
        place = alt.Chart(alt.sequence(1, (ticks or 0) + 1, as_="x")).mark_rule(color="currentColor", opacity=0.6)
        layers.append(place.encode(x=at).transform_filter(f"datum.x == {shown}").add_params(chosen))
    return alt.layer(*layers).properties(height=150, width="container")


def worth(rows: Sequence[Row]) -> Any:
    """Return the chart of `worth_rows`: a larger mark stands for more seeds."""
    axis = alt.Axis(format="+~g")
    slots, blueprints = (list(dict.fromkeys(row[column] for row in rows)) for column in ("slot", "blueprint"))
    return (
        plot(rows)
        .mark_point(filled=True, opacity=0.9)
        .encode(
            x=alt.X("points:Q", title="mean contribution of a seed, in points", axis=axis),
            y=alt.Y("blueprint:N", title=" "),
            color=alt.Color("slot:N", title=None, scale=colours_of(slots)),
            shape=alt.Shape("slot:N", title=None, scale=shapes_of(slots)),
            size=alt.Size("seeds:Q", scale=alt.Scale(range=[30, 260], type="sqrt"), legend=None),
            tooltip=["blueprint:N", "slot:N", "seeds:Q", alt.Tooltip("kept:Q", format=".0%"), "points:Q"],
        )
        .properties(height=24 * len(blueprints), width="container")
    )


def scatter(rows: Sequence[Row], *, x: str, y: str) -> Any:
    """Return means with intervals both ways, on a logarithmic horizontal axis.

    Rows have `name`, `x`, `x_low`, `x_high`, `y`, `y_low` and `y_high`.
    """
    names = [row["name"] for row in rows]
    scale = alt.Scale(type="log", nice=False, padding=12)
    base = plot(rows).encode(
        x=alt.X("x:Q", title=x, scale=scale, axis=alt.Axis(format="~s", tickCount=4)),
        y=alt.Y("y:Q", title=y, scale=alt.Scale(zero=False)),
        color=alt.Color("name:N", title=None, scale=colours_of(names)),
        tooltip=["name:N", alt.Tooltip("x:Q", format=".4~s"), alt.Tooltip("y:Q", format=".4f")],
    )
    shape = alt.Shape("name:N", title=None, scale=shapes_of(names))
    return alt.layer(
        base.mark_rule(opacity=0.6).encode(y="y_low:Q", y2="y_high:Q"),
        base.mark_rule(opacity=0.6).encode(x=alt.X("x_low:Q", scale=scale), x2="x_high:Q"),
        base.mark_point(size=80, strokeWidth=2).encode(shape=shape),
    ).properties(height=280, width="container")


def typical_hosts(objective: np.ndarray) -> dict[str, int]:
    """Return the numbers of the worst, the median and the best host, given the objectives of all [N]."""
    ranked = np.argsort(objective, kind="stable").tolist()
    return {"worst": ranked[0], "median": ranked[len(ranked) // 2], "best": ranked[-1]}


def worth_rows(stats: SeedStats, blueprints: Sequence[str], slots: Sequence[str]) -> list[dict[str, Any]]:
    """Return the rows of `worth` for the blueprints that were tried; points are None where none were measured."""
    rows = []
    for b, k in zip(*np.nonzero(stats.germinated), strict=True):
        points = float(stats.mean_contribution[b, k])
        seeds, kept = int(stats.germinated[b, k]), float(stats.fossilized[b, k] / stats.germinated[b, k])
        row = {"blueprint": blueprints[b], "slot": slots[k], "seeds": seeds, "kept": kept}
        rows.append(row | {"points": points if np.isfinite(points) else None})
    return sorted(rows, key=lambda row: (row["blueprint"], row["slot"]))
