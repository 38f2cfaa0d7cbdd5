"""Schedules: actions by tick, with names instead of indices. Their JSON files, and controllers that play them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import HEADS, Action, ActionSpace, Op
from esper_lightning.envs.actions import RELEVANT_OPS, to_action
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.growth.blueprints import suggest_name
from esper_lightning.runtime.serialization import replace_file

FORMAT_VERSION = 1
"""Version of the file format; other versions are refused."""


class ScheduledAction(NamedTuple):
    """One scheduled action.

    Heads that the op does not use are None; other heads that are None take the pool's first choice.
    """

    tick: int
    """Host epochs completed when the action is due; 0 is before the first one."""
    op: str
    slot: str
    blueprint: str | None = None
    tempo: str | None = None

    def __str__(self) -> str:
        return f"tick {self.tick}: {' '.join(str(value) for value in self[1:] if value is not None)}"


class Schedule(NamedTuple):
    """Scheduled actions of one host in an episode."""

    slots: tuple[str, ...]
    """Names of the slots of the hosts that the schedule fits."""
    entries: tuple[ScheduledAction, ...]
    """Actions in order of priority: if several are due, the first is carried out first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self.entries)) or "nothing is ever grown"


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    entries = [{name: value for name, value in e._asdict().items() if value is not None} for e in schedule.entries]
    document = {"format": FORMAT_VERSION, "slots": list(schedule.slots), "entries": entries}
    replace_file(Path(path), lambda draft: draft.write_text(json.dumps(document, indent=1) + "\n"))


def read_schedule(path: str | Path) -> Schedule:
    """Read a schedule file. Raises ValueError, naming the file and the entry, if it cannot be read."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["format"] != FORMAT_VERSION:
            raise ValueError(f"format is {document['format']!r}, this version reads {FORMAT_VERSION}")
        slots = document["slots"]
        entries = tuple(_read_entry(f"entry {i}", entry, slots) for i, entry in enumerate(document["entries"], 1))
    except OSError as error:
        raise ValueError(f"schedule {path} cannot be read: {error.strerror}") from None
    except (LookupError, TypeError, AttributeError):
        raise ValueError(f"schedule {path} must hold format, slots and entries, as `write_schedule` writes") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"schedule {path}: {error}") from None
    return Schedule(tuple(slots), entries)


def _read_entry(where: str, entry: dict[str, Any], slots: list[str]) -> ScheduledAction:
    """Return the action of an entry of a file. Raises ValueError, which begins with `where`, if it is not valid."""
    ops = [op.name for op in Op if op is not Op.WAIT]
    if entry.get("op") not in ops:
        raise ValueError(f"{where}: op {entry.get('op')!r} is none of {', '.join(ops)}; between entries hosts wait")
    fields = ["tick", *(head for head in HEADS if Op[entry["op"]] in RELEVANT_OPS[head])]
    for name in entry:
        if name not in fields:
            raise ValueError(f"{where}: unknown key {name!r}; {suggest_name(name, fields)}")
    for name in fields:
        if name not in (*entry, "tempo"):
            raise ValueError(f"{where}: {name} is missing")
    if type(entry["tick"]) is not int or entry["tick"] < 0:
        raise ValueError(f"{where}: tick must be a whole number from 0, got {entry['tick']!r}")
    if entry["slot"] not in slots:
        raise ValueError(f"{where}: there is no slot {entry['slot']!r}; {suggest_name(str(entry['slot']), slots)}")
    return ScheduledAction(**entry)


def actions_by_tick(schedule: Schedule, pool: Hosts) -> list[tuple[int, tuple[int, ...]]]:
    """Return tick and action, as one index per head, of every entry, ordered by tick.

    Raises ValueError, naming the entry, if the schedule does not fit the pool's hosts.
    """
    if list(schedule.slots) != pool.space.slot:
        raise ValueError(
            f"the schedule is for hosts with slots {list(schedule.slots)}, these have {pool.space.slot}; name one of "
            f"these hosts"
        )
    due_actions = []
    for number, entry in enumerate(schedule.entries, 1):
        where = f"entry {number} of the schedule ({entry})"
        if entry.tick >= (horizon := pool.config.horizon):
            raise ValueError(f"{where}: an episode has {horizon} ticks, 0 to {horizon - 1}; name an earlier tick")
        action = []
        for head, choices in zip(HEADS, pool.space, strict=True):
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


def is_possible(pool: Hosts, host: int, action: Sequence[int]) -> bool:
    """Return True if the pool would carry out the action now: the masks and the Governor both allow it."""
    return pool.masks_on_cpu.allows(host, action) and not pool.envs[host].refusal_reasons(action)


class FixedSchedule:
    """Plays a schedule, one for all hosts or one per host, whatever the state of the host.

    Each tick carries out the first action that is due and possible; earlier ones for the same slot are then dropped.
    """

    def __init__(self, schedules: Schedule | Sequence[Schedule]) -> None:
        self.schedules = schedules

    def reset(self, pool: Hosts) -> None:
        if isinstance(self.schedules, Schedule):  # the lists are replaced, never changed
            self.remaining = [actions_by_tick(self.schedules, pool)] * pool.n_envs
            return
        if len(self.schedules) != pool.n_envs:
            raise ValueError(f"there are {len(self.schedules)} schedules for {pool.n_envs} hosts; give one for each")
        self.remaining = [actions_by_tick(schedule, pool) for schedule in self.schedules]

    def act(self, pool: Hosts) -> Action:
        return to_action([self._choose(pool, host, due) for host, due in enumerate(self.remaining)], pool.device)

    def _choose(self, pool: Hosts, host: int, remaining: list[tuple[int, tuple[int, ...]]]) -> tuple[int, ...]:
        """Return the action on a host, an index per head, given tick and action of each remaining entry."""
        slot = HEADS.index("slot")
        for i, (tick, action) in enumerate(remaining):
            if tick > pool.envs[host].tick:
                break
            if is_possible(pool, host, action):
                on_other_slots = [(due, other) for due, other in remaining[:i] if other[slot] != action[slot]]
                self.remaining[host] = on_other_slots + remaining[i + 1 :]
                return action
        return WAIT_ACTION

    def state_dict(self) -> dict[str, Any]:
        """Remaining actions of each host, for an episode that is continued later."""
        return {"remaining": list(self.remaining)}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.remaining = list(state["remaining"])


def recorded_schedules(space: ActionSpace, actions: np.ndarray) -> list[Schedule]:  # actions [T, heads, H]
    """Return the actions of an episode as one schedule per host."""
    schedules = []
    for actions_on_host in actions.transpose(2, 0, 1).tolist():  # [T, heads]
        entries = []
        for tick, indices in enumerate(actions_on_host):
            op = Op(indices[HEADS.index("op")])
            if op is not Op.WAIT:
                choices = space.decode(indices)._asdict().items()
                used = {head: choice for head, choice in choices if op in RELEVANT_OPS[head]}
                entries.append(ScheduledAction(tick, **used))
        schedules.append(Schedule(tuple(space.slot), tuple(entries)))
    return schedules


def yoke_schedules(schedules: Sequence[Schedule], kinds: Sequence[str], prices: Sequence[float]) -> list[Schedule]:
    """Return for each host the schedule of the next host of its kind by price; for the last one, of the first."""
    assigned = list(schedules)
    for kind in set(kinds):
        of_kind = sorted((host for host, other in enumerate(kinds) if other == kind), key=lambda host: prices[host])
        for host, following in zip(of_kind, of_kind[1:] + of_kind[:1], strict=True):
            assigned[host] = schedules[following]
    return assigned
