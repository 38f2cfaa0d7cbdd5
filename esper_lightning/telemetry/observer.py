"""Records that telemetry keeps of every environment step, and statistics of them over a rollout and over the run.

N hosts, K slots, B blueprints, T ticks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from esper_lightning.envs import HostPool, MixedPool, Op, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.runtime.ranks import Ranks
from esper_lightning.telemetry.events import SCHEMA, Contributed, Event, GateRefused, HostsMeasured, Started

HOST = np.dtype(
    [
        *((name, "f8") for name in ("score", "loss", "objective", "parameters", "reward")),
        *(("op", "u1"), ("ended", "?"), ("stopped", "?")),
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
    events: list[Any]  # of seeds and of the Governor, and of gates that are closed now, whenever they closed


def started(pool: Any, *, tick: int, hosts: int) -> Started:
    """Return the first event of a run on a pool of hosts, or on the pools of several tasks."""
    pools = pool.pools.values() if isinstance(pool, MixedPool) else [pool]
    flops = pool.envs[0].flops
    return Started(
        *(tick, SCHEMA, hosts, pool.horizon),
        slots=list(pool.space.slot),
        blueprints=list(pool.space.blueprint),
        score=" or ".join(sorted({of_task.task.score_name for of_task in pools})),
        flops=flops.host,
        behind=flops.behind,
    )


def observe(pool: HostPool, step: StepResult, tick: int, host_numbers: Sequence[int] | None = None) -> Tick:
    """Return the record of a step of this process's hosts, all of whose values are on the CPU already.

    `tick` counts from the start of the run. `host_numbers` are the numbers of the hosts among those of all processes;
    None: there is one process.
    """
    host_numbers = host_numbers or range(pool.n_envs)
    blueprints = {None: -1} | {name: b for b, name in enumerate(pool.space.blueprint)}
    diverged = [verdict for verdict in step.verdicts if verdict.decision.diverged]
    events = (*step.events, *diverged, *step.vetoes, *_closed_gates(pool.envs, step))
    measurements = zip(*(column.tolist() for column in step.metrics), step.ops.tolist(), strict=True)
    return Tick(
        run_tick=tick,
        number=pool.envs[0].tick,
        hosts=[(*measured, *_host_row(env)) for env, measured in zip(pool.envs, measurements, strict=True)],
        slots=[_slot_rows(env, blueprints) for env in pool.envs],
        terms={name: paid.tolist() for name, paid in step.terms.items()},
        events=[event._replace(tick=tick, host=host_numbers[event.host]) for event in events],
    )


def _host_row(env: HostEnv) -> tuple[Any, ...]:
    """Return the columns of `HOST` for a host, from `ended` on."""
    gradient, monitor = env.host_gradient, env.monitor
    state = None if monitor is None else monitor.governor_state
    return (
        *(env.ended, env.stopped),
        *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
        env.skipped_steps if env.loss_scale is not None else np.nan,
        *((np.nan, np.nan) if state is None else (state.consecutive_anomalies > 0, state.rollbacks)),
    )


def _slot_rows(env: HostEnv, blueprints: dict[str | None, int]) -> list[tuple[Any, ...]]:
    """Return the columns of `SLOT` for each slot of a host, given the index of each blueprint by name."""
    rows = []
    for slot, record, score_before in zip(env.slots, env.records, env.score_at_germination, strict=True):
        gradient, blended = record.gradient, slot.blended
        # Points of the score since germination, which a seed can have caused only while it is blended.
        gain = 100.0 * (env.history.score[-1] - score_before) if blended else np.nan
        rows.append(
            (
                *(int(slot.stage), blueprints[slot.blueprint], slot.age, slot.live, blended),
                *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
                np.nan if record.contribution is None else record.contribution,
                gain,
            )
        )
    return rows


def _closed_gates(envs: Sequence[HostEnv], step: StepResult) -> Iterator[GateRefused]:
    """Yield an event for each seed that a gate refuses although its minimum time in the stage is over."""
    for host, env in enumerate(envs):
        for slot, refusals in zip(env.slots, step.refusals[host], strict=True):
            reasons, next_stage = [], Stage.BLENDING
            if slot.stage is Stage.TRAINING and slot.ticks_in_stage >= env.lifecycle.training_ticks:
                reasons = refusals.blending
            elif slot.stage is Stage.PROBATIONARY and slot.alpha_before == 1.0:
                reasons, next_stage = refusals.fossilizing, Stage.FOSSILIZED
            if reasons and not env.ended:
                yield GateRefused(env.tick, host, slot.name, str(slot.blueprint), stage=next_stage, reasons=reasons)


def join(ticks: Sequence[Tick], ranks: Ranks) -> Tick:
    """Return the record of a step of all hosts, as arrays, given the records of all processes."""
    first = ticks[0]
    return Tick(
        run_tick=first.run_tick,
        number=first.number,
        hosts=np.array(ranks.join([tick.hosts for tick in ticks]), HOST),
        slots=np.array(ranks.join([tick.slots for tick in ticks]), SLOT),
        terms={name: np.array(ranks.join([tick.terms[name] for tick in ticks])) for name in first.terms},
        events=[event for tick in ticks for event in tick.events],
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
    seed: SeedEvent, sums: SeedStats, last_contributions: np.ndarray, *, slots: Sequence[str], blueprints: Sequence[str]
) -> None:
    """Add a seed that has germinated, or whose fate was decided, to sums [B, K].

    `last_contributions` [N, K] are those of the seeds as last measured, in points; NaN: never.
    """
    before, after = seed.before, seed.after
    k = slots.index(seed.slot)
    cell = (blueprints.index(seed.blueprint) if seed.blueprint else -1, k)
    if before is not after and after is Stage.GERMINATED:
        last_contributions[seed.host, k] = np.nan
        sums.germinated[cell] += 1.0
    elif before in LIVE and after not in LIVE:  # fossilized, culled, or lost by a rollback
        points = last_contributions[seed.host, k] if seed.contribution is None else seed.contribution
        if np.isfinite(points):
            sums.measured[cell] += 1.0
            sums.contribution[cell] += points
        (sums.fossilized if after is Stage.FOSSILIZED else sums.culled)[cell] += 1.0


ARRAYS = ("sums", "refused", "last_contributions", "silent", "born", "dead", "health")
"""Attributes of an observer that a checkpoint holds."""


class Observer:
    """Collects statistics of all hosts, their seeds and the actions applied to them.

    Args:
        slots, blueprints: Names, in the order of all tables.
        horizon: Ticks T of an episode.
        n_envs: Number N of hosts, over all processes.
    """

    def __init__(self, slots: Sequence[str], blueprints: Sequence[str], *, horizon: int, n_envs: int) -> None:
        self.slots, self.blueprints, self.horizon, self.n_envs = list(slots), list(blueprints), horizon, n_envs
        # The next stage of each seed, which the gate refuses; 0: the gate is open.
        self.refused = np.zeros((n_envs, len(slots)), np.uint8)
        self._begin_rollout()

    def _begin_rollout(self) -> None:
        self.seen = 0  # ticks of this rollout that were observed
        self.sums = np.zeros((len(SeedStats._fields), len(self.blueprints), len(self.slots)))  # of this rollout
        # Contribution of each seed as last measured; NaN: never
        self.last_contributions = np.full((self.n_envs, len(self.slots)), np.nan)
        # Blueprint of the seed in each slot, if it has had no gradient since this rollout began with it; else -1.
        self.silent = np.full((self.n_envs, len(self.slots)), -1)
        # By blueprint: new seeds in hosts with gradients, and those of them that were silent until they were replaced.
        self.born, self.dead = np.zeros((2, len(self.blueprints)))
        self.health = np.zeros(2)  # sum of the hosts' gradient health, and number of measurements
        self.terms: dict[str, float] = {}  # sums of the reward's terms, means over hosts

    def update(self, tick: Tick) -> list[Event]:
        """Add one environment step to the statistics.

        Returns its events: seed changes, new refusals of gates, contributions, rollbacks, vetoes and measurements. The
        first tick of an episode begins a new rollout.
        """
        if tick.number == 1:
            self._begin_rollout()
        self.seen += 1
        for event in tick.events:
            if isinstance(event, SeedEvent):
                sums = SeedStats(*self.sums)  # views
                count_seed(event, sums, self.last_contributions, slots=self.slots, blueprints=self.blueprints)
        contributions = tick.slots["contribution"]
        measured = tick.slots["blended"] & ~np.isnan(contributions)  # [N, K]
        self.last_contributions = np.where(measured, contributions, self.last_contributions)
        self._watch_gradients(tick)
        for name, paid in tick.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + float(paid.mean())
        events = self._new_events(tick)
        measured &= ~tick.hosts["ended"][:, None]
        if measured.any():
            hosts, slots = np.nonzero(measured)
            names = [self.slots[k] for k in slots.tolist()]
            events.append(Contributed(tick.run_tick, hosts.tolist(), names, points=contributions[measured].tolist()))
        # Rounded, since there is one such event in every tick.
        rounded = {name: np.round(tick.hosts[name], 4).tolist() for name in ("score", "loss", "objective")}
        ops, parameters = [Op(op).name for op in tick.hosts["op"]], tick.hosts["parameters"].astype(int).tolist()
        return [*events, HostsMeasured(tick.run_tick, ops, **rounded, parameters=parameters)]

    def _watch_gradients(self, tick: Tick) -> None:
        """Sum the health of hosts' gradients, and note seeds without a gradient since they were germinated.

        Health is 1 if every tensor has a gradient; it is NaN where no gradient was measured.
        """
        hosts, slots = tick.hosts, tick.slots
        watched = ~hosts["ended"] & ~np.isnan(hosts["health"])  # [N]
        self.health += hosts["health"][watched].sum(), watched.sum()
        measured = watched[:, None] & slots["live"] & ~np.isnan(slots["health"])  # [N, K]
        new = measured & (slots["age"] == 1)
        # A seed that is still silent when a new one takes its slot was dead. One blueprint may occur several times.
        np.add.at(self.dead, self.silent[new & (self.silent >= 0)], 1.0)
        # Where the host itself has hardly a gradient, its seeds cannot have one.
        counted = new & (hosts["health"] >= MIN_HOST_GRADIENT_HEALTH)[:, None]
        np.add.at(self.born, slots["blueprint"][counted], 1.0)
        self.silent[new] = -1
        self.silent[counted] = slots["blueprint"][counted]
        self.silent[measured & (slots["norm"] != 0.0)] = -1  # NaN is not the absence of a gradient

    def _new_events(self, tick: Tick) -> list[Event]:
        """Return the events of a tick, without gates that were closed one tick ago, unless an episode has begun."""
        before, self.refused = self.refused, np.zeros_like(self.refused)
        events: list[Event] = []
        for event in tick.events:
            if isinstance(event, GateRefused):
                cell = (event.host, self.slots.index(event.slot))
                self.refused[cell] = event.stage
                if before[cell] == event.stage and tick.number > 1:
                    continue
            events.append(event)
        return events

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a finished rollout by tag; undefined ones are left out."""
        metrics = {f"rollout/reward.{name}": paid for name, paid in self.terms.items() if self.seen == self.horizon}
        if self.health[1]:
            metrics["rollout/gradient_health"] = self.health[0] / self.health[1]
        silent = self.dead + np.bincount(self.silent[self.silent >= 0], minlength=len(self.blueprints))
        seeds = SeedStats(*self.sums.sum(2))  # of all slots, [B]
        for b, name in enumerate(self.blueprints):
            if self.born[b] >= LEAST_SEEDS:
                metrics[f"rollout/dead_seeds.{name}"] = silent[b] / self.born[b]
            metrics[f"blueprint/{name}/germinated"] = seeds.germinated[b] / self.n_envs
            metrics[f"blueprint/{name}/kept"] = seeds.fossilized[b] / self.n_envs
            if seeds.germinated[b] > 0.0:
                metrics[f"blueprint/{name}/churn"] = seeds.culled[b] / seeds.germinated[b]
            if seeds.measured[b] > 0.0:
                metrics[f"blueprint/{name}/contribution"] = seeds.mean_contribution[b]
        return {tag: float(value) for tag, value in metrics.items()}

    def state_dict(self) -> dict[str, Any]:
        arrays = {name: torch.from_numpy(getattr(self, name).copy()) for name in ARRAYS}
        return arrays | {"terms": dict(self.terms), "ticks": [self.seen]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name in ARRAYS:
            getattr(self, name)[:] = state[name]
        self.terms, self.seen = dict(state["terms"]), state["ticks"][0]
