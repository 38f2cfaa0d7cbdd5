"""Records that telemetry keeps of every environment step, and statistics of them over a rollout and over the run.

N hosts, K slots, B blueprints, T ticks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from esper_lightning.envs import HostEvent, HostPool, Op, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.ranks import Ranks
from esper_lightning.telemetry.events import (
    SCHEMA,
    Contributed,
    Event,
    GateRefused,
    HostsMeasured,
    RolledBack,
    SeedChanged,
    Started,
    Vetoed,
)

HOST = np.dtype(
    [
        *((name, "f8") for name in ("score", "loss", "objective", "parameters", "reward")),
        *(("op", "u1"), ("ended", "?"), ("stopped", "?"), ("rolled_back", "?")),
        *(("norm", "f8"), ("health", "f8")),  # of the host's gradient; NaN: none was measured
        ("skipped_steps", "f8"),  # NaN: the host has no loss scale
        *(("suspicious", "f8"), ("rollbacks", "f8")),  # NaN: nothing watches the host
    ]
)
"""Columns of a host."""

SLOT = np.dtype(
    [
        *(("stage", "u1"), ("blueprint", "i2"), ("age", "i4")),  # blueprint -1: the slot is empty
        *(("live", "?"), ("blended", "?")),
        *((name, "f8") for name in ("norm", "health", "contribution")),  # NaN: not measured
        ("gain", "f8"),  # points that a host with this blended seed has gained since it was germinated
    ]
)
"""Columns of a slot."""

GATED_TRANSITIONS = {Stage.TRAINING: Stage.BLENDING, Stage.PROBATIONARY: Stage.FOSSILIZED}
"""Stages that a gate guards the exit of, and the stage that follows each."""

MIN_HOST_GRADIENT_HEALTH = 0.7
"""Least gradient health of a host for a new seed to be counted: below it, the host may be why the seed has none."""

LEAST_SEEDS = 5
"""Least number of a blueprint's seeds in a rollout for a share of them to be told."""


class Tick(NamedTuple):
    """Record of one environment step.

    `hosts`, `slots` and the terms are lists from `observe`, for the hosts of one process, and arrays from `join`, for
    all hosts.
    """

    run_tick: int  # from 1 since the run began
    number: int  # from 1 in each episode
    hosts: Any  # [N] of HOST
    slots: Any  # [N, K] of SLOT
    terms: dict[str, Any]  # [N] each: terms of the reward
    changes: list[SeedChanged]
    refusals: list[GateRefused]  # of gates that are closed now, whether or not they were closed before
    interventions: list[Event]  # rollbacks and vetoes


def started(pool: Any, *, tick: int, hosts: int) -> Started:
    """Return the event with which the events of a pool begin, or of the pools of several tasks."""
    space, flops = pool.space, pool.envs[0].flops
    scores = sorted({each.task.score_name for each in getattr(pool, "pools", {"": pool}).values()})
    names = (list(space.slot), list(space.blueprint), " or ".join(scores))
    return Started(tick, SCHEMA, hosts, pool.horizon, *names, flops.host, flops.behind)


def observe(pool: HostPool, step: StepResult, tick: int, own: Sequence[int] | None = None) -> Tick:
    """Return the record of a step of this process's hosts, all of whose values are on the CPU already.

    `tick` counts from the start of the run. `own` are the numbers of the hosts among those of all processes; None:
    there is one process.
    """
    own = own or range(pool.n_envs)
    blueprints = {None: -1} | {name: b for b, name in enumerate(pool.space.blueprint)}
    diverged = [verdict for verdict in step.verdicts if verdict.verdict.diverged]
    rolled_back = {verdict.host for verdict in diverged}
    columns = zip(*(column.tolist() for column in step.metrics), step.ops.tolist(), strict=True)
    return Tick(
        run_tick=tick,
        number=pool.envs[0].tick,
        hosts=[
            (*numbers, *_host_row(env, i in rolled_back))
            for i, (env, numbers) in enumerate(zip(pool.envs, columns, strict=True))
        ],
        slots=[_slot_rows(env, blueprints) for env in pool.envs],
        terms={name: paid.tolist() for name, paid in step.terms.items()},
        changes=seed_changes(step.events, tick, own),
        refusals=[
            GateRefused(tick, own[i], slot.name, str(slot.blueprint), GATED_TRANSITIONS[slot.stage].name, reasons)
            for i, env in enumerate(pool.envs)
            for slot, reasons in _closed_gates(env, step.refusals[i])
        ],
        interventions=[
            *(
                RolledBack(
                    tick, own[one.host], one.rng_seed, one.verdict.outcome.value, one.verdict.cause, one.restored_tick
                )
                for one in diverged
            ),
            *(Vetoed(tick, own[veto.host], veto.action, veto.reasons) for veto in step.vetoes),
        ],
    )


def _host_row(env: HostEnv, rolled_back: bool) -> tuple[Any, ...]:
    gradient, monitor = env.host_gradient, env.monitor
    state = None if monitor is None else monitor.governor_state
    return (
        *(env.ended, env.stopped, rolled_back),
        *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
        env.skipped_steps if env.loss_scale is not None else np.nan,
        *((np.nan, np.nan) if state is None else (state.consecutive_anomalies > 0, state.rollbacks)),
    )


def _slot_rows(env: HostEnv, blueprints: dict[str | None, int]) -> list[tuple[Any, ...]]:
    rows = []
    for slot, record, before in zip(env.slots, env.records, env.score_at_germination, strict=True):
        gradient, blended = record.gradient, slot.blended
        rows.append(
            (
                *(int(slot.stage), blueprints[slot.blueprint], slot.age, slot.live, blended),
                *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
                np.nan if record.contribution is None else record.contribution,
                100.0 * (env.history.score[-1] - before) if blended else np.nan,
            )
        )
    return rows


def _closed_gates(env: HostEnv, refusals: Sequence[Any]) -> Iterator[tuple[SeedSlot, list[str]]]:
    """Yield the slots whose seed a gate refuses although its minimum time in the stage is over, with the reasons."""
    for slot, refused in zip(env.slots, refusals, strict=True):
        reasons = []
        if slot.stage is Stage.TRAINING and slot.ticks_in_stage >= env.lifecycle.training_ticks:
            reasons = refused.blending
        elif slot.stage is Stage.PROBATIONARY and slot.alpha_before == 1.0:
            reasons = refused.fossilizing
        if reasons and not env.ended:
            yield slot, reasons


def seed_changes(events: Sequence[HostEvent], tick: int, own: Sequence[int]) -> list[SeedChanged]:
    """Return one event for each seed change: a new stage, or that the seed is stuck."""
    return [
        SeedChanged(
            *(tick, own[host], seed.slot, seed.blueprint, seed.before.name, seed.after.name),
            *(seed.cause, seed.age, seed.contribution),
        )
        for host, _, seed in events
    ]


def join(ticks: Sequence[Tick], ranks: Ranks) -> Tick:
    """Return the record of a step of all hosts, as arrays, given the records of all processes."""
    first = ticks[0]
    return Tick(
        run_tick=first.run_tick,
        number=first.number,
        hosts=np.array(ranks.join([one.hosts for one in ticks]), HOST),
        slots=np.array(ranks.join([one.slots for one in ticks]), SLOT),
        terms={name: np.array(ranks.join([one.terms[name] for one in ticks])) for name in first.terms},
        changes=[change for one in ticks for change in one.changes],
        refusals=[refusal for one in ticks for refusal in one.refusals],
        interventions=[event for one in ticks for event in one.interventions],
    )


class SeedStats(NamedTuple):
    """Sums over seeds; each field is an array of one shape."""

    germinated: Any
    fossilized: Any
    culled: Any  # or lost by a rollback
    measured: Any  # fossilized or culled seeds whose contribution was measured
    contribution: Any  # sum of their contributions in points, as they were at that moment

    @property
    def mean_contribution(self) -> Any:
        """Mean contribution of a seed in points; NaN where none was measured."""
        return np.where(self.measured > 0.0, self.contribution / np.maximum(self.measured, 1.0), np.nan)


def count_seed(
    seed: SeedChanged,
    sums: SeedStats,
    last_contributions: np.ndarray,
    *,
    slots: Sequence[str],
    blueprints: Sequence[str],
) -> None:
    """Add a seed that has germinated, or whose fate was decided, to sums [B, K].

    `last_contributions` [N, K] are those of the seeds as last measured, in points; NaN: never.
    """
    before, after = Stage[seed.before], Stage[seed.after]
    k, b = slots.index(seed.slot), blueprints.index(seed.blueprint) if seed.blueprint else -1
    if before is not after and after is Stage.GERMINATED:
        last_contributions[seed.host, k] = np.nan
        sums.germinated[b, k] += 1.0
    elif before in LIVE and after not in LIVE:  # fossilized, culled, or lost by a rollback
        points = last_contributions[seed.host, k] if seed.contribution is None else seed.contribution
        if np.isfinite(points):
            sums.measured[b, k] += 1.0
            sums.contribution[b, k] += points
        (sums.fossilized if after is Stage.FOSSILIZED else sums.culled)[b, k] += 1.0


TRACED = ("op", "stage", "rolled_back")
ARRAYS = {
    "earlier": "sums_of_earlier_rollouts",
    "sums": "sums_of_rollout",
    **{name: name for name in ("refused", "last_contributions", "silent", "born", "dead", "health")},
}
"""Attributes of an observer that are saved, by their key in a checkpoint; of a trace, all that are in `TRACED`."""


class Trace:
    """One episode of every host for pictures: op, stages and rollbacks by tick."""

    def __init__(self, ticks: int, n_envs: int, slots: int) -> None:
        self.length = 0
        self.op = np.zeros((ticks, n_envs), np.uint8)
        self.stage = np.zeros((ticks, n_envs, slots), np.uint8)  # after the tick
        self.rolled_back = np.zeros((ticks, n_envs), bool)

    def update(self, tick: int, hosts: Any, slots: Any) -> None:
        """Record an environment step, counted from 1 in each episode; see `HOST` and `SLOT`."""
        self.length = tick
        self.op[tick - 1], self.rolled_back[tick - 1] = hosts["op"], hosts["rolled_back"]
        self.stage[tick - 1] = slots["stage"]


class Observer:
    """Collects statistics of all hosts, their seeds and the actions applied to them.

    Args:
        slots, blueprints: Names, in the order of all tables.
        horizon: Ticks T of an episode.
        n_envs: Number N of hosts, over all processes.
    """

    def __init__(self, slots: Sequence[str], blueprints: Sequence[str], *, horizon: int, n_envs: int) -> None:
        self.slots, self.blueprints, self.horizon, self.n_envs = list(slots), list(blueprints), horizon, n_envs
        self.sums_of_earlier_rollouts = np.zeros((len(SeedStats._fields), len(blueprints), len(slots)))
        # The next stage of each seed, which the gate refuses; 0: the gate is open.
        self.refused = np.zeros((n_envs, len(slots)), np.uint8)
        self._begin_rollout()

    def _begin_rollout(self) -> None:
        self.seen = 0  # ticks of this rollout that were observed
        self.trace = Trace(self.horizon, self.n_envs, len(self.slots))
        self.sums_of_rollout = np.zeros_like(self.sums_of_earlier_rollouts)
        # Contribution of each seed as last measured; NaN: never
        self.last_contributions = np.full((self.n_envs, len(self.slots)), np.nan)
        self.silent = np.full((self.n_envs, len(self.slots)), -1)  # blueprint of a seed that never had a gradient
        self.born, self.dead = np.zeros((2, len(self.blueprints)))  # seeds, and silent ones that were replaced
        self.health = np.zeros(2)  # sum of the hosts' gradient health, and number of measurements
        self.terms: dict[str, float] = {}  # sums of the reward's terms, means over hosts

    @property
    def is_complete(self) -> bool:
        """True if every tick of the episode so far was observed."""
        return self.seen == self.trace.length

    def update(self, tick: Tick) -> list[Event]:
        """Add one environment step to the statistics.

        Returns its events: seed changes, new refusals of gates, contributions, rollbacks, vetoes and measurements. The
        first tick of an episode begins a new rollout.
        """
        if tick.number == 1:
            self.sums_of_earlier_rollouts += self.sums_of_rollout
            self._begin_rollout()
        self.seen += 1
        self.trace.update(tick.number, tick.hosts, tick.slots)
        for change in tick.changes:
            sums = SeedStats(*self.sums_of_rollout)  # views
            count_seed(change, sums, self.last_contributions, slots=self.slots, blueprints=self.blueprints)
        slots = tick.slots
        known = slots["blended"] & ~np.isnan(slots["contribution"])
        self.last_contributions = np.where(known, slots["contribution"], self.last_contributions)
        self._watch_gradients(tick)
        for name, paid in tick.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + float(paid.mean())
        events = [*tick.changes, *self._refusals(tick), *contributions(tick, self.slots), *tick.interventions]
        return [*events, measurements(tick)]

    def _watch_gradients(self, tick: Tick) -> None:
        """Find seeds that have had no gradient since they were germinated in this rollout."""
        hosts, slots = tick.hosts, tick.slots
        watched = ~hosts["ended"] & ~np.isnan(hosts["health"])
        self.health += hosts["health"][watched].sum(), watched.sum()
        measured = watched[:, None] & slots["live"] & ~np.isnan(slots["health"])
        new = measured & (slots["age"] == 1)
        np.add.at(self.dead, self.silent[new & (self.silent >= 0)], 1.0)
        counted = new & (hosts["health"] >= MIN_HOST_GRADIENT_HEALTH)[:, None]
        np.add.at(self.born, slots["blueprint"][counted], 1.0)
        self.silent[new] = -1
        self.silent[counted] = slots["blueprint"][counted]
        self.silent[measured & (slots["norm"] != 0.0)] = -1  # NaN is not the absence of a gradient

    def _refusals(self, tick: Tick) -> list[Event]:
        """Return the closed gates that were not closed one tick ago.

        No action is needed: a gate counts as closed while it keeps a seed from its next stage after the minimum time. A
        gate that stays closed is reported once; it is reported again after it has opened, and in the first tick of an
        episode.
        """
        before, self.refused = self.refused, np.zeros_like(self.refused)
        events: list[Event] = []
        for refusal in tick.refusals:
            place, stage = (refusal.host, self.slots.index(refusal.slot)), Stage[refusal.stage]
            self.refused[place] = stage
            if before[place] != stage or tick.number == 1:
                events.append(refusal)
        return events

    @property
    def run_stats(self) -> SeedStats:
        """Statistics since the run began, arrays [B, K]."""
        return SeedStats(*(self.sums_of_earlier_rollouts + self.sums_of_rollout))

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a finished rollout by tag; undefined ones are left out."""
        found = {f"rollout/reward.{name}": paid for name, paid in self.terms.items() if self.seen == self.horizon}
        if self.health[1]:
            found["rollout/gradient_health"] = self.health[0] / self.health[1]
        silent = self.dead + np.bincount(self.silent[self.silent >= 0], minlength=len(self.blueprints))
        of_blueprint = SeedStats(*self.sums_of_rollout.sum(2))  # [B]
        for b, name in enumerate(self.blueprints):
            if self.born[b] >= LEAST_SEEDS:
                found[f"rollout/dead_seeds.{name}"] = silent[b] / self.born[b]
            found[f"blueprint/{name}/germinated"] = of_blueprint.germinated[b] / self.n_envs
            found[f"blueprint/{name}/kept"] = of_blueprint.fossilized[b] / self.n_envs
            if of_blueprint.germinated[b] > 0.0:
                found[f"blueprint/{name}/churn"] = of_blueprint.culled[b] / of_blueprint.germinated[b]
            if of_blueprint.measured[b] > 0.0:
                found[f"blueprint/{name}/contribution"] = of_blueprint.mean_contribution[b]
        return {tag: float(value) for tag, value in found.items()}

    def state_dict(self) -> dict[str, Any]:
        trace = {name: torch.from_numpy(getattr(self.trace, name).copy()) for name in TRACED}
        own = {key: torch.from_numpy(getattr(self, name).copy()) for key, name in ARRAYS.items()}
        return trace | own | {"terms": dict(self.terms), "ticks": [self.seen, self.trace.length]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; with other hosts only the sums of finished rollouts, since episodes then start again."""
        self.sums_of_earlier_rollouts[:] = state["earlier"]
        seen, length = state["ticks"]
        if state["op"].shape == self.trace.op.shape:
            for name in TRACED:
                getattr(self.trace, name)[:] = state[name]
            for key, name in ARRAYS.items():
                getattr(self, name)[:] = state[key]
            self.terms, self.seen, self.trace.length = dict(state["terms"]), seen, length
        elif length == len(state["op"]):
            self.sums_of_earlier_rollouts += state["sums"].numpy()


def measurements(tick: Tick) -> HostsMeasured:
    """Return one event with the measurements of all hosts, rounded: there is one in every tick."""
    score, loss, objective = (np.round(tick.hosts[name], 4).tolist() for name in ("score", "loss", "objective"))
    parameters = tick.hosts["parameters"].astype(int).tolist()
    return HostsMeasured(tick.run_tick, [Op(op).name for op in tick.hosts["op"]], score, loss, objective, parameters)


def contributions(tick: Tick, slots: Sequence[str]) -> list[Event]:
    """Return one event with the contributions of the blended seeds that have one; no event if there are none."""
    of_slots = tick.slots
    known = of_slots["blended"] & ~np.isnan(of_slots["contribution"]) & ~tick.hosts["ended"][:, None]
    hosts, places = np.nonzero(known)
    points = of_slots["contribution"][known].tolist()
    return [Contributed(tick.run_tick, hosts.tolist(), [slots[k] for k in places.tolist()], points)] if points else []
