"""Telemetry of several ranks as one: events, metrics and the state of the observer of all hosts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from esper_lightning.ranks import Ranks
from esper_lightning.telemetry.events import Contributed, Event, GateRefused, SeedChanged

SUMMED = ("governor/", "hosts/skipped_steps", "time/samples_per_second.")
"""Beginnings of the tags that are sums over hosts."""

OF_THE_FIRST = ("time/", "memory/", "telemetry/", "train/", "policy/", "rollout/return")
"""Beginnings of the tags that describe rank 0, or that have the same value on all ranks."""

KINDS = (SeedChanged, GateRefused, Contributed)
"""Kinds of events of a step, in the order in which they are written, before all others."""

TRACED = ("op", "stage", "alpha", "rolled_back")
"""Parts of an episode's trace with a column per host."""


def with_global_hosts(events: Iterable[Event], own: Sequence[int]) -> list[Event]:
    """Return the events of one rank with the indices of its hosts among those of all ranks.

    Args:
        events: Events with the indices of hosts in the pool of their rank.
        own: Index of each host of that pool among those of all ranks.
    """

    def renamed(event: Any) -> Any:
        if "host" not in event._fields:
            return event
        hosts = event.host
        return event._replace(host=[own[host] for host in hosts] if isinstance(hosts, list) else own[hosts])

    return [renamed(event) for event in events]


def join_events(of_ranks: Sequence[Sequence[Event]]) -> list[Event]:
    """Return the events of one step of all hosts, given those of the ranks: by kind, contributions in one event."""
    events = [event for of_rank in of_ranks for event in of_rank]
    contributions = [event for event in events if isinstance(event, Contributed)]
    if len(contributions) < 2:
        return sorted(events, key=_kind)
    rows = [row for event in contributions for row in zip(event.host, event.slot, event.points, strict=True)]
    rows.sort(key=itemgetter(0))  # by host
    joined = Contributed(contributions[0].tick, *map(list, zip(*rows, strict=True)))
    return sorted([*(event for event in events if not isinstance(event, Contributed)), joined], key=_kind)


def _kind(event: Event) -> int:
    return KINDS.index(type(event)) if type(event) in KINDS else len(KINDS)


def metrics_over_ranks(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return metrics of all hosts by tag, given those of the hosts of each rank.

    Ranks have equal numbers of hosts, so the mean over ranks of a mean over hosts is the mean over all hosts. Of a mean
    over seeds or actions, whose numbers differ between ranks, it is close to that.
    """
    if len(of_ranks) == 1:
        return dict(of_ranks[0])
    columns: dict[str, list[float]] = {}
    for metrics in of_ranks:
        for tag, value in metrics.items():
            columns.setdefault(tag, []).append(value)
    found = {}
    for tag, values in columns.items():
        if tag.startswith(SUMMED):
            found[tag] = sum(values)
        else:
            found[tag] = values[0] if tag.startswith(OF_THE_FIRST) else sum(values) / len(values)
    return found


def join_observers(states: Sequence[dict[str, Any]], ranks: Ranks) -> dict[str, Any]:
    """Return the state of an `Observer` of all hosts, given those of the ranks."""
    if len(states) == 1:
        return states[0]
    first = states[0]
    owned = [ranks.own_of(rank) for rank in range(ranks.world)]
    gradients = [state["gradients"] for state in states]
    boards, traces = ([state[part] for state in states] for part in ("scoreboard", "trace"))
    counted = {name: dict(sum((Counter(one[name]) for one in gradients), Counter())) for name in ("born", "gone")}
    summed = {name: sum(one[name] for one in gradients) for name in ("health", "host_ticks")}
    return {
        "gradients": counted
        | summed
        | {
            "silent": [
                [own[host], *seed] for own, one in zip(owned, gradients, strict=True) for host, *seed in one["silent"]
            ]
        },
        "scoreboard": {name: torch.stack([board[name] for board in boards]).sum(0) for name in ("sums", "stages")}
        | {"last_contributions": ranks.join([board["last_contributions"] for board in boards])},
        "trace": first["trace"] | {name: ranks.join([trace[name] for trace in traces], 1) for name in TRACED},
        "gates": [
            [own[host], *refusal] for own, state in zip(owned, states, strict=True) for host, *refusal in state["gates"]
        ],
    }


def split_observer(state: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return the part of one rank in the state of an `Observer` of all hosts; sums are the part of rank 0.

    Of a state with another number of hosts only the sums are left.
    """
    if ranks.world == 1:
        return state
    places = {host: place for place, host in enumerate(ranks.own)}
    gradients, board, trace = state["gradients"], state["scoreboard"], state["trace"]
    fits = len(board["last_contributions"]) == ranks.total

    def rows(part: torch.Tensor, axis: int) -> torch.Tensor:
        return ranks.rows(part, axis) if fits and part.shape[axis] == ranks.total else part.narrow(axis, 0, 0)

    def own_rows(of_all: list[list[Any]]) -> list[list[Any]]:
        return [[places[host], *rest] for host, *rest in of_all if fits and host in places]

    if ranks.rank > 0:
        gradients = gradients | {"born": {}, "gone": {}, "health": 0.0, "host_ticks": 0}
        board = board | {name: torch.zeros_like(board[name]) for name in ("sums", "stages")}
    return {
        "gradients": gradients | {"silent": own_rows(gradients["silent"])},
        "scoreboard": board | {"last_contributions": rows(board["last_contributions"], 0)},
        "trace": trace | {name: rows(trace[name], 1) for name in TRACED},
        "gates": own_rows(state["gates"]),
    }
