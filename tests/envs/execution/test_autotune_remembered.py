"""Executor auto: a choice is cached for hosts of its kind, in a file that may be foreign, broken or read-only."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from esper_lightning.hosts import CNN
from tests.conftest import SMALL
from tests.envs.execution.choices import PLAIN_THREADS, FixedSpeeds, MakePool, printed_report

pytestmark = pytest.mark.usefixtures("cache")


def test_a_choice_is_remembered_for_hosts_of_the_same_kind_and_number(
    make_pool: MakePool, stopwatch: FixedSpeeds, cache: Path
) -> None:
    assert f"remembered in {cache}" in printed_report(make_pool(2, executor="auto")).replace("\n", "")
    (speeds,) = json.loads(cache.read_text())["measured"].values()
    assert speeds["environment steps per second"]["loop without oneDNN"] == 3.0
    stopwatch.calls.clear()

    for changes in ({}, {"training": replace(SMALL.training, lr=0.5, weight_decay=0.1)}, {"horizon": 9}):
        pool = make_pool(2, executor="auto", **changes)
        assert pool.executor_choice == PLAIN_THREADS
        (line,) = printed_report(pool).splitlines()
        assert line == "executor threads without oneDNN: the fastest when it was measured for hosts like these"
    assert not stopwatch.calls


def wider(input_shape: tuple[int, ...], outputs: int) -> CNN:
    return CNN(input_shape, outputs, base=8, kernel=1, pools=2, channels_last=False)


def other_layout(input_shape: tuple[int, ...], outputs: int) -> CNN:
    """Host with the same weights, computed in another memory format."""
    slots = ["block1.pool", "block2.pool", "block3"]
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_envs": 3},
        {"host": wider},
        {"host": other_layout},
        {"training": replace(SMALL.training, batch_size=16)},
        {"training": replace(SMALL.training, batches=3)},
        {"training": replace(SMALL.training, precision="bf16")},
        {"training": replace(SMALL.training, onednn=False)},
        {"actions": replace(SMALL.actions, blueprints=["norm"])},
    ],
)
def test_what_differs_is_measured_anew(make_pool: MakePool, stopwatch: FixedSpeeds, changes: dict) -> None:
    make_pool(2, executor="auto")
    stopwatch.calls.clear()

    make_pool(**{"n_envs": 2, "executor": "auto", **changes})

    assert stopwatch.calls


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "could not be read (JSONDecodeError) and is replaced"),
        ("\udcff", "could not be read (UnicodeDecodeError) and is replaced"),
        ("[]", "was not of format 1 and is replaced"),
        ('{"format": 2, "measured": {}}', "was not of format 1 and is replaced"),
        ('{"format": 1, "measured": {"here": 3}}', "was not of format 1 and is replaced"),
    ],
)
def test_a_file_of_another_program_is_replaced_and_reported(
    make_pool: MakePool, stopwatch: FixedSpeeds, cache: Path, content: str, complaint: str
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content.encode(errors="surrogateescape"))

    pool = make_pool(2, executor="auto")

    assert pool.selection.note == f"{cache} {complaint}; remembered in {cache}"
    assert not make_pool(2, executor="auto").selection.measured
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "no draft is left"


def test_an_entry_that_names_no_candidate_is_mended(make_pool: MakePool, stopwatch: FixedSpeeds, cache: Path) -> None:
    make_pool(2, executor="auto")
    make_pool(3, executor="auto")
    content = json.loads(cache.read_text())
    first, _ = content["measured"].values()
    first["fastest"] = "abacus"
    cache.write_text(json.dumps(content))

    assert make_pool(2, executor="auto").selection.note.startswith(f"{cache} was damaged and is mended; remembered")
    assert not make_pool(2, executor="auto").selection.measured
    assert not make_pool(3, executor="auto").selection.measured, "the others are kept"


def test_where_nothing_can_be_written_the_choice_is_measured_every_time(
    make_pool: MakePool, stopwatch: FixedSpeeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    for _ in range(2):
        pool = make_pool(2, executor="auto")
        assert pool.executor_choice == PLAIN_THREADS
        assert pool.selection.note.startswith("not remembered: ")
        assert pool.selection.note.endswith("cannot be written (Not a directory)")
