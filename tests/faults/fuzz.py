"""Mutated configs, command lines, manifests and checkpoints: each works or is refused in one line
without harm.

`python -m tests.faults.fuzz --cases 2000 --seed 1` tries more of them than the tests do.
"""

import argparse
import contextlib
import io
import json
import logging
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha1
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import yaml

from esper_lightning.__main__ import main
from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.growth import GrowingNetwork, load, save, slots_of
from tests.faults.mutations import alternatives, at, mutate, mutate_bytes, mutate_number
from tests.growth.saved import read_saved, write_saved
from tests.runs import CONFIGS, ROOT, SharedParserCLI, only_run, tiny_host
from tests.runs import load as load_checkpoint

SMALL_RUN = {
    "trainer.max_epochs": 1,
    "trainer.enable_progress_bar": False,
    "data.n_envs": 2,
    "data.env.horizon": 2,
    "data.env.executor": "loop",
    "data.env.training.batches": 1,
    "model.ppo.epochs": 1,
    "model.policy.width": 8,
    "evaluation.hosts": 0,
}
"""Settings of a run that takes a third of a second."""


LIMIT = 30.0
"""Time limit of a case in seconds: many times what one needs."""


class Case(NamedTuple):
    """Outcome of a mutated input."""

    kind: str
    what: str
    outcome: str  # "runs", "refused", or what went wrong


def contents(folder: Path) -> dict[Path, bytes]:
    """Return every file below `folder` with a hash of its bytes."""
    return {path: sha1(path.read_bytes()).digest() for path in folder.rglob("*") if path.is_file()}


def nested(settings: dict[str, Any]) -> dict[str, Any]:
    """Return `{"a.b": 1}` as `{"a": {"b": 1}}`."""
    whole: dict[str, Any] = {}
    for name, value in settings.items():
        *above, last = name.split(".")
        place = whole
        for key in above:
            place = place.setdefault(key, {})
        place[last] = value
    return whole


def merged(low: Any, high: Any) -> Any:
    if not (isinstance(low, dict) and isinstance(high, dict)):
        return high
    return low | {key: merged(low.get(key), value) for key, value in high.items()}


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Make the command line's parser only once, and hide this process's arguments from Lightning."""
    with patch("esper_lightning.cli.main.EsperCLI", SharedParserCLI), patch.object(sys, "argv", sys.argv[:1]):
        yield


def start(*args: str) -> str:
    """Run a command line in this process and return its outcome."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err), patched(), log_to_present_stderr():
        try:
            main(["fit", *args])
        except SystemExit as ended:
            return judged(ended.code, err.getvalue())
        except Exception as error:  # any other exception is a finding
            return f"{type(error).__name__}: {error}"[:300] + origin(error)
    return "runs"


@contextlib.contextmanager
def log_to_present_stderr() -> Iterator[None]:
    """Send warnings and Lightning's messages to the present stderr."""
    handlers = [handler for handler in logging.getLogger("lightning.pytorch").handlers if hasattr(handler, "setStream")]
    before = [handler.setStream(sys.stderr) for handler in handlers]
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.simplefilter("default")
        for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", category)
        try:
            yield
        finally:
            for handler, stream in zip(handlers, before, strict=True):
                handler.setStream(stream)


def origin(error: BaseException) -> str:
    """Return the last lines of the project's own code in the traceback of an error."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(ROOT) in frame.filename]
    return " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:])


def judged(code: Any, stderr: str) -> str:
    lines = stderr.splitlines()
    if code == 2 and len(lines) == 1 and lines[0].startswith("error: ") and len(lines[0]) > 12:
        return "refused"
    return f"exit code {code} with {len(lines)} lines: {stderr[:300]}"


class Fuzzer:
    """Makes and judges cases below a folder of its own.

    Args:
        root: The folder; no case may change a file outside it, or a file that was in it before.
        random: Source of all random choices.
    """

    def __init__(self, root: Path, random: Random) -> None:
        self.root = root
        self.random = random
        self.config = merged(yaml.safe_load((CONFIGS / "smoke.yaml").read_text()), nested(SMALL_RUN))
        self.settings = self._all_settings()
        (root / "precious").write_text("not to be touched")
        self.finished = self._finish_run()
        self.checkpoint = load_checkpoint(self.finished / "checkpoints" / "latest.ckpt")
        self.network = self._grow()

    def _all_settings(self) -> dict[str, Any]:
        """Every setting of the config with its default."""
        out = io.StringIO()
        (self.root / "smoke.yaml").write_text(yaml.safe_dump(self.config))
        with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit), patched():
            main(["fit", "--config", str(self.root / "smoke.yaml"), "--print_config"])
        settings = yaml.safe_load(out.getvalue())
        return {name: value for name, value in settings.items() if name != "ckpt_path"}

    def _finish_run(self) -> Path:
        runs = self.root / "finished"
        outcome = self._start("--config", self.root / "smoke.yaml", "--trainer.default_root_dir", runs)
        assert outcome == "runs", outcome
        return only_run(runs).folder

    def _grow(self) -> Path:
        network = tiny_host((1, 8, 8), 10)
        growing = GrowingNetwork(network, torch.optim.Adam(network.parameters()), horizon=9)
        for name in list(slots_of(network))[:2]:
            growing.germinate(name, "conv_small")
        save(network, self.root / "network")
        return self.root / "network"

    def _start(self, *args: object) -> str:
        return start(*(str(arg) for arg in args))

    def cases(self, kind: str, count: int) -> Iterator[Case]:
        """Run `count` cases of a kind."""
        make: Callable[[Path], tuple[str, Callable[[], str]]] = getattr(self, kind)
        for number in range(count):
            folder = self.root / f"{kind}{number}"
            folder.mkdir()
            what, run = make(folder)
            before = contents(self.root)
            since = time.perf_counter()
            outcome = run()
            if (seconds := time.perf_counter() - since) > LIMIT:
                outcome = f"took {seconds:.0f} s, and then: {outcome}"
            after = contents(self.root)
            if outcome == "refused" and after != before:
                outcome = f"refused, but changed {sorted(p.name for p in after if after[p] != before.get(p))}"
            harmed = [path for path in before if before[path] != after.get(path) and not self._may_change(path, folder)]
            if harmed:
                outcome = f"overwrote {harmed[0]}"
            shutil.rmtree(folder)
            yield Case(kind, what, outcome)

    def _may_change(self, path: Path, folder: Path) -> bool:
        """Resume a run in its folder."""
        return path.is_relative_to(folder / "version_0")

    def config_file(self, folder: Path) -> tuple[str, Callable[[], str]]:
        """Judge a config with one or two changes, or with damaged text."""
        if self.random.random() < 0.2:
            what, damaged = mutate_bytes(yaml.safe_dump(self.config).encode(), self.random)
            (folder / "config.yaml").write_bytes(damaged)
        else:
            what, config = mutate(self.random.choice([self.config, self.settings]), self.random)
            if self.random.random() < 0.3 and isinstance(config, dict) and config:
                more, config = mutate(config, self.random)
                what = f"{what}; {more}"
            (folder / "config.yaml").write_text(yaml.safe_dump(config))
        root = ("--trainer.default_root_dir", folder / "runs")
        return what, lambda: self._start("--config", folder / "config.yaml", *root)

    def command_line(self, folder: Path) -> tuple[str, Callable[[], str]]:
        """Judge flags with wrong values, wrong names or no values."""
        names = [".".join(map(str, where)) for where in flags(self.settings)]
        where = self.random.choice(flags(self.settings))
        name = ".".join(where)
        value = self.random.choice([*VALUES, *map(str, 20 * alternatives(at(self.settings, where)))])
        args = {
            0: [f"--{name}={value}"],
            1: [f"--{name}"],
            2: [f"--{name[:-1]}={value}"],
            3: [f"--{name}", value],
            4: [value],
            5: [f"--{name}={value}", f"--{self.random.choice(names)}={self.random.choice(VALUES)}"],
            6: [f"--{self.random.choice(('config', 'ckpt_path', 'data.task', 'data.host'))}={value}"],
        }[self.random.choice([0, 0, 0, 0, 1, 2, 3, 4, 5, 6])]
        root = ("--trainer.default_root_dir", folder / "runs")
        return str(args), lambda: self._start("--config", self.root / "smoke.yaml", *root, *args)

    def manifest(self, folder: Path) -> tuple[str, Callable[[], str]]:
        """Judge a saved network with a changed manifest or changed weights."""
        saved = Path(shutil.copy(self.network, folder / "network"))
        growth, weights = read_saved(saved)
        match self.random.choice(["json", "json", "tensors", "header", "bytes"]):
            case "json":
                what, changed = mutate(growth, self.random)
                write_saved(saved, json.loads(json.dumps(changed, default=str)), weights)
            case "tensors":
                what, changed = mutate(weights, self.random, tensors=True)
                # The format holds dense tensors only: neither other objects nor a tensor that is a view of less.
                dense = {
                    str(name): value.contiguous().clone()
                    for name, value in changed.items()
                    if isinstance(value, torch.Tensor) and value.numel() < 10**6
                }
                write_saved(saved, growth, dense)
            case "header":
                whole = saved.read_bytes()
                end = 8 + int.from_bytes(whole[:8], "little")
                what, damaged = mutate_bytes(whole[:end], self.random)
                saved.write_bytes(damaged + whole[end:])
            case _:
                what, damaged = mutate_bytes(saved.read_bytes(), self.random)
                saved.write_bytes(damaged)
        return what, lambda: read(lambda: self._load(saved))

    def _load(self, saved: Path) -> None:
        network = tiny_host((1, 8, 8), 10)
        load(network, saved)
        network(torch.zeros(2, 1, 8, 8))

    def damaged(self, folder: Path) -> tuple[str, Callable[[], str]]:
        """Judge a checkpoint with damaged bytes."""
        whole = (self.finished / "checkpoints" / "latest.ckpt").read_bytes()
        what, damaged = mutate_bytes(whole, self.random)
        (folder / "a.ckpt").write_bytes(damaged)
        return what, lambda: read(lambda: open_checkpoint(folder / "a.ckpt"))

    def checkpoint_content(self, folder: Path) -> tuple[str, Callable[[], str]]:
        """Judge an intact checkpoint file with changed contents."""
        part = self.random.choice(PLACES)
        inner = self.checkpoint
        for key in part:
            inner = inner[key]
        if part[-1:] == ("layout",):
            what, changed_part = mutate_number(inner, self.random)
        else:
            what, changed_part = mutate(inner, self.random, tensors=True)
        run = Path(shutil.copytree(self.finished, folder / "version_0"))
        torch.save(replaced(self.checkpoint, part, changed_part), run / "checkpoints" / "latest.ckpt")
        args = ("--config", self.root / "smoke.yaml", "--trainer.max_epochs", 2, "--trainer.default_root_dir", folder)
        return f"{part} {what}", lambda: self._start(*args, "--ckpt_path", run / "checkpoints" / "latest.ckpt")


VALUES = (
    *(
        "",
        "x",
        "-1",
        "0",
        "1",
        "3",
        "0.5",
        "nan",
        "inf",
        "-inf",
        "1e308",
        "1" + 30 * "0",
        "null",
        "true",
        "[]",
        "{}",
        "[[]]",
    ),
    *(
        "[1, a]",
        "{a: 1}",
        "{",
        "!!python/object:os.system",
        "ünïcödé",
        "a" * 3000,
        "..",
        "/",
        "/dev/null",
        "\n",
        "@",
        "=",
    ),
    *(
        "os.system",
        "esper_lightning.hosts.CNN",
        "torch.nn.Linear",
        "latest",
        "last",
        "[null]",
        "1,2",
        "--",
        "0x10",
        "1e400",
    ),
)

PLACES: tuple[tuple[Any, ...], ...] = (
    (),
    ("loops", "fit_loop"),
    ("callbacks",),
    ("callbacks", "RolloutState"),
    ("callbacks", "RolloutState", "loop"),
    ("callbacks", "RolloutState", "loop", "buffer"),
    ("callbacks", "RolloutState", "random"),
    ("optimizer_states",),
    ("HostPoolData",),
    ("HostPoolData", "pool", "envs"),
    ("HostPoolData", "pool", "envs", 0),
    ("HostPoolData", "pool", "envs", 0, "layout"),
    ("HostPoolData", "pool", "envs", 0, "template", "growing"),
    ("HostPoolData", "pool", "envs", 0, "template", "growing", "manifest"),
    ("HostPoolData", "pool", "envs", 0, "template", "growing", "optimizer"),
    ("HostPoolData", "pool", "envs", 1, "template", "monitor"),
    ("state_dict",),
    ("esper_identity",),
)
"""Parts of a checkpoint that are changed equally often."""


def flags(settings: Any, where: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the names of all settings that have no parts."""
    if not isinstance(settings, dict):
        return [where]
    return [found for key, value in settings.items() for found in flags(value, (*where, str(key)))]


def replaced(whole: Any, where: tuple[Any, ...], part: Any) -> Any:
    if not where:
        return part
    copied = list(whole) if isinstance(whole, list) else dict(whole)
    copied[where[0]] = replaced(whole[where[0]], where[1:], part)
    return copied


def read(attempt: Callable[[], object]) -> str:
    """Return the outcome of loading a file directly: a ValueError with one line is a refusal."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except ValueError as error:
        return "refused" if len(str(error).splitlines()) == 1 else f"ValueError of many lines: {error}"
    except Exception as error:  # any other exception is a finding
        return f"{type(error).__name__}: {error}"[:300] + origin(error)
    return "runs"


KINDS = {"config_file": 0.1, "command_line": 0.1, "manifest": 0.4, "damaged": 0.28, "checkpoint_content": 0.12}
"""Share of each kind of case: fewer of the kinds that start a run."""


def fuzz(counts: Mapping[str, int], rng_seed: int, root: Path) -> list[Case]:
    """Run that many cases of each kind."""
    fuzzer = Fuzzer(root, Random(rng_seed))
    (root / "here").mkdir()
    with contextlib.chdir(root / "here"):  # folder that mutated relative paths lead to
        return [case for kind, count in counts.items() for case in fuzzer.cases(kind, count)]


def table(cases: list[Case]) -> str:
    """Print counts by kind and outcome."""
    counted = Counter((case.kind, case.outcome if case.outcome in ("runs", "refused") else "FAILED") for case in cases)
    lines = [f"{kind:20} {outcome:8} {number:5}" for (kind, outcome), number in sorted(counted.items())]
    return "\n".join([*lines, f"{'all':29} {len(cases):5}"])


def failures(cases: list[Case]) -> list[Case]:
    return [case for case in cases if case.outcome not in ("runs", "refused")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts = {kind: round(chosen.cases * share) for kind, share in KINDS.items()}
        done = fuzz(counts, chosen.seed, Path(folder))
    for case in failures(done):
        print(*case, sep="\n    ")
    print(table(done))
    raise SystemExit(bool(failures(done)))
