"""Records of environment steps for telemetry: a table of hosts and one of slots each. N hosts, K slots."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.events import Event, GateRefused, RolledBack, SeedChanged, Vetoed

if TYPE_CHECKING:
    from esper_lightning.envs import HostEvent, HostPool, StepResult
    from esper_lightning.envs.host_env import HostEnv
    from esper_lightning.growth.lifecycle import SeedEvent
    from esper_lightning.growth.slot import SeedSlot
    from esper_lightning.ranks import Ranks

HOST = np.dtype(
    [
        *((name, "f8") for name in ("accuracy", "loss", "objective", "parameters", "reward")),
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
        *(("live", "?"), ("blended", "?"), ("alpha", "f4")),  # alpha in the next tick
        *((name, "f8") for name in ("norm", "health", "contribution", "potential")),  # NaN: not measured
        ("gain", "f8"),  # accuracy points that a host with this blended seed has gained since it was germinated
    ]
)
"""Columns of a slot."""

GATED_TRANSITIONS = {Stage.TRAINING: Stage.BLENDING, Stage.PROBATIONARY: Stage.FOSSILIZED}
"""Stages that a gate guards the exit of, and the stage that follows each."""


class Tick(NamedTuple):
    """Record of one environment step for telemetry.

    `hosts`, `slots` and the terms are lists from `observe`, for the hosts of one process, and arrays from `join`, for
    all hosts.
    """

    run_tick: int  # from 1 since the run began
    number: int  # from 1 in each episode
    hosts: Any  # [N] of HOST
    slots: Any  # [N, K] of SLOT
    terms: dict[str, Any]  # [N] each: terms of the reward
    changes: list[tuple[SeedChanged, int, int]]  # ticks in the stage before; parameters of a seed that was fossilized
    refusals: list[GateRefused]  # of gates that are closed now, whether or not they were closed before
    interventions: list[Event]  # rollbacks and vetoes


def observe(pool: "HostPool", step: "StepResult", tick: int, own: Sequence[int] | None = None) -> Tick:
    """Return the record of a step of this process's hosts, all of whose values are on the CPU already.

    Args:
        pool: The hosts, after the step.
        step: Result of the step.
        tick: Number of the step, counted from the start of the run.
        own: Number of each host among those of all processes. None: there is one process.
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
        changes=[
            (change, event.ticks_before, _size_of_fossil(pool.envs[i], event))
            for (i, _, event), change in zip(step.events, seed_changes(step.events, tick, own), strict=True)
        ],
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


def _size_of_fossil(env: "HostEnv", event: "SeedEvent") -> int:
    return count_parameters(env.growing.slots[event.slot].seed) if event.after is Stage.FOSSILIZED else 0


def _host_row(env: "HostEnv", rolled_back: bool) -> tuple[Any, ...]:
    gradient, monitor = env.host_gradient, env.monitor
    state = None if monitor is None else monitor.governor_state
    return (
        *(env.ended, env.stopped, rolled_back),
        *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
        env.skipped_steps if env.loss_scale is not None else np.nan,
        *((np.nan, np.nan) if state is None else (state.consecutive_anomalies > 0, state.rollbacks)),
    )


def _slot_rows(env: "HostEnv", blueprints: dict[str | None, int]) -> list[tuple[Any, ...]]:
    rows = []
    for slot, record, before in zip(env.slots, env.records, env.accuracy_at_germination, strict=True):
        gradient, blended = record.gradient, slot.blended
        rows.append(
            (
                *(int(slot.stage), blueprints[slot.blueprint], slot.age, slot.live, blended),
                slot.alpha_now if blended else 0.0,
                *((np.nan, np.nan) if gradient is None else (gradient.norm, gradient.health)),
                np.nan if record.contribution is None else record.contribution,
                np.nan if record.potential is None or not slot.isolated else record.potential,
                100.0 * (env.history.accuracy[-1] - before) if blended else np.nan,
            )
        )
    return rows


def join(ticks: Sequence[Tick], ranks: "Ranks") -> Tick:
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


def _closed_gates(env: "HostEnv", refusals: Sequence[Any]) -> "Iterator[tuple[SeedSlot, list[str]]]":
    """Yield the slots whose seed a gate refuses although its minimum time in the stage is over, with the reasons."""
    for slot, refused in zip(env.slots, refusals, strict=True):
        reasons = []
        if slot.stage is Stage.TRAINING and slot.ticks_in_stage >= env.lifecycle.training_ticks:
            reasons = refused.blending
        elif slot.stage is Stage.PROBATIONARY and slot.alpha_before == 1.0:
            reasons = refused.fossilizing
        if reasons and not env.ended:
            yield slot, reasons


def seed_changes(events: "Sequence[HostEvent]", tick: int, own: Sequence[int]) -> list[SeedChanged]:
    """Return one event for each seed change: a new stage, a new target of its alpha, or that the seed is stuck."""
    return [
        SeedChanged(
            tick=tick,
            host=own[host],
            slot=seed.slot,
            blueprint=seed.blueprint,
            before=seed.before.name,
            after=seed.after.name,
            cause=seed.cause,
            age=seed.age,
            contribution=seed.contribution,
        )
        for host, _, seed in events
    ]
