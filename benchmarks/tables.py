"""Make the tables of the README and of docs/results from committed results of `test`.

    python -m benchmarks.tables keep RUN/evaluation/evaluation.csv benchmarks/results/NAME.csv
    python -m benchmarks.tables show benchmarks/results/NAME.csv
    python -m benchmarks.tables publish RUN/checkpoints/last.ckpt POLICY.safetensors benchmarks/results/NAME.csv
    python -m benchmarks.tables by benchmarks/results/NAME.csv VARIABLE ... --cells tamiyo 'best fixed:score'

`keep` copies the columns that the tables need. `show` prints a Markdown table of the objective on test data, and the
lead of the policy over every row, paired by host, for each training run and for all together. `publish` writes the
policy of a checkpoint to a file, with this table. `by` prints means over training runs and hosts for each kind of host
in a family, of the objective or of the column named after a colon; `ahead of climbing` is a lead with its interval.
"""

import argparse
import csv
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.runtime.checkpoint import write_policy

KEPT_COLUMNS = ("controller", "training_seed", "host", "objective", "score", "parameters", "fossils", "flops")
"""Columns that `keep` copies."""

TAMIYO = "tamiyo"
"""Name of the entries for the policy."""

AHEAD = "ahead of "
"""Beginning of a cell with a lead of the policy."""

ByTrainingSeed = dict[str, np.ndarray]
"""A column [H] for each RNG seed of training; the key is empty for controllers without training."""


def members_of(results: Path) -> Path:
    """Return the path of the file with the context of each host, beside stored results of a family."""
    return results.with_stem(f"{results.stem}_members")


def keep(source: Path, target: Path) -> None:
    """Copy the columns that the tables need, rounded to six digits."""
    with source.open(newline="") as file:
        rows = list(csv.DictReader(file))
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(KEPT_COLUMNS)
        for row in rows:
            numbers = [f"{float(row[name]):.6g}" for name in KEPT_COLUMNS[3:]]
            writer.writerow([*(row[name] for name in KEPT_COLUMNS[:3]), *numbers])
    members = {row["host"]: row["member"] for row in rows}
    if len(set(members.values())) > 1:
        with members_of(target).open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([("host", "member"), *members.items()])


def read(path: Path, column: str = "objective") -> dict[str, ByTrainingSeed]:
    """Return one column of the results of each controller, by RNG seed of training."""
    found: dict[str, dict[str, list[float]]] = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            found.setdefault(row["controller"], {}).setdefault(row["training_seed"], []).append(float(row[column]))
    return {name: {seed: np.array(values) for seed, values in of.items()} for name, of in found.items()}


def number(value: float) -> str:
    """Format a number like `.573` or `−.021`."""
    return f"{value:.3f}".replace("-", "−").replace("0.", ".", 1)


def shown(interval: Interval, signed: bool = False) -> str:
    """Format an interval like `.573 ± .017`, or signed like `+.021 [.010, .032]`."""
    if not signed:
        return f"{number(interval.mean)} ± {number((interval.high - interval.low) / 2)}"
    sign = "+" if interval.mean >= 0 else ""
    return f"{sign}{number(interval.mean)} [{number(interval.low)}, {number(interval.high)}]"


def markdown(results: dict[str, ByTrainingSeed]) -> list[str]:
    """Return the lines of the table of objectives and leads."""
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


def parse_context(member: str) -> dict[str, str]:
    """Parse the variables of a context: `a.b 1, c [2, 3]` → {"a.b": "1", "c": "[2, 3]"}."""
    return dict(variable.split(" ", 1) for variable in re.split(r", (?=[a-z_.]+ )", member))


def by_kind(path: Path, names: Sequence[str], cells: Sequence[str]) -> list[str]:
    """Return the lines of a table with a row for each kind of host: means over training runs and hosts.

    A cell names a controller, with a column other than the objective after a colon, or is `ahead of` one: the lead of
    the policy over it, with its interval. A variable that a host lacks is empty. Raises ValueError for a variable in
    which hosts do not differ, and for a controller without results.
    """
    with members_of(path).open(newline="") as file:
        hosts = [parse_context(row["member"]) for row in csv.DictReader(file)]
    known = dict.fromkeys(name for host in hosts for name in host)
    if missing := [name for name in names if name not in known]:
        raise ValueError(f"{path}: hosts do not differ in {missing[0]}; they do in {', '.join(known)}")
    kinds = [tuple(host.get(name, "") for name in names) for host in hosts]
    values: list[np.ndarray] = []  # [training runs, hosts]
    for cell in cells:
        controller, _, column = cell.removeprefix(AHEAD).partition(":")
        results = read(path, column or "objective")
        if controller not in results:
            raise ValueError(f"{path}: no results of {controller}; there are those of {', '.join(results)}")
        own = np.array(list(results[controller].values()))
        values.append(np.array(list(results[TAMIYO].values())) - own if cell.startswith(AHEAD) else own)
    lines = [f"| {' | '.join([*names, 'hosts', *cells])} |", "|---" * (len(names) + 1 + len(cells)) + "|"]
    for kind in sorted(set(kinds)):
        own = [index for index, other in enumerate(kinds) if other == kind]
        row = [*kind, str(len(own))]
        for cell, of in zip(cells, values, strict=True):
            mean = of[:, own].mean()
            lead = shown(mean_interval(of[:, own]), signed=True) if cell.startswith(AHEAD) else ""
            row.append(lead or (number(mean) if mean < 10.0 else f"{mean:.0f}"))
        lines.append(f"| {' | '.join(row)} |")
    return lines


def main(args: Sequence[str] | None = None) -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    keeping = verbs.add_parser("keep", help="copy what the tables need")
    keeping.add_argument("source", type=Path)
    keeping.add_argument("target", type=Path)
    verbs.add_parser("show", help="print the table").add_argument("results", type=Path)
    publishing = verbs.add_parser("publish", help="write a policy with its table")
    for name in ("checkpoint", "policy", "results"):
        publishing.add_argument(name, type=Path)
    grouping = verbs.add_parser("by", help="print means by kind of host")
    grouping.add_argument("results", type=Path)
    grouping.add_argument("variables", nargs="+")
    grouping.add_argument("--cells", nargs="+", required=True, metavar="CONTROLLER[:COLUMN]")
    chosen = parser.parse_args(args)
    if chosen.verb == "keep":
        keep(chosen.source, chosen.target)
    elif chosen.verb == "show":
        print("\n".join(markdown(read(chosen.results))))
    elif chosen.verb == "publish":
        write_policy(chosen.checkpoint, chosen.policy, {chosen.results.stem: "\n".join(markdown(read(chosen.results)))})
    else:
        try:
            print("\n".join(by_kind(chosen.results, chosen.variables, chosen.cells)))
        except ValueError as error:
            parser.error(str(error))


if __name__ == "__main__":
    main()
