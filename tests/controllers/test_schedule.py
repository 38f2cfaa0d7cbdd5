"""Schedules and their JSON files."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from esper_lightning.controllers.schedule import (
    MAX_FILE_BYTES,
    Schedule,
    ScheduledAction,
    actions_by_tick,
    read_schedule,
    write_schedule,
)
from esper_lightning.envs import HostPool
from tests.conftest import FREE
from tests.decisions import cull, fossilize, germinate

SLOTS = ("block1.pool", "block2.pool", "block3")

GROW = {"tick": 0, "op": "GERMINATE", "slot": "block3", "blueprint": "norm"}


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(1, **FREE)


def written(path: Path, *entries: Any, **changes: Any) -> Path:
    path.write_text(json.dumps({"format": 1, "slots": list(SLOTS), "entries": entries} | changes))
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    schedule = Schedule(
        SLOTS,
        (
            ScheduledAction(0, "GERMINATE", "block3", "norm", "linear_gate", "SLOW"),
            ScheduledAction(5, "CULL", "block3"),
        ),
    )

    write_schedule(schedule, tmp_path / "best.json")

    assert read_schedule(tmp_path / "best.json") == schedule
    assert [path.name for path in tmp_path.iterdir()] == ["best.json"], "and no draft is left"


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    write_schedule(Schedule(SLOTS, ()), tmp_path / "best.json")

    with pytest.raises(TypeError):
        write_schedule(Schedule(SLOTS, (ScheduledAction(0, "CULL", {1}),)), tmp_path / "best.json")

    assert read_schedule(tmp_path / "best.json") == Schedule(SLOTS, ())
    assert len(list(tmp_path.iterdir())) == 1


def test_names_become_the_pools_numbers_and_what_is_left_out_its_first_choice(pool: HostPool) -> None:
    entries = (
        ScheduledAction(4, "FOSSILIZE", "block3"),
        ScheduledAction(0, "GERMINATE", "block1.pool", "conv_small"),
        ScheduledAction(0, "GERMINATE", "block2.pool", "norm", "linear_gate", "SLOW"),
        ScheduledAction(3, "CULL", "block3"),
    )

    assert actions_by_tick(Schedule(SLOTS, entries), pool) == [
        (0, germinate(0, 1)),
        (0, germinate(1, 0, tempo=1, style=2)),
        (3, cull(2)),
        (4, fossilize(2)),
    ]


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (
            ScheduledAction(12, "CULL", "block3"),
            r"entry 2 of the schedule \(tick 12: CULL block3\): .* 12 ticks, 0 to 11",
        ),
        (ScheduledAction(0, "GERMINATE", "block3", "conv_heavy"), r"entry 2 .*blueprint 'conv_heavy' is not available"),
        (
            ScheduledAction(0, "GERMINATE", "block3", "norm", tempo="FST"),
            r"tempo 'FST' is not available here; did you mean 'FAST'",
        ),
    ],
)
def test_a_schedule_for_other_choices_is_refused(pool: HostPool, entry: ScheduledAction, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        actions_by_tick(Schedule(SLOTS, (ScheduledAction(0, "CULL", "block3"), entry)), pool)


def test_a_schedule_for_other_slots_is_refused(pool: HostPool) -> None:
    with pytest.raises(ValueError, match=r"with slots \['block7'\], these have \['block1.pool'"):
        actions_by_tick(Schedule(("block7",), ()), pool)


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in GROW.items() if name != key}


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (3, "entry 2: it must hold a tick, an op and a slot, got a int"),
        (without("tick"), "entry 2: tick is missing"),
        (without("slot"), "entry 2: slot is missing"),
        (without("blueprint"), "entry 2: blueprint is missing"),
        (GROW | {"op": "WAIT"}, "entry 2: op 'WAIT' is none of GERMINATE, .*by themselves"),
        (GROW | {"op": ["CULL"]}, "entry 2: op .* is none of"),
        (GROW | {"tick": -1}, "entry 2: tick must be a whole number from 0, got -1"),
        (GROW | {"tick": True}, "entry 2: tick must be a whole number"),
        (GROW | {"tick": 1.0}, "entry 2: tick must be a whole number"),
        (GROW | {"slot": "blok3"}, "entry 2: slot 'blok3' is not among the schedule's slots; did you mean 'block3'"),
        (GROW | {"blueprint": 4}, "entry 2: blueprint must be a name, got 4"),
        (GROW | {"tmepo": "FAST"}, "entry 2: unknown key 'tmepo'; did you mean 'tempo'"),
        (GROW | {"speed": 0}, "entry 2: unknown key 'speed'"),
    ],
)
def test_an_unsound_entry_is_named_in_one_line(tmp_path: Path, entry: Any, error: str) -> None:
    path = written(tmp_path / "bad.json", GROW, entry)

    with pytest.raises(ValueError, match=error) as caught:
        read_schedule(path)

    assert str(caught.value).startswith(f"schedule {path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "Expecting value"),
        ("[]", "it must hold format, slots, entries, got a list"),
        ("{}", "format is 'missing', this version reads 1"),
        ('{"format": 2}', "format is 2"),
        ('{"format": true, "slots": ["a"], "entries": []}', "format is True"),
        ('{"format": 1, "slots": ["a"]}', "entries is missing"),
        ('{"format": 1, "slots": [], "entries": []}', "slots must be a list of at least one name"),
        ('{"format": 1, "slots": ["a", "a"], "entries": []}', "slots names one twice"),
        ('{"format": 1, "slots": ["a"], "entries": {}}', "entries must be a list, got dict"),
        ('{"format": 1, "slots": ["a"], "entries": [], "sedes": 1}', "unknown key 'sedes'"),
        ('{"format": 1, "format": 1, "slots": ["a"], "entries": []}', "'format' is given twice"),
        ("{" + ", ".join(f'"k{i}": 0' for i in range(75_000)) + "}", "format is 'missing'"),
        (
            json.dumps({"format": 1, "slots": [f"s{i}" for i in range(1001)], "entries": []}),
            "slots names 1001, more than",
        ),
        ("[" * 100_000, "recursion"),
        ("\xff", "codec can't decode"),
        (" " * (MAX_FILE_BYTES + 1), "larger than"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    started = time.process_time()

    with pytest.raises(ValueError, match=error) as caught:
        read_schedule(path)

    assert "\n" not in str(caught.value)
    assert time.process_time() - started < 5.0


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        read_schedule(tmp_path / "none.json")
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        read_schedule(tmp_path)
