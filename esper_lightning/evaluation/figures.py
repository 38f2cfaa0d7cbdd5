"""Figures of a comparison, as PNG files. S training seeds, T ticks, H hosts, K slots."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from esper_lightning.evaluation.comparison import ComparisonResult, Entry
from esper_lightning.evaluation.play import PoolTrace
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.growth.stages import Stage
from esper_lightning.serialization import replace_file
from esper_lightning.telemetry.figures import OP_COLOURS, STAGE_COLOURS, add_legend, draw_cells, make_panels

DPI = 130
MARKERS = "osD^v<>ph*XPd8H"

MAX_TIMELINE_HOSTS = 48
"""Maximum number of hosts in a timeline; more rows would be too thin."""


def write_figures(result: ComparisonResult, slots: list[str], folder: Path) -> list[str]:
    """Write all figures as PNG files and return their names."""
    figures = {"pareto": pareto_figure(result), "curves": accuracy_figure(result)}
    first = result.reference
    titles = [f"{first.name}, {label}" for label in result.policy_labels()] or [first.name]
    for number, (outcome, title) in enumerate(zip(first.outcomes, titles, strict=True)):
        name = "timeline" if len(titles) == 1 else f"timeline{number}"
        figures[name] = timeline_figure(outcome.trace, slots, title)
    for name, figure in figures.items():
        save_figure(figure, folder / f"{name}.png")
    return [f"{name}.png" for name in figures]


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as a PNG file."""
    replace_file(path, lambda draft: figure.savefig(draft, dpi=DPI, format="png"))


def entry_style(number: int, entry: Entry) -> dict[str, Any]:
    """Return colour, marker and label of an entry, the same in all figures."""
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "label": entry.name}


def pareto_figure(result: ComparisonResult) -> Figure:
    """Plot mean accuracy against parameters and against training FLOPs, with intervals; up and left is better."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    columns = (("parameters", "final parameters"), ("flops", "FLOP of training"))
    sizes = np.linspace(13.0, 5.0, len(result.entries))  # hollow and ever smaller: controllers at one point all show
    for axes, (column, heading) in zip(panels, columns, strict=True):
        for number, entry in enumerate(result.entries):
            x, y = mean_interval(entry.values(column)), mean_interval(entry.values("accuracy"))
            axes.errorbar(
                x.mean,
                y.mean,
                xerr=[[x.mean - x.low], [x.high - x.mean]],
                yerr=[[y.mean - y.low], [y.high - y.mean]],
                **entry_style(number, entry),
                ls="",
                ms=sizes[number],
                mfc="none",
                mew=1.6,
                elinewidth=0.8,
            )
        axes.set_xscale("log")
        label_log_axis(axes.xaxis)
        axes.set_xlabel(f"{heading}, mean per host")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy")
    figure.suptitle(f"{len(result.rng_seeds)} hosts, test images, mean and 95 % interval", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def label_log_axis(axis: Axis) -> None:
    """Label a logarithmic axis at few places: matplotlib labels every minor tick of less than a decade."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(5) if high < 10.0 * low else LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(EngFormatter(sep=""))
    axis.set_minor_formatter(NullFormatter())


def accuracy_figure(result: ComparisonResult) -> Figure:
    """Plot the mean validation accuracy after each host epoch, with the 95 % interval as a band."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, entry in enumerate(result.entries):
        accuracies = np.array([outcome.trace.accuracy for outcome in entry.outcomes])  # [S, T, H]
        mean, low, high = np.array([mean_interval(accuracies[:, t]) for t in range(accuracies.shape[1])]).T
        ticks, style = np.arange(1, len(mean) + 1), "-" if number < 10 else "--"
        axes.plot(ticks, mean, ls=style, **entry_style(number, entry), ms=4, lw=1.3)
        axes.fill_between(ticks, low, high, color=f"C{number % 10}", alpha=0.12, lw=0)
    axes.set_xlabel("tick (host epochs)")
    axes.set_ylabel("validation accuracy; at the last tick of fossilized seeds only")
    axes.set_title(f"{len(result.rng_seeds)} hosts, mean and 95 % interval", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def timeline_figure(trace: PoolTrace, slots: list[str], title: str) -> Figure:
    """Plot the op applied to each host before each host epoch, and the stage of each slot after it."""
    n_hosts = min(trace.ops.shape[1], MAX_TIMELINE_HOSTS)
    figure, panels = make_panels(1 + len(slots), trace.ops.shape[0], n_hosts)
    draw_cells(panels[0], trace.ops[:, :n_hosts].T, list(OP_COLOURS.values()), title="action")
    for k, (axes, slot) in enumerate(zip(panels[1:], slots, strict=True)):
        stages = trace.stages[:, :n_hosts, k]
        draw_cells(axes, stages.T, list(STAGE_COLOURS.values()), title=slot)
        if (stages == Stage.DORMANT).all():  # white all over
            axes.text(0.5, 0.5, "nothing grew here", transform=axes.transAxes, ha="center", color="0.5")
    panels[0].set_yticks(range(0, n_hosts, max(1, n_hosts // 16)))
    figure.subplots_adjust(top=figure.subplotpars.top - 0.25 / figure.get_size_inches()[1])
    figure.suptitle(f"{title}: the first {n_hosts} of {trace.ops.shape[1]} hosts", fontsize=10)
    names = [(name, colour) for i, (name, colour) in enumerate(OP_COLOURS.items()) if (trace.ops == i).any()]
    names += [(stage.name, colour) for stage, colour in STAGE_COLOURS.items() if (trace.stages == stage).any()]
    add_legend(figure, names)
    return figure
