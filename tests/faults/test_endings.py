"""Every ending of the program is one line and an exit code of docs/reference/cli.md, and nothing is half-written."""

import csv
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from signal import SIGHUP, SIGINT, SIGTERM, Signals
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from lightning import Callback, LightningDataModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from esper_lightning.__main__ import main
from esper_lightning.checkpointing.validate import open_checkpoint
from esper_lightning.module import TamiyoModule
from esper_lightning.process import Output
from tests.faults.programs import Program, fresh_starter
from tests.faults.runs import tick_of
from tests.processes import run_in_fork
from tests.runs import CONFIGS, HARD_LIMIT, HORIZON, ROOT, TINY, fit, only_run, with_callback


class NoReader(io.StringIO):
    """Output whose reader goes away after some lines, like `head -1`."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        if self.getvalue().count("\n") >= self.lines:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def ended_with(code: int, root: Path, *flags: str) -> None:
    with pytest.raises(SystemExit) as ended:
        fit(root, *flags)
    assert ended.value.code == code


def test_a_reader_that_goes_away_in_training_ends_the_run_after_it_is_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", NoReader(lines=1))  # the first rollout's line is the last that is read
    ended_with(141, tmp_path, "--progress.show=lines", "--trainer.enable_progress_bar=true")

    latest = only_run(tmp_path).latest
    assert tick_of(latest) == 2 * HORIZON
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("stopped by a closed output") and line.endswith(f"--ckpt_path {latest}")
    monkeypatch.undo()
    fit(tmp_path, "--ckpt_path", str(latest))
    assert tick_of(latest) == 3 * HORIZON


def test_an_output_that_fails_before_training_ends_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", NoReader(lines=0))
    ended_with(141, tmp_path, "--data.env.executor=auto")

    assert len(capsys.readouterr().err.splitlines()) == 1


class Prints(Callback):
    """Callback of a user that prints."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: TamiyoModule, *_: object) -> None:
        print("tick", pl_module.collector.ticks)
        assert isinstance(sys.stdout, Output)


def test_a_callback_that_prints_does_not_end_a_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", NoReader(lines=2))
    ended_with(141, tmp_path, *with_callback(Prints))

    assert tick_of(only_run(tmp_path).latest) == 3


class Data(LightningDataModule):
    """Data module of a user; `fault` names what goes wrong in it."""

    def __init__(self, fault: str = "nothing") -> None:
        super().__init__()
        self.fault = fault

    def prepare_data(self) -> None:
        if self.fault == "KeyError":
            raise KeyError("leaves \x1b[2J")
        if self.fault == "SystemExit":
            raise SystemExit(0)
        if self.fault == "FileNotFoundError":
            Path("nowhere").read_text()

    def _loader(self) -> Any:
        if self.fault == "None":
            return None
        if self.fault == "complex":
            return [(torch.ones(4, 3, dtype=torch.complex64), torch.tensor([0, 1, 0, 1]))]
        if self.fault == "endless":
            return iter(lambda: (torch.zeros(2, 3), torch.tensor([0, 1])), None)
        inputs = torch.randn(40, 1, 8, 8)
        return DataLoader(TensorDataset(inputs, torch.arange(40) % 10), batch_size=10)

    train_dataloader = val_dataloader = test_dataloader = _loader


class Network(nn.Module):
    """Host of a user that cannot be made."""

    def __init__(self, input_shape: Sequence[int], outputs: int, kind: str = "TypeError") -> None:
        super().__init__()
        raise {"TypeError": TypeError, "ValueError": ValueError}[kind]("the network of a user")


class Stops(Callback):
    """Callback of a user that raises in the second rollout."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: TamiyoModule) -> None:
        if trainer.current_epoch == 1:
            raise LookupError("[/x] :warning:")


def with_data(fault: str) -> tuple[str, str]:
    data = {"class_path": f"{__name__}.Data", "init_args": {"fault": fault}}
    return "--data.task", json.dumps(
        {"class_path": "esper_lightning.tasks.FromDataModule", "init_args": {"data": data}}
    )


OWN_CODE: dict[str, tuple[tuple[str, ...], str, str]] = {
    "data module, KeyError": (with_data("KeyError"), "data.task.init_args.data", r"KeyError: 'leaves \x1b[2J'"),
    "data module, SystemExit": (with_data("SystemExit"), "data.task.init_args.data", "SystemExit: 0"),
    "data module, missing file": (with_data("FileNotFoundError"), "data.task.init_args.data", "'nowhere'"),
    "constructor of a host": ((f"--data.host={__name__}.Network",), "data.host", "TypeError: the network of a user"),
    "constructor of a host that checks its arguments": (
        (f"--data.host={__name__}.Network", "--data.host.init_args.kind=ValueError"),
        "data.host",
        "ValueError: the network of a user",
    ),
    "callback": (with_callback(Stops), "trainer.callbacks[0]", "LookupError: [/x] :warning:"),
}


@pytest.mark.parametrize(("flags", "setting", "said"), OWN_CODE.values(), ids=list(OWN_CODE))
def test_an_error_in_code_of_the_user_is_told_apart(
    flags: tuple[str, ...], setting: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_with(4, tmp_path, *flags)

    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.startswith("Traceback")
    assert last.startswith(f"error: {setting} ({__name__}.") and said in last


def test_an_error_of_a_callback_leaves_the_checkpoint_of_the_rollout_before(tmp_path: Path) -> None:
    ended_with(4, tmp_path, *with_callback(Stops))

    assert tick_of(only_run(tmp_path).latest) == HORIZON


REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "a loader that is None": (with_data("None"), "Data's training loader is a NoneType"),
    "complex inputs of a loader": (with_data("complex"), "complex"),
    "an argument of a host that is null": (("--data.host.init_args.base=null",), "data.host.init_args.base is null"),
    "a layer of torch as the host": (("--data.host=torch.nn.Linear",), "data.host cannot be made"),
    "a NUL in a folder's name": (("--trainer.default_root_dir=a\0b",), "trainer.default_root_dir holds a NUL"),
    "a byte that is no text in a folder's name": (
        (f"--trainer.default_root_dir={os.fsdecode(b'a' + bytes([255]))}",),
        r"trainer.default_root_dir 'a\udcff' holds bytes that are no UTF-8",
    ),
    "a folder in which none can be made": (("--best.dirpath=/proc/nope",), "/proc/nope"),
    "a config that is no text": (("--config", str(ROOT / "docs" / "learning_curves.png")), "learning_curves.png"),
}


@pytest.mark.parametrize(("flags", "named"), REFUSED.values(), ids=list(REFUSED))
def test_what_cannot_be_used_is_refused_in_a_line_that_names_it(
    flags: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended_with(2, tmp_path / "runs", *flags)

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and named in line
    assert not (tmp_path / "runs").exists()


def test_a_run_below_a_folder_whose_name_is_no_text_is_refused_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(bytes([255]))
    folder.mkdir()
    monkeypatch.chdir(folder)
    ended_with(2, Path("runs"))

    (line,) = capsys.readouterr().err.splitlines()
    assert "the folder of the run" in line and "no UTF-8" in line
    assert not list(folder.iterdir())


def test_a_loader_that_never_ends_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_lightning.tasks.datamodule.main_memory", lambda: 100_000)
    ended_with(2, tmp_path, *with_data("endless"))
    assert "have no end after 626 batches" in capsys.readouterr().err  # of 40 bytes each: a quarter of the memory

    monkeypatch.undo()
    monkeypatch.setattr("esper_lightning.tasks.datamodule.MAX_BATCHES", 20)
    ended_with(2, tmp_path, *with_data("endless"))
    assert "have no end after 21 batches" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a finished run of one rollout."""
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs=1")
    return root


@pytest.fixture
def resumable(finished: Path, tmp_path: Path) -> Path:
    """Copy of a finished run."""
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def test_a_disk_without_any_space_ends_a_resumed_run_in_a_line(resumable: Path) -> None:
    latest = only_run(resumable).latest
    before = latest.read_bytes()

    def resume_without_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # as if no byte were free
        fit(resumable, "--ckpt_path", str(latest))

    code, said = run_in_fork(resume_without_space)

    assert code == 1, said
    *_, last = said.splitlines()
    assert last.startswith("error: ") and "File too large" in last
    assert "Traceback" not in said and said.count("error") == 1, said
    assert latest.read_bytes() == before
    fit(resumable, "--ckpt_path", str(latest))


RESULTS: dict[str, tuple[str, ...]] = {
    "evaluate": (*TINY, "--evaluation.hosts=2"),
    "grow": (*TINY, "--controller=periodic"),
    "information": (
        *(*TINY, "--look.plans=1", "--look.finalists=3", "--look.hosts=2"),
        "--data.env.family={train: [{host.kernel: [1, 3]}], held_out: []}",
    ),
}
"""Commands that write results into the folder of --out, with further arguments."""


@pytest.mark.slow
@pytest.mark.parametrize("command", RESULTS)
def test_a_command_whose_results_find_no_space_ends_in_a_line(command: str, tmp_path: Path) -> None:
    def run_without_space() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))  # as if no byte were free
        with patch.object(sys, "argv", sys.argv[:1]):  # Lightning warns of arguments of the process
            main([command, *RESULTS[command], f"--out={tmp_path}"])

    code, said = run_in_fork(run_without_space)

    assert code == 1 and "Traceback" not in said, said
    assert said.splitlines()[-1].endswith(", and start again, or name another folder by --out"), said
    assert not list(tmp_path.iterdir())


def test_a_table_whose_numbers_cannot_be_scaled_is_refused_without_warnings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    rows = "\n".join(f"{i},{i % 2}" for i in range(60))
    (tmp_path / "a.csv").write_text(f"a,b\n1e308,1\n{rows}\n")
    source = json.dumps(
        {
            "class_path": "esper_lightning.tasks.Tabular",
            "init_args": {"source": str(tmp_path / "a.csv"), "target": "b"},
        }
    )
    ended_with(2, tmp_path / "runs", "--data.task", source)

    (line,) = capsys.readouterr().err.splitlines()
    assert "column 'a' holds 1e+308 in row 1" in line
    assert not [warning for warning in recwarn if issubclass(warning.category, RuntimeWarning)]


def catches_signals(program: Program) -> bool:
    """Return True once a program has installed its handlers; before, the interpreter starts."""
    status = Path(f"/proc/{program.pid}/status").read_text()
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught & 1 << (SIGTERM - 1))


def check_that_nothing_is_half_written(root: Path) -> None:
    """Open every file of the runs below `root` whose name says that it is whole."""
    for path in root.rglob("*"):
        if not path.is_file() or path.name.startswith("."):
            continue
        if path.suffix == ".ckpt":
            open_checkpoint(path)
        elif path.suffix == ".json":
            json.loads(path.read_text())
        elif path.suffix == ".yaml":
            assert yaml.safe_load(path.read_text()) is not None or path.name == "hparams.yaml", path
        elif path.suffix == ".csv":
            with path.open(newline="") as rows:
                lengths = {len(row) for row in csv.reader(rows)}
            assert len(lengths) == 1, path


WHOLE = (*TINY, "--evaluation.hosts=2", "--data.env.executor=auto")
"""Settings of a run with all its phases: autotuning, training, comparison."""

MOMENTS, PARTS = 40, 8


@pytest.fixture(scope="module")
def seconds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[float]:
    """Duration of a whole run in a process of its own."""
    root = tmp_path_factory.mktemp("whole")
    with fresh_starter() as start:
        began = time.monotonic()
        program = start([*WHOLE, "--trainer.default_root_dir", str(root / "runs")], root / "said.txt")
        assert program.ended() == 0, program.output.read_text()
        yield time.monotonic() - began


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_a_signal_at_any_moment_of_a_whole_run_ends_it_with_its_code(part: int, seconds: float, tmp_path: Path) -> None:
    chance = Random(part)
    with fresh_starter() as start:
        for number in range(MOMENTS // PARTS):
            root = tmp_path / str(number)
            root.mkdir()
            sent: Signals = chance.choice([SIGTERM, SIGINT, SIGHUP])
            program = start([*WHOLE, "--trainer.default_root_dir", str(root / "runs")], root / "said.txt")
            while not catches_signals(program):
                assert program.wait(0.002) is None
            program.wait(chance.uniform(0.0, seconds))
            if program.wait(0.0) is None:
                program.send(sent)
            code, said = program.ended(), program.output.read_text()
            assert code in (0, 128 + sent, -sent), said  # negative: while the interpreter shuts down
            assert "Traceback" not in said
            assert sum(line.startswith(("error: ", "stopped by")) for line in said.splitlines()) <= 1, said
            check_that_nothing_is_half_written(root)


SHORT = f"--config {CONFIGS / 'smoke.yaml'} --trainer.max_epochs 3 --data.env.horizon 5 --evaluation.hosts 0"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of a user's shell; `esper-lightning` is the program."""
    program = f'esper-lightning() {{ "{sys.executable}" -m esper_lightning "$@"; }}\n'
    return subprocess.run(
        ["bash", "-c", program + command],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("streams", "code"),
    [("| head -1", 141), ("| true", 141), (">&-", 0), ("2>&-", 0), ("<&- >&- 2>&-", 0), (">/dev/full", 1)],
)
def test_a_program_whose_streams_fail_ends_with_its_code_and_saves(streams: str, code: int, tmp_path: Path) -> None:
    flags = f"--config {CONFIGS / 'smoke.yaml'} --trainer.max_epochs 3 --data.env.horizon 5 --evaluation.hosts 0"
    ended = shell(
        f"esper-lightning fit {flags} --trainer.default_root_dir {tmp_path} {streams}; echo ${{PIPESTATUS[0]}}"
    )

    assert ended.stdout.splitlines()[-1] == str(code), ended.stderr
    assert "Traceback" not in ended.stderr
    said = [line for line in ended.stderr.splitlines() if "max_epochs" not in line]  # Lightning's word of the end
    assert len(said) == (0 if code == 0 else 1), ended.stderr
    for path in tmp_path.rglob("latest.ckpt"):
        open_checkpoint(path)


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--help", "--print_config"])
def test_a_reader_of_the_help_may_go_away(options: str) -> None:
    ended = shell(f"esper-lightning fit {options} | head -1; echo ${{PIPESTATUS[0]}}")

    assert ended.stdout.splitlines()[-1] in ("0", "141") and "Traceback" not in ended.stderr
    assert len(ended.stderr.splitlines()) <= 1


@pytest.mark.slow
def test_too_little_memory_to_load_the_program_is_told_in_a_line() -> None:
    ended = shell("ulimit -v 1000000; esper-lightning fit --config smoke; echo $?")

    assert ended.stdout.splitlines() == ["1"]
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: there is too little memory")


@pytest.mark.slow
def test_a_run_under_nohup_survives_its_terminal(tmp_path: Path) -> None:
    ended = shell(
        f'nohup "{sys.executable}" -m esper_lightning fit {SHORT} --trainer.default_root_dir {tmp_path} & '
        "sleep 4; kill -HUP $!; wait $!; echo $?"
    )

    assert ended.stdout.splitlines()[-1] == "0", ended.stderr
