"""A full or failing disk ends a run with one line, and the last good checkpoint stays."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pytest
import torch

from esper_lightning.checkpointing.atomic_io import AtomicCheckpointIO, DiskError, size_on_disk
from esper_lightning.errors import find_system_error, one_line_errors, one_line_system_errors
from esper_lightning.growth.export import export
from esper_lightning.telemetry.tensorboard import TensorBoardWriter
from tests.runs import HARD_LIMIT, HORIZON, ROOT, TINY, Run, fit, load, only_run


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def with_free(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 0, free))


@pytest.mark.parametrize(
    "content", [{"a": torch.zeros(10**6)}, {i: torch.zeros(3) for i in range(3000)}, {"a": [1.5] * 10**5}]
)
def test_what_a_checkpoint_needs_is_estimated_from_above(content: dict[Any, Any], tmp_path: Path) -> None:
    AtomicCheckpointIO().save_checkpoint(content, tmp_path / "a.ckpt")
    needed = (tmp_path / "a.ckpt").stat().st_size

    assert needed <= size_on_disk(content) <= 3 * needed + 2**21


def test_tensors_that_share_memory_need_it_once() -> None:
    whole = torch.zeros(10**7)

    assert size_on_disk([whole[:5], whole[5:], whole]) < 1.1 * whole.nbytes


def test_nothing_is_written_where_it_would_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.ones(3)}, target)
    with_free(monkeypatch, 4_500_000)

    with pytest.raises(DiskError, match=r"a\.ckpt' cannot be written: 5\.0 MB are needed, 4\.5 MB are free"):
        AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(10**6)}, target)

    assert torch.equal(load(target)["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_system_that_does_not_know_its_size_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 0))

    AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(3)}, tmp_path / "a.ckpt")

    assert (tmp_path / "a.ckpt").is_file()


@pytest.fixture
def small_files() -> Iterator[None]:
    """The kernel accepts at most 100 kB in one file, so that torch's writer fails with its own message."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("size", [30_000, 10**6])
def test_a_write_that_the_kernel_cuts_off_leaves_the_old_checkpoint(size: int, tmp_path: Path) -> None:
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.ones(3)}, target)

    with pytest.raises(DiskError, match=r"a\.ckpt' cannot be written: File too large"):
        AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(size)}, target)

    assert torch.equal(load(target)["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_is_full_when_it_is_flushed_leaves_the_old_checkpoint(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.ckpt"
    AtomicCheckpointIO().save_checkpoint({"a": torch.ones(3)}, target)

    def full(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskError, match=os.strerror(number)):
        AtomicCheckpointIO().save_checkpoint({"a": torch.zeros(3)}, target)

    assert torch.equal(load(target)["a"], torch.ones(3))
    assert list(tmp_path.iterdir()) == [target]


def test_what_is_no_failure_of_the_disk_is_not_called_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(checkpoint: object, file: BinaryIO) -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(torch, "save", broken)

    with pytest.raises(RuntimeError, match="a mistake of ours"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt")


def test_a_run_on_a_full_disk_ends_in_one_line_that_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(tmp_path, "--trainer.max_epochs=1")
    run = only_run(tmp_path)
    kept = run.latest.read_bytes()
    with_free(monkeypatch, 1000)
    capsys.readouterr()

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path, "--ckpt_path", str(run.latest))

    assert ended.value.code == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Trainer.fit" not in line]
    assert line.startswith("error: ")
    assert "0.0 MB are free" in line
    command = f"esper-lightning fit --config {run.folder / 'config.yaml'} --ckpt_path {run.latest}"
    assert line.endswith(command)
    assert run.latest.read_bytes() == kept
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["best.ckpt", "latest.ckpt"]
    monkeypatch.undo()
    fit(tmp_path, "--ckpt_path", str(run.latest))
    assert load(run.latest)["callbacks"]["RolloutState"]["loop"]["ticks"] == 3 * HORIZON


@pytest.mark.slow
def test_a_real_process_ends_so_when_the_kernel_takes_no_more(tmp_path: Path) -> None:
    limited = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000));"
        "from esper_lightning.__main__ import main; main()"
    )
    command = [sys.executable, "-c", limited, "fit", *TINY, "--trainer.default_root_dir", str(tmp_path)]

    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)

    assert ended.returncode == 1, ended.stderr
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert "File too large" in line
    assert "start again" in line  # no checkpoint exists yet
    assert list(Run(only_run(tmp_path).folder).checkpoints.iterdir()) == []


READ_ONLY_IN_A_RUN = """
mount -t tmpfs tmpfs "$1"; run=$1/runs/version_0; latest=$run/checkpoints/latest.ckpt; shift
fit() { "$python" -m esper_lightning fit "$@" --trainer.default_root_dir "${run%/*}"; }
fit "$@" --trainer.max_epochs 100000 & program=$!
until [ -e "$latest" ]; do sleep .1; kill -0 $program || exit 99; done
mount --bind "$run" "$run"; mount -o remount,ro,bind "$run"; cp "$latest" "$run/../../kept"
wait $program; echo "ended with $?"
cmp "$latest" "$run/../../kept" && echo "checkpoint is whole"
fit "$@" --ckpt_path "$latest"; echo "ended with $?"
umount "$run"
ticks=$("$python" -c "import sys, torch; print(torch.load(sys.argv[1])['epoch'])" "$latest")
fit "$@" --trainer.max_epochs $((ticks + 2)) --ckpt_path "$latest"; echo "ended with $?"
"""
"""Script that makes the run folder of a program read-only, and writable again before the last resume."""


@pytest.mark.slow
@pytest.mark.skipif(
    subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounts need a namespace of their own",
)
def test_a_file_system_that_becomes_read_only_in_a_run_ends_it_in_a_line(tmp_path: Path) -> None:
    ended = subprocess.run(
        ["unshare", "-rm", "bash", "-c", READ_ONLY_IN_A_RUN, "bash", str(tmp_path), *TINY],
        cwd=ROOT,
        env=os.environ | {"python": sys.executable},
        capture_output=True,
        text=True,
        timeout=HARD_LIMIT,
        check=False,
    )

    said = [line for line in ended.stdout.splitlines() if line.startswith(("ended with", "checkpoint is"))]
    assert said == ["ended with 1", "checkpoint is whole", "ended with 1", "ended with 0"], ended.stderr
    errors = [line for line in ended.stderr.splitlines() if "Trainer.fit" not in line]
    assert len(errors) == 2 and all("make the file system writable" in line for line in errors), ended.stderr


def circular(error: OSError) -> OSError:
    """Return the error with a circular chain of causes, as TensorBoard's thread leaves it after several writes."""
    behind = RuntimeError("while another one was handled")
    error.__cause__, behind.__context__ = behind, error
    return error


@pytest.mark.parametrize(("number", "is_one"), [(errno.ENOSPC, True), (errno.EMFILE, True), (errno.ENOENT, False)])
def test_an_error_behind_which_is_itself_is_looked_into_once(number: int, is_one: bool) -> None:
    error = circular(OSError(number, os.strerror(number)))

    assert find_system_error(error) is (error if is_one else None)
    assert find_system_error(error.__cause__) is (error if is_one else None)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_command_on_a_failing_disk_ends_in_a_line_with_the_way_out(
    wrapped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "a.csv")
    failure = RuntimeError("unexpected pos 64 vs 0")  # torch's writer raises this one
    failure.__context__ = full

    with pytest.raises(SystemExit) as ended, one_line_system_errors("start again"):
        raise failure if wrapped else full

    assert ended.value.code == 1
    assert capsys.readouterr().err == "error: No space left on device (a.csv); free some space, and start again\n"


def test_an_error_of_another_kind_passes_with_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="a mistake of ours"), one_line_system_errors("start again"):
        raise RuntimeError("a mistake of ours")


def test_a_thread_that_the_system_does_not_start_is_told_with_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, one_line_errors():
        raise RuntimeError("can't start new thread")

    assert ended.value.code == 1
    assert "raise the limit on processes and threads" in capsys.readouterr().err


@pytest.mark.usefixtures("small_files")
def test_an_export_on_a_full_disk_names_the_reason_and_leaves_the_earlier_file(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_text("earlier")
    with pytest.raises(RuntimeError) as failed:
        export(torch.nn.Linear(300, 300), torch.randn(2, 300), tmp_path / "a.pt", "state_dict")

    found = find_system_error(failed.value)
    assert found is not None and found.errno == errno.EFBIG
    assert [path.read_text() for path in tmp_path.iterdir()] == ["earlier"]


@pytest.mark.parametrize(
    ("kind", "ours", "said"),
    [
        (FileNotFoundError, True, "was removed or replaced while the run wrote to it; start again"),
        (FileNotFoundError, False, None),
        (PermissionError, True, "may not be written; permit it, and start again"),
    ],
)
def test_a_run_whose_folder_is_removed_or_may_not_be_written_ends_in_one_line(
    kind: type[OSError],
    ours: bool,
    said: str | None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing: list[Path] = []

    def histogram(board: TensorBoardWriter, tag: str, *_: object) -> None:
        folder = Path(board.writer.log_dir)
        shutil.rmtree(folder)
        missing.append(folder / "events" if ours else tmp_path.parent / "of_a_data_set")
        raise circular(kind(errno.ENOENT, "as the system says", os.fsencode(missing[0])))

    monkeypatch.setattr(TensorBoardWriter, "histogram", histogram)

    with pytest.raises(SystemExit) as ended:
        fit(tmp_path)

    line = capsys.readouterr().err.splitlines()[-1]
    assert (f"error: {str(missing[0])!r} {said}" in line) == (said is not None)
    assert ended.value.code == (1 if said else 4)  # 4: raised by the function above
