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


class Plan(NamedTuple):
    """Seeds in different slots, in the order of the host's."""

    seeds: tuple[Sprout, ...]
    late: bool
    """Are they fossilized in the episode's last ticks, or each as soon as possible?"""


class Generator:
    """Draws plans with 1 … K seeds: how many, their slots, and then each choice for each seed is equally likely,
    but for early ticks, which are likelier.

    Args:
        pool: Says what there is to choose from.
        seed: Of its own random numbers.
        max_seeds: Most seeds in a plan. None: one in each slot.
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
        self.most = min(slots, max_seeds or slots, pool.config.actions.max_seeds or slots)
        self.last_tick = {
            tempo: pool.config.horizon - 1 - ticks_to_judge(pool.config.lifecycle, ticks)
            for tempo, ticks in pool.config.actions.tempos.items()
        }
        self.tempos = [tempo for tempo in pool.space.tempo if self.last_tick[tempo] >= 0]
        if not self.tempos:
            raise ValueError(f"no seed can be kept within {pool.config.horizon} ticks; raise env.horizon")

    def draw(self) -> Plan:
        chosen = self.random.sample(self.slots, self.random.randint(1, self.most))
        return self._plan([self._sprout(slot) for slot in chosen], self._flip())

    def child(self, one: Plan, other: Plan) -> Plan:
        """In every slot what one of them has there, by chance; and half of the children are then changed a little."""
        both = [{seed.slot: seed for seed in plan.seeds} for plan in (one, other)]
        seeds = [seed for slot in self.slots if (seed := both[self._flip()].get(slot)) is not None]
        if not 1 <= len(seeds) <= self.most:
            return self.neighbour(one)
        plan = self._plan(seeds, (one, other)[self._flip()].late)
        return self.neighbour(plan) if self._flip() or plan in (one, other) else plan

    def neighbour(self, plan: Plan) -> Plan:
        """The same plan but for one thing: a choice for a seed, the seed itself, one more, one less, or their end."""
        seeds = list(plan.seeds)
        free = [slot for slot in self.slots if slot not in {seed.slot for seed in seeds}]
        moves = ["blueprint", "tick", "place", "late"]
        moves += ["style"] * (len(self.space.style) > 1) + ["tempo"] * (len(self.tempos) > 1)
        moves += ["more"] * (len(seeds) < self.most) + ["less"] * (len(seeds) > 1)
        move, i = self.random.choice(moves), self.random.randrange(len(seeds))
        if move == "late":
            return plan._replace(late=not plan.late)
        if move == "more":
            seeds.append(self._sprout(self.random.choice(free)))
        elif move == "less":
            del seeds[i]
        elif move == "place":
            seeds[i] = self._sprout(self.random.choice([*free, seeds[i].slot]))
        else:
            other = self._sprout(seeds[i].slot)
            changed = seeds[i]._replace(**{move: getattr(other, move)})
            seeds[i] = changed._replace(tick=min(changed.tick, self.last_tick[changed.tempo]))
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
        return Sprout(slot, choose(self.growable[slot]), choose(self.space.style), tempo, tick)

    def _plan(self, seeds: list[Sprout], late: bool) -> Plan:
        return Plan(tuple(sorted(seeds, key=lambda seed: self.space.slot.index(seed.slot))), late)

    def schedule(self, plan: Plan) -> Schedule:
        """The plan spelled out. Where several entries are due, seeds that are there come before new ones."""
        advances = (not self.config.lifecycle.auto_blend) + (not self.config.lifecycle.auto_probation)
        entries = []
        for i, seed in enumerate(plan.seeds):
            entries.append(Entry(seed.tick, "GERMINATE", *seed[:4]))
            entries += [Entry(seed.tick + 1, "ADVANCE", seed.slot)] * advances
            # The end leaves as many ticks again as there are seeds, for one that cannot be kept at once.
            end = self.config.horizon - 2 * len(plan.seeds) + i if plan.late else 0
            entries.append(Entry(max(end, seed.tick + 1), "FOSSILIZE", seed.slot))
        entries.sort(key=lambda entry: (entry.tick, entry.op == "GERMINATE"))
        return Schedule(tuple(self.space.slot), tuple(entries))
