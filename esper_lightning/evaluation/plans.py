"""What a search for the best fixed schedule chooses from: plans, drawn at random or made from good ones."""

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
    """Of its germination."""
    culled: int | None = None
    """Tick in which it is culled: it helps the host to learn and costs nothing in the end. None: it is kept."""


class Plan(NamedTuple):
    """Seeds in the order of the host's slots; in one slot one after the other, and only the last is kept or not."""

    seeds: tuple[Sprout, ...]
    late: bool
    """Are they fossilized in the episode's last ticks, or each as soon as possible?"""


CULLED = 1 / 3
"""Share of drawn seeds that are not kept."""


class Generator:
    """Draws plans with 1 … K seeds in as many slots: how many, their slots, and then each choice for each seed is
    equally likely, but for early ticks and for being kept, which are likelier. Neighbours and children may have several
    seeds in a slot, one after the other.

    Args:
        pool: Says what there is to choose from.
        seed: Of its own random numbers.
        max_seeds: Most seeds in a plan. None: two in each slot.
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
        """Ticks from a seed's being culled to the next one's germination."""
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
        """In every slot what one of them has there, by chance; and half of the children are then changed a little."""
        seeds = []
        for slot in self.slots:
            seeds += [seed for seed in (one, other)[self._flip()].seeds if seed.slot == slot]
        if not 1 <= len(seeds) <= self.most or len({seed.slot for seed in seeds}) > self.wide:
            return self.neighbour(one)
        plan = self._plan(seeds, (one, other)[self._flip()].late)
        return self.neighbour(plan) if self._flip() or plan in (one, other) else plan

    def neighbour(self, plan: Plan) -> Plan:
        """The same plan but for one thing: a choice for a seed, its end, the seed itself, one more, one less, or when
        all are kept; and what that leaves no time for."""
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
        """`number` plans that are not `known`, fewer if they are hard to find: children of `parents`, or any."""
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
        # Early ticks are likelier: a seed that is there for longer learns for longer.
        tick = min(self.random.randint(0, self.last_tick[tempo]) for _ in range(2))
        culled = self._cull(tick) if self.random.random() < CULLED else None
        return Sprout(slot, choose(self.growable[slot]), choose(self.space.style), tempo, tick, culled)

    def _cull(self, tick: int) -> int:
        """When to cull a seed that germinates then."""
        return self.random.randint(tick + 1, self.config.horizon - 1)

    def _place(self, seeds: Sequence[Sprout]) -> str:
        """A slot for one more."""
        used = {seed.slot for seed in seeds}
        return self.random.choice(self.slots if len(used) < self.wide else [s for s in self.slots if s in used])

    def _plan(self, seeds: list[Sprout], late: bool) -> Plan:
        """In order; a seed makes way for the next one in its slot, which begins when the slot is open again, or not at
        all if there is no time left then."""
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
        """The plan spelled out. Where several entries are due, seeds that are there come before new ones."""
        advances = (not self.config.lifecycle.auto_blend) + (not self.config.lifecycle.auto_probation)
        kept = [seed for seed in plan.seeds if seed.culled is None]
        entries = []
        for seed in plan.seeds:
            entries.append(Entry(seed.tick, "GERMINATE", *seed[:4]))
            entries += [Entry(seed.tick + 1, "ADVANCE", seed.slot)] * advances
            if seed.culled is not None:
                entries.append(Entry(seed.culled, "CULL", seed.slot))
                continue
            # The end leaves as many ticks again as seeds are kept, for one that cannot be kept at once.
            end = self.config.horizon - 2 * len(kept) + kept.index(seed) if plan.late else 0
            entries.append(Entry(max(end, seed.tick + 1), "FOSSILIZE", seed.slot))
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
        return Schedule(tuple(self.space.slot), tuple(entries))
