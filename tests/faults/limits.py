"""Command lines that give every number among the settings an extreme value, under limits of memory and time.

    python -m tests.faults.limits [--settings data.env model] [--values 1e300 -1] [--cases 100] [-- further flags]

Each case works, or ends in one line with a documented exit code. It prints the cases that do neither, and counts.
"""

import argparse
import contextlib
import io
import resource
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import yaml

from esper_lightning.__main__ import main
from tests.faults.fuzz import SMALL_RUN, flags, merged, nested, patched
from tests.faults.mutations import at
from tests.processes import run_in_fork
from tests.runs import CONFIGS

EXTREMES = (str(10**18), "1e300", "-1", "0", "nan")
"""Values that each number is given: far more than any machine can do, and what a number of things cannot be."""

MAX_GIBIBYTES, MAX_SECONDS, MAX_WAIT = 6, 60, 900
"""Limits of a case: memory, processor time, and time on a machine that does other things, too."""

ENDINGS = {0: "runs", 2: "refused", 3: "diverged"}
"""What the exit codes mean with which a case may end."""


class Outcome(NamedTuple):
    """Outcome of a command line in a process of its own."""

    what: str  # a value of ENDINGS, or what went wrong
    output: str
    """Output on both streams."""


def attempt(act: Callable[[], object]) -> Outcome:
    """Call `act` in a fork of this process, under the limits."""

    def act_under_limits() -> None:
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (virtual + MAX_GIBIBYTES * 2**30,) * 2)
        resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS, MAX_SECONDS))
        signal.alarm(MAX_WAIT)
        try:
            act()
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None

    code, output = run_in_fork(act_under_limits)
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    is_known = code == 0 or (code in ENDINGS and len(errors) == 1 and "Traceback" not in output)
    return Outcome(ENDINGS[code] if is_known else f"exit code {code} with {len(errors)} error lines", output)


def numbers_among(settings: Any) -> Iterator[str]:
    """Yield the names of all settings that are numbers, or that have no value and may take one."""
    for where in flags(settings):
        value = at(settings, where)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield ".".join(where)


def write_tiny_config(path: Path) -> None:
    """Write the config of a run that takes a third of a second."""
    settings = merged(yaml.safe_load((CONFIGS / "smoke.yaml").read_text()), nested(SMALL_RUN))
    path.write_text(yaml.safe_dump(settings))


def all_settings(config: Path) -> dict[str, Any]:
    """Return every setting of a config with its value."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), patched():
        main(["fit", "--config", str(config), "--print_config"])
    settings = yaml.safe_load(out.getvalue())
    return {name: value for name, value in settings.items() if name not in ("ckpt_path", "weights_only")}


def attempt_settings(
    config: Path,
    root: Path,
    prefixes: Sequence[str] = ("",),
    values: Sequence[str] = EXTREMES,
    *,
    cases: int | None = None,
    more: Sequence[str],
) -> Iterator[tuple[str, Outcome]]:
    """Yield a flag and its outcome for each number whose name begins with one of `prefixes`, and each value.

    Args:
        config: Config of the runs.
        root: Folder for the runs.
        prefixes: Beginnings of names.
        values: Values that each number is given.
        cases: Number of cases, drawn at random but the same every time. None: all.
        more: Further flags of every run.
    """
    names = [name for name in numbers_among(all_settings(config)) if name.startswith(tuple(prefixes))]
    chosen = list(product(names, values))
    if cases is not None:
        chosen = Random(0).sample(chosen, min(cases, len(chosen)))
    for name, value in chosen:
        flag, folder = f"--{name}={value}", str(root / f"{name} {value}")
        args = ["fit", "--config", str(config), "--trainer.default_root_dir", folder, *more, flag]
        yield flag, attempt(lambda args=args: run(args))


def run(args: list[str]) -> None:
    with patched():
        main(args)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", nargs="*", default=[""], help="beginnings of the names of settings to try")
    parser.add_argument("--values", nargs="*", default=EXTREMES, help="values that each is given")
    parser.add_argument("--cases", type=int, help="number of cases that are drawn; all if it is left out")
    parser.add_argument("more", nargs="*", help="further flags of every run, behind --")
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        write_tiny_config(tiny := Path(temporary, "tiny.yaml"))
        since = time.monotonic()
        for case, outcome in attempt_settings(
            tiny, Path(temporary), chosen.settings, chosen.values, cases=chosen.cases, more=chosen.more
        ):
            is_known = outcome.what in ENDINGS.values()
            counts[outcome.what if is_known else "FAILED"] += 1
            if not is_known:
                lines = outcome.output.strip().splitlines()
                print(f"{case}: {outcome.what}, {time.monotonic() - since:.0f} s, {len(lines)} lines")
                print("    " + "\n    ".join(lines[-3:]), flush=True)
            since = time.monotonic()
    print(dict(counts))
    raise SystemExit(counts["FAILED"] > 0)
