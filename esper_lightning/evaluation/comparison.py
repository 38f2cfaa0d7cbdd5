"""Comparison of a trained policy, rivals, rules and schedules on the same hosts. S training seeds, H hosts."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers.fixed_schedule import (
    FixedSchedule,
    SchedulePerPrice,
    most_common_schedule,
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
from esper_lightning.evaluation.episodes import Played, play, play_policy, play_static
from esper_lightning.evaluation.networks import GrownHost
from esper_lightning.evaluation.play import Outcome, try_controller
from esper_lightning.evaluation.search.search import (
    BestSchedules,
    SearchConfig,
    check_budget,
    read_best_schedules,
    search_best_schedules,
)
from esper_lightning.evaluation.statistics import Interval, effect_size, mean_interval
from esper_lightning.evaluation.work import run_all
from esper_lightning.parallel import Mapper, Processes, check_jobs

Episodes = Callable[[], list[Played]]
"""Plays one episode, or several that follow from each other."""

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


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of the comparison of a policy with other controllers on the same fresh hosts and test data."""

    hosts: int = 64
    """Number of hosts. Their test samples are never used for rewards. 0: `fit` ends without a comparison."""

    seed: int = 0
    """RNG seed that selects the hosts. The same number gives the same hosts in every run."""

    against: list[str] | None = None
    """Names of the controllers to compare with: baselines, schedules, `sampled`, `replayed`, `yoked`, `best fixed`,
    `best per price`, and your own by name or import path. None: all of this package."""

    controls: bool = True
    """Play static controls: the final networks of the policy and of the best baseline compared, complete from the first
    tick, with as many host epochs and with as much training compute."""

    held_out: bool = False
    """Draw hosts from the held-out contexts of the family, which training never uses."""

    policies: list[str] | None = None
    """Trained policies to test in place of the module's own: checkpoints, safetensors files, or `tamiyo`, the policy of
    the package. Several are of several training seeds. An empty list: rules and schedules are compared alone, with the
    first of `against`, by default `small static`."""

    transfer: bool = False
    """The `policies` were trained on other hosts."""

    rivals: list[str] | None = None
    """Checkpoints trained on the same hosts in another way, such as with another reward; each is a row of the table."""

    search: SearchConfig | None = None
    """Search for the best fixed schedule, which takes minutes. None: no search."""

    schedules: dict[str, str] | None = None
    """Files of schedules to add to the comparison, by the names under which they appear in the table."""

    save_networks: int = 0
    """Number of hosts to save as grown networks, in `networks` in the folder: those with the best objective."""

    jobs: int = 1
    """Processes that play the controllers, and search schedules, side by side; each has its own copy of the data. The
    number does not change the result."""

    heuristic: HeuristicConfig = HeuristicConfig()
    """Settings of the heuristic baseline."""

    climbing: ClimbingConfig = ClimbingConfig()
    """Settings of hill climbing, which is compared with and without its rule about seeds without gradient."""

    periodic: PeriodicConfig = PeriodicConfig()
    """Settings of the periodic baseline."""

    def __post_init__(self) -> None:
        if self.hosts < 0 or self.hosts == 1:
            raise ValueError(f"model.evaluation.hosts must be 0 or at least 2 (for an interval), got {self.hosts}")
        check_host_count("model.evaluation.hosts", self.hosts, least=0)
        check_rng_seed("model.evaluation.seed", self.seed)
        check_jobs(self.jobs)
        if self.save_networks < 0:
            raise ValueError(f"model.evaluation.save_networks must be at least 0, got {self.save_networks}")


class Comparison:
    """Compares controllers on the same fresh hosts and the same data.

    Args:
        config: Settings of the comparison.

    Raises ValueError if a controller or a schedule that they name does not exist.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        self.hosts, self.seed, self.search = config.hosts, config.seed, config.search
        self.against, self.controls, self.held_out = config.against, config.controls, config.held_out
        against, search, schedules = config.against, config.search, config.schedules
        self.found_schedules = None if search is None or search.found is None else read_best_schedules(search.found)
        self.rule_configs = {"heuristic": config.heuristic, "climbing": config.climbing, "periodic": config.periodic}
        self.schedules = read_schedules(schedules or {})
        reserved = [*DERIVED, BEST_FIXED, BEST_PER_PRICE]
        taken = {TAMIYO, *reserved, *make_baselines(self.seed, **self.rule_configs)}
        for name in schedules or {}:
            if name in taken or name.startswith((RIVAL_PREFIX, TWIN_PREFIX)):
                raise ValueError(f"model.evaluation.schedules: {name!r} is another controller's name; choose a new one")
        known = [*reserved, *self._named_controllers()]
        self.own = [name for name in against or () if name not in known]
        for name in self.own:
            try:
                CONTROLLERS.find(name, known)
            except ValueError as error:
                raise ValueError(f"model.evaluation.against: {error}") from error
        self.hand_written = (*HAND_WRITTEN, *self.own)
        self.make_controllers()  # raises ValueError now if one cannot be made
        per_price = search is not None and (
            search.per_price if self.found_schedules is None else bool(self.found_schedules.per_price)
        )
        for name, is_available in ((BEST_FIXED, search is not None), (BEST_PER_PRICE, per_price)):
            if name in (against or ()) and not is_available:
                setting = "search.steps" if name == BEST_FIXED else "search.per_price"
                raise ValueError(f"model.evaluation.against: {name!r} must be searched first; set its {setting}")

    def includes(self, name: str) -> bool:
        """Return True if the comparison includes this controller."""
        return self.against is None or name in self.against

    def check_without_policy(self) -> None:
        """Raise ValueError unless there is something to compare without a trained policy."""
        for name in DERIVED:
            if name in (self.against or ()):
                raise ValueError(f"model.evaluation.against: {name!r} needs a trained policy; name one in policies")
        if self.against == []:
            raise ValueError(
                "model.evaluation.against is empty and there is no policy, so nothing is compared; name controllers"
            )

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
                "model.evaluation.controls: static controls train beyond the horizon, which hosts with the variable "
                "horizon do not; set it to false"
            )
        if self.held_out and not pool.config.family.held_out:
            raise ValueError(
                "model.evaluation.held_out: there are no held-out contexts; name some in data.env.family.held_out"
            )

    def check_controllers(self, data: HostPoolData) -> None:
        """Let each controller of the user choose one action on each of two new hosts, before any training.

        Raises ValueError if that is none. What the controller raises passes.
        """
        for task in data.pools if self.own else ():
            for name in self.own:
                try_controller(data.make_pool(2, task=task), name, make_controller(name))

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
        executor: Mapper | None = None,
    ) -> ComparisonResult:
        """Run the comparison on hosts of one task. It creates its own pools.

        Args:
            data: Hosts; the pool must be built and is not modified.
            policies: Trained policies, one per training seed. Empty: rules and schedules are compared alone.
            rivals: Further trained policies, by the names of their rows.
            task: Name of the task, where there are several. None: the first.
            save_networks: Number of hosts to keep: the best of the first policy, or without one of the reference.
            executor: Has a method `map(function, items)`, which plays the episodes and searches the schedules. None:
                this process, or as many as `jobs` says.
        """
        if executor is None and self.config.jobs > 1:
            executor = Processes(self.config.jobs)
        make_pool = partial(data.make_pool, task=task, sight=policies[0].sight if policies else None)
        pool = make_pool(self.hosts, held_out=self.held_out)
        rng_seeds = episode_rng_seeds(self.seed, EVALUATION, 0, n_envs=self.hosts)
        reference = TAMIYO if policies else (self.against or [UNGROWN_HOST])[0]

        def episodes(name: str, controllers: Sequence[Controller]) -> list[Episodes]:
            saved = save_networks if name == reference else 0
            play_here = partial(play, pool, name, rng_seeds=rng_seeds, save_networks=saved)
            return [partial(play_here, controller) for controller in controllers]

        rules = {name: [controller] for name, controller in self.make_controllers().items() if self.includes(name)}
        played = run_all(
            {
                TAMIYO: self._policy_episodes(pool, policies, rng_seeds, save_networks=save_networks),
                **self._rival_episodes(pool, rivals, rng_seeds, make_pool=make_pool),
                **{name: episodes(name, controllers) for name, controllers in rules.items()},
            },
            executor,
        )
        of_policies = [of_policy for (of_policy,) in played[TAMIYO]]
        common, notes = self._describe_schedules(policies, of_policies)
        best = self._find_best_schedules(make_pool, [*self.schedules.values(), *common.values()], executor)
        derived: dict[str, list[Controller]] = {
            SAMPLED: [policy.sampled(self.seed) for policy in policies],
            BEST_FIXED: [] if best.fixed is None else [FixedSchedule(best.fixed)],
            BEST_PER_PRICE: [SchedulePerPrice(best.per_price)] if best.per_price else [],
            REPLAYED: [FixedSchedule(schedule) for schedule in common.values()],
            YOKED: [
                FixedSchedule(yoke_schedules(of_policy.schedules, of_policy.outcome.contexts, of_policy.prices))
                for of_policy in of_policies
            ],
        }
        twinned = [TAMIYO, *best_hand_written(played, self.hand_written)] if self.controls else []
        played |= run_all(
            {
                **{name: episodes(name, made) for name, made in derived.items() if self.includes(name)},
                **{
                    TWIN_PREFIX + name: [
                        partial(play_static, pool, TWIN_PREFIX + name, grown.outcome, rng_seeds=rng_seeds)
                        for (grown,) in played[name]
                    ]
                    for name in twinned
                },
            },
            executor,
        )
        training_seeds = [policy.training_seed for policy in policies]
        seeds_of = dict.fromkeys((TAMIYO, *DERIVED, TWIN_PREFIX + TAMIYO), training_seeds)
        seeds_of |= {name: [rival.training_seed] for name, rival in rivals.items()}
        names = [TAMIYO, SAMPLED, *rivals, *rules, BEST_FIXED, BEST_PER_PRICE, REPLAYED, YOKED]
        entries = [
            Entry(row[0].outcome.controller, [one.outcome for one in row], seeds_of.get(name, [None]))
            for name in [*names, *(TWIN_PREFIX + name for name in twinned)]
            for row in zip(*played.get(name, ()), strict=True)
        ]
        saved = [one.networks for of_name in played.values() for row in of_name for one in row if one.networks]
        return ComparisonResult(
            list(policies),
            dict(rivals),
            rng_seeds,
            sorted(entries, key=lambda entry: entry.name != reference),
            common | best.by_file(),
            notes,
            saved[0] if saved else [],
        )

    def _policy_episodes(
        self,
        pool: HostPool,
        policies: Sequence[TrainedPolicy],
        rng_seeds: Sequence[int],
        *,
        save_networks: int,
    ) -> list[Episodes]:
        """Return the episodes of the policies; networks are saved in the first."""
        played = [partial(play_policy, pool, TAMIYO, policy, rng_seeds=rng_seeds) for policy in policies]
        return [partial(episode, save_networks=save_networks) for episode in played[:1]] + played[1:]

    def _rival_episodes(
        self,
        pool: HostPool,
        rivals: Mapping[str, TrainedPolicy],
        rng_seeds: Sequence[int],
        *,
        make_pool: Callable[..., HostPool],
    ) -> dict[str, list[Episodes]]:
        """Return the episodes of the rivals on the same hosts, which each of them observes as in its training."""
        episodes = {}
        for name, rival in rivals.items():
            own = pool
            if rival.sight != pool.config.sight:
                own = make_pool(self.hosts, held_out=self.held_out, sight=rival.sight)
            episodes[name] = [partial(play, own, name, rival.greedy(), rng_seeds=rng_seeds)]
        return episodes

    def _describe_schedules(
        self, policies: Sequence[TrainedPolicy], episodes: Sequence[Played]
    ) -> tuple[dict[str, Schedule], list[str]]:
        """Return the most frequent schedule of each policy, by file name without suffix, and notes for the reader."""
        common_schedules, notes = {}, []
        for number, (policy, played) in enumerate(zip(policies, episodes, strict=True)):
            common, frequency = most_common_schedule(played.schedules)
            name, suffix = "schedule", ""
            if len(policies) > 1:
                name, suffix = f"schedule{number}", f" of training seed {policy.training_seed}"
            common_schedules[name] = common
            notes.append(
                f"{frequency} of {self.hosts} hosts{suffix} grew by the same schedule: {name}.json; "
                f"different schedules: {len(set(played.schedules))}"
            )
        contexts = episodes[0].outcome.contexts if episodes else []
        n_singletons = sum(number == 1 for number in Counter(contexts).values())
        if n_singletons and self.includes(YOKED):
            notes.append(
                f"{n_singletons} of {self.hosts} hosts were the only ones of their kind: "
                "yoked plays their own schedules"
            )
        return common_schedules, notes

    def _find_best_schedules(
        self, make_pool: Callable[..., HostPool], known: Sequence[Schedule], executor: Mapper | None
    ) -> BestSchedules:
        """Return the best schedules from earlier files or from a new search, restricted to the requested ones."""
        fixed, per_price = self.includes(BEST_FIXED), self.includes(BEST_PER_PRICE)
        if self.search is None or not (fixed or per_price):
            return BestSchedules(None, {})
        if self.found_schedules is not None:
            return self.found_schedules
        return search_best_schedules(
            make_pool(SEARCH_ENVS),
            self.search,
            list(dict.fromkeys(known)),
            fixed=fixed,
            per_price=self.search.per_price and per_price,
            executor=executor,
        )


def best_hand_written(played: Mapping[str, Sequence[Sequence[Played]]], names: Sequence[str]) -> list[str]:
    """Return the name among `names` of the controller with the best mean objective, or none if none was played."""
    means = {
        name: np.mean([one.outcome.objective for row in played[name] for one in row])
        for name in names
        if name in played
    }
    return sorted(means, key=lambda name: -means[name])[:1]
