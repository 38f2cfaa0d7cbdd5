"""Which seeds are worth it: what became of every seed, by blueprint and slot. B blueprints, K slots, N hosts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from esper_lightning.growth.restoring import check_like, check_parts
from esper_lightning.growth.stages import LIVE, Stage

if TYPE_CHECKING:
    from esper_lightning.envs import StepResult
    from esper_lightning.envs.host_env import HostEnv
    from esper_lightning.growth.network import SeedEvent


class Score(NamedTuple):
    """Sums over seeds; each field is a number or an array."""

    germinated: Any = 0.0
    fossilized: Any = 0.0
    culled: Any = 0.0
    """Or lost by a rollback."""
    judged: Any = 0.0
    """Kept or culled with a contribution that was measured."""
    contribution: Any = 0.0
    """Of these, in accuracy points, when they were kept or culled."""
    squares: Any = 0.0
    """Of these contributions."""
    parameters: Any = 0.0
    """Of the seeds that were kept."""
    ticks: Any = 0.0
    """Host epochs between germination and the end, of the seeds that were kept or culled."""

    @property
    def churn(self) -> Any:
        """Share of the seeds that were taken out again."""
        return self.culled / np.maximum(self.germinated, 1.0)

    @property
    def mean(self) -> Any:
        """Contribution of a seed; not a number where none was judged."""
        with np.errstate(invalid="ignore"):
            return np.where(self.judged > 0.0, self.contribution / np.maximum(self.judged, 1.0), np.nan)

    @property
    def spread(self) -> Any:
        """Deviation of contributions between seeds."""
        known = np.maximum(self.judged, 1.0)
        return np.sqrt(np.maximum(0.0, self.squares / known - (self.contribution / known) ** 2))

    @property
    def age(self) -> Any:
        """Host epochs that a seed was alive before it was kept or culled."""
        return self.ticks / np.maximum(self.fossilized + self.culled, 1.0)

    @property
    def size(self) -> Any:
        """Parameters of a seed that was kept."""
        return self.parameters / np.maximum(self.fossilized, 1.0)


class Scoreboard:
    """Follows every seed of a run.

    Args:
        blueprints, slots: Names, in the order of the tables.
        n_envs: Hosts N.
    """

    def __init__(self, blueprints: Sequence[str], slots: Sequence[str], n_envs: int) -> None:
        self.blueprints, self.slots = list(blueprints), list(slots)
        self.sums = np.zeros((2, len(Score._fields), len(blueprints), len(slots)))  # of the run, of the rollout
        self.stages = np.zeros((2, len(Stage)))  # seeds that left a stage in this rollout, and their host epochs there
        self.known = np.full((n_envs, len(slots)), np.nan)  # contribution as last measured before it began to fade

    @property
    def run(self) -> Score:  # of arrays [B, K]
        """Since the run began."""
        return Score(*self.sums[0])

    @property
    def rollout(self) -> Score:  # of arrays [B, K]
        """Since the rollout began."""
        return Score(*self.sums[1])

    @property
    def durations(self) -> dict[Stage, float]:
        """Host epochs that a seed spent in each stage that any has left in this rollout."""
        left, ticks = self.stages
        return {stage: ticks[stage] / left[stage] for stage in sorted(LIVE) if left[stage] > 0.0}

    def tick(self, step: "StepResult", envs: Sequence["HostEnv"]) -> None:
        """Takes in what a host epoch brought."""
        if envs[0].tick == 1:
            self.sums[1], self.stages[:], self.known[:] = 0.0, 0.0, np.nan
        for host, _, seed in step.events:
            if seed.before is not seed.after:
                self._move(host, seed, envs[host])
        for host, env in enumerate(envs):
            for k, (slot, record) in enumerate(zip(env.slots, env.records, strict=True)):
                if slot.blended and not slot.fading and record.contribution is not None:
                    self.known[host, k] = record.contribution

    def _move(self, host: int, seed: "SeedEvent", env: "HostEnv") -> None:
        k = self.slots.index(seed.slot)
        if seed.before in LIVE:
            self.stages[:, seed.before] += 1.0, seed.ticks
        if seed.after is Stage.GERMINATED:
            self.known[host, k] = np.nan
            self._add(seed, k, germinated=1.0)
        elif seed.before in LIVE and seed.after not in LIVE:  # kept, or gone: culled, or by a rollback
            points = self.known[host, k] if seed.contribution is None else seed.contribution
            if np.isfinite(points):
                self._add(seed, k, judged=1.0, contribution=points, squares=points**2)
            if seed.after is Stage.FOSSILIZED:
                size = sum(parameter.numel() for parameter in env.slots[k].seed.parameters())
                self._add(seed, k, fossilized=1.0, ticks=seed.age, parameters=size)
            else:
                self._add(seed, k, culled=1.0, ticks=seed.age)

    def _add(self, seed: "SeedEvent", slot: int, **amounts: float) -> None:
        for name, amount in amounts.items():
            self.sums[:, Score._fields.index(name), self.blueprints.index(seed.blueprint), slot] += amount

    def metrics(self) -> dict[str, float]:
        """Of the rollout, for plots: per blueprint over all slots and hosts; what has no value is left out."""
        of_blueprint = Score(*(part.sum(1) for part in self.rollout))  # [B]
        hosts = len(self.known)
        found = {f"growth/ticks.{stage.name}": ticks for stage, ticks in self.durations.items()}
        for b, name in enumerate(self.blueprints):
            found[f"blueprint/{name}/germinated"] = of_blueprint.germinated[b] / hosts
            found[f"blueprint/{name}/kept"] = of_blueprint.fossilized[b] / hosts
            if of_blueprint.germinated[b] > 0.0:
                found[f"blueprint/{name}/churn"] = of_blueprint.churn[b]
            if of_blueprint.judged[b] > 0.0:
                found[f"blueprint/{name}/contribution"] = of_blueprint.mean[b]
        return {tag: float(value) for tag, value in found.items()}

    def table(self) -> str:
        """Of the run so far, as Markdown."""
        head = "| slot | blueprint | germinated | kept | culled | churn | contribution ± spread | parameters | ticks |"
        rows = [head, "|---|---|---|---|---|---|---|---|---|"]
        score = self.run
        for k, slot in enumerate(self.slots):
            for b, blueprint in enumerate(self.blueprints):
                one = Score(*(part[b, k] for part in score))
                if one.germinated:
                    judged = f"{one.mean:+.1f} ± {one.spread:.1f}" if one.judged else "–"
                    counts = f"{one.germinated:.0f} | {one.fossilized:.0f} | {one.culled:.0f} | {one.churn:.2f}"
                    size = f"{one.size:.0f}" if one.fossilized else "–"
                    rows.append(f"| {slot} | {blueprint} | {counts} | {judged} | {size} | {one.age:.1f} |")
        return "\n".join(rows)

    def forget_rollout(self) -> None:
        """The rollout in flight counts as never begun."""
        self.sums[0] -= self.sums[1]
        self.sums[1], self.stages[:] = 0.0, 0.0

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.from_numpy(getattr(self, name).copy()) for name in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; with another number of hosts only the sums do, for then their episodes begin anew.

        Raises ValueError if the state is damaged.
        """
        what = "the scoreboard"
        check_parts(what, state, PARTS)
        for name in PARTS:
            ours = getattr(self, name)
            if name != "known" or len(state["known"]) == len(ours):
                ours[:] = check_like(what, state[name], torch.from_numpy(ours)).numpy()


PARTS = ("sums", "stages", "known")
