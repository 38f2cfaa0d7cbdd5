"""Comparison of a trained policy, rivals, rules and schedules on the same hosts. S training seeds, H hosts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers.fixed_schedule import (
    FixedSchedule,
    RecordingController,
    SchedulePerPrice,
    most_common_schedule,
    parameter_prices,
    yoke_schedules,
)
from esper_lightning.controllers.heuristic import HeuristicConfig
from esper_lightning.controllers.hill_climbing import ClimbingConfig
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.periodic import PeriodicConfig
from esper_lightning.controllers.registry import CONTROLLERS, make_controller
from esper_lightning.controllers.schedule import Schedule
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import HostPool, check_host_count
from esper_lightning.envs.seeding import EVALUATION, check_rng_seed, episode_rng_seeds
from esper_lightning.evaluation.baselines import (
    HAND_WRITTEN,
    UNGROWN_HOST,
    check_schedules,
    make_baselines,
    make_fixed_schedules,
    read_schedules,
)
from esper_lightning.evaluation.checkpoints import RIVAL_PREFIX, TrainedPolicy
from esper_lightning.evaluation.credit import CreditConfig, SeedCredit, measure_credit
from esper_lightning.evaluation.networks import GrownHost, best_hosts
from esper_lightning.evaluation.play import Outcome, play_episode
from esper_lightning.evaluation.search.search import (
    BestSchedules,
    SearchConfig,
    check_budget,
    read_best_schedules,
    search,
    search_per_price,
)
from esper_lightning.evaluation.static_host import StaticController, affordable_ticks
from esper_lightning.evaluation.statistics import Interval, effect_size, mean_interval

TAMIYO, SAMPLED = "tamiyo", "sampled"
"""Names of the compared policy, taking its most likely action and drawing actions as in training."""

REPLAYED, YOKED = "replayed", "yoked"
"""Names of two open-loop controls: the policy's most frequent schedule, played on every host; and for each host the
schedule that the policy chose for another host of the same context."""

BEST_FIXED, BEST_PER_PRICE = "best fixed", "best per price"
"""Names of the controllers that play the results of the schedule search."""

DERIVED = (SAMPLED, REPLAYED, YOKED)
"""Names of the controllers that exist only beside a trained policy."""

TWIN_PREFIX = "static "
"""Prefix of the names of static twins."""

SEARCH_ENVS = 96
"""Number of environments in which the search evaluates candidate schedules side by side."""


class Entry(NamedTuple):
    """One row of the comparison: a controller and its outcomes."""

    name: str
    outcomes: list[Outcome]
    """Outcomes, one per training seed, or a single one if the controller does not depend on training."""
    training_seeds: list[int | None]
    """RNG seed of the training behind each outcome. None: unknown, or the controller does not depend on training."""

    def values(self, column: str) -> np.ndarray:  # [S, H] or [1, H]
        """Return one column of the outcomes, one value per training seed and host."""
        return np.array([getattr(outcome, column) for outcome in self.outcomes], dtype=np.float64)

    def mean_metrics(self) -> dict[str, float]:
        """Return the mean of each further test metric over training seeds and hosts, by name."""
        return {
            name: float(np.mean([outcome.metrics[name] for outcome in self.outcomes]))
            for name in self.outcomes[0].metrics
        }


class ComparisonResult(NamedTuple):
    """Result of a comparison, ready to be reported."""

    policies: list[TrainedPolicy]
    """Trained policies, one per training seed; empty if rules and schedules were compared alone."""
    rivals: dict[str, TrainedPolicy]
    """Further trained policies, by the names of their rows."""
    rng_seeds: list[int]
    """RNG seeds of the hosts."""
    entries: list[Entry]
    """Rows of the comparison; the first is the one with which the others are compared."""
    schedules: dict[str, Schedule]
    """Schedules to save, by file name without suffix.
    They are the most frequent schedule of each policy and the best ones of the search."""
    notes: list[str]
    credits: list[SeedCredit]
    networks: list[GrownHost]
    """The best hosts of the reference, the best first, if they are to be saved."""

    @property
    def reference(self) -> Entry:
        """Row with which the others are compared: the trained policy, if there is one."""
        return self.entries[0]

    def lead(self, other: Entry) -> np.ndarray:  # [S, H]
        """Return the objective of the reference minus that of `other`, paired by host.

        It is also paired by training seed if both entries have one outcome per training seed.
        """
        return self.reference.values("objective") - other.values("objective")

    def mean_lead(self, other: Entry) -> tuple[Interval, float]:
        """Return the mean lead over `other` with its interval, and the lead as Cohen's d_z."""
        lead = self.lead(other)
        return mean_interval(lead), effect_size(lead)


class LearnedEntries(NamedTuple):
    """Results of the trained policies and of the controls derived from them; all are empty without a policy."""

    entries: dict[str, Entry]
    """Rows by name: the policy and the controls in `DERIVED`. A row that was not played has no outcomes."""
    schedules: dict[str, Schedule]
    """Most frequent schedule of each policy, by file name without suffix."""
    notes: list[str]
    credits: list[SeedCredit]
    networks: list[GrownHost]
    """Best hosts of the first policy."""


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
            fixed`, `best per price`, and your own by name or import path. None: all of this package. Without a trained
            policy the other rows are compared with the first name, by default `small static`.
        controls: Play static controls: the final networks of the policy and of the best baseline compared, complete
            from the first tick, with as many host epochs and with as much training compute.
        held_out: Draw hosts from the held-out contexts of the family, which training never uses.
    """

    def __init__(
        self,
        *,
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
        check_host_count("evaluation.hosts", hosts, least=0)
        check_rng_seed("evaluation.seed", seed)
        if credit.hosts > hosts:
            raise ValueError(f"evaluation.credit.hosts is {credit.hosts}, more than the {hosts} that are evaluated")
        self.hosts = hosts
        self.seed = seed
        self.credit = credit
        self.search = search
        self.found_schedules = None if search is None or search.found is None else read_best_schedules(search.found)
        self.against = against
        self.controls = controls
        self.held_out = held_out
        self.rule_configs = {"heuristic": heuristic, "climbing": climbing, "periodic": periodic}
        self.schedules = read_schedules(({} if schedule is None else {"schedule": schedule}) | (schedules or {}))
        if schedule is not None and "schedule" in (schedules or {}):
            raise ValueError("evaluation.schedule and a 'schedule' in evaluation.schedules: give the file once")
        reserved = [*DERIVED, BEST_FIXED, BEST_PER_PRICE]
        taken = {TAMIYO, *reserved, *make_baselines(seed, **self.rule_configs)}
        for name in schedules or {}:
            if name in taken or name.startswith((RIVAL_PREFIX, TWIN_PREFIX)):
                raise ValueError(f"evaluation.schedules: {name!r} is another controller's name; choose a new one")
        known = [*reserved, *self._named_controllers()]
        self.own = [name for name in against or () if name not in known]
        for name in self.own:
            try:
                CONTROLLERS.find(name, known)
            except ValueError as error:
                raise ValueError(f"evaluation.against: {error}") from error
        self.hand_written = (*HAND_WRITTEN, *self.own)
        self.make_controllers()  # raises ValueError now if one cannot be made
        per_price = search is not None and (
            search.per_price if self.found_schedules is None else bool(self.found_schedules.per_price)
        )
        for name, is_available in ((BEST_FIXED, search is not None), (BEST_PER_PRICE, per_price)):
            if name in (against or ()) and not is_available:
                setting = "search.steps" if name == BEST_FIXED else "search.per_price"
                raise ValueError(f"evaluation.against: {name!r} must be searched first; set evaluation.{setting}")

    def includes(self, name: str) -> bool:
        """Return True if the comparison includes this controller."""
        return self.against is None or name in self.against

    def check_without_policy(self) -> None:
        """Raise ValueError unless there is something to compare without a trained policy."""
        for name in DERIVED:
            if name in (self.against or ()):
                raise ValueError(f"evaluation.against: {name!r} needs a trained policy; give --ckpt_path")
        if self.against == []:
            raise ValueError(
                "there is nothing to compare: evaluation.against is empty and there is no policy; name controllers, "
                "or give --ckpt_path"
            )
        if self.credit.hosts:
            raise ValueError("evaluation.credit analyses the seeds of a trained policy; give --ckpt_path")

    def check(self, pool: HostPool) -> None:
        """Raise ValueError if a schedule does not fit the pool's hosts or the search budget is too small.

        The same happens if held-out contexts are requested and there are none.
        """
        check_schedules(self.schedules, pool)
        if self.found_schedules is not None:
            check_schedules(self.found_schedules.by_file(), pool)
        elif self.search is not None and (self.includes(BEST_FIXED) or self.includes(BEST_PER_PRICE)):
            check_budget(
                replace(self.search, per_price=self.search.per_price and self.includes(BEST_PER_PRICE)),
                pool,
                SEARCH_ENVS,
            )
        contexts = pool.config.family.contexts(self.held_out)
        if self.controls and any(context.horizon is not None for context in contexts):
            raise ValueError(
                "evaluation.controls: static controls train beyond the horizon, which hosts with the variable horizon "
                "do not; set evaluation.controls to false"
            )
        if self.held_out and not pool.config.family.held_out:
            raise ValueError(
                "evaluation.held_out: there are no held-out contexts; name some in data.env.family.held_out"
            )

    def _named_controllers(self) -> dict[str, Controller]:
        """Return new instances of the baselines and the schedules, by name."""
        return make_baselines(self.seed, **self.rule_configs) | make_fixed_schedules(self.schedules)

    def make_controllers(self) -> dict[str, Controller]:
        """Return new instances of all controllers that do not depend on training, by name."""
        return self._named_controllers() | {name: make_controller(name) for name in self.own}

    def run(
        self,
        data: HostPoolData,
        policies: Sequence[TrainedPolicy],
        rivals: Mapping[str, TrainedPolicy],
        *,
        task: str | None = None,
        save_networks: int = 0,
    ) -> ComparisonResult:
        """Run the comparison on hosts of one task. It creates its own pools.

        Args:
            data: Hosts; the pool must be built and is not modified.
            policies: Trained policies, one per training seed. Empty: rules and schedules are compared alone.
            rivals: Further trained policies, by the names of their rows.
            task: Name of the task, where there are several. None: the first.
            save_networks: Number of hosts to keep: the best of the first policy, or without one of the reference.
        """
        make_pool = partial(data.make_pool, task=task, sight=policies[0].sight if policies else None)
        pool = make_pool(self.hosts, held_out=self.held_out)
        rng_seeds = episode_rng_seeds(self.seed, EVALUATION, 0, n_envs=self.hosts)
        learned = self._play_policies(pool, rng_seeds, policies, make_pool=make_pool, save_networks=save_networks)
        reference = TAMIYO if policies else (self.against or [UNGROWN_HOST])[0]
        networks = learned.networks
        rival_entries = [
            self._play_rival(pool, rng_seeds, name, rival=rival, make_pool=make_pool) for name, rival in rivals.items()
        ]
        controllers = {name: controller for name, controller in self.make_controllers().items() if self.includes(name)}
        best = self._find_best_schedules(make_pool, [*self.schedules.values(), *learned.schedules.values()])
        if best.fixed is not None and self.includes(BEST_FIXED):
            controllers[BEST_FIXED] = FixedSchedule(best.fixed)
        if best.per_price and self.includes(BEST_PER_PRICE):
            controllers[BEST_PER_PRICE] = SchedulePerPrice(best.per_price)
        rules: dict[str, Entry] = {}
        for name, controller in controllers.items():
            outcome = play_episode(pool, name, controller, rng_seeds=rng_seeds)
            rules[name] = Entry(name, [outcome], [None])
            if name == reference:
                networks = best_hosts(pool, outcome, save_networks)
        policy, sampled, replayed, yoked = learned.entries.values()
        twinned = [policy, *best_hand_written(rules, self.hand_written)] if self.controls else []
        twins = [twin for entry in twinned for twin in play_static_twins(pool, rng_seeds, entry)]
        entries = [policy, sampled, *rival_entries, *rules.values(), replayed, yoked, *twins]
        return ComparisonResult(
            list(policies),
            dict(rivals),
            rng_seeds,
            sorted((entry for entry in entries if entry.outcomes), key=lambda entry: entry.name != reference),
            learned.schedules | best.by_file(),
            learned.notes,
            learned.credits,
            networks,
        )

    def _find_best_schedules(self, make_pool: Callable[..., HostPool], known: Sequence[Schedule]) -> BestSchedules:
        """Return the best schedules from earlier files or from a new search, restricted to the requested ones."""
        if self.search is None:
            return BestSchedules(None, {})
        if self.found_schedules is not None:
            return self.found_schedules
        known = list(dict.fromkeys(known))
        fixed = search(make_pool(SEARCH_ENVS), self.search, known).schedule if self.includes(BEST_FIXED) else None
        wanted = self.search.per_price and self.includes(BEST_PER_PRICE)
        return BestSchedules(fixed, search_per_price(make_pool(SEARCH_ENVS), self.search, known) if wanted else {})

    def _play_policies(
        self,
        pool: HostPool,
        rng_seeds: Sequence[int],
        policies: Sequence[TrainedPolicy],
        *,
        make_pool: Callable[..., HostPool],
        save_networks: int,
    ) -> LearnedEntries:
        """Play the policies, and the sampled, replayed and yoked controls derived from them."""
        training_seeds = [policy.training_seed for policy in policies]
        entries = {name: Entry(name, [], training_seeds) for name in (TAMIYO, *DERIVED)}
        learned = LearnedEntries(entries, {}, [], [], [])
        for number, policy in enumerate(policies):
            recording = RecordingController(policy.greedy())
            outcome = play_episode(pool, TAMIYO, recording, rng_seeds=rng_seeds)
            if number == 0:
                learned.networks.extend(best_hosts(pool, outcome, save_networks))
            if number == 0 and self.credit.hosts:
                fork_pool = make_pool(2 * self.credit.repetitions, held_out=self.held_out)
                learned.credits.extend(measure_credit(pool, fork_pool, self.credit))
            schedules = recording.schedules
            common, frequency = most_common_schedule(schedules)
            name, suffix = "schedule", ""
            if len(policies) > 1:
                name, suffix = f"schedule{number}", f" of training seed {policy.training_seed}"
            learned.schedules[name] = common
            learned.notes.append(
                f"{frequency} of {self.hosts} hosts{suffix} grew by the same schedule: {name}.json; there are "
                f"{len(set(schedules))} different ones"
            )
            entries[TAMIYO].outcomes.append(outcome)
            others = {
                SAMPLED: policy.sampled(self.seed),
                REPLAYED: FixedSchedule(common),
                YOKED: FixedSchedule(yoke_schedules(schedules, outcome.contexts, parameter_prices(pool))),
            }
            for other, controller in others.items():
                if self.includes(other):
                    entries[other].outcomes.append(play_episode(pool, other, controller, rng_seeds=rng_seeds))
        contexts = entries[TAMIYO].outcomes[0].contexts if policies else []
        n_singletons = sum(number == 1 for number in Counter(contexts).values())
        if n_singletons and self.includes(YOKED):
            learned.notes.append(
                f"{n_singletons} of {self.hosts} hosts were the only ones of their kind: "
                "yoked plays their own schedules"
            )
        return learned

    def _play_rival(
        self,
        pool: HostPool,
        rng_seeds: Sequence[int],
        name: str,
        *,
        rival: TrainedPolicy,
        make_pool: Callable[..., HostPool],
    ) -> Entry:
        """Play a rival on the same hosts, which it observes as in its training."""
        if rival.sight != pool.config.sight:
            pool = make_pool(self.hosts, held_out=self.held_out, sight=rival.sight)
        return Entry(name, [play_episode(pool, name, rival.greedy(), rng_seeds=rng_seeds)], [rival.training_seed])


def best_hand_written(rules: Mapping[str, Entry], names: Sequence[str]) -> list[Entry]:
    """Return the controller among `names` with the best mean objective, or no controller if none was played."""
    played = [rules[name] for name in names if name in rules]
    return sorted(played, key=lambda entry: -entry.values("objective").mean())[:1]


def play_static_twins(pool: HostPool, rng_seeds: Sequence[int], entry: Entry) -> list[Entry]:
    """Play the static twins of a row's final hosts: with as many host epochs, and with as much training compute."""
    static, equal_flops = (
        Entry(f"{TWIN_PREFIX}{entry.name}{suffix}", [], entry.training_seeds) for suffix in ("", ", equal FLOPs")
    )
    for outcome in entry.outcomes:
        controller = StaticController(outcome.topologies)
        static.outcomes.append(play_episode(pool, static.name, controller, rng_seeds=rng_seeds))
        ticks = affordable_ticks(static.outcomes[-1], outcome.flops)
        equal_flops.outcomes.append(
            play_episode(pool, equal_flops.name, controller, rng_seeds=rng_seeds, tick_limits=ticks)
        )
    return [static, equal_flops]
