"""Plans of the search for the best fixed schedule: sampled at random or derived from good ones."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import NamedTuple

from esper_lightning.controllers.rules import min_ticks_to_judge
from esper_lightning.controllers.schedules import Schedule, ScheduledAction
from esper_lightning.envs import EnvConfig, HostPool

CULL_PROBABILITY = 1 / 3
"""Probability that a sampled seed is culled."""


class PlannedSeed(NamedTuple):
    """One seed of a plan."""

    slot: str
    blueprint: str
    style: str
    tempo: str
    tick: int
    """Tick of the germination."""
    cull_tick: int | None = None
    """Tick in which the seed is culled, or None if it is fossilized.
    A culled seed helps the host to learn and costs no parameters at the end."""


class Plan(NamedTuple):
    """Seeds of one host, ordered by slot and tick. Only the last seed in a slot may be fossilized."""

    seeds: tuple[PlannedSeed, ...]
    fossilize_late: bool
    """True if the seeds are fossilized in the last ticks of the episode, False if each is as soon as possible."""


def latest_germinations(config: EnvConfig, horizon: int) -> dict[str, int]:
    """Return the last tick of each tempo in which a seed that germinates can still be fossilized.

    Tempos without such a tick are left out. Raises ValueError if there is none at all.
    """
    last = {name: horizon - 1 - min_ticks_to_judge(config.lifecycle, n) for name, n in config.actions.tempos.items()}
    possible = {tempo: tick for tempo, tick in last.items() if tick >= 0}
    if not possible:
        raise ValueError(
            f"search: no seed can be fossilized in episodes of {horizon} ticks; raise env.horizon, or the horizons in "
            f"env.family"
        )
    return possible


class PlanSampler:
    """Samples plans with 1 … K seeds in as many slots.

    The number of seeds, their slots and every choice for each seed are uniformly distributed, except that early ticks
    and fossilization are more likely. Mutated plans and crossovers may have several seeds in a slot, one after the
    other, and up to two per slot together.

    Args:
        pool: Pool that defines the slots, blueprints, styles and tempos.
        rng_seed: RNG seed of the sampler.
        horizon: Ticks of the longest episode that is planned for. None: those of the pool.
    """

    def __init__(self, pool: HostPool, rng_seed: int, *, horizon: int | None = None) -> None:
        self.random = Random(rng_seed)
        self.space, self.config = pool.space, pool.config
        self.horizon = pool.config.horizon if horizon is None else horizon
        self.growable = {
            slot: [name for name, grows in zip(pool.space.blueprint, row, strict=True) if grows]
            for slot, row in zip(pool.space.slot, pool.growable.tolist(), strict=True)
        }
        self.slots = [slot for slot in pool.space.slot if self.growable[slot]]
        self.max_slots = len(self.slots)
        self.max_seeds = 2 * len(self.slots)
        self.latest_germination = latest_germinations(pool.config, self.horizon)
        self.tempos = list(self.latest_germination)

    def draw(self) -> Plan:
        """Return a random plan."""
        chosen = self.random.sample(self.slots, self.random.randint(1, self.max_slots))
        return self._make_plan([self._sample_seed(slot) for slot in chosen], self._coin_flip())

    def crossover(self, one: Plan, other: Plan) -> Plan:
        """Return a crossover, in which each slot has the seeds of one parent, chosen at random.

        Half of the crossovers are also mutated.
        """
        seeds = []
        for slot in self.slots:
            seeds += [seed for seed in (one, other)[self._coin_flip()].seeds if seed.slot == slot]
        if not 1 <= len(seeds) <= self.max_seeds or len({seed.slot for seed in seeds}) > self.max_slots:
            return self.mutate(one)
        plan = self._make_plan(seeds, (one, other)[self._coin_flip()].fossilize_late)
        return self.mutate(plan) if self._coin_flip() or plan in (one, other) else plan

    def mutate(self, plan: Plan) -> Plan:
        """Return the plan with one random change, and whatever adjustments of ticks it requires.

        The change concerns one choice of a seed, its culling, its slot, an added or removed seed, or `fossilize_late`.
        """
        seeds = list(plan.seeds)
        moves = ["blueprint", "tick", "cull_tick", "slot", "fossilize_late"]
        moves += ["style"] * (len(self.space.style) > 1) + ["tempo"] * (len(self.tempos) > 1)
        moves += ["more"] * (len(seeds) < self.max_seeds) + ["less"] * (len(seeds) > 1)
        move, i = self.random.choice(moves), self.random.randrange(len(seeds))
        if move == "fossilize_late":
            return plan._replace(fossilize_late=not plan.fossilize_late)
        if move in ("less", "slot"):
            del seeds[i]
        if move in ("more", "slot"):
            seeds.append(self._sample_seed(self._sample_slot(seeds)))
        elif move == "cull_tick":
            uncull = seeds[i].cull_tick is not None and self._coin_flip()
            seeds[i] = seeds[i]._replace(cull_tick=None if uncull else self._sample_cull_tick(seeds[i].tick))
        elif move != "less":
            other = self._sample_seed(seeds[i].slot)
            changed = seeds[i]._replace(**{move: getattr(other, move)})
            tick = min(changed.tick, self.latest_germination[changed.tempo])
            is_cull_too_early = changed.cull_tick is not None and changed.cull_tick <= tick
            cull_tick = self._sample_cull_tick(tick) if is_cull_too_early else changed.cull_tick
            seeds[i] = changed._replace(tick=tick, cull_tick=cull_tick)
        return self._make_plan(seeds, plan.fossilize_late)

    def sample_distinct(self, number: int, known: AbstractSet[Plan], parents: Sequence[Plan] = ()) -> list[Plan]:
        """Return up to `number` plans not in `known`: crossovers of `parents`, or random plans without parents.

        There are fewer if new plans are hard to find.
        """
        plans: dict[Plan, None] = {}
        for _ in range(20 * number):
            plan = self.crossover(*self.random.choices(parents, k=2)) if parents else self.draw()
            if plan not in known:
                plans[plan] = None
            if len(plans) == number:
                break
        return list(plans)

    def _coin_flip(self) -> bool:
        return self.random.random() < 0.5

    def _sample_seed(self, slot: str) -> PlannedSeed:
        choose = self.random.choice
        tempo = choose(self.tempos)
        # Early ticks are more likely: a seed that germinates earlier learns for longer.
        tick = min(self.random.randint(0, self.latest_germination[tempo]) for _ in range(2))
        culled = self._sample_cull_tick(tick) if self.random.random() < CULL_PROBABILITY else None
        return PlannedSeed(slot, choose(self.growable[slot]), choose(self.space.style), tempo, tick, culled)

    def _sample_cull_tick(self, tick: int) -> int:
        """Return a random tick to cull a seed that germinates at `tick`."""
        return self.random.randint(tick + 1, self.horizon - 1)

    def _sample_slot(self, seeds: Sequence[PlannedSeed]) -> str:
        """Return a random slot for a further seed."""
        used = {seed.slot for seed in seeds}
        return self.random.choice(self.slots if len(used) < self.max_slots else [s for s in self.slots if s in used])

    def _make_plan(self, seeds: list[PlannedSeed], late: bool) -> Plan:
        """Return a plan with ordered seeds: a seed is culled in time for the next one in its slot.

        The next one germinates when the slot is open again. It is dropped if no time is left for it.
        """
        reopening = 1 + self.config.lifecycle.embargo_ticks  # ticks from a cull to the next germination in the slot
        ordered: list[PlannedSeed] = []
        for slot in self.slots:
            in_slot: list[PlannedSeed] = []
            for seed in sorted((seed for seed in seeds if seed.slot == slot), key=lambda seed: seed.tick):
                if not in_slot:
                    in_slot.append(seed)
                    continue
                last = in_slot[-1]
                culled = max(last.tick + 1, min(last.cull_tick or seed.tick, seed.tick))
                tick = max(seed.tick, culled + reopening)
                if tick <= self.latest_germination[seed.tempo] and (seed.cull_tick is None or tick < seed.cull_tick):
                    in_slot[-1:] = [last._replace(cull_tick=culled), seed._replace(tick=tick)]
            ordered += in_slot
        return Plan(tuple(ordered), late)

    def to_schedule(self, plan: Plan) -> Schedule:
        """Return the plan as a schedule: if several actions are due, germinations come last."""
        fossilized = [seed for seed in plan.seeds if seed.cull_tick is None]
        entries = []
        for seed in plan.seeds:
            entries.append(ScheduledAction(seed.tick, "GERMINATE", *seed[:4]))
            if seed.cull_tick is not None:
                entries.append(ScheduledAction(seed.cull_tick, "CULL", seed.slot))
                continue
            # Two ticks per fossilized seed are reserved at the end, in case a seed cannot be fossilized at once.
            end = self.horizon - 2 * len(fossilized) + fossilized.index(seed) if plan.fossilize_late else 0
            entries.append(ScheduledAction(max(end, seed.tick + 1), "FOSSILIZE", seed.slot))
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
        return Schedule(tuple(self.space.slot), tuple(entries))
