"""Schedules: actions by tick, with names instead of indices, and the JSON files that hold them."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from esper_lightning.blueprints import suggest_name
from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import HEADS, ActionSpace, Op
from esper_lightning.envs.spaces.actions import RELEVANT_OPS
from esper_lightning.serialization.replace import replace_file

FORMAT_VERSION = 1
"""Version of the file format; other versions are refused."""

REQUIRED_FIELDS = ("slot", "blueprint")
"""Heads that must be named if the op uses them; other heads default to the pool's first choice."""

FILE_KEYS = ("format", "slots", "entries")

MAX_SLOTS = 1000
"""Maximum number of slots that a schedule names; each entry is looked up among them."""

MAX_FILE_BYTES = 2**20
"""Maximum size of a schedule file; a thousand entries take a tenth of it."""


class ScheduledAction(NamedTuple):
    """One scheduled action.

    Heads that the op does not use are None; other heads that are None take the pool's first choice.
    """

    tick: int
    """Host epochs completed when the action is due; 0 is before the first one."""
    op: str
    slot: str
    blueprint: str | None = None
    style: str | None = None
    tempo: str | None = None

    def __str__(self) -> str:
        values = [str(value) for value in self[1:] if value is not None]
        return f"tick {self.tick}: {' '.join(values)}"


class Schedule(NamedTuple):
    """Scheduled actions of one host in an episode."""

    slots: tuple[str, ...]
    """Names of the slots of the hosts that the schedule fits."""
    entries: tuple[ScheduledAction, ...]
    """Actions in order of priority: if several are due, the first is carried out first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries)) or "nothing is ever grown"


def make_scheduled_action(tick: int, action: Sequence[int], space: ActionSpace) -> ScheduledAction:
    """Return the scheduled action for an action given as one index per head."""
    chosen = space.decode(action)
    fields = {head: value for head, value in chosen._asdict().items() if Op(action[0]) in RELEVANT_OPS[head]}
    return ScheduledAction(tick, **fields)


def actions_by_tick(schedule: Schedule, pool: Hosts) -> list[tuple[int, tuple[int, ...]]]:
    """Return tick and action, as one index per head, of every entry, ordered by tick.

    Raises ValueError, naming the entry, if the schedule does not fit the pool's hosts.
    """
    space = pool.space
    if list(schedule.slots) != space.slot:
        raise ValueError(f"the schedule is for hosts with slots {list(schedule.slots)}, these have {space.slot}")
    due_actions = []
    for number, entry in enumerate(schedule.entries, 1):
        where = f"entry {number} of the schedule ({entry})"
        if entry.tick >= pool.config.horizon:
            raise ValueError(
                f"{where}: an episode has {pool.config.horizon} ticks, 0 to {pool.config.horizon - 1}; name an earlier "
                f"tick, or train for longer"
            )
        action = []
        for head, choices in zip(HEADS, space, strict=True):
            value = getattr(entry, head) if Op[entry.op] in RELEVANT_OPS[head] else None
            if value is not None and value not in choices:
                suggestion = suggest_name(str(value), [str(choice) for choice in choices])
                raise ValueError(f"{where}: {head} {value!r} is not available here; {suggestion}")
            action.append(0 if value is None else choices.index(value))
        _, slot, blueprint, *_ = action
        if entry.blueprint is not None and not pool.growable[slot, blueprint]:
            raise ValueError(f"{where}: {entry.blueprint} cannot grow in {entry.slot}")
        due_actions.append((entry.tick, tuple(action)))
    return sorted(due_actions, key=lambda due: due[0])


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Write the schedule to a JSON file, replacing an existing one."""
    entries = [{name: value for name, value in e._asdict().items() if value is not None} for e in schedule.entries]
    document = {"format": FORMAT_VERSION, "slots": list(schedule.slots), "entries": entries}
    replace_file(Path(path), lambda draft: draft.write_text(json.dumps(document, indent=1) + "\n"))


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule file. Raises ValueError, naming the entry, if it is invalid."""
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"schedule {path} cannot be read: {error.strerror}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise ValueError(f"schedule {path} is larger than the limit of {MAX_FILE_BYTES} bytes")
    try:
        return _parse_schedule(json.loads(raw.decode(), object_pairs_hook=_dict_without_repeated_keys))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schedule {path}: {error}") from None


def _dict_without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the dict of a JSON object, given as pairs of key and value. Raises ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"{key!r} is given twice; give it once")
    return content


def _parse_schedule(document: Any) -> Schedule:
    if not isinstance(document, dict):
        raise ValueError(f"it must hold {', '.join(FILE_KEYS)}, got a {type(document).__name__}")
    if type(document.get("format")) is not int or document["format"] != FORMAT_VERSION:
        raise ValueError(f"format is {document.get('format', 'missing')!r}, this version reads {FORMAT_VERSION}")
    _check_keys(document, FILE_KEYS, FILE_KEYS)
    slots, entries = document["slots"], document["entries"]
    if not isinstance(slots, list) or not slots or not all(isinstance(slot, str) for slot in slots):
        raise ValueError("slots must be a list of at least one name")
    if len(slots) > MAX_SLOTS:
        raise ValueError(f"slots names {len(slots)}, more than {MAX_SLOTS}")
    if len(set(slots)) < len(slots):
        raise ValueError("slots names one twice; name each once")
    if not isinstance(entries, list):
        raise ValueError(f"entries must be a list, got {type(entries).__name__}")
    parsed = []
    for number, entry in enumerate(entries, 1):
        try:
            parsed.append(_parse_entry(entry, slots))
        except ValueError as error:
            raise ValueError(f"entry {number}: {error}") from None
    return Schedule(tuple(slots), tuple(parsed))


def _parse_entry(entry: Any, slots: list[str]) -> ScheduledAction:
    if not isinstance(entry, dict):
        raise ValueError(f"it must hold a tick, an op and a slot, got a {type(entry).__name__}")
    _check_keys(entry, ScheduledAction._fields, ("tick", "op"))
    ops = [op.name for op in Op if op is not Op.WAIT]
    if entry["op"] not in ops:
        raise ValueError(f"op {entry['op']!r} is none of {', '.join(ops)}; between entries hosts wait by themselves")
    heads = [head for head in HEADS if Op[entry["op"]] in RELEVANT_OPS[head]]
    _check_keys(entry, ("tick", *heads), [head for head in heads if head in REQUIRED_FIELDS])
    if type(entry["tick"]) is not int or entry["tick"] < 0:
        raise ValueError(f"tick must be a whole number from 0, got {entry['tick']!r}")
    if entry["slot"] not in slots:
        raise ValueError(
            f"slot {entry['slot']!r} is not among the schedule's slots; {suggest_name(str(entry['slot']), slots)}"
        )
    for head in ("blueprint", "style", "tempo"):
        if head in entry and not isinstance(entry[head], str):
            raise ValueError(f"{head} must be a name, got {entry[head]!r}")
    return ScheduledAction(**entry)


def _check_keys(given: dict[str, Any], known: Sequence[str], required: Sequence[str]) -> None:
    for key in given:
        if key not in known:
            raise ValueError(f"unknown key {key!r}; {suggest_name(key, list(known))}")
    for key in required:
        if key not in given:
            raise ValueError(f"{key} is missing")
