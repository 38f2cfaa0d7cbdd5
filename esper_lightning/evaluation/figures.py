"""Figures of a comparison, as PNG files. S training seeds, T ticks, H hosts, K slots."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from esper_lightning.evaluation.compare import Trace
from esper_lightning.evaluation.comparison import Contender, Contest
from esper_lightning.evaluation.intervals import Interval, mean_interval
from esper_lightning.evaluation.report import label
from esper_lightning.growth.saving import replace_file
from esper_lightning.telemetry.figures import OP_COLOURS, STAGE_COLOURS, grid, legend, panels_for

DPI = 130
MARKERS = "ooosssDDDvvv^^^"

MOST_HOSTS = 48
"""Maximum number of hosts in a timeline; more rows could not be told apart."""


def draw(contest: Contest, slots: list[str], folder: Path) -> list[Path]:
    """Write all figures as PNG files and return their paths."""
    figures = {"pareto": pareto(contest), "curves": curves(contest)}
    for number, outcome in enumerate(contest.ours.outcomes):
        name = "timeline" if len(contest.tamiyos) == 1 else f"timeline{number}"
        figures[name] = timeline(outcome.trace, slots, f"{contest.ours.name}, {label(contest, number)}")
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        replace_file(path, lambda draft, figure=figure: figure.savefig(draft, dpi=DPI, format="png"))
        paths.append(path)
    return paths


def pareto(contest: Contest) -> Figure:
    """Plot mean accuracy against parameters and against training FLOPs, with intervals; up and left is better."""
    figure = Figure(figsize=(12, 5.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    scales = (("parameters", 1.0, "final parameters"), ("flops", 1e-6, "training MFLOP"))
    for axes, (column, scale, heading) in zip(panels, scales, strict=True):
        for number, contender in enumerate(contest.contenders):
            x, y = mean_interval(scale * contender.values(column)), mean_interval(contender.values("accuracy"))
            axes.errorbar(
                x.mean, y.mean, yerr=arms(y), xerr=arms(x), **look(number, contender), ls="", ms=7, capsize=2, alpha=0.9
            )
        axes.set_xscale("log")
        axes.set_xlabel(f"{heading}, mean per host")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy")
    figure.suptitle(f"{len(contest.seeds)} hosts, test images, mean and 95 % interval", fontsize=10)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize=8)
    return figure


def arms(interval: Interval) -> list[list[float]]:  # [2, 1]
    """Return the lower and upper length of an error bar."""
    return [[interval.mean - interval.low], [interval.high - interval.mean]]


def look(number: int, contender: Contender) -> dict[str, str]:
    """Return colour, marker and label of an entry, the same in all figures."""
    return {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "label": contender.name}


def curves(contest: Contest) -> Figure:
    """Plot the mean validation accuracy after each host epoch, with the 95 % interval as a band."""
    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    for number, contender in enumerate(contest.contenders):
        tables = np.array([outcome.trace.accuracy for outcome in contender.outcomes])  # [S, T, H]
        band = [mean_interval(tables[:, t]) for t in range(tables.shape[1])]
        ticks = np.arange(1, len(band) + 1)
        mean, low, high = np.array(band).T
        style = "-" if number < 10 else "--"
        axes.plot(ticks, mean, ls=style, **look(number, contender), ms=4, lw=1.3)
        axes.fill_between(ticks, low, high, color=f"C{number % 10}", alpha=0.12, lw=0)
    axes.set_xlabel("tick (host epochs)")
    axes.set_ylabel("validation accuracy; at the last tick of fossilized seeds only")
    axes.set_title(f"{len(contest.seeds)} hosts, mean and 95 % interval", fontsize=10)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=8)
    return figure


def timeline(trace: Trace, slots: list[str], who: str) -> Figure:
    """Plot the op applied to each host before each host epoch, and the stage of each slot after it."""
    shown = min(trace.ops.shape[1], MOST_HOSTS)
    figure, panels = panels_for(1 + len(slots), trace.ops.shape[0], shown)
    grid(panels[0], trace.ops[:, :shown].T, list(OP_COLOURS.values()), "action")
    for k, slot in enumerate(slots):
        grid(panels[1 + k], trace.stages[:, :shown, k].T, list(STAGE_COLOURS.values()), slot)
    panels[0].set_yticks(range(0, shown, max(1, shown // 16)))
    figure.subplots_adjust(top=figure.subplotpars.top - 0.25 / figure.get_size_inches()[1])
    figure.suptitle(f"{who}: the first {shown} of {trace.ops.shape[1]} hosts", fontsize=10)
    names = [(name, colour) for i, (name, colour) in enumerate(OP_COLOURS.items()) if (trace.ops == i).any()]
    names += [(stage.name, colour) for stage, colour in STAGE_COLOURS.items() if (trace.stages == stage).any()]
    legend(figure, names)
    return figure
