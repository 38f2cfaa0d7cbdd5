"""Events: they can be read back, even after a crash, and a resumed run writes each of them once."""

import json
import math
import re
from pathlib import Path

import pytest

from esper_lightning.growth import SeedEvent, Stage
from esper_lightning.telemetry.events import (
    EVENT_CLASSES,
    SCHEMA,
    AnomalyChanged,
    Event,
    EventLog,
    Started,
    read_events,
    to_line,
)
from tests.runs import ROOT

START = Started(0, SCHEMA, 2, 12, ["block1"], ["norm"], "accuracy", 500, {"block1": 100})
BORN = SeedEvent("block1", "norm", Stage.DORMANT, Stage.GERMINATED, "germinate", host=1, tick=3)
PAGE = (ROOT / "docs" / "reference" / "telemetry.md").read_text()


def write_events(path: Path, *events: Event) -> EventLog:
    log = EventLog(path)
    log.write(events)
    return log


def test_what_is_written_is_there_at_once_as_plain_json_and_reads_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = write_events(path, START, BORN)

    assert list(read_events(path)) == [START, BORN], "the file was not closed"
    assert json.loads(path.read_text().splitlines()[1]) == {
        "type": "seed",
        "tick": 3,
        "host": 1,
        "slot": "block1",
        "blueprint": "norm",
        "before": "DORMANT",
        "after": "GERMINATED",
        "cause": "germinate",
        "age": 0,
        "contribution": None,
    }
    anomaly = AnomalyChanged(5, 1, "kl", "critical", math.nan, 0.1, "why", ["a.b"])
    log.write([anomaly])
    assert list(read_events(path))[2] == anomaly._replace(value=None), "what is not finite is null"


def test_going_on_forgets_what_came_later_and_the_line_that_a_crash_has_cut(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    EventLog(path).discard_after(3)
    assert not path.exists(), "nothing was written"
    log = write_events(path, START, BORN, BORN._replace(tick=4), BORN._replace(tick=5))
    log.close()
    path.write_bytes(path.read_bytes()[:-5])
    assert [event.tick for event in read_events(path)] == [0, 3, 4]
    path.write_bytes(path.read_bytes() + b"\0" * 50 + b"\n")  # damage, which is removed with what came later
    log.discard_after(3)
    log.write([BORN._replace(tick=4, host=0)])

    assert list(read_events(path)) == [START, BORN, BORN._replace(tick=4, host=0)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"nonsense","tick":1}', "no event of schema 5"),
        ('{"type":"seed","tick":1}', "no event of schema 5"),
        (to_line(BORN).replace("DORMANT", "ASLEEP"), "ASLEEP"),
        (to_line(START._replace(schema=2)), "events of schema 2; use the version of this package that wrote them"),
        ("x" * 1_000_000, "Expecting value"),
        ("\udcff", "can't decode byte"),
    ],
)
def test_a_line_that_is_no_event_is_refused_in_a_short_line_and_the_file_left_as_it_is(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    text = to_line(START) + line.rstrip() + "\n" + to_line(BORN)
    path.write_bytes(text.encode(errors="surrogateescape"))
    before = path.read_bytes()

    for read in (lambda: list(read_events(path)), lambda: EventLog(path).discard_after(10)):
        with pytest.raises(ValueError, match=message) as raised:
            read()
        assert f"{path}, line 2" in str(raised.value) and len(str(raised.value)) < 500
    assert path.read_bytes() == before


def test_the_page_describes_every_event_and_every_field() -> None:
    described = dict(re.findall(r"^### `(\w+)`\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))

    assert list(described) == list(EVENT_CLASSES)
    for name, kind in EVENT_CLASSES.items():
        assert re.findall(r"^- `(\w+)`", described[name], re.MULTILINE) == [f for f in kind._fields if f != "tick"]
    assert f"schema {SCHEMA}" in PAGE
