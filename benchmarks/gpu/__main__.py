"""Check on a GPU that everything works there, and measure how fast: one report in at most 25 minutes.

    make gpu
    python -m benchmarks.gpu --out gpu_report --wheels wheels
    python -m benchmarks.gpu --list
    python -m benchmarks.gpu --only formats depth

Parts, the most important first, each in at most seven minutes:
tests: those marked `cuda`. executors: training in every precision, and waits within a tick.
formats: bf16, memory formats and compilation. depth: hosts in bf16 that grow in depth, and `Stack` in bf16.
counts: launches, the rate of matrix products, memory over rollouts. runs: a whole `fit` with each executor, and a run
that is killed and resumed. speed: executors with 16, 64 and 256 hosts.
Every step of a part is a process of its own, so one that fails or takes too long does not stop the others. The results
are in `report.md` and `report.csv` in the output folder, with the output of each step beside them.

The program needs no network and no installation. It imports the packages of this Python, and those whose wheels lie in
the folder `--wheels`. If one is missing, it names the wheels to put there.
"""

import argparse
import os
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module, invalidate_caches
from pathlib import Path

from benchmarks.gpu.report import Result, Step, parse_results, write_report

ROOT = Path(__file__).parent.parent.parent

BUDGET_SECONDS = 24 * 60
"""Seconds for all steps together; a step that would begin later is skipped."""

PART_SECONDS = 7 * 60
"""Most seconds for the steps of one part."""

NEEDED = (
    *("docstring_parser", "hypothesis", "jsonargparse", "lightning", "matplotlib", "PIL", "pytest", "rich"),
    *("safetensors", "scipy", "sklearn", "tensorboard", "torch", "torchmetrics", "torchvision", "typeshed_client"),
    "yaml",
)
"""Modules that the steps import; what these import themselves is found with them."""

DISTRIBUTIONS = {"PIL": "pillow", "markdown_it": "markdown-it-py", "sklearn": "scikit-learn", "yaml": "pyyaml"}
"""Package of a module, where the names differ by more than a hyphen."""

SPEED_CASES = [(case, hosts) for hosts in (64, 16, 256) for case in ("digits", "32x8", "32x32")]
"""Measured kinds of hosts and numbers of hosts, the most important first."""


def unpack_wheels(folder: Path, target: Path) -> list[Path]:
    """Unpack all wheels of a folder into `target`, and return them; an unpacked wheel can be imported from there."""
    wheels = sorted(folder.glob("*.whl"))
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
    invalidate_caches()
    return wheels


def missing_distributions(modules: Iterable[str]) -> list[str]:
    """Return the packages of those modules that cannot be imported, or the modules that they lack themselves."""
    missing = set()
    for module in modules:
        try:
            import_module(module)
        except ModuleNotFoundError as error:
            lacking = (error.name or module).partition(".")[0]
            missing.add(DISTRIBUTIONS.get(lacking, lacking.replace("_", "-")))
    return sorted(missing)


def make_parts(out: Path, device: str) -> dict[str, list[Step]]:
    """Return all steps in their order, by part; `device` is that of Lightning's accelerator, `gpu` or `cpu`."""
    python = sys.executable

    def measure(name: str, *arguments: str, limit: int) -> Step:
        title = " ".join([name, *arguments])
        return Step(title, [python, "-m", "benchmarks.gpu.measure", name, *arguments], limit)

    def fit(executor: str, *flags: str, config: str = "smoke", limit: int = 120) -> Step:
        settings = ["--data.env.executor", executor, "--trainer.accelerator", device, "--trainer.devices", "1", *flags]
        folder = out / "runs" / f"{config}_{executor}"
        command = [python, "-m", "esper_lightning", "fit", "--config", f"configs/{config}.yaml", *settings]
        command += ["--trainer.default_root_dir", str(folder), "--trainer.enable_progress_bar", "false"]
        return Step(f"fit {config} {executor}", command, limit, folder=folder)

    half = ("--data.env.training.precision", "fp16")
    executors = ["loop", "streams", "fused", "auto"] if device == "gpu" else ["loop", "fused", "auto"]
    return {
        "tests": [Step("tests", [python, "-m", "pytest", "-qm", "cuda", "-p", "no:cacheprovider", "--tb=short"], 400)],
        "executors": [measure(name, one, limit=70) for name in ("precisions", "waits") for one in executors[:-1]],
        "formats": [measure("formats", limit=400)],
        "depth": [measure("depth_hosts", limit=240), measure("depth_stack", limit=180)],
        "counts": [
            measure("launches", limit=120),
            measure("matrix_rate", limit=60),
            *(measure("memory", one, limit=90) for one in ("fused", "streams" if device == "gpu" else "loop")),
        ],
        "runs": [
            measure("resume", device, str(out / "resume"), limit=180),
            *(fit(executor, limit=60) for executor in executors),
            fit("streams" if device == "gpu" else "loop", *half, config="synthetic", limit=120),
        ],
        "speed": [measure("speed", case, str(hosts), limit=150) for case, hosts in SPEED_CASES],
    }


def choose(parts: Mapping[str, Sequence[Step]], only: Sequence[str]) -> dict[str, list[Step]]:
    """Return the parts with one of these names, and of others the steps whose title begins with one of them."""
    starts = tuple(only)
    return {name: [one for one in parts[name] if name in only or one.title.startswith(starts)] for name in parts}


def run_step(step: Step, environment: Mapping[str, str], out: Path, seconds_left: float) -> list[Result]:
    """Run one step and return its results; the last one says how the step ended."""
    if seconds_left < min(step.limit, 60):
        return [Result(step.title, "outcome", "skipped: no time left")]
    begin, log = time.monotonic(), out / f"{step.title.replace(' ', '_').replace('/', '_')[:60]}.log"
    with log.open("w") as file:
        try:
            code: int | None = subprocess.run(
                step.command,
                cwd=ROOT,
                env=dict(environment),
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=min(step.limit, seconds_left),
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    outcome = "ok" if code == 0 else "took too long" if code is None else f"failed with exit code {code}"
    if code == 0 and step.folder is not None and not list(step.folder.rglob("evaluation.csv")):
        outcome = "failed: no closing comparison"
    return [
        *parse_results(step.title, log.read_text(errors="replace")),
        Result(step.title, "time", f"{time.monotonic() - begin:.0f}", "s"),
        Result(step.title, "outcome", outcome),
    ]


def run_parts(
    parts: Mapping[str, Sequence[Step]], environment: Mapping[str, str], out: Path, budget: float
) -> list[Result]:
    """Run all steps within `budget` seconds, and write the report after each of them. Returns all results."""
    end, results = time.monotonic() + budget, []
    for steps in parts.values():
        part_end = min(end, time.monotonic() + PART_SECONDS)
        for step in steps:
            results += run_step(step, environment, out, part_end - time.monotonic())
            print(f"{step.title}: {results[-1].value}", flush=True)
            write_report(results, out)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="folder with wheels of missing packages")
    parser.add_argument("--only", nargs="*", help="run these parts, and steps whose title begins with one of the words")
    parser.add_argument("--list", action="store_true", help="show the parts, the most minutes of each, and their steps")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu tries the program itself")
    args = parser.parse_args()
    out = args.out.resolve()
    parts = make_parts(out, args.accelerator)
    parts = choose(parts, args.only or [*parts])
    if args.list:
        for name, steps in parts.items():
            most = min(PART_SECONDS, sum(one.limit for one in steps)) / 60
            print(f"{name}, at most {most:.1f} min: {', '.join(one.title for one in steps)}")
        return
    out.mkdir(parents=True, exist_ok=True)
    packages = out / "packages"
    unpack_wheels(args.wheels, packages)
    sys.path.insert(0, str(packages))
    if missing := missing_distributions(NEEDED):
        sys.exit(
            f"missing packages: put the wheels of {', '.join(missing)} into {args.wheels}/ (on a machine with network: "
            f"pip download --only-binary :all: --no-deps --dest {args.wheels} {' '.join(missing)})"
        )
    path = os.pathsep.join([str(ROOT), str(packages), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {
        "PYTHONPATH": path,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # cuBLAS is reproducible with it
        "OMP_NUM_THREADS": "1",
    }
    results = run_parts(parts, environment, out, BUDGET_SECONDS)
    print(f"{(out / 'report.md').read_text()}written: {out / 'report.md'}, {out / 'report.csv'}")
    sys.exit(any(result.quantity == "outcome" and result.value != "ok" for result in results))


if __name__ == "__main__":
    main()
