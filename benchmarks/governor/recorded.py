"""Judgements of the Governor on recorded hosts, unchanged and with injected faults."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import NamedTuple

from benchmarks.governor.kinds import DETECTION_TICKS, KINDS, DetectionCount, show
from benchmarks.governor.traces import CONTROLLERS, EPISODES, GovernorInput, Trace
from esper_lightning.envs.governor import GovernorConfig, HostMonitor


def first_rollback(trace: Trace, ticks: Sequence[GovernorInput], config: GovernorConfig) -> tuple[int, str] | None:
    """Return the tick (from 0) and the cause of the first rollback by the Governor, or None."""
    guard = HostMonitor(config, chance_loss=trace.chance, steps_per_epoch=trace.steps)
    for i, seen in enumerate(ticks):
        verdict = guard.judge(*seen)
        if verdict.outcome.diverged:
            return i, verdict.cause
    return None


def replace_losses(ticks: Sequence[GovernorInput], begin: int, losses: Sequence[float]) -> list[GovernorInput]:
    """Return a copy of `ticks` with the given losses from tick `begin` on."""
    changed = list(ticks)
    for i, loss in enumerate(losses, begin):
        changed[i] = ticks[i]._replace(reading=ticks[i].reading._replace(loss=loss))
    return changed


class Fault(NamedTuple):
    """A fault that is injected into a trace."""

    name: str
    inject: Callable[
        [Trace, int, random.Random], list[GovernorInput] | None
    ]  # returns None where the fault is not applicable
    within: int  # number of ticks within which it should be detected; 0: it should not be detected


def normal_loss(trace: Trace, tick: int) -> float:
    """Return the normal loss at a tick: the mean of the three ticks before it."""
    return fmean(seen.loss for seen in trace.ticks[tick - 3 : tick])


def inject_value(value: float, field: str, trace: Trace, tick: int, _: random.Random) -> list[GovernorInput]:
    """Replace a field of one tick by NaN or infinity."""
    ticks = list(trace.ticks)
    wrong = (value,) if field == "gradient_norms" else value
    ticks[tick] = ticks[tick]._replace(reading=ticks[tick].reading._replace(**{field: wrong}))
    return ticks


def inject_spike(factor: float, length: int | None, trace: Trace, tick: int, rng: random.Random) -> list[GovernorInput]:
    """Set the loss to `factor` times the normal one, ± 5 %, for `length` ticks (None: to the end)."""
    normal, length = normal_loss(trace, tick), length or len(trace.ticks) - tick
    losses = [factor * normal * rng.uniform(0.95, 1.05) for _ in range(length)]
    return replace_losses(trace.ticks, tick, losses)


def inject_collapse(trace: Trace, tick: int, rng: random.Random) -> list[GovernorInput] | None:
    """Set the loss to that of guessing, ± 3 %, or return None for a host that has not learned yet."""
    if normal_loss(trace, tick) > 0.6 * trace.chance:
        return None
    losses = [trace.chance * rng.uniform(0.97, 1.03) for _ in trace.ticks[tick:]]
    return replace_losses(trace.ticks, tick, losses)


FACTORS = (3, 5, 10, 30, 100)
"""Heights of spikes, as multiples of the normal loss."""

FAULTS = [
    *(
        Fault(f"{name} {value}", partial(inject_value, value, field), 1)
        for field, name in (("loss", "loss"), ("train_loss", "training loss"), ("gradient_norms", "gradient's norm"))
        for value in (math.nan, math.inf)
    ),
    *(Fault(f"spike of {factor} ×, held", partial(inject_spike, factor, None), DETECTION_TICKS) for factor in FACTORS),
    Fault("collapse to guessing, held", inject_collapse, DETECTION_TICKS),
    *(
        Fault(f"spike of {factor} ×, {length} tick{'s'[: length - 1]}", partial(inject_spike, factor, length), 0)
        for length, factor in product((1, 2), FACTORS)
    ),
]


def count_detections(
    fault: Fault, traces: Sequence[Trace], config: GovernorConfig, rng: random.Random
) -> dict[tuple[int, bool], DetectionCount]:
    """Inject a fault into each trace at a random tick and count how often the Governor detects it in time.

    For faults that should not be detected (`within` 0) any later rollback counts. Traces have no rollback. Counts are
    by horizon, and by whether a seed's alpha fell between three ticks before and two ticks after.
    """
    counts: dict[tuple[int, bool], DetectionCount] = defaultdict(lambda: DetectionCount(0, 0))
    for trace in traces:
        tick = rng.randrange(3, len(trace.ticks) - 2)
        changed = fault.inject(trace, tick, rng)
        if changed is None:
            continue
        where = first_rollback(trace, changed, config)
        last = tick + fault.within - 1 if fault.within else len(trace.ticks)
        moved = any(trace.weight_lost[max(0, tick - 3) : tick + 3])
        key = trace.horizon, moved
        counts[key] = counts[key].add(where is not None and tick <= where[0] <= last)
    return counts


def judge_recorded(traces: Sequence[Trace], config: GovernorConfig, markdown: bool) -> None:
    """Print false rollbacks of healthy hosts, and detected faults in copies of their traces."""
    healthy = [trace for trace in traces if trace.healthy]
    false_positives = {id(trace): first_rollback(trace, trace.ticks, config) for trace in healthy}
    rows = []
    for kind, controller in [*((kind, None) for kind in KINDS), *((None, one) for one in CONTROLLERS), (None, None)]:
        row = [kind or controller or "all"]
        for horizon in (*EPISODES, None):
            among = [
                trace
                for trace in traces
                if kind in (None, trace.kind) and controller in (None, trace.controller)
                and horizon in (None, trace.horizon)
            ]  # fmt: skip
            healthy_among = [trace for trace in among if trace.healthy]
            row += [
                len(among) - len(healthy_among),
                DetectionCount(
                    sum(false_positives[id(trace)] is not None for trace in healthy_among), len(healthy_among)
                ),
            ]
        rows.append(row)
    spans = [f"{horizon} ticks" for horizon in EPISODES] + ["both"]
    columns = [part for span in spans for part in (f"{span}: not healthy", "rolled back of healthy")]
    show("Undisturbed hosts", ["hosts", *columns], rows, markdown)
    for trace in healthy:
        if false_positives[id(trace)] is not None:
            tick, cause = false_positives[id(trace)]
            around = " ".join(f"{seen.loss:.2f}" for seen in trace.ticks[max(0, tick - 5) : tick + 4])
            print(f"  {trace.kind}, {trace.controller}, tick {tick + 1} of {trace.horizon}: {cause}; … {around} …")
    unhealthy = [trace for trace in traces if not trace.healthy]
    rolled_back = sum(first_rollback(trace, trace.ticks, config) is not None for trace in unhealthy)
    print(f"of {len(unhealthy)} unhealthy hosts {rolled_back} would have been rolled back")
    clean, rng = [trace for trace in healthy if false_positives[id(trace)] is None], random.Random(0)
    columns = ["injected", "should be found", *(f"{horizon} ticks" for horizon in EPISODES), "where a seed lost weight"]
    rows = []
    for fault in FAULTS:
        counts = count_detections(fault, clean, config, rng)
        calm = [counts[horizon, False] for horizon in EPISODES]
        moved = [counts[horizon, True] for horizon in EPISODES]
        within = {0: "never", 1: "at once"}.get(fault.within, f"in {fault.within} ticks")
        rows.append([fault.name, within, *calm, DetectionCount(*map(sum, zip(*moved, strict=True)))])
    show("Faults injected into recorded traces", columns, rows, markdown)
