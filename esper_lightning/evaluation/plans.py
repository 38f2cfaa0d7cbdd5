"""Plans of the search for the best fixed schedule: sampled at random or derived from good ones."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from random import Random
from typing import NamedTuple

from esper_lightning.envs import HostPool
from esper_lightning.tamiyo.climbing import ticks_to_judge
from esper_lightning.tamiyo.schedule import Entry, Schedule


class Sprout(NamedTuple):
    """One seed of a plan."""

    slot: str
    blueprint: str
    style: str
    tempo: str
    tick: int
    """Tick of the germination."""
    culled: int | None = None
    """Tick in which the seed is culled, or None if it is fossilized.
    A culled seed helps the host to learn and costs no parameters at the end."""


class Plan(NamedTuple):
    """Seeds of one host, ordered by slot and tick. Only the last seed in a slot may be fossilized."""

    seeds: tuple[Sprout, ...]
    late: bool
    """True if the seeds are fossilized in the last ticks of the episode, False if each is as soon as possible."""


CULLED = 1 / 3
"""Probability that a sampled seed is culled."""


class Generator:
    """Samples plans with 1 … K seeds in as many slots.

    The number of seeds, their slots and every choice for each seed are uniformly distributed, except that early ticks
    and fossilization are more likely. Mutated plans and crossovers may have several seeds in a slot, one after the
    other.

    Args:
        pool: Pool that defines the slots, blueprints, styles, tempos and the horizon.
        rng_seed: RNG seed of the sampler.
        max_seeds: Maximum number of seeds in a plan. None: two per slot.
    """

    def __init__(self, pool: HostPool, seed: int, max_seeds: int | None = None) -> None:
        self.random = Random(seed)
        self.space = pool.space
        self.config = pool.config
        growable = pool.masks_on_cpu.blueprint[0].tolist()
        self.growable = {
            slot: [name for name, grows in zip(pool.space.blueprint, row, strict=True) if grows]
            for slot, row in zip(pool.space.slot, growable, strict=True)
        }
        self.slots = [slot for slot in pool.space.slot if self.growable[slot]]
        slots = len(self.slots)
        self.closed = 1 + pool.config.lifecycle.embargo_ticks
        """Ticks from the culling of a seed to the next germination in its slot."""
        self.wide = min(slots, max_seeds or slots, pool.config.actions.max_seeds or slots)
        self.most = max_seeds or 2 * slots
        self.last_tick = {
            tempo: pool.config.horizon - 1 - ticks_to_judge(pool.config.lifecycle, ticks)
            for tempo, ticks in pool.config.actions.tempos.items()
        }
        self.tempos = [tempo for tempo in pool.space.tempo if self.last_tick[tempo] >= 0]
        if not self.tempos:
            raise ValueError(f"no seed can be kept within {pool.config.horizon} ticks; raise env.horizon")

    def draw(self) -> Plan:
        chosen = self.random.sample(self.slots, self.random.randint(1, self.wide))
        return self._plan([self._sprout(slot) for slot in chosen], self._flip())

    def child(self, one: Plan, other: Plan) -> Plan:
        """Return a crossover, in which each slot has the seeds of one parent, chosen at random.

        Half of the crossovers are also mutated.
        """
        seeds = []
        for slot in self.slots:
            seeds += [seed for seed in (one, other)[self._flip()].seeds if seed.slot == slot]
        if not 1 <= len(seeds) <= self.most or len({seed.slot for seed in seeds}) > self.wide:
            return self.neighbour(one)
        plan = self._plan(seeds, (one, other)[self._flip()].late)
        return self.neighbour(plan) if self._flip() or plan in (one, other) else plan

    def neighbour(self, plan: Plan) -> Plan:
        """Return the plan with one random change, and whatever adjustments of ticks it requires.

        The change concerns one choice of a seed, its culling, its slot, an added or removed seed, or `fossilize_late`.
        """
        seeds = list(plan.seeds)
        moves = ["blueprint", "tick", "culled", "place", "late"]
        moves += ["style"] * (len(self.space.style) > 1) + ["tempo"] * (len(self.tempos) > 1)
        moves += ["more"] * (len(seeds) < self.most) + ["less"] * (len(seeds) > 1)
        move, i = self.random.choice(moves), self.random.randrange(len(seeds))
        if move == "late":
            return plan._replace(late=not plan.late)
        if move == "more":
            seeds.append(self._sprout(self._place(seeds)))
        elif move == "less":
            del seeds[i]
        elif move == "place":
            del seeds[i]
            seeds.append(self._sprout(self._place(seeds)))
        elif move == "culled":
            kept = seeds[i].culled is not None and self._flip()
            seeds[i] = seeds[i]._replace(culled=None if kept else self._cull(seeds[i].tick))
        else:
            other = self._sprout(seeds[i].slot)
            changed = seeds[i]._replace(**{move: getattr(other, move)})
            tick = min(changed.tick, self.last_tick[changed.tempo])
            missed = changed.culled is not None and changed.culled <= tick
            seeds[i] = changed._replace(tick=tick, culled=self._cull(tick) if missed else changed.culled)
        return self._plan(seeds, plan.late)

    def distinct(self, number: int, known: AbstractSet[Plan], parents: Sequence[Plan] = ()) -> list[Plan]:
        """Return up to `number` plans not in `known`: crossovers of `parents`, or random plans without parents.

        There are fewer if new plans are hard to find.
        """
        found: dict[Plan, None] = {}
        for _ in range(20 * number):
            plan = self.child(*self.random.choices(parents, k=2)) if parents else self.draw()
            if plan not in known:
                found[plan] = None
            if len(found) == number:
                break
        return list(found)

    def _flip(self) -> bool:
        return self.random.random() < 0.5

    def _sprout(self, slot: str) -> Sprout:
        choose = self.random.choice
        tempo = choose(self.tempos)
        # Early ticks are more likely: a seed that germinates earlier learns for longer.
        tick = min(self.random.randint(0, self.last_tick[tempo]) for _ in range(2))
        culled = self._cull(tick) if self.random.random() < CULLED else None
        return Sprout(slot, choose(self.growable[slot]), choose(self.space.style), tempo, tick, culled)

    def _cull(self, tick: int) -> int:
        """Return a random tick to cull a seed that germinates at `tick`."""
        return self.random.randint(tick + 1, self.config.horizon - 1)

    def _place(self, seeds: Sequence[Sprout]) -> str:
        """Return a random slot for a further seed."""
        used = {seed.slot for seed in seeds}
        return self.random.choice(self.slots if len(used) < self.wide else [s for s in self.slots if s in used])

    def _plan(self, seeds: list[Sprout], late: bool) -> Plan:
        """Return a plan with ordered seeds: a seed is culled in time for the next one in its slot.

        The next one germinates when the slot is open again. It is dropped if no time is left for it.
        """
        found: list[Sprout] = []
        for slot in self.slots:
            own: list[Sprout] = []
            for seed in sorted((seed for seed in seeds if seed.slot == slot), key=lambda seed: seed.tick):
                if not own:
                    own.append(seed)
                    continue
                last = own[-1]
                culled = max(last.tick + 1, min(last.culled or seed.tick, seed.tick))
                tick = max(seed.tick, culled + self.closed)
                if tick <= self.last_tick[seed.tempo] and (seed.culled is None or tick < seed.culled):
                    own[-1:] = [last._replace(culled=culled), seed._replace(tick=tick)]
            found += own
        return Plan(tuple(found), late)

    def schedule(self, plan: Plan) -> Schedule:
        """Return the plan as a schedule.

        If several actions are due, those on existing seeds come before germinations.
        """
        advances = (not self.config.lifecycle.auto_blend) + (not self.config.lifecycle.auto_probation)
        kept = [seed for seed in plan.seeds if seed.culled is None]
        entries = []
        for seed in plan.seeds:
            entries.append(Entry(seed.tick, "GERMINATE", *seed[:4]))
            entries += [Entry(seed.tick + 1, "ADVANCE", seed.slot)] * advances
            if seed.culled is not None:
                entries.append(Entry(seed.culled, "CULL", seed.slot))
                continue
            # Two ticks per fossilized seed are reserved at the end, in case a seed cannot be fossilized at once.
            end = self.config.horizon - 2 * len(kept) + kept.index(seed) if plan.late else 0
            entries.append(Entry(max(end, seed.tick + 1), "FOSSILIZE", seed.slot))
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
        return Schedule(tuple(self.space.slot), tuple(entries))
