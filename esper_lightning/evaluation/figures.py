"""Figures of a comparison, as PNG files. S training seeds, T ticks, H hosts, K slots."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from esper_lightning.evaluation.comparison import ComparisonResult, Entry
from esper_lightning.evaluation.play import PoolTrace
from esper_lightning.evaluation.report import policy_label
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.serialization.replace import replace_file
from esper_lightning.telemetry.figures import OP_COLOURS, STAGE_COLOURS, add_legend, draw_cells, make_panels

DPI = 130
MARKERS = "ooosssDDDvvv^^^"

MAX_TIMELINE_HOSTS = 48
"""Maximum number of hosts in a timeline; more rows would be too thin."""


def write_figures(result: ComparisonResult, slots: list[str], folder: Path) -> list[Path]:
    """Write all figures as PNG files and return their paths."""
    figures = {"pareto": pareto_figure(result), "curves": accuracy_figure(result)}
    first = result.reference
    titles = [f"{first.name}, {policy_label(result, number)}" for number in range(len(result.policies))] or [first.name]
    for number, (outcome, title) in enumerate(zip(first.outcomes, titles, strict=True)):
        name = "timeline" if len(titles) == 1 else f"timeline{number}"
        figures[name] = timeline_figure(outcome.trace, slots, title)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        replace_file(path, lambda draft, figure=figure: figure.savefig(draft, dpi=DPI, format="png"))
        paths.append(path)
    return paths


def pareto_figure(result: ComparisonResult) -> Figure:
    """Plot mean accuracy against parameters and against training FLOPs, with intervals; up and left is better."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    scales = (("parameters", 1.0, "final parameters"), ("flops", 1e-6, "training MFLOP"))
    for axes, (column, scale, heading) in zip(panels, scales, strict=True):
        for number, entry in enumerate(result.entries):
            x, y = mean_interval(scale * entry.values(column)), mean_interval(entry.values("accuracy"))
            axes.errorbar(
                x.mean,
                y.mean,
                yerr=error_bar(y),
                xerr=error_bar(x),
                **entry_style(number, entry),
                ls="",
                ms=7,
                capsize=2,
                alpha=0.9,
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"{heading}, mean per host")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy")
    figure.suptitle(f"{len(result.rng_seeds)} hosts, test images, mean and 95 % interval", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def error_bar(interval: Interval) -> list[list[float]]:  # [2, 1]
    """Return the lower and upper length of an error bar."""
    return [[interval.mean - interval.low], [interval.high - interval.mean]]


def entry_style(number: int, entry: Entry) -> dict[str, Any]:
    """Return colour, marker and label of an entry, the same in all figures."""
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "label": entry.name}


def accuracy_figure(result: ComparisonResult) -> Figure:
    """Plot the mean validation accuracy after each host epoch, with the 95 % interval as a band."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, entry in enumerate(result.entries):
        accuracies = np.array([outcome.trace.accuracy for outcome in entry.outcomes])  # [S, T, H]
        band = [mean_interval(accuracies[:, t]) for t in range(accuracies.shape[1])]
        ticks = np.arange(1, len(band) + 1)
        mean, low, high = np.array(band).T
        style = "-" if number < 10 else "--"
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
    for k, slot in enumerate(slots):
        draw_cells(panels[1 + k], trace.stages[:, :n_hosts, k].T, list(STAGE_COLOURS.values()), title=slot)
    panels[0].set_yticks(range(0, n_hosts, max(1, n_hosts // 16)))
    figure.subplots_adjust(top=figure.subplotpars.top - 0.25 / figure.get_size_inches()[1])
    figure.suptitle(f"{title}: the first {n_hosts} of {trace.ops.shape[1]} hosts", fontsize=10)
    names = [(name, colour) for i, (name, colour) in enumerate(OP_COLOURS.items()) if (trace.ops == i).any()]
    names += [(stage.name, colour) for stage, colour in STAGE_COLOURS.items() if (trace.stages == stage).any()]
    add_legend(figure, names)
    return figure
