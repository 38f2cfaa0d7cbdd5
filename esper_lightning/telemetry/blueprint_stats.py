"""Statistics of all seeds of a run, by blueprint and slot. B blueprints, K slots, N hosts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.serialization.checks import check_keys, check_matching_tensor

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv
    from esper_lightning.growth.lifecycle import SeedEvent


RUN, ROLLOUT = 0, 1
"""Indices of the sums since the run, or the rollout, began."""

PARTS = ("sums", "stages", "last_contributions")
"""Attributes of a Scoreboard that are saved."""


class SeedStats(NamedTuple):
    """Sums over seeds; each field is a number or an array of one shape."""

    germinated: Any = 0.0
    """Number of germinated seeds."""
    fossilized: Any = 0.0
    """Number of fossilized seeds."""
    culled: Any = 0.0
    """Number of seeds that were culled, or lost by a rollback."""
    measured: Any = 0.0
    """Number of fossilized or culled seeds whose contribution was measured."""
    contribution: Any = 0.0
    """Sum of the measured contributions in accuracy points, as they were when the seeds were fossilized or culled."""
    squares: Any = 0.0
    """Sum of the squares of the measured contributions."""
    parameters: Any = 0.0
    """Number of parameters of the fossilized seeds."""
    ticks: Any = 0.0
    """Host epochs from germination to fossilization or cull, summed over seeds."""

    @property
    def churn(self) -> Any:
        """Share of germinated seeds that were culled or lost."""
        return self.culled / np.maximum(self.germinated, 1.0)

    @property
    def mean_contribution(self) -> Any:
        """Mean contribution of a seed in accuracy points; NaN where none was measured."""
        with np.errstate(invalid="ignore"):
            return np.where(self.measured > 0.0, self.contribution / np.maximum(self.measured, 1.0), np.nan)

    @property
    def deviation(self) -> Any:
        """Standard deviation of the contributions between seeds."""
        known = np.maximum(self.measured, 1.0)
        return np.sqrt(np.maximum(0.0, self.squares / known - (self.contribution / known) ** 2))

    @property
    def mean_age(self) -> Any:
        """Mean host epochs from a seed's germination to its fossilization or cull."""
        return self.ticks / np.maximum(self.fossilized + self.culled, 1.0)

    @property
    def mean_parameters(self) -> Any:
        """Mean number of parameters of a fossilized seed."""
        return self.parameters / np.maximum(self.fossilized, 1.0)


class Scoreboard:
    """Collects statistics of every seed of a run.

    Args:
        blueprints, slots: Names, in the order of the tables.
        n_envs: Number of hosts N.
    """

    def __init__(self, blueprints: Sequence[str], slots: Sequence[str], n_envs: int) -> None:
        self.blueprints, self.slots = list(blueprints), list(slots)
        # The first index is RUN or ROLLOUT.
        self.sums = np.zeros((2, len(SeedStats._fields), len(blueprints), len(slots)))
        self.stages = np.zeros((2, len(Stage)))  # seeds that left a stage in this rollout, and their host epochs there
        # Contribution of each seed as last measured before it began to fade; NaN: never measured.
        self.last_contributions = np.full((n_envs, len(slots)), np.nan)

    @property
    def run_stats(self) -> SeedStats:  # of arrays [B, K]
        """Statistics since the run began, arrays of [B, K]."""
        return SeedStats(*self.sums[RUN])

    @property
    def rollout_stats(self) -> SeedStats:  # of arrays [B, K]
        """Statistics since the rollout began, arrays of [B, K]."""
        return SeedStats(*self.sums[ROLLOUT])

    @property
    def durations(self) -> dict[Stage, float]:
        """Mean host epochs that a seed spent in each stage, for the stages that some seed left in this rollout."""
        seeds_that_left, ticks = self.stages
        return {stage: ticks[stage] / seeds_that_left[stage] for stage in sorted(LIVE) if seeds_that_left[stage] > 0.0}

    def update(self, step: "StepResult", envs: Sequence["HostEnv"]) -> None:
        """Count the seeds' changes of stage in one step; tick 1 begins a new rollout."""
        if envs[0].tick == 1:
            self.sums[ROLLOUT], self.stages[:], self.last_contributions[:] = 0.0, 0.0, np.nan
        for host, _, seed in step.events:
            if seed.before is not seed.after:
                self._count_transition(host, seed, envs[host])
        for host, env in enumerate(envs):
            for k, (slot, record) in enumerate(zip(env.slots, env.records, strict=True)):
                if slot.blended and record.contribution is not None:
                    self.last_contributions[host, k] = record.contribution

    def _count_transition(self, host: int, seed: "SeedEvent", env: "HostEnv") -> None:
        k = self.slots.index(seed.slot)
        if seed.before in LIVE:
            self.stages[:, seed.before] += 1.0, seed.ticks_before
        if seed.after is Stage.GERMINATED:
            self.last_contributions[host, k] = np.nan
            self._add(seed, k, germinated=1.0)
        elif seed.before in LIVE and seed.after not in LIVE:  # fossilized, culled, or lost by a rollback
            points = self.last_contributions[host, k] if seed.contribution is None else seed.contribution
            if np.isfinite(points):
                self._add(seed, k, measured=1.0, contribution=points, squares=points**2)
            if seed.after is Stage.FOSSILIZED:
                size = sum(parameter.numel() for parameter in env.slots[k].seed.parameters())
                self._add(seed, k, fossilized=1.0, ticks=seed.age, parameters=size)
            else:
                self._add(seed, k, culled=1.0, ticks=seed.age)

    def _add(self, seed: "SeedEvent", slot: int, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[:, SeedStats._fields.index(name), self.blueprints.index(seed.blueprint), slot] += amount

    def metrics(self) -> dict[str, float]:
        """Return the rollout's metrics by tag, per blueprint over all slots and hosts; undefined ones are left out."""
        of_blueprint = SeedStats(*(part.sum(1) for part in self.rollout_stats))  # [B]
        hosts = len(self.last_contributions)
        found = {f"growth/ticks.{stage.name}": ticks for stage, ticks in self.durations.items()}
        for b, name in enumerate(self.blueprints):
            found[f"blueprint/{name}/germinated"] = of_blueprint.germinated[b] / hosts
            found[f"blueprint/{name}/kept"] = of_blueprint.fossilized[b] / hosts
            if of_blueprint.germinated[b] > 0.0:
                found[f"blueprint/{name}/churn"] = of_blueprint.churn[b]
            if of_blueprint.measured[b] > 0.0:
                found[f"blueprint/{name}/contribution"] = of_blueprint.mean_contribution[b]
        return {tag: float(value) for tag, value in found.items()}

    def table(self) -> str:
        """Return the statistics since the run began as a table in Markdown."""
        head = "| slot | blueprint | germinated | kept | culled | churn | contribution ± spread | parameters | ticks |"
        rows = [head, "|---|---|---|---|---|---|---|---|---|"]
        score = self.run_stats
        for k, slot in enumerate(self.slots):
            for b, blueprint in enumerate(self.blueprints):
                one = SeedStats(*(part[b, k] for part in score))
                if one.germinated:
                    judged = f"{one.mean_contribution:+.1f} ± {one.deviation:.1f}" if one.measured else "–"
                    counts = f"{one.germinated:.0f} | {one.fossilized:.0f} | {one.culled:.0f} | {one.churn:.2f}"
                    size = f"{one.mean_parameters:.0f}" if one.fossilized else "–"
                    rows.append(f"| {slot} | {blueprint} | {counts} | {judged} | {size} | {one.mean_age:.1f} |")
        return "\n".join(rows)

    def forget_rollout(self) -> None:
        """Remove the current rollout from the statistics."""
        self.sums[RUN] -= self.sums[ROLLOUT]
        self.sums[ROLLOUT], self.stages[:] = 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state; with another number of hosts only the sums, since episodes then start again.

        Raises ValueError if the state is damaged.
        """
        what = "the scoreboard"
        check_keys(what, state, PARTS)
        for name in PARTS:
            own = getattr(self, name)
            if name != "last_contributions" or len(state[name]) == len(own):
                own[:] = check_matching_tensor(what, state[name], torch.from_numpy(own)).numpy()
