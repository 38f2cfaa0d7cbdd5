"""Run folders: each belongs to one run, and one process at a time writes to it."""

import shutil
import time
from pathlib import Path

import pytest
from lightning.pytorch.loggers import TensorBoardLogger

from esper_lightning.checkpointing.run_lock import LOCK_FILE, lock_folder
from esper_lightning.cli.main import make_logger
from esper_lightning.telemetry.events import read_events
from esper_lightning.trainer import resume_command, run_folder
from tests.processes import Signal, forked
from tests.runs import Run, fit, only_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("finished")
    fit(root, "--trainer.max_epochs=1")
    return only_run(root)


def copy_of(run: Run, root: Path) -> Run:
    return Run(Path(shutil.copytree(run.folder, root / "version_0")))


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_runs_that_begin_at_the_same_moment_get_a_folder_each(tmp_path: Path) -> None:
    (tmp_path / "version_1").touch()  # a file in the way

    def begin_five() -> None:
        for _ in range(5):
            folder = Path(make_logger(tmp_path, None).log_dir)
            (folder / "mine").touch(exist_ok=False)

    with forked(begin_five) as a, forked(begin_five) as b, forked(begin_five) as c:
        assert [a.wait(), b.wait(), c.wait()] == [0, 0, 0]
    assert len(list(tmp_path.glob("version_*/mine"))) == 15


def test_a_folder_that_another_process_has_just_made_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TensorBoardLogger, "_get_next_version", lambda self: 0)  # neither has seen the other's folder
    folders = [Path(make_logger(tmp_path, None).log_dir) for _ in range(2)]
    assert [folder.name for folder in folders] == ["version_0", "version_1"]


def test_a_logger_that_is_made_but_not_used_makes_no_folder(tmp_path: Path) -> None:
    make_logger(tmp_path / "runs", None)
    assert list(tmp_path.iterdir()) == []


def test_a_linked_checkpoint_counts_where_its_link_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere" / "checkpoints").mkdir(parents=True)
    (tmp_path / "elsewhere" / "checkpoints" / "a.ckpt").touch()
    checkpoints = tmp_path / "runs" / "version_7" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest.ckpt").symlink_to(tmp_path / "elsewhere" / "checkpoints" / "a.ckpt")
    (tmp_path / "runs" / "version_8").mkdir()
    (tmp_path / "runs" / "version_8" / "checkpoints").symlink_to(tmp_path / "elsewhere" / "checkpoints")
    (tmp_path / "moved").symlink_to(tmp_path / "runs" / "version_7")

    paths = {
        checkpoints / "latest.ckpt": checkpoints.parent,
        tmp_path / "runs" / "version_8" / "checkpoints" / "a.ckpt": tmp_path / "runs" / "version_8",
        tmp_path / "moved" / "checkpoints" / "latest.ckpt": checkpoints.parent,  # the run folder itself is linked
        checkpoints / ".." / "checkpoints" / "latest.ckpt": checkpoints.parent,
    }
    for path, run in paths.items():
        assert run_folder(path) == run
        assert Path(make_logger(tmp_path / "runs", str(path)).log_dir) == run
    monkeypatch.chdir(checkpoints)
    assert run_folder("latest.ckpt") == checkpoints.parent


@pytest.mark.slow
def test_a_linked_checkpoint_goes_on_where_its_link_lies_after_a_crash(finished: Run, tmp_path: Path) -> None:
    """The crash has left a damaged file of events, drafts of the record, and the lock."""
    run = copy_of(finished, tmp_path / "runs")
    elsewhere = tmp_path / "elsewhere" / "tamiyo.ckpt"
    elsewhere.parent.mkdir()
    run.latest.rename(elsewhere)
    run.latest.symlink_to(elsewhere)
    (elsewhere.parent / "config.yaml").write_text("dear")
    with (run.folder / "events.jsonl").open("a") as file:
        file.write('{"type":"level","tick":null,"level":"off","cause":"x"}\n')
    for name in (".config.yaml.99999999.tmp", ".config.1.yaml.99999999.tmp", ".run.json.99999999.tmp", LOCK_FILE):
        (run.folder / name).write_text("half")
    outside, earlier = contents(elsewhere.parent), (run.folder / "config.yaml").read_text()

    fit(tmp_path / "runs", "--trainer.max_epochs=2", f"--ckpt_path={run.latest}")

    assert contents(elsewhere.parent) == outside
    assert not run.latest.is_symlink()
    assert (run.folder / "config.1.yaml").read_text() == earlier
    assert (run.folder / "events.1.jsonl").is_file()
    assert all(event.tick >= 5 for event in read_events(run.folder / "events.jsonl"))
    assert [path.name for path in run.folder.iterdir() if path.name == LOCK_FILE or path.suffix == ".tmp"] == []


@pytest.mark.parametrize("flag", ["--ckpt_path={run}/checkpoints/latest.ckpt", "--best.dirpath={run}"])
def test_a_run_whose_folder_is_in_use_is_refused_in_a_line_and_changes_nothing(
    flag: str, finished: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, reached = copy_of(finished, tmp_path / "runs"), Signal()

    def hold() -> None:
        with lock_folder(run.folder):
            reached.set()
            time.sleep(60)

    with forked(hold) as holder:
        reached.wait()
        before = contents(tmp_path)
        with pytest.raises(SystemExit) as ended:
            fit(tmp_path / "runs", "--trainer.max_epochs=2", flag.format(run=run.folder))
        assert ended.value.code == 2
        assert capsys.readouterr().err.splitlines() == [
            f"error: run folder '{run.folder}' is in use by process {holder.pid}; wait until it ends, or stop it"
        ]
        assert contents(tmp_path) == before
        assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]


def test_a_run_goes_on_by_its_config_or_in_python_if_it_has_none(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "latest.ckpt"
    assert resume_command(checkpoint) == f"esper_lightning.train(…, resume={str(checkpoint)!r})"

    config = tmp_path / "config.yaml"
    config.touch()
    assert resume_command(checkpoint) == f"esper-lightning fit --config {config} --ckpt_path {checkpoint}"
