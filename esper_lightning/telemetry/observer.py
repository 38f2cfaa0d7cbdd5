"""Statistics of hosts and their seeds over a rollout and over the run. N hosts, K slots, B blueprints, T ticks."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.telemetry.events import Contributed, Event
from esper_lightning.telemetry.hosts import Tick

MIN_HOST_GRADIENT_HEALTH = 0.7
"""Least gradient health of a host for a new seed to be counted: below it, the host may be why the seed has none."""

LEAST_SEEDS = 5
"""Least number of a blueprint's seeds in a rollout for a share of them to be told."""


class SeedStats(NamedTuple):
    """Sums over seeds; each field is an array of one shape."""

    germinated: Any
    """Number of germinated seeds."""
    fossilized: Any
    """Number of fossilized seeds."""
    culled: Any
    """Number of seeds that were culled, or lost by a rollback."""
    measured: Any
    """Number of fossilized or culled seeds whose contribution was measured."""
    contribution: Any
    """Sum of the measured contributions in accuracy points, as they were when the seeds were fossilized or culled."""
    squares: Any
    """Sum of the squares of the measured contributions."""
    parameters: Any
    """Number of parameters of the fossilized seeds."""
    ticks: Any
    """Host epochs from germination to fossilization or cull, summed over seeds."""

    @property
    def churn(self) -> Any:
        """Share of germinated seeds that were culled or lost."""
        return self.culled / np.maximum(self.germinated, 1.0)

    @property
    def mean_contribution(self) -> Any:
        """Mean contribution of a seed in accuracy points; NaN where none was measured."""
        return np.where(self.measured > 0.0, self.contribution / np.maximum(self.measured, 1.0), np.nan)

    @property
    def deviation(self) -> Any:
        """Standard deviation of the contributions between seeds."""
        known = np.maximum(self.measured, 1.0)
        return np.sqrt(np.maximum(0.0, self.squares / known - (self.contribution / known) ** 2))


class Trace:
    """One episode of every host for figures: op, stages, alphas and rollbacks by tick."""

    def __init__(self, ticks: int, n_envs: int, slots: int) -> None:
        self.length = 0
        self.op = np.zeros((ticks, n_envs), np.uint8)
        self.stage = np.zeros((ticks, n_envs, slots), np.uint8)  # after the tick
        self.alpha = np.zeros((ticks, n_envs, slots), np.float32)  # in the next tick
        self.rolled_back = np.zeros((ticks, n_envs), bool)

    def update(self, tick: int, hosts: Any, slots: Any) -> None:
        """Record an environment step, counted from 1 in each episode; see `HOST` and `SLOT`."""
        self.length = tick
        self.op[tick - 1], self.rolled_back[tick - 1] = hosts["op"], hosts["rolled_back"]
        self.stage[tick - 1], self.alpha[tick - 1] = slots["stage"], slots["alpha"]


class Observer:
    """Collects statistics of all hosts, their seeds and the actions applied to them.

    Args:
        slots, blueprints: Names, in the order of all tables.
        horizon: Ticks T of an episode.
        n_envs: Number N of hosts, over all processes.
    """

    def __init__(self, slots: Sequence[str], blueprints: Sequence[str], *, horizon: int, n_envs: int) -> None:
        self.slots, self.blueprints, self.horizon, self.n_envs = list(slots), list(blueprints), horizon, n_envs
        self.earlier = np.zeros((len(SeedStats._fields), len(blueprints), len(slots)))  # sums over earlier rollouts
        self.refused = np.zeros((n_envs, len(slots)), np.uint8)  # stage that a gate refuses to the seed; 0: none
        self._begin_rollout()

    def _begin_rollout(self) -> None:
        self.seen = 0  # ticks of this rollout that were observed
        self.trace = Trace(self.horizon, self.n_envs, len(self.slots))
        self.sums = np.zeros_like(self.earlier)
        self.left = np.zeros((2, len(Stage)))  # seeds that left a stage, and their host epochs in it
        # Contribution of each seed as last measured before it began to fade; NaN: never measured.
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
        """Process one environment step and return its events."""
        if tick.number == 1:
            self.earlier += self.sums
            self._begin_rollout()
        self.seen += 1
        self.trace.update(tick.number, tick.hosts, tick.slots)
        for change, ticks_before, parameters in tick.changes:
            self._count(change, ticks_before, parameters)
        slots = tick.slots
        known = slots["blended"] & ~np.isnan(slots["contribution"])
        self.last_contributions = np.where(known, slots["contribution"], self.last_contributions)
        self._watch_gradients(tick)
        for name, paid in tick.terms.items():
            self.terms[name] = self.terms.get(name, 0.0) + float(paid.mean())
        changes = [change for change, *_ in tick.changes]
        return [*changes, *self._refusals(tick), *contributions(tick, self.slots), *tick.interventions]

    def _count(self, seed: Any, ticks_before: int, parameters: int) -> None:
        """Count a seed's change of stage."""
        before, after = Stage[seed.before], Stage[seed.after]
        k, b = self.slots.index(seed.slot), self.blueprints.index(seed.blueprint) if seed.blueprint else -1
        if before is after:
            return
        if before in LIVE:
            self.left[:, before] += 1.0, ticks_before
        if after is Stage.GERMINATED:
            self.last_contributions[seed.host, k] = np.nan
            self._add(b, k, germinated=1.0)
        elif before in LIVE and after not in LIVE:  # fossilized, culled, or lost by a rollback
            points = self.last_contributions[seed.host, k] if seed.contribution is None else seed.contribution
            if np.isfinite(points):
                self._add(b, k, measured=1.0, contribution=points, squares=points**2)
            fate = {"fossilized": 1.0, "parameters": parameters} if after is Stage.FOSSILIZED else {"culled": 1.0}
            self._add(b, k, ticks=seed.age, **fate)

    def _add(self, blueprint: int, slot: int, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[SeedStats._fields.index(name), blueprint, slot] += amount

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
        """Return refusals of gates once per seed and stage, until the gate has opened in between."""
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
        return SeedStats(*(self.earlier + self.sums))

    @property
    def rollout_stats(self) -> SeedStats:
        """Statistics since the rollout began, arrays [B, K]."""
        return SeedStats(*self.sums)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a finished rollout by tag; undefined ones are left out."""
        found = {f"rollout/reward.{name}": paid for name, paid in self.terms.items() if self.seen == self.horizon}
        if self.health[1]:
            found["rollout/gradient_health"] = self.health[0] / self.health[1]
        silent = self.dead + np.bincount(self.silent[self.silent >= 0], minlength=len(self.blueprints))
        of_blueprint = SeedStats(*(part.sum(1) for part in self.rollout_stats))  # [B]
        for b, name in enumerate(self.blueprints):
            if self.born[b] >= LEAST_SEEDS:
                found[f"rollout/dead_seeds.{name}"] = silent[b] / self.born[b]
            found[f"blueprint/{name}/germinated"] = of_blueprint.germinated[b] / self.n_envs
            found[f"blueprint/{name}/kept"] = of_blueprint.fossilized[b] / self.n_envs
            if of_blueprint.germinated[b] > 0.0:
                found[f"blueprint/{name}/churn"] = of_blueprint.churn[b]
            if of_blueprint.measured[b] > 0.0:
                found[f"blueprint/{name}/contribution"] = of_blueprint.mean_contribution[b]
        for stage in sorted(LIVE):
            if self.left[0, stage] > 0.0:
                found[f"growth/ticks.{stage.name}"] = self.left[1, stage] / self.left[0, stage]
        return {tag: float(value) for tag, value in found.items()}

    def table(self) -> str:
        """Return the statistics since the run began as a table in Markdown."""
        head = "| slot | blueprint | germinated | kept | culled | churn | contribution ± spread | parameters | ticks |"
        rows = [head, "|---|---|---|---|---|---|---|---|---|"]
        for k, slot in enumerate(self.slots):
            for b, blueprint in enumerate(self.blueprints):
                one = SeedStats(*(part[b, k] for part in self.run_stats))
                if one.germinated:
                    judged = f"{one.mean_contribution:+.1f} ± {one.deviation:.1f}" if one.measured else "–"
                    counts = f"{one.germinated:.0f} | {one.fossilized:.0f} | {one.culled:.0f} | {one.churn:.2f}"
                    size = f"{one.parameters / one.fossilized:.0f}" if one.fossilized else "–"
                    age = one.ticks / max(1.0, one.fossilized + one.culled)
                    rows.append(f"| {slot} | {blueprint} | {counts} | {judged} | {size} | {age:.1f} |")
        return "\n".join(rows)

    def state_dict(self) -> dict[str, Any]:
        trace = {name: torch.from_numpy(getattr(self.trace, name).copy()) for name in TRACED}
        own = {name: torch.from_numpy(getattr(self, name).copy()) for name in ARRAYS}
        return trace | own | {"terms": dict(self.terms), "ticks": [self.seen, self.trace.length]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; with other hosts only the sums of finished rollouts, since episodes then start again."""
        self.earlier[:] = state["earlier"]
        seen, length = state["ticks"]
        if state["op"].shape == self.trace.op.shape:
            for name in (*TRACED, *ARRAYS):
                getattr(self.trace if name in TRACED else self, name)[:] = state[name]
            self.terms, self.seen, self.trace.length = dict(state["terms"]), seen, length
        elif length == len(state["op"]):
            self.earlier += state["sums"].numpy()


TRACED = ("op", "stage", "alpha", "rolled_back")
ARRAYS = ("earlier", "refused", "sums", "left", "last_contributions", "silent", "born", "dead", "health")
"""Attributes of a trace, and of an observer, that are saved."""


def contributions(tick: Tick, slots: Sequence[str]) -> list[Event]:
    """Return one event with the contributions of all blended seeds; no event if there are none."""
    of_slots = tick.slots
    known = of_slots["blended"] & ~np.isnan(of_slots["contribution"]) & ~tick.hosts["ended"][:, None]
    hosts, places = np.nonzero(known)
    points = of_slots["contribution"][known].tolist()
    return [Contributed(tick.run_tick, hosts.tolist(), [slots[k] for k in places.tolist()], points)] if points else []
