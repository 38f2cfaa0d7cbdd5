"""Draw the learning curves of finished runs, and print their speed and the share of time of each phase.

    python benchmarks/learning_curves.py runs/digits/version_* --out docs/learning_curves.png

Each run is one line: the objective of the exploring policy on validation images of each rollout's hosts, over
environment steps. For evaluated runs the figure also shows the greedy policy (dots) and four baselines (dashed), on
test images.
"""

import argparse
import json
from pathlib import Path

import matplotlib
import yaml

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from esper_lightning.runtime.machine import PHASES

OBJECTIVE_TAG = "rollout/objective"
SPEED_TAG = "time/env_steps_per_second"
RULE_COLOURS = {"random": "tab:gray", "small static": "tab:brown", "periodic": "tab:olive", "best fixed": "tab:red"}


def load(run: Path) -> EventAccumulator:
    return EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()


def values(events: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in events.Scalars(tag)]


def name(run: Path) -> str:
    """Return a label like `seed 0` with the RNG seed in the config of a run folder."""
    return f"seed {yaml.safe_load((run / 'config.yaml').read_text())['seed_everything']}"


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def report(run: Path, events: EventAccumulator) -> None:
    """Print one line with the speed of a run and the share of time of each phase."""
    speeds = values(events, SPEED_TAG)
    measured = set(events.Tags()["scalars"])  # an older run may lack some phases
    tags = {phase: f"time/share.{phase}" for phase in (*PHASES, "other")}
    shares = ", ".join(
        f"{phase} {100 * median(values(events, tag)):.1f} %" for phase, tag in tags.items() if tag in measured
    )
    print(f"{run}: median {median(speeds):.0f} environment steps/s ({min(speeds):.0f} to {max(speeds):.0f}); {shares}")


def draw(runs: dict[Path, EventAccumulator], out: Path) -> None:
    """Draw the learning curves of all runs into one figure."""
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    rules: dict[str, list[float]] = {}
    for number, (run, events) in enumerate(runs.items()):
        n_envs = round(median(values(events, SPEED_TAG)) / median(values(events, "time/ticks_per_second")))
        steps = [event.step * n_envs for event in events.Scalars(OBJECTIVE_TAG)]
        (line,) = axes.plot(steps, values(events, OBJECTIVE_TAG), label=f"Tamiyo, {name(run)}, exploring, validation")
        table = run / "evaluation" / "evaluation.json"
        for controller, found in json.loads(table.read_text())["controllers"].items() if table.exists() else ():
            mean, low, high = (found["objective"][end] for end in ("mean", "low", "high"))
            if controller == "tamiyo":
                place = steps[-1] * (1.03 + 0.02 * number)
                axes.errorbar(place, mean, [[mean - low], [high - mean]], fmt="o", ms=4, color=line.get_color())
            elif controller in RULE_COLOURS:
                rules.setdefault(controller, []).append(mean)
    for rule, means in rules.items():
        axes.axhline(sum(means) / len(means), ls="--", lw=1, color=RULE_COLOURS[rule], label=f"{rule}, test")
    axes.set_xlabel("environment steps (host epochs)")
    axes.set_ylabel("objective: score - rent")
    axes.set_title("Learning to grow. Dots: Tamiyo, greedy, fresh hosts, test images, 95 % interval", fontsize=10)
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
    runs = {run: load(run) for run in options.runs}
    for run, events in runs.items():
        report(run, events)
    draw(runs, options.out)


if __name__ == "__main__":
    main()
