"""Observer of all hosts: collects statistics in every environment step, and makes the events and figures of hosts."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from esper_lightning.growth.stages import Stage
from esper_lightning.telemetry.anomaly_metrics import RolloutGradients
from esper_lightning.telemetry.blueprint_stats import Scoreboard
from esper_lightning.telemetry.episode_trace import EpisodeTrace
from esper_lightning.telemetry.events import Contributed, Event, GateRefused, RolledBack, SeedChanged, Vetoed
from esper_lightning.telemetry.figures import (
    accuracy_against_parameters,
    blueprint_scoreboard,
    growth_timeline,
    op_map,
)

if TYPE_CHECKING:
    from esper_lightning.envs import HostEvent, HostPool, StepResult
    from esper_lightning.envs.host_env import HostEnv
    from esper_lightning.growth.growing_network import RefusalReasons

GATED_TRANSITIONS = {Stage.TRAINING: Stage.BLENDING, Stage.PROBATIONARY: Stage.FOSSILIZED}
"""Stages that a gate guards the exit of, and the stage that follows each."""

PARTS = ("gradients", "scoreboard", "trace", "gates")
"""Attributes of an Observer that have a state."""


def rollbacks(step: "StepResult", tick: int) -> list[Event]:
    """Return one event for each host that the Governor rolled back or gave up in this step."""
    host_verdicts = (host_verdict for host_verdict in step.verdicts if host_verdict.verdict.diverged)
    return [
        RolledBack(
            tick,
            host_verdict.host,
            host_verdict.rng_seed,
            host_verdict.verdict.outcome.value,
            host_verdict.verdict.cause,
            host_verdict.restored_tick,
        )
        for host_verdict in host_verdicts
    ]


def vetoes(step: "StepResult", tick: int) -> list[Event]:
    """Return one event for each action that the Governor refused in this step."""
    return [Vetoed(tick, veto.host, veto.action, veto.reasons) for veto in step.vetoes]


def seed_changes(events: "Sequence[HostEvent]", tick: int) -> list[Event]:
    """Return one event for each seed change: a new stage, a new target of its alpha (its blending weight), or that the
    seed is stuck."""
    return [
        SeedChanged(
            tick=tick,
            host=host,
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


def contributions(envs: Sequence["HostEnv"], tick: int) -> list[Event]:
    """Return one event with the contributions of all blended seeds; no event if there are none."""
    rows = [
        (host, slot.name, record.contribution)
        for host, env in enumerate(envs)
        if not env.ended
        for slot, record in zip(env.slots, env.records, strict=True)
        if slot.blended and record.contribution is not None
    ]
    return [Contributed(tick, *map(list, zip(*rows, strict=True)))] if rows else []


class GateRefusals:
    """Reports gates that refuse a seed whose minimum time in its stage is over: once per seed and stage."""

    def __init__(self) -> None:
        self.refused: dict[tuple[int, str], str] = {}  # host, slot -> the stage that the gate refuses to its seed

    def update(self, step: "StepResult", envs: Sequence["HostEnv"], tick: int) -> list[Event]:
        """Process one step of `envs` and return new refusals; `tick` counts steps since the run began.

        A refusal is reported again only after the seed has changed its stage or the gate has opened in between.
        """
        refusals_now = {
            (host, slot.name): (slot.blueprint, GATED_TRANSITIONS[slot.stage].name, reasons)
            for host, (env, refusals) in enumerate(zip(envs, step.refusals, strict=True))
            if not env.ended
            for slot, reasons in refusal_reasons(env, refusals)
        }
        events: list[Event] = [
            GateRefused(tick, *key, *refusal)
            for key, refusal in refusals_now.items()
            if self.refused.get(key) != refusal[1] or envs[0].tick == 1  # the first step of an episode
        ]
        self.refused = {key: stage for key, (_, stage, _) in refusals_now.items()}
        return events

    def state_dict(self) -> list[list[Any]]:
        return [[*key, stage] for key, stage in self.refused.items()]

    def load_state_dict(self, state: list[Any]) -> None:
        """Restore the state."""
        self.refused = {(host, slot): stage for host, slot, stage in state}


def refusal_reasons(env: "HostEnv", refusals: Sequence["RefusalReasons"]) -> Iterator[tuple[Any, list[str]]]:
    """Yield each slot whose seed a gate refuses although its minimum time in the stage is over, with the reasons."""
    min_ticks = env.lifecycle.training_ticks
    for slot, refused in zip(env.slots, refusals, strict=True):
        if slot.stage is Stage.TRAINING and slot.ticks_in_stage >= min_ticks:
            reasons = refused.blending
        elif slot.stage is Stage.PROBATIONARY and slot.alpha_before == 1.0:
            reasons = refused.fossilizing
        else:
            continue
        if reasons:
            yield slot, reasons


class Observer:
    """Collects statistics of the hosts, their seeds, and the actions applied to them.

    Args:
        pool: The hosts; only numbers and names (hosts, slots, blueprints, horizon) are read from it.
        n_envs: Number of hosts. None: those of the pool.
    """

    def __init__(self, pool: "HostPool", n_envs: int | None = None) -> None:
        space, n_envs = pool.space, pool.n_envs if n_envs is None else n_envs
        self.slots, self.blueprints = space.slot, space.blueprint
        self.gradients = RolloutGradients()
        self.scoreboard = Scoreboard(space.blueprint, space.slot, n_envs)
        self.trace = EpisodeTrace(pool.horizon, n_envs, len(space.slot))
        self.gates = GateRefusals()

    def update(self, step: "StepResult", envs: Sequence["HostEnv"], tick: int, *, all_events: bool) -> list[Event]:
        """Process one environment step and return its events.

        Args:
            step: Result of the step.
            envs: The hosts, after the step.
            tick: Number of the step, counted from the start of the run.
            all_events: Also return the events of seeds and gates, not only rollbacks and vetoes.
        """
        self.gradients.update(envs)
        self.scoreboard.update(step, envs)
        self.trace.update(step, envs)
        events = [*rollbacks(step, tick), *vetoes(step, tick)]
        if all_events:
            events = [
                *seed_changes(step.events, tick),
                *self.gates.update(step, envs, tick),
                *contributions(envs, tick),
                *events,
            ]
        return events

    def figures(self, step: "StepResult") -> dict[str, Figure]:
        """Return the figures of the finished episode by tag; if a part was not observed, only those without history."""
        final = (part.numpy() for part in (step.metrics.accuracy, step.metrics.parameters, step.metrics.objective))
        found = {
            "figures/hosts": accuracy_against_parameters(*final),
            "figures/blueprints": blueprint_scoreboard(self.scoreboard.run_stats, self.blueprints, self.slots),
        }
        if self.trace.is_complete:
            found |= {"figures/growth": growth_timeline(self.trace, self.slots), "figures/ops": op_map(self.trace)}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state."""
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        is_of_other_hosts = state["trace"]["length"] not in (0, len(self.trace.op)) and self.trace.length == 0
        if is_of_other_hosts:
            self.scoreboard.forget_rollout()
