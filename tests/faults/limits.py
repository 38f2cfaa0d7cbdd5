"""Command lines that give every number among the settings an extreme value, under limits of memory and time.

    python -m tests.faults.limits [--settings data.env model] [--gibibytes 6] [--seconds 60]

Each case works, or ends in one line with a documented exit code. It prints the cases that do neither, and a count.
"""

import argparse
import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from esper_lightning.__main__ import main
from tests.faults.fuzz import SMALL_RUN, flags, merged, nested, patched
from tests.faults.mutations import at
from tests.runs import CONFIGS

EXTREMES = (str(10**18), "1e300", "-1", "0", "nan")
"""Values that each number is given: far more than any machine can do, and what a number of things cannot be."""

GIBIBYTE = 2**30

EXIT_CODES = {0: "runs", 2: "refused", 3: "diverged"}
"""Exit codes with which a case may end, and the outcome of each."""


class Outcome(NamedTuple):
    """Outcome of a command line in a process of its own."""

    what: str  # "runs", "refused", "diverged", or what went wrong
    output: str
    """Output on both streams."""
    seconds: float
    gibibytes: float
    """Peak of the process's memory."""


def attempt(act: Callable[[], object], *, gibibytes: float = 6.0, seconds: float = 60.0) -> Outcome:
    """Call `act` in a fork of this process, with at most so much memory and so much processor time."""
    since = time.monotonic()
    with tempfile.TemporaryFile("w+") as file:
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            _act_in_fork(act, file.fileno(), round(gibibytes * GIBIBYTE), round(seconds))
        deadline = since + 10.0 * seconds  # the machine may be busy; the limit counts processor time
        while True:
            ended, status, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        file.seek(0)
        output = file.read()
    code = os.waitstatus_to_exitcode(status)
    what = EXIT_CODES.get(code, f"exit code {code}")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if what in ("refused", "diverged") and (len(errors) != 1 or "Traceback" in output):
        what = f"exit code {code} with {len(errors)} error lines"
    return Outcome(what, output, time.monotonic() - since, usage.ru_maxrss / 2**20)


def _act_in_fork(act: Callable[[], object], output: int, max_bytes: int, seconds: int) -> None:
    """Call `act` under the limits and end the process; never returns."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (virtual + max_bytes,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    code = 0
    try:
        act()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def numbers_among(settings: Any) -> Iterator[str]:
    """Yield the names of all settings that are numbers, or that have no value and may take one."""
    for where in flags(settings):
        value = at(settings, where)
        if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
            yield ".".join(where)


def all_settings(config: Path) -> dict[str, Any]:
    """Return every setting of a config with its value."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), patched():
        main(["fit", "--config", str(config), "--print_config"])
    settings = yaml.safe_load(out.getvalue())
    return {name: value for name, value in settings.items() if name not in ("ckpt_path", "weights_only")}


def cases(config: Path, root: Path, prefixes: Sequence[str]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield a command line, and what runs it, for each number and each extreme."""
    for name in numbers_among(all_settings(config)):
        for value in EXTREMES:
            if name.startswith(tuple(prefixes)):
                flag = f"--{name}={value}"
                folder = str(root / f"{name} {value}")
                yield flag, lambda flag=flag, folder=folder: run(config, folder, flag)


def run(config: Path, folder: str, *args: str) -> None:
    """Run `fit` with a config and further arguments."""
    with patched():
        main(["fit", "--config", str(config), "--trainer.default_root_dir", folder, *args])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", nargs="*", default=[""], help="beginnings of the names of settings to try")
    parser.add_argument("--gibibytes", type=float, default=6.0)
    parser.add_argument("--seconds", type=float, default=60.0)
    chosen = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        tiny = Path(temporary, "tiny.yaml")
        settings = merged(yaml.safe_load((CONFIGS / "smoke.yaml").read_text()), nested(SMALL_RUN))
        tiny.write_text(yaml.safe_dump(settings))
        for case, act in cases(tiny, Path(temporary), chosen.settings):
            outcome = attempt(act, gibibytes=chosen.gibibytes, seconds=chosen.seconds)
            known = outcome.what in EXIT_CODES.values()
            counts[outcome.what if known else "FAILED"] += 1
            if not known:
                lines = outcome.output.strip().splitlines()
                print(
                    f"{case}: {outcome.what}, {outcome.seconds:.0f} s, {outcome.gibibytes:.1f} GiB, {len(lines)} lines"
                )
                print("    " + "\n    ".join(lines[-3:]), flush=True)
    print(dict(counts))
    raise SystemExit(counts["FAILED"] > 0)
