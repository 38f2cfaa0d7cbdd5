"""Figures of the growth of hosts. T ticks, H hosts, K slots, B blueprints."""

from collections.abc import Sequence

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from esper_lightning.envs import Op
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.observer import Observer, SeedStats

OP_COLOURS = {Op.WAIT: "#eeeeee", Op.GERMINATE: "#2ca02c", Op.CULL: "#d62728", Op.FOSSILIZE: "#1f77b4"}

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


def draw_figures(observer: Observer) -> dict[str, Figure]:
    """Return the figures of the finished episode by tag; its growth only if it was observed from the beginning."""
    found = {"figures/blueprints": blueprint_scoreboard(observer.run_stats, observer.blueprints, observer.slots)}
    if observer.is_complete:
        trace, shown = observer.trace, np.s_[: observer.trace.length, :MAX_HOSTS_SHOWN]
        found["figures/growth"] = timeline(
            trace.op[shown],
            trace.stage[shown],
            observer.slots,
            alpha=trace.alpha[shown],
            rolled_back=trace.rolled_back[shown],
        )
    return found


def timeline(
    op: np.ndarray,  # [T, H]
    stage: np.ndarray,  # [T, H, K]
    slots: Sequence[str],
    *,
    alpha: np.ndarray | None = None,  # [T, H, K]
    rolled_back: np.ndarray | None = None,  # [T, H] bool
    title: str = "",
) -> Figure:
    """Draw the op on each host before each tick, and each slot's stage after it as colour.

    The height of the filled part shows alpha, and a mark each rollback, where they are given.
    """
    (ticks, hosts), panels = op.shape, 1 + len(slots)
    figure = Figure(figsize=(1.0 + panels * max(2.4, 0.17 * ticks), (1.85 if title else 1.6) + 0.2 * hosts))
    row = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    set_margins(figure, bottom=1.05, top=0.6 if title else 0.35)
    images = [cells(op, list(OP_COLOURS.values()))]
    images += [
        cells(stage[..., k], list(STAGE_COLOURS.values()), None if alpha is None else alpha[..., k])
        for k in range(len(slots))
    ]
    for axes, image, name in zip(row, images, ("action", *slots), strict=True):
        axes.imshow(image, aspect="auto", interpolation="nearest", extent=(0.5, ticks + 0.5, hosts - 0.5, -0.5))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xticks(np.arange(1.5, ticks), minor=True)
        axes.set_yticks(np.arange(0.5, hosts), minor=True)
        axes.grid(which="minor", color="white", lw=0.6)
        axes.tick_params(which="minor", length=0)
        axes.set_xlabel("tick", fontsize=8)
        axes.set_title(name, fontsize=9)
    row[0].set_ylabel("host")
    legend = [Patch(fc=c, ec="0.6", label=one.name) for one, c in OP_COLOURS.items() if (op == one).any()]
    legend += [Patch(fc=c, ec="0.6", label=one.name) for one, c in STAGE_COLOURS.items() if (stage == one).any()]
    if rolled_back is not None and rolled_back.any():
        when, who = np.nonzero(rolled_back)
        for axes in row:
            axes.scatter(when + 1, who, marker="v", s=14, color="black", zorder=3)
        legend.append(Patch(fc="none", ec="none", label="▼ rolled back"))
    figure.legend(handles=legend, loc="lower center", ncols=min(6, len(legend)), fontsize=8)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure


def cells(numbers: np.ndarray, colours: Sequence[str], alpha: np.ndarray | None = None) -> np.ndarray:
    """Return an RGB image [H·ROWS, T, 3] with a cell for each tick and host, [T, H] both, pale above alpha."""
    rgb = np.array([to_rgb(colour) for colour in colours])[numbers.T]  # [H, T, 3]
    if alpha is None:
        return rgb
    height = (np.arange(PIXEL_ROWS_PER_HOST)[::-1] + 0.5) / PIXEL_ROWS_PER_HOST  # of each row, from the top down
    pale = (alpha.T[:, None] < height[:, None])[..., None] * WHITE_SHARE_ABOVE_ALPHA  # [H, ROWS, T, 1]
    return (rgb[:, None] * (1.0 - pale) + pale).reshape(-1, len(numbers), 3)


def blueprint_scoreboard(score: SeedStats, blueprints: Sequence[str], slots: Sequence[str]) -> Figure:
    """Draw, by blueprint and slot, the number of seeds, the share fossilized and the mean contribution."""
    figure = Figure(figsize=(2.6 + 1.1 * 3 * len(slots), 1.4 + 0.34 * len(blueprints)))
    panels = figure.subplots(1, 3, sharey=True)
    set_margins(figure, left=1.2, bottom=0.8)
    tables = (
        ("seeds", score.germinated, ".0f"),
        ("share fossilized", score.fossilized / np.maximum(score.germinated, 1.0), ".2f"),
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


def set_margins(figure: Figure, *, left: float = 0.6, bottom: float = 0.6, top: float = 0.35) -> None:
    """Set the space around the panels in inches: matplotlib's automatic layout takes longer than the whole drawing."""
    width, height = figure.get_size_inches()
    figure.subplots_adjust(left / width, bottom / height, 1.0 - 0.2 / width, 1.0 - top / height, wspace=0.1)
