"""One process at a time holds the lock of a run folder, and its end releases it."""

import errno
import os
import signal
import time
from pathlib import Path

import pytest

from esper_lightning.checkpointing.run_lock import LOCK_FILE, lock_folder
from tests.processes import Fork, Signal, forked


def hold(folder: Path, reached: Signal) -> None:
    with lock_folder(folder):
        reached.set()
        time.sleep(60)


def check_refused(folder: Path, holder: Fork) -> None:
    """Assert that this process is refused the lock in a line that names the holder."""
    said = f"run folder '{folder}' is in use by process {holder.pid}; wait until"
    with pytest.raises(ValueError, match=said), lock_folder(folder):
        pass


def test_a_second_process_is_refused_until_the_first_one_is_killed(tmp_path: Path) -> None:
    reached = Signal()
    with forked(lambda: hold(tmp_path, reached)) as holder:
        reached.wait()
        check_refused(tmp_path, holder)
        os.kill(holder.pid, signal.SIGSTOP)
        check_refused(tmp_path, holder)
        holder.kill()
        with lock_folder(tmp_path):
            assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_the_same_by_whatever_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    reached = Signal()
    with forked(lambda: hold(tmp_path / "run", reached)) as holder:
        reached.wait()
        check_refused(tmp_path / "link", holder)
        check_refused(tmp_path / "link" / ".." / "run", holder)


def test_a_worker_that_outlives_its_killed_run_does_not_hold_the_lock(tmp_path: Path) -> None:
    reached, worker = Signal(), Signal()

    def hold_with_worker() -> None:
        with lock_folder(tmp_path):
            if os.fork() == 0:
                worker.set()
                time.sleep(5)
                os._exit(0)
            reached.set()
            time.sleep(60)

    with forked(hold_with_worker) as holder:
        reached.wait()
        worker.wait()
        holder.kill()
        with lock_folder(tmp_path):
            pass


@pytest.mark.parametrize("content", ["", "99999999", "no number", "x" * 10_000])
def test_a_file_that_a_killed_process_has_left_is_no_lock(content: str, tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text(content)
    with lock_folder(tmp_path):
        assert (tmp_path / LOCK_FILE).read_text() == str(os.getpid())
    with lock_folder(tmp_path):  # again, in the same process
        pass


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: path.symlink_to("dear"), lambda path: path.symlink_to("no")])
def test_what_is_no_file_is_an_error_and_a_link_is_not_followed(make: object, tmp_path: Path) -> None:
    (tmp_path / "dear").write_text("dear")
    make(tmp_path / LOCK_FILE)
    with pytest.raises(OSError, match=LOCK_FILE), lock_folder(tmp_path):
        pass
    assert (tmp_path / "dear").read_text() == "dear"
    assert not (tmp_path / "no").exists()


def test_a_folder_that_becomes_read_only_changes_no_exit_code_and_is_free_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="1"), lock_folder(tmp_path):
        patch.setattr(Path, "unlink", read_only)
        raise SystemExit(1)

    reached = Signal()
    with forked(lambda: hold(tmp_path, reached)) as other:
        reached.wait()
        check_refused(tmp_path, other)


def test_of_processes_that_lock_and_unlock_at_the_same_time_one_is_inside(tmp_path: Path) -> None:
    def lock_often() -> None:
        entered = 0
        while entered < 50:
            try:
                with lock_folder(tmp_path):
                    os.close(os.open(tmp_path / "inside", os.O_CREAT | os.O_EXCL))  # fails if another one is inside
                    (tmp_path / "inside").unlink()
                    entered += 1
            except ValueError:
                continue

    with forked(lock_often) as a, forked(lock_often) as b, forked(lock_often) as c:
        assert [a.wait(), b.wait(), c.wait()] == [0, 0, 0]
