"""Check on a GPU that everything works there, and measure how fast: one report in at most 25 minutes.

    make gpu
    python -m benchmarks.gpu --out gpu_report --wheels wheels

Steps: the tests marked `cuda`, a whole `fit` with each executor, training in every precision, waits within a tick,
launches, memory over rollouts, a run that is killed and resumed, the rate of matrix products, and the speed of the
executors for 16, 64 and 256 hosts.
Every step is a process of its own, so one that fails or takes too long does not stop the others. The results are in
`report.md` and `report.csv` in the output folder, with the output of each step beside them.

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


def make_steps(out: Path, device: str) -> list[Step]:
    """Return all steps in their order; `device` is that of Lightning's accelerator, `gpu` or `cpu`."""
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
    return [
        Step("tests", [python, "-m", "pytest", "-m", "cuda", "-p", "no:cacheprovider", "--tb=short", "-q"], 480),
        *(fit(executor) for executor in executors),
        fit("streams" if device == "gpu" else "loop", *half, config="synthetic", limit=180),
        *(measure(name, executor, limit=90) for name in ("precisions", "waits") for executor in executors[:-1]),
        measure("launches", limit=120),
        measure("memory", "fused", limit=90),
        measure("memory", "streams" if device == "gpu" else "loop", limit=90),
        measure("resume", device, str(out / "resume"), limit=240),
        measure("matrix_rate", limit=60),
        *(measure("speed", case, str(hosts), limit=150) for case, hosts in SPEED_CASES),
    ]


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


def run_steps(steps: Sequence[Step], environment: Mapping[str, str], out: Path, budget: float) -> list[Result]:
    """Run the steps within `budget` seconds, and write the report after each of them. Returns all results."""
    end, results = time.monotonic() + budget, []
    for step in steps:
        results += run_step(step, environment, out, end - time.monotonic())
        print(f"{step.title}: {results[-1].value}", flush=True)
        write_report(results, out)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu_report"), help="folder of the report")
    parser.add_argument("--wheels", type=Path, default=Path("wheels"), help="folder with wheels of missing packages")
    parser.add_argument("--only", nargs="*", help="run the steps whose title begins with one of these words")
    parser.add_argument("--accelerator", choices=("gpu", "cpu"), default="gpu", help="cpu tries the program itself")
    args = parser.parse_args()
    out = args.out.resolve()
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
    steps = make_steps(out, args.accelerator)
    if args.only:
        steps = [step for step in steps if step.title.startswith(tuple(args.only))]
    results = run_steps(steps, environment, out, BUDGET_SECONDS)
    print(f"{(out / 'report.md').read_text()}written: {out / 'report.md'}, {out / 'report.csv'}")
    sys.exit(any(result.quantity == "outcome" and result.value != "ok" for result in results))


if __name__ == "__main__":
    main()
