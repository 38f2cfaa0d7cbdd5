"""Draws the learning curves of finished runs, and prints how fast they were and where their time went.

    python benchmarks/learning_curves.py runs/digits/version_* --out docs/learning_curves.png

One line per run: the objective that the exploring policy reached on each rollout's hosts, over environment steps.
Where a run was evaluated, its greedy policy and the rules it was compared with are drawn at the right.
"""

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper_lightning.envs.execution import PHASES

ACTING = "rollout/objective"
SPEED = "time/env_steps_per_second"
RULE_COLOURS = {"random": "tab:gray", "wait": "tab:brown", "heuristic": "tab:olive"}


def read(run: Path, tag: str) -> tuple[list[int], list[float]]:
    """Ticks and values of a scalar."""
    events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload().Scalars(tag)
    return [event.step for event in events], [event.value for event in events]


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def report(run: Path) -> None:
    """One line: speed and shares of time."""
    speeds = read(run, SPEED)[1]
    shares = ", ".join(f"{phase} {100 * median(read(run, f'time/share.{phase}')[1]):.1f} %" for phase in PHASES)
    print(f"{run}: median {median(speeds):.0f} environment steps/s ({min(speeds):.0f} to {max(speeds):.0f}); {shares}")


def draw(runs: list[Path], out: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rules: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        ticks, objective = read(run, ACTING)
        per_tick = median(read(run, SPEED)[1]) / median(read(run, "time/ticks_per_second")[1])  # environments
        steps = [tick * per_tick for tick in ticks]
        (line,) = axes.plot(steps, objective, label=f"Tamiyo, run {number + 1}, exploring")
        table = run / "evaluation.csv"
        for row in csv.DictReader(table.open()) if table.exists() else ():
            mean, low, high = (float(row[f"objective_{end}"]) for end in ("mean", "low", "high"))
            if row["controller"] == "tamiyo":
                place = steps[-1] * (1.03 + 0.02 * number)
                axes.errorbar(place, mean, [[mean - low], [high - mean]], fmt="o", ms=4, color=line.get_color())
            else:
                rules.setdefault(row["controller"], []).append(mean)
    for rule, means in rules.items():
        axes.axhline(sum(means) / len(means), ls="--", lw=1, color=RULE_COLOURS.get(rule), label=rule)
    axes.set_xlabel("environment steps (host epochs)")
    axes.set_ylabel("objective: accuracy - rent")
    axes.set_title("Learning to grow: digits. Dots: greedy policy on fresh hosts, test images, 95 % interval")
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=120)
    print(f"written to {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+", help="run folders, such as runs/digits/version_0")
    parser.add_argument("--out", type=Path, default=Path("docs/learning_curves.png"), help="the figure to write")
    options = parser.parse_args()
    for run in options.runs:
        report(run)
    draw(options.runs, options.out)


if __name__ == "__main__":
    main()
