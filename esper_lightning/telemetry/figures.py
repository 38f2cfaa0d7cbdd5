"""Figures of the growth of hosts. T ticks, H hosts, K slots, B blueprints."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.colors import BoundaryNorm, ListedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.hosts import Tick
from esper_lightning.telemetry.observer import Observer, SeedStats, Trace

OP_COLOURS = {
    "WAIT": "#eeeeee",
    "GERMINATE": "#2ca02c",
    "CULL": "#d62728",
    "FOSSILIZE": "#1f77b4",
}
"""Colour of each op, in the order of the op indices."""

STAGE_COLOURS = {
    Stage.DORMANT: "#ffffff",
    Stage.GERMINATED: "#d9f0d3",
    Stage.TRAINING: "#a6dba0",
    Stage.BLENDING: "#fee08b",
    Stage.PROBATIONARY: "#fdae61",
    Stage.FOSSILIZED: "#1f77b4",
    Stage.CULLED: "#d62728",
    Stage.EMBARGOED: "#f4a6a6",
}

MAX_HOSTS_SHOWN = 24
"""Most hosts in one figure: rows of more hosts would be too thin to see in TensorBoard."""

PIXEL_ROWS_PER_HOST = 10
"""Pixel rows per host: the resolution at which the height of the filled part shows alpha."""

WHITE_SHARE_ABOVE_ALPHA = 0.72
"""Share of white in the colour of a stage above the height of alpha."""


def draw_figures(observer: Observer, last: Tick) -> dict[str, Figure]:
    """Return the figures of the finished episode by tag; if a part was not observed, only those without history."""
    final = (last.hosts[name] for name in ("accuracy", "parameters", "objective"))
    found = {
        "figures/hosts": accuracy_against_parameters(*final),
        "figures/blueprints": blueprint_scoreboard(observer.run_stats, observer.blueprints, observer.slots),
    }
    if observer.is_complete:
        found |= {
            "figures/growth": growth_timeline(observer.trace, observer.slots),
            "figures/ops": op_map(observer.trace),
        }
    return found


def growth_timeline(trace: Trace, slots: Sequence[str]) -> Figure:
    """Draw each slot's stage after each tick as colour, alpha as the height of the filled part, and rollbacks."""
    stage, alpha = (part[: trace.length, :MAX_HOSTS_SHOWN] for part in (trace.stage, trace.alpha))
    hosts = stage.shape[1]
    figure, panels = make_panels(len(slots), trace.length, hosts)
    for k, (axes, slot) in enumerate(zip(panels, slots, strict=True)):
        extent = (0.5, trace.length + 0.5, hosts - 0.5, -0.5)
        axes.imshow(
            stage_image(stage[..., k].T, alpha[..., k].T), aspect="auto", interpolation="nearest", extent=extent
        )
        draw_cell_borders(axes, hosts, trace.length, title=slot)
        ticks, host_indices = np.nonzero(trace.rolled_back[: trace.length, :hosts])
        axes.scatter(ticks + 1, host_indices, marker="v", s=14, color="black", zorder=3)
    present = [(name.name, colour) for name, colour in STAGE_COLOURS.items() if (stage == name).any()]
    add_legend(figure, present, "▼ rolled back" if trace.rolled_back[: trace.length, :hosts].any() else None)
    return figure


def stage_image(stage: np.ndarray, alpha: np.ndarray) -> np.ndarray:  # [H, T] both -> [H·ROWS, T, 3]
    """Return an RGB image with one cell per host and tick in the colour of its stage, pale above alpha."""
    colours = np.array([to_rgb(colour) for colour in STAGE_COLOURS.values()])[stage]  # [H, T, 3]
    height = (
        np.arange(PIXEL_ROWS_PER_HOST)[::-1] + 0.5
    ) / PIXEL_ROWS_PER_HOST  # of each row of pixels, from the top down
    pale = (alpha[:, None] < height[:, None])[..., None] * WHITE_SHARE_ABOVE_ALPHA  # [H, ROWS, T, 1]
    return (colours[:, None] * (1.0 - pale) + pale).reshape(-1, stage.shape[1], 3)


def op_map(trace: Trace) -> Figure:
    """Draw the op carried out on each host before each tick, and the share of each op in each tick."""
    op = trace.op[: trace.length]
    hosts = min(op.shape[1], MAX_HOSTS_SHOWN)
    figure, (left, right) = make_panels(2, trace.length, hosts, sharey=False)
    draw_cells(left, op[:, :hosts].T, list(OP_COLOURS.values()), title=f"the first {hosts} hosts")
    edges = np.repeat(np.arange(trace.length + 1) + 0.5, 2)[1:-1]  # of each tick, on both sides
    right.stackplot(edges, np.repeat(op_shares(op), 2, axis=1), colors=list(OP_COLOURS.values()))
    right.set(xlabel="tick", ylabel="share", xlim=(0.5, trace.length + 0.5), ylim=(0.0, 1.0))
    right.set_title(f"all {op.shape[1]} hosts", fontsize=9)
    show_integers(right.xaxis)
    add_legend(figure, [(name, colour) for i, (name, colour) in enumerate(OP_COLOURS.items()) if (op == i).any()])
    return figure


def op_shares(op: np.ndarray) -> np.ndarray:  # [T, H] -> [ops, T]
    """Return the share of hosts on which each op was carried out in each tick."""
    return np.stack([(op == number).mean(1) for number in range(len(OP_COLOURS))])


def accuracy_against_parameters(accuracy: np.ndarray, parameters: np.ndarray, objective: np.ndarray) -> Figure:
    """Draw the H hosts at the end of their episodes, [H] each. Better hosts are up and to the left."""
    figure = Figure(figsize=(6.0, 4.2))
    axes = figure.subplots()
    set_margins(figure, left=0.8, right=0.3)
    dots = axes.scatter(parameters, accuracy, c=objective, cmap="viridis", s=22, edgecolors="0.4", linewidths=0.4)
    figure.colorbar(dots, label="objective")
    axes.set(xlabel="parameters of host and fossilized seeds", ylabel="validation accuracy with fossilized seeds")
    axes.grid(alpha=0.3)
    return figure


def blueprint_scoreboard(score: SeedStats, blueprints: Sequence[str], slots: Sequence[str]) -> Figure:
    """Draw, by blueprint and slot, the number of seeds, the share fossilized and the mean contribution."""
    figure = Figure(figsize=(2.6 + 1.1 * 3 * len(slots), 1.4 + 0.34 * len(blueprints)))
    panels = figure.subplots(1, 3, sharey=True)
    set_margins(figure, left=1.2, bottom=0.8)
    fossilized_share = score.fossilized / np.maximum(score.germinated, 1.0)
    tables = (
        ("seeds", score.germinated, ".0f"),
        ("share fossilized", fossilized_share, ".2f"),
        ("contribution", score.mean_contribution, "+.1f"),
    )
    for axes, (title, table, form) in zip(panels, tables, strict=True):
        shown = np.ma.masked_where((score.germinated == 0.0) | ~np.isfinite(table), table)
        axes.imshow(shown, aspect="auto", cmap="YlGnBu", alpha=0.55)
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(len(slots)), slots, fontsize=8, rotation=20)
        axes.set_yticks(range(len(blueprints)), blueprints, fontsize=8)
        for b, k in zip(*np.nonzero(~np.ma.getmaskarray(shown)), strict=True):
            axes.text(k, b, f"{table[b, k]:{form}}", ha="center", va="center", fontsize=8)
    return figure


def make_panels(number: int, ticks: int, hosts: int, *, sharey: bool = True) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with `number` panels side by side, high enough for one row per host."""
    figure = Figure(figsize=(1.0 + number * max(2.4, 0.17 * ticks), 1.6 + 0.2 * hosts))
    panels = figure.subplots(1, number, sharey=sharey, squeeze=False)[0]
    set_margins(figure, bottom=1.05)
    if not sharey:
        figure.subplots_adjust(wspace=0.3)
    panels[0].set_ylabel("host")
    return figure, panels


def set_margins(
    figure: Figure, *, left: float = 0.6, right: float = 0.2, bottom: float = 0.6, top: float = 0.35
) -> None:
    """Set the space around the panels in inches: matplotlib's automatic layout takes longer than the whole drawing."""
    width, height = figure.get_size_inches()
    sides = {"left": left / width, "right": 1.0 - right / width, "bottom": bottom / height, "top": 1.0 - top / height}
    figure.subplots_adjust(**sides, wspace=0.1)


def draw_cells(axes: Axes, numbers: np.ndarray, colours: Sequence[str], *, title: str) -> None:
    """Draw numbers [H, T] as coloured cells."""
    cells = ListedColormap(colours)
    hosts, ticks = numbers.shape
    norm = BoundaryNorm(np.arange(len(colours) + 1) - 0.5, cells.N)
    axes.imshow(numbers, cmap=cells, norm=norm, aspect="auto", extent=(0.5, ticks + 0.5, hosts - 0.5, -0.5))
    draw_cell_borders(axes, hosts, ticks, title=title)


def show_integers(axis: Axis) -> None:
    """Label an axis at integers only."""
    locator = axis.get_major_locator()
    assert isinstance(locator, MaxNLocator), "matplotlib's default for numbers"
    locator.set_params(integer=True)


def draw_cell_borders(axes: Axes, hosts: int, ticks: int, *, title: str) -> None:
    """Draw thin lines between the cells of H hosts and T ticks, and label the axes."""
    show_integers(axes.xaxis)
    show_integers(axes.yaxis)
    axes.set_xticks(np.arange(1.5, ticks), minor=True)
    axes.set_yticks(np.arange(0.5, hosts), minor=True)
    axes.grid(which="minor", color="white", lw=0.6)
    axes.tick_params(which="minor", length=0)
    axes.set_xlabel("tick", fontsize=8)
    axes.set_title(title, fontsize=9)


def add_legend(figure: Figure, names: Sequence[tuple[str, str]], mark: str | None = None) -> None:
    """Add a legend below a figure: names with their colours, and the meaning of a mark."""
    patches = [Patch(facecolor=colour, edgecolor="0.6", label=name) for name, colour in names]
    if mark is not None:
        patches.append(Patch(facecolor="none", edgecolor="none", label=mark))
    figure.legend(handles=patches, loc="lower center", ncols=min(6, len(patches)), fontsize=8)
