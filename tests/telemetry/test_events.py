"""Events: they can be read back, even after a crash, and a resumed run writes each of them once."""

import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_lightning.telemetry.events import (
    EVENT_CLASSES,
    SCHEMA,
    AnomalyChanged,
    Event,
    EventLog,
    SeedChanged,
    Started,
    from_line,
    read_events,
    to_line,
)
from tests.runs import ROOT, SaveEveryTick, fit, only_run, with_callback
from tests.tiers import rest_is_slow

START = Started(0, SCHEMA, 2, 12, ["block1"], ["norm"], "normal")
BORN = SeedChanged(3, 1, "block1", "norm", "DORMANT", "GERMINATED", "germinate", 0, None)
PAGE = (ROOT / "docs" / "reference" / "events.md").read_text()


def write_events(path: Path, *events: Event) -> EventLog:
    log = EventLog(path)
    log.write(events)
    return log


def test_what_is_written_is_there_at_once_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = write_events(path, START, BORN)

    assert list(read_events(path)) == [START, BORN], "the file was not closed"
    log.write([BORN._replace(tick=4)])
    assert [event.tick for event in read_events(path)] == [0, 3, 4]


def test_a_line_is_plain_json_that_names_its_type() -> None:
    assert json.loads(to_line(BORN)) == {"type": "seed", **BORN._asdict()}


def test_what_is_not_finite_is_null() -> None:
    event = AnomalyChanged(5, 1, "kl", "critical", math.nan, 0.1, "why", ["a.b"])

    assert json.loads(to_line(event))["value"] is None
    assert from_line(to_line(event)) == event._replace(value=None)


def test_the_line_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, START, BORN)
    path.write_bytes(path.read_bytes()[:-5])

    assert list(read_events(path)) == [START]


def test_going_on_forgets_what_came_later_and_the_cut_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = write_events(path, START, BORN, BORN._replace(tick=4), BORN._replace(tick=5))
    log.close()
    path.write_bytes(path.read_bytes()[:-5])

    log.discard_after(3)
    log.write([BORN._replace(tick=4, host=0)])

    assert list(read_events(path)) == [START, BORN, BORN._replace(tick=4, host=0)]


def test_going_on_where_nothing_was_written_makes_no_file(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").discard_after(3)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"nonsense","tick":1}', "no event of schema 1"),
        ("[]", "no event of schema 1"),
        ('{"type":"seed","tick":1}', "has not the fields tick, host, slot"),
        (to_line(START._replace(schema=SCHEMA + 1)), f"events of schema {SCHEMA + 1}, but this version reads {SCHEMA}"),
        ("{", "Expecting property name"),
    ],
)
def test_a_line_that_is_no_event_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(START) + line.rstrip() + "\n")

    with pytest.raises(ValueError, match=message) as raised:
        list(read_events(path))
    assert f"{path}, line 2" in str(raised.value)


DAMAGED = {
    "a tick that is null": '{"type":"level","tick":null,"level":"off","cause":"x"}',
    "a tick that is a text": '{"type":"level","tick":"0","level":"off","cause":"x"}',
    "a tick that is true": '{"type":"level","tick":true,"level":"off","cause":"x"}',
    "a tick with a fraction": '{"type":"level","tick":1.5,"level":"off","cause":"x"}',
    "a tick below 0": '{"type":"level","tick":-1,"level":"off","cause":"x"}',
    "a tick that is a list": '{"type":"level","tick":[1],"level":"off","cause":"x"}',
    "a tick without end": '{"type":"level","tick":1e400,"level":"off","cause":"x"}',
    "a tick that is no number": '{"type":"level","tick":NaN,"level":"off","cause":"x"}',
    "a tick of 5,000 digits": '{"type":"level","tick":' + "9" * 5000 + ',"level":"off","cause":"x"}',
    "a type that is a list": '{"type":[],"tick":1}',
    "a type that is an object": '{"type":{"a":1},"tick":1}',
    "no type": '{"tick":1}',
    "lists without end": "[" * 100_000,
    "objects without end": '{"type":' * 100_000,
    "an array": "[1]",
    "a number": "1",
    "nothing": "",
    "NUL characters": "\0" * 100,
    "two events": to_line(START).rstrip() * 2,
    "a mark of the byte order": "\ufeff" + to_line(START).rstrip(),
    "a long text": "x" * 1_000_000,
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_file_is_refused_in_a_short_line_and_left_as_it_is(tmp_path: Path, line: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(to_line(START) + line + "\n" + to_line(BORN), encoding="utf-8")
    before = path.read_bytes()

    with pytest.raises(ValueError, match=r"events\.jsonl, line 2: ") as raised:
        EventLog(path).discard_after(10)

    assert len(str(raised.value)) < 500 and path.read_bytes() == before


def test_bytes_that_are_no_text_are_refused_too(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"\xff\xfe\n")

    with pytest.raises(ValueError, match="line 1"):
        EventLog(path).discard_after(10)


def test_a_tick_that_is_far_too_large_does_not_have_the_later_events_removed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, START, BORN._replace(tick=10**30), BORN).close()
    before = path.read_bytes()

    with pytest.raises(ValueError, match=f"line 3: tick {BORN.tick} after tick {10**30}"):
        EventLog(path).discard_after(BORN.tick)

    assert path.read_bytes() == before


def test_damage_after_the_checkpoint_is_removed_with_what_came_later(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    write_events(path, START, BORN._replace(tick=9)).close()
    with path.open("ab") as file:
        file.write(b"\0" * 50 + b"\n")

    EventLog(path).discard_after(5)

    assert list(read_events(path)) == [START]


@pytest.mark.parametrize(
    "make",
    [
        Path.mkdir,
        os.mkfifo,
        lambda path: path.symlink_to("dear"),
        lambda path: path.symlink_to("nowhere"),
        lambda path: path.symlink_to("/dev/zero"),
    ],
    ids=["a folder", "a pipe", "a link", "a link to nothing", "a link to a device"],
)
def test_what_is_no_regular_file_is_refused_and_not_followed(make: Callable[[Path], object], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    (tmp_path / "dear").write_text(to_line(BORN))
    make(path)

    with pytest.raises(ValueError, match=r"events\.jsonl is not a regular file"):
        EventLog(path).discard_after(0)

    assert (tmp_path / "dear").read_text() == to_line(BORN)


def test_a_file_without_line_ends_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(10**12)  # sparse: takes no space

    with pytest.raises(ValueError, match="line 1"):
        EventLog(path).discard_after(0)


def comparable_events(root: Path) -> list[Event]:
    """Return the events of a run without the seconds that writing checkpoints took, which differ between equal runs."""
    events = read_events(only_run(root).folder / "events.jsonl")
    return [event._replace(seconds=0.0) if hasattr(event, "seconds") else event for event in events]


@pytest.mark.parametrize("tick", rest_is_slow([1, 4, 5, 8], {8}))
def test_a_resumed_run_tells_everything_once(tmp_path: Path, tick: int) -> None:
    """Resume from the checkpoint of any tick with the whole run's file in place, as after `kill -9`."""
    fit(tmp_path, *with_callback(SaveEveryTick))
    whole = comparable_events(tmp_path)
    checkpoint = only_run(tmp_path).checkpoints / f"tick{tick}.ckpt"

    fit(tmp_path, *with_callback(SaveEveryTick), "--ckpt_path", str(checkpoint))

    resumed = comparable_events(tmp_path)
    starts = [event for event in resumed if isinstance(event, Started)]
    assert [start.tick for start in starts] == [0, tick]
    resumed.remove(starts[1])
    assert resumed == whole


def test_ticks_never_go_back(tmp_path: Path) -> None:
    fit(tmp_path)

    ticks = [event.tick for event in comparable_events(tmp_path)]
    assert ticks == sorted(ticks) and ticks[-1] == 15


def test_the_page_describes_every_event_and_every_field() -> None:
    described = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))

    assert list(described) == list(EVENT_CLASSES)
    for name, kind in EVENT_CLASSES.items():
        assert re.findall(r"^- `(\w+)`", described[name], re.MULTILINE) == [f for f in kind._fields if f != "tick"]
    assert f"schema {SCHEMA}" in PAGE
