"""The tables of the README, from committed results of `evaluate`.

    python -m benchmarks.tables keep RUN/evaluation/evaluation.csv benchmarks/results/NAME.csv
    python -m benchmarks.tables show benchmarks/results/NAME.csv
    python -m benchmarks.tables gap benchmarks/results/NAME.csv

The first keeps what the tables need; the second prints one in Markdown: objective on test images, and Tamiyo's lead
over every row, paired by host, for each training seed and for all together. The third prints how much of the gap in
accuracy each one closed between the host that never grows and the network that Tamiyo came to, built in from the start.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper_lightning.evaluation.intervals import Interval, mean_interval, ratio_interval

KEPT = ("controller", "training_seed", "host", "objective", "accuracy", "parameters", "fossils", "flops")

TAMIYO, SMALL, BIG = "tamiyo", "small static", "static tamiyo"

ByTrainingSeed = dict[str, np.ndarray]
"""A column [H]; the seed of what was not trained is empty."""


def keep(source: Path, target: Path) -> None:
    """Copies the columns that the tables need, rounded to what an image of 700 can tell."""
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(KEPT)
        for row in rows:
            numbers = [f"{float(row[name]):.6g}" for name in KEPT[3:]]
            writer.writerow([*(row[name] for name in KEPT[:3]), *numbers])


def read(path: Path, column: str = "objective") -> dict[str, ByTrainingSeed]:
    """The results of each controller."""
    found: dict[str, dict[str, list[float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["controller"], {}).setdefault(row["training_seed"], []).append(float(row[column]))
    return {name: {seed: np.array(values) for seed, values in of.items()} for name, of in found.items()}


def number(value: float) -> str:
    """`.573`, `−.021`"""
    return f"{value:.3f}".replace("-", "−").replace("0.", ".", 1)


def shown(interval: Interval, signed: bool = False) -> str:
    """`.573 ± .017`, or with its sign and both ends."""
    if not signed:
        return f"{number(interval.mean)} ± {number((interval.high - interval.low) / 2)}"
    sign = "+" if interval.mean >= 0 else ""
    return f"{sign}{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]"


def markdown(results: dict[str, ByTrainingSeed]) -> list[str]:
    """The lines of the table."""
    ours = results[TAMIYO]
    seeds = list(ours)
    together = ["all"] if len(seeds) > 1 else []
    lines = ["| controller | objective | " + " | ".join(f"ahead, {s}" for s in [f"seed {s}" for s in seeds] + together)]
    lines = [f"{lines[0]} |", "|---|---|" + "---|" * (len(seeds) + len(together))]
    for name, of in results.items():
        row = [name, shown(mean_interval(np.array(list(of.values()))))]
        leads = [ours[seed] - of.get(seed, of.get("", ours[seed])) for seed in seeds]
        cells = leads + ([np.array(leads)] if together else [])
        row += ["" if name == TAMIYO else shown(mean_interval(cell), signed=True) for cell in cells]
        lines.append(f"| {' | '.join(row)} |")
    return lines


def gaps(accuracy: dict[str, ByTrainingSeed]) -> list[str]:
    """The lines of the table of gaps closed: (grown − small) / (big − small)."""
    tables = {name: np.array(list(of.values())) for name, of in accuracy.items()}
    shape = tables[BIG].shape
    small, big = np.broadcast_to(tables[SMALL], shape), tables[BIG]
    lines = ["| controller | accuracy | gap closed |", "|---|---|---|"]
    for name, table in tables.items():
        closed = ratio_interval(np.broadcast_to(table, shape) - small, big - small)
        cell = "" if name in (SMALL, BIG) else f"{closed.mean:.0%} [{closed.low:.0%}, {closed.high:.0%}]"
        lines.append(f"| {name} | {shown(mean_interval(table))} | {cell.replace('%', ' %').replace('-', '−')} |")
    return lines


def main(args: Sequence[str] | None = None) -> None:
    """Keeps results, or shows them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    keeping = verbs.add_parser("keep", help="copy what the tables need")
    keeping.add_argument("source", type=Path)
    keeping.add_argument("target", type=Path)
    verbs.add_parser("show", help="print the table").add_argument("results", type=Path)
    verbs.add_parser("gap", help="print the gaps closed").add_argument("results", type=Path)
    chosen = parser.parse_args(args)
    if chosen.verb == "keep":
        keep(chosen.source, chosen.target)
    elif chosen.verb == "show":
        print("\n".join(markdown(read(chosen.results))))
    else:
        print("\n".join(gaps(read(chosen.results, "accuracy"))))


if __name__ == "__main__":
    main()
