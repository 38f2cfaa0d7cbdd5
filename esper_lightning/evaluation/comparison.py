"""Comparison of trained policies with baselines on the same hosts. S training seeds, H hosts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from esper_lightning.blueprints import nearest
from esper_lightning.data import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.compare import Outcome, play
from esper_lightning.evaluation.credit import CreditConfig, SeedCredit, credit_seeds
from esper_lightning.evaluation.intervals import Interval, effect_size, mean_interval
from esper_lightning.evaluation.learned import Tamiyo
from esper_lightning.evaluation.rules import (
    HAND_WRITTEN,
    check_schedules,
    fixed,
    make_rules,
    read_schedules,
)
from esper_lightning.evaluation.search import (
    BestSchedules,
    SearchConfig,
    check_budget,
    read_best_schedules,
    search,
    search_per_price,
)
from esper_lightning.evaluation.static import Static, affordable_ticks
from esper_lightning.rollout import EVALUATION, episode_seeds
from esper_lightning.tamiyo.climbing import ClimbingConfig
from esper_lightning.tamiyo.controller import Controller
from esper_lightning.tamiyo.heuristic import HeuristicConfig
from esper_lightning.tamiyo.periodic import PeriodicConfig
from esper_lightning.tamiyo.replay import FixedPerPrice, FixedSchedule, Recording, most_common, prices_in, yoked
from esper_lightning.tamiyo.schedule import Schedule

TAMIYO = "tamiyo"

REPLAYED, YOKED = "replayed", "yoked"
"""Names of two open-loop controls: the policy's most frequent schedule, played on every host; and for each host the
schedule that the policy chose for another host of the same context."""

BEST, PER_PRICE = "best fixed", "best per price"
"""Names of the controllers that play the results of the schedule search."""

RACERS = 96
"""Number of environments in which the search evaluates candidate schedules side by side."""


class Contender(NamedTuple):
    """One row of the comparison: a controller and its outcomes."""

    name: str
    outcomes: list[Outcome]
    """Outcomes, one per training seed, or a single one if the controller does not depend on training."""

    def values(self, column: str) -> np.ndarray:  # [S, H] or [1, H]
        """Return one column of the outcomes, one value per training seed and host."""
        return np.array([getattr(outcome, column) for outcome in self.outcomes], dtype=np.float64)


class Contest(NamedTuple):
    """Result of a comparison, ready to be reported."""

    tamiyos: list[Tamiyo]
    seeds: list[int]
    """RNG seeds of the hosts."""
    contenders: list[Contender]
    """Rows of the comparison; the trained policy comes first."""
    schedules: dict[str, Schedule]
    """Schedules to save, by file name without suffix.
    They are the most frequent schedule of each policy and the best ones of the search."""
    notes: list[str]
    credits: list[SeedCredit]

    @property
    def ours(self) -> Contender:
        return self.contenders[0]

    def lead(self, other: Contender) -> np.ndarray:  # [S, H]
        """Return the objective of the policy minus that of `other`, paired by host.

        It is also paired by training seed if both entries have one outcome per training seed.
        """
        return self.ours.values("objective") - other.values("objective")

    def ahead(self, other: Contender) -> tuple[Interval, float]:
        """Return the mean lead over `other` with its interval, and the lead as Cohen's d_z."""
        lead = self.lead(other)
        return mean_interval(lead), effect_size(lead)


class Learned(NamedTuple):
    """Results of the trained policies and of the controls derived from them."""

    rows: dict[str, list[Outcome]]
    schedules: dict[str, Schedule]
    """Most frequent schedule of each policy, by file name without suffix."""
    notes: list[str]
    credits: list[SeedCredit]


class Comparison:
    """Compares controllers on the same fresh hosts and the same data.

    Args:
        hosts: Number of hosts. Their test samples are never used for rewards. 0: no evaluation.
        seed: RNG seed that selects the hosts. The same number gives the same hosts in every run.
        heuristic: Settings of the heuristic baseline.
        credit: Number of hosts whose fossilized seeds are analysed, and how precisely.
        climbing: Settings of hill climbing, which is compared with and without its rule about seeds without gradient.
        periodic: Settings of the periodic baseline.
        search: Settings of the search for the best fixed schedule, which takes minutes. None: no search.
        schedule: File with a schedule to add to the comparison.
        schedules: Further schedule files, by the names under which they appear in the table.
        against: Names of the controllers to compare with: baselines, schedules, `sampled`, `replayed`, `yoked`, `best
            fixed`, `best per price`. None: all.
        controls: Play static controls: the final networks of the policy and of the best baseline, complete from the
            first tick, with as many host epochs and with as much training compute.
        held_out: Draw hosts from the held-out contexts of the family, which training never uses.
    """

    def __init__(
        self,
        hosts: int = 64,
        seed: int = 0,
        heuristic: HeuristicConfig = HeuristicConfig(),
        credit: CreditConfig = CreditConfig(),
        climbing: ClimbingConfig = ClimbingConfig(),
        periodic: PeriodicConfig = PeriodicConfig(),
        search: SearchConfig | None = None,
        schedule: str | None = None,
        schedules: dict[str, str] | None = None,
        against: list[str] | None = None,
        controls: bool = True,
        held_out: bool = False,
    ) -> None:
        if hosts < 0 or hosts == 1:
            raise ValueError(f"evaluation.hosts must be 0 (none) or at least 2 (for an interval), got {hosts}")
        if seed < 0:
            raise ValueError(f"evaluation.seed must not be negative, got {seed}")
        if credit.hosts > hosts:
            raise ValueError(f"evaluation.credit.hosts is {credit.hosts}, more than the {hosts} that are evaluated")
        self.hosts = hosts
        self.seed = seed
        self.credit = credit
        self.search = search
        self.found = None if search is None or search.found is None else read_best_schedules(search.found)
        self.against = against
        self.controls = controls
        self.held_out = held_out
        self.rules = (heuristic, climbing, periodic)
        self.schedules = read_schedules(({} if schedule is None else {"schedule": schedule}) | (schedules or {}))
        if schedule is not None and "schedule" in (schedules or {}):
            raise ValueError("evaluation.schedule and a 'schedule' in evaluation.schedules: give the file once")
        ours = ["sampled", REPLAYED, YOKED, BEST, PER_PRICE]
        taken = {TAMIYO, *ours, *make_rules(seed, *self.rules)} & set(schedules or {})
        if taken:
            raise ValueError(f"evaluation.schedules: {min(taken)!r} is another controller's name; choose a new one")
        known = [*ours, *self.controllers()]
        for name in against or ():
            if name not in known:
                raise ValueError(f"evaluation.against: unknown controller {name!r}; {nearest(name, known)}")
        per_price = search is not None and (search.per_price if self.found is None else bool(self.found.per_price))
        for name, there in ((BEST, search is not None), (PER_PRICE, per_price)):
            if name in (against or ()) and not there:
                setting = "search.steps" if name == BEST else "search.per_price"
                raise ValueError(f"evaluation.against: {name!r} must be searched first; set evaluation.{setting}")
        if controls and hosts and not any(self.wants(name) for name in HAND_WRITTEN):
            raise ValueError(
                "evaluation.controls wants a rule for its twin; name one in evaluation.against, or switch it off"
            )

    def wants(self, name: str) -> bool:
        """Return True if the comparison includes this controller."""
        return self.against is None or name in self.against

    def check(self, pool: HostPool) -> None:
        """Raise ValueError if a schedule does not fit the pool's hosts or the search budget is too small.

        The same happens if held-out contexts are requested and there are none.
        """
        check_schedules(self.schedules, pool)
        if self.found is not None:
            check_schedules(self.found.by_file(), pool)
        elif self.search is not None and (self.wants(BEST) or self.wants(PER_PRICE)):
            check_budget(replace(self.search, per_price=self.search.per_price and self.wants(PER_PRICE)), pool, RACERS)
        if self.held_out and not pool.config.family.held_out:
            raise ValueError(
                "evaluation.held_out: there are no held-out members; name some in data.env.family.held_out"
            )

    def controllers(self) -> dict[str, Controller]:
        """Return new instances of all controllers that do not depend on training, by name."""
        return make_rules(self.seed, *self.rules) | fixed(self.schedules)

    def play(self, data: HostPoolData, tamiyos: Sequence[Tamiyo], task: str | None = None) -> Contest:
        """Run the comparison on hosts of one task (None: the first). It creates its own pools."""
        make_pool = partial(data.make_pool, task=task)
        pool = make_pool(self.hosts, held_out=self.held_out)
        seeds = episode_seeds(self.seed, EVALUATION, 0, self.hosts)
        learned = self._learned(pool, seeds, tamiyos, make_pool)
        found = dict(learned.schedules)
        others = {name: controller for name, controller in self.controllers().items() if self.wants(name)}
        best = self._searched(make_pool, [*self.schedules.values(), *learned.schedules.values()])
        found |= best.by_file()
        if best.fixed is not None and self.wants(BEST):
            others[BEST] = FixedSchedule(best.fixed)
        if best.per_price and self.wants(PER_PRICE):
            others[PER_PRICE] = FixedPerPrice(best.per_price)
        rules = {name: [play(pool, name, controller, seeds)] for name, controller in others.items()}
        controls = self._controls(pool, seeds, learned.rows[TAMIYO], rules) if self.controls else {}
        blind = {name: learned.rows.pop(name) for name in (REPLAYED, YOKED)}
        rows = learned.rows | rules | blind | controls
        contenders = [Contender(name, outcomes) for name, outcomes in rows.items() if outcomes]
        return Contest(list(tamiyos), seeds, contenders, found, learned.notes, learned.credits)

    def _searched(self, make_pool: Callable[..., HostPool], known: Sequence[Schedule]) -> BestSchedules:
        """Return the best schedules from earlier files or from a new search, restricted to the requested ones."""
        if self.search is None:
            return BestSchedules(None, {})
        if self.found is not None:
            return self.found
        known = list(dict.fromkeys(known))
        fixed = search(make_pool(RACERS), self.search, known).schedule if self.wants(BEST) else None
        wanted = self.search.per_price and self.wants(PER_PRICE)
        return BestSchedules(fixed, search_per_price(make_pool(RACERS), self.search, known) if wanted else {})

    def _learned(
        self, pool: HostPool, seeds: Sequence[int], tamiyos: Sequence[Tamiyo], make_pool: Callable[..., HostPool]
    ) -> Learned:
        """Play the policies, and the sampled, replayed and yoked controls derived from them."""
        learned = Learned({TAMIYO: [], "sampled": [], REPLAYED: [], YOKED: []}, {}, [], [])
        for number, tamiyo in enumerate(tamiyos):
            recording = Recording(tamiyo.greedy())
            outcome = play(pool, TAMIYO, recording, seeds)
            if number == 0 and self.credit.hosts:
                pairs = make_pool(2 * self.credit.repetitions, held_out=self.held_out)
                learned.credits.extend(credit_seeds(pool, pairs, self.credit))
            schedules = recording.schedules
            common, times = most_common(schedules)
            name, whose = "schedule", ""
            if len(tamiyos) > 1:
                name, whose = f"schedule{number}", f" of training seed {tamiyo.training_seed}"
            learned.schedules[name] = common
            learned.notes.append(
                f"{times} of {self.hosts} hosts{whose} grew by the same schedule: {name}.json; there are "
                f"{len(set(schedules))} different ones"
            )
            learned.rows[TAMIYO].append(outcome)
            others = {
                "sampled": tamiyo.sampled(self.seed),
                REPLAYED: FixedSchedule(common),
                YOKED: FixedSchedule(yoked(schedules, outcome.members, prices_in(pool))),
            }
            for other, controller in others.items():
                if self.wants(other):
                    learned.rows[other].append(play(pool, other, controller, seeds))
        alone = sum(number == 1 for number in Counter(learned.rows[TAMIYO][0].members).values())
        if alone and self.wants(YOKED):
            learned.notes.append(
                f"{alone} of {self.hosts} hosts were the only ones of their kind: yoked plays their own schedules"
            )
        return learned

    def _controls(
        self, pool: HostPool, seeds: Sequence[int], tamiyo: list[Outcome], rules: Mapping[str, list[Outcome]]
    ) -> dict[str, list[Outcome]]:
        """Play static twins of the final hosts of the policy and of the best baseline; return outcomes by name."""
        best = max((name for name in HAND_WRITTEN if name in rules), key=lambda name: rules[name][0].objective.mean())
        twins: dict[str, list[Outcome]] = {}
        for name, grown in ((TAMIYO, tamiyo), (best, rules[best])):
            for outcome in grown:
                controller = Static(outcome.kept)
                whole, equal = f"static {name}", f"static {name}, equal FLOPs"
                static = play(pool, whole, controller, seeds)
                ticks = affordable_ticks(static, outcome.flops)
                twins.setdefault(whole, []).append(static)
                twins.setdefault(equal, []).append(play(pool, equal, controller, seeds, ticks))
        return twins
