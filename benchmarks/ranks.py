"""Compare the speed of a run in two processes with that of one.

    python -m benchmarks.ranks [--config configs/digits.yaml] [--executor fused] [--hosts 96] [--rounds 5]

It trains in one process on one core and in two processes on two, in turn, and prints environment steps per second
with their ratio for each round, and where the time of a rollout goes on the first process. Nothing else should run on
the machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent

SHARE = "time/share."
"""Start of the tags with the share of each phase in the time of a rollout."""


class Speed(NamedTuple):
    """Speed of a run, medians over its rollouts but the first."""

    steps: float
    """Environment steps per second."""
    phases: dict[str, float]
    """Seconds of a rollout by phase, on the first process."""


def compare_speed(config: str, executor: str, hosts: int, rounds: int) -> None:
    """Print environment steps per second of one process on one core and of two on two, with their phases."""
    measured = []
    for number in range(rounds):
        one, two = (measure_speed(config, executor, hosts, cores) for cores in ([0], [0, 1]))
        measured.append((one, two))
        ratio = two.steps / one.steps
        print(f"round {number + 1}: {one.steps:.0f} and {two.steps:.0f} steps/s, ratio {ratio:.2f}", flush=True)
    ratios = [two.steps / one.steps for one, two in measured]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} … {max(ratios):.2f})\n")
    print("| phase | one process | two | ratio |\n|---|--:|--:|--:|")
    for phase in measured[0][0].phases:
        alone, together = (statistics.median(pair[i].phases[phase] for pair in measured) for i in range(2))
        print(f"| {phase} | {alone:.2f} s | {together:.2f} s | {alone / together:.2f} |")


def measure_speed(config: str, executor: str, hosts: int, cores: Sequence[int]) -> Speed:
    """Train four rollouts with a process on each of these cores, and return their speed."""
    flags = ("--config", config, f"--data.env.executor={executor}", f"--data.n_envs={hosts}", "--trainer.max_epochs=4")
    flags += ("--model.evaluation.hosts=0", "--trainer.limit_val_batches=0")
    with tempfile.TemporaryDirectory() as name:
        command = ["taskset", "-c", ",".join(map(str, cores)), sys.executable, "-m", "esper_lightning", "fit", *flags]
        command += [f"--trainer.default_root_dir={name}", f"--trainer.devices={len(cores)}"]
        subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
        run = Path(name) / "version_0"
        # Imported here, because it takes seconds that no other command needs.
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        horizon = int(json.loads((run / "events.jsonl").read_text().splitlines()[0])["horizon"])

    def values(tag: str) -> list[float]:
        return [point.value for point in events.Scalars(tag)[1:]]

    steps = values("time/env_steps_per_second")
    phases = {
        tag.removeprefix(SHARE): statistics.median(
            share * horizon * hosts / speed for share, speed in zip(values(tag), steps, strict=True)
        )
        for tag in events.Tags()["scalars"]
        if tag.startswith(SHARE)
    }
    return Speed(statistics.median(steps), phases)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="configs/digits.yaml")
    parser.add_argument("--executor", default="fused")
    parser.add_argument("--hosts", type=int, default=96, help="of all processes")
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    compare_speed(given.config, given.executor, given.hosts, given.rounds)


if __name__ == "__main__":
    main()
