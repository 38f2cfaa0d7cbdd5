"""Comparison of a trained policy, other policies, rules and schedules on the same hosts. S training seeds, H hosts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers import CONTROLLERS, make_controller
from esper_lightning.controllers.learned import Controller, LearnedController
from esper_lightning.controllers.rules import (
    ClimbingConfig,
    Heuristic,
    HillClimbing,
    Periodic,
    PeriodicConfig,
    RandomValid,
    WaitOnly,
)
from esper_lightning.controllers.schedules import (
    FixedSchedule,
    Schedule,
    actions_by_tick,
    read_schedule,
    yoke_schedules,
)
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool, Op, check_host_count
from esper_lightning.envs.vector_env import EVALUATION, check_rng_seed, episode_rng_seeds
from esper_lightning.evaluation.play import Outcome, named_controller, play_episode, play_static
from esper_lightning.evaluation.search import SearchConfig, check_budget, search
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.runtime.checkpoint import NAMED_POLICIES, names_policy
from esper_lightning.runtime.generators import seeded_generators

TAMIYO = "tamiyo"
"""Name of the compared policy, taking its most likely action."""

REPLAYED, YOKED = "replayed", "yoked"
"""Names of the open-loop controls of a trained policy: its most frequent schedule, played on every host; and for each
host the schedule that it chose for another host of the same context."""

BEST_FIXED, BEST_FILE = "best fixed", "best_schedule"
"""Name of the controller that plays the result of the schedule search, and of the file of that schedule."""

UNGROWN_HOST = "small static"
"""Name of the controller that never grows the host."""

HAND_WRITTEN = ("heuristic", "periodic", "climbing")
"""Candidates for the best baseline: controllers that react to observations or follow a clock."""

TWIN_PREFIX, RIVAL_PREFIX = "static ", "rival "
"""Prefixes of the names of static twins, and of policies that `against` names."""

SEARCH_ENVS = 96
"""Number of environments in which the search evaluates candidate schedules side by side."""


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Settings of the comparison of a policy with other controllers on the same fresh hosts and test data."""

    hosts: int = 64
    """Number of hosts. Their test samples are never used for rewards. 0: `fit` ends without a comparison."""

    seed: int = 0
    """RNG seed that selects the hosts. The same number gives the same hosts in every run."""

    against: list[str] | None = None
    """Names of the controllers to compare with: baselines, schedules, `replayed`, `yoked`, `best fixed`, your own
    by name or import path, and other policies by the paths of their files. None: all of this package but `scaling`."""

    controls: bool = True
    """Play static controls: the final networks of the policy and of the best baseline compared, complete from the first
    tick, with as many host epochs and with as much training compute."""

    held_out: bool = False
    """Draw hosts from the held-out contexts of the family, which training never uses."""

    policies: list[str] | None = None
    """Trained policies to test in place of the module's own: checkpoints, safetensors files, or `tamiyo` or
    `tamiyo_depth`, those of the package. They may have been trained on other hosts. Several must come from trainings
    with different RNG seeds. An empty list: rules and schedules are compared alone, with the first of `against`, by
    default `small static`."""

    search: SearchConfig | None = None
    """Search for the best fixed schedule, which takes minutes. None: no search."""

    schedules: dict[str, str] | None = None
    """Files of schedules to add to the comparison, by the names under which they appear in the table. One named `best
    fixed`, from an earlier comparison, takes the place of a search."""

    climbing: ClimbingConfig = ClimbingConfig()
    """Settings of hill climbing."""

    periodic: PeriodicConfig = PeriodicConfig()
    """Settings of the periodic baseline."""

    def __post_init__(self) -> None:
        if self.hosts < 0 or self.hosts == 1:
            raise ValueError(f"model.evaluation.hosts must be 0 or at least 2 (for an interval), got {self.hosts}")
        check_host_count("model.evaluation.hosts", self.hosts, least=0)
        check_rng_seed("model.evaluation.seed", self.seed)


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
        names = self.outcomes[0].metrics
        return {name: float(np.mean([outcome.metrics[name] for outcome in self.outcomes])) for name in names}


class ComparisonResult(NamedTuple):
    """Result of a comparison, ready to be reported."""

    policies: list[LearnedController]
    """Trained policies, one per training seed; empty if rules and schedules were compared alone."""
    rng_seeds: list[int]
    """RNG seeds of the hosts."""
    entries: list[Entry]
    """Rows of the comparison; the first is the one with which the others are compared."""
    schedules: dict[str, Schedule]
    """Schedules to save, by file name without suffix: the most frequent one of each policy, and the best of the search.
    """
    notes: list[str]
    score: str
    """Name of the score in `Outcome.score`, which the task of the hosts has chosen."""

    @property
    def reference(self) -> Entry:
        """Row with which the others are compared: the trained policy, if there is one."""
        return self.entries[0]

    def lead(self, other: Entry) -> np.ndarray:  # [S, H]
        """Return the objective of the reference minus that of `other`, paired by host.

        It is also paired by training seed if both entries have one outcome per training seed.
        """
        return self.reference.values("objective") - other.values("objective")

    def mean_lead(self, other: Entry) -> Interval:
        return mean_interval(self.lead(other))


class Comparison:
    """Compares controllers on the same fresh hosts and the same data.

    Raises ValueError if a controller or a schedule that the settings name does not exist.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        named = config.against or ()
        self.rivals = [name for name in named if names_policy(name)]
        self.schedules: dict[str, Schedule] = {}
        self.user_controllers: list[str] = []  # names of the user's own controllers
        known = [REPLAYED, YOKED, *([] if config.search is None else [BEST_FIXED]), *self.make_controllers()]
        for name, file in (config.schedules or {}).items():
            if name in (*NAMED_POLICIES, *known) or name.startswith((RIVAL_PREFIX, TWIN_PREFIX)):
                raise ValueError(f"model.evaluation.schedules: {name!r} is another controller's name; choose a new one")
            self.schedules[name] = read_schedule(file)
        known += self.schedules
        if BEST_FIXED in named and BEST_FIXED not in known:
            raise ValueError(
                f"model.evaluation.against: {BEST_FIXED!r} must be searched first; set search.steps, or name its file "
                f"in schedules"
            )
        self.user_controllers = [name for name in named if name not in known and name not in self.rivals]
        try:
            for name in self.user_controllers:
                CONTROLLERS.find(name, known)
        except ValueError as error:
            raise ValueError(f"model.evaluation.against: {error}") from error
        self.make_controllers()  # raises ValueError now if one cannot be made

    def make_controllers(self) -> dict[str, Controller]:
        """Return new instances of all controllers that do not depend on training, by name."""
        return {
            "random": RandomValid(self.config.seed),
            UNGROWN_HOST: WaitOnly(),
            "heuristic": Heuristic(),
            "periodic": Periodic(self.config.periodic),
            "climbing": HillClimbing(self.config.climbing),
            **{name: FixedSchedule(schedule) for name, schedule in self.schedules.items()},
            **{name: make_controller(name) for name in self.user_controllers},
        }

    def includes(self, name: str) -> bool:  # the controller with this name
        return self.config.against is None or name in self.config.against

    def check(self, data: HostPoolData) -> None:
        """Raise ValueError if the settings do not fit the hosts, before anything is played.

        Each controller of the user chooses one action on each of two new hosts. Exceptions of its code pass.
        """
        for task, pool in data.pools.items():
            for name, schedule in self.schedules.items():
                try:
                    actions_by_tick(schedule, pool)
                except ValueError as error:
                    raise ValueError(f"schedule {name!r}: {error}") from error
            if self.config.search is not None and self.includes(BEST_FIXED):
                check_budget(self.config.search, pool, SEARCH_ENVS)
            family, held_out = pool.config.family, self.config.held_out
            if self.config.controls and any(context.horizon is not None for context in family.contexts(held_out)):
                raise ValueError(
                    "model.evaluation.controls: static controls train beyond the horizon, which hosts with the "
                    "variable horizon do not; set it to false"
                )
            if held_out and not family.held_out:
                raise ValueError(
                    "model.evaluation.held_out: there are no held-out contexts; name some in data.env.family.held_out"
                )
            for name in self.user_controllers:
                two_hosts, controller = data.make_pool(2, task=task), make_controller(name)
                two_hosts.reset(range(2))
                controller.reset(two_hosts)
                with named_controller(name, controller):
                    two_hosts.read_action(controller.act(two_hosts))

    def run(
        self,
        data: HostPoolData,
        policies: Sequence[LearnedController],
        rivals: Sequence[LearnedController] = (),
        *,
        task: str | None = None,
    ) -> ComparisonResult:
        """Run the comparison on hosts of one task (None: the first), in new pools.

        There is one of the `policies` per training seed, or none: then rules and schedules are compared alone. Each of
        the `rivals`, policies that `against` names, has a row.
        """
        config = self.config
        if not policies and (derived := [name for name in config.against or () if name in (REPLAYED, YOKED)]):
            raise ValueError(f"model.evaluation.against: {derived[0]!r} needs a trained policy; name one in policies")
        if not policies and config.against == []:
            raise ValueError(
                "model.evaluation.against is empty and there is no policy, so nothing is compared; name controllers"
            )
        make_pool = partial(data.make_pool, task=task, observation=policies[0].observation if policies else None)
        pool = make_pool(config.hosts, held_out=config.held_out)
        rng_seeds = episode_rng_seeds(config.seed, EVALUATION, 0, n_envs=config.hosts)
        entries: dict[str, Entry] = {}

        def play(
            name: str,
            controllers: Sequence[Controller],
            training_seeds: Sequence[int | None] = (None,),
            *,
            hosts: HostPool = pool,
        ) -> None:
            """Play a controller, or one for each training seed, and add the row. Global generators begin alike."""
            outcomes = []
            for controller in controllers:
                with seeded_generators(0):
                    outcomes.append(play_episode(hosts, name, controller, rng_seeds=rng_seeds))
            entries[name] = Entry(name, outcomes, list(training_seeds))

        # First all that depends on no other row: the policies, rivals with their own observation of hosts, and rules.
        seeds = [policy.training_seed for policy in policies]
        if policies:
            play(TAMIYO, policies, seeds)
        for rival in rivals:
            hosts = pool
            if rival.observation != pool.config.observation:
                hosts = make_pool(config.hosts, held_out=config.held_out, observation=rival.observation)
            play(RIVAL_PREFIX + rival.source, [rival], [rival.training_seed], hosts=hosts)
        for name, rule in self.make_controllers().items():
            if self.includes(name):
                play(name, [rule])

        # Then schedules; the most frequent ones of the policies are among the candidates of the search.
        grown = entries[TAMIYO].outcomes if policies else []  # one outcome for each of the policies
        schedules, notes = self._common_schedules(policies, grown)
        common = list(schedules.values())
        if config.search is not None and self.includes(BEST_FIXED):
            with seeded_generators(0):
                best = search(make_pool(SEARCH_ENVS), config.search, [*self.schedules.values(), *common])
            schedules[BEST_FILE] = best
            play(BEST_FIXED, [FixedSchedule(best)])
        # Controls of a policy that never acts would be the ungrown host: they are left out, unless asked for by name.
        acts = config.against is not None or any((outcome.ops != Op.WAIT).any() for outcome in grown)
        if grown and not acts:
            notes.append(f"{TAMIYO} grew nothing on any host: its controls would be {UNGROWN_HOST} and are left out")
        if grown and acts and self.includes(REPLAYED):
            play(REPLAYED, [FixedSchedule(schedule) for schedule in common], seeds)
        if grown and acts and self.includes(YOKED):
            yoked = [yoke_schedules(outcome.schedules, outcome.contexts, outcome.prices) for outcome in grown]
            play(YOKED, [FixedSchedule(schedules_by_host) for schedules_by_host in yoked], seeds)

        # Last the static twins of the policy and of the best of the rules, two rows each.
        hand_written = [name for name in (*HAND_WRITTEN, *self.user_controllers) if name in entries]
        twinned = [TAMIYO] if grown and acts else []
        if hand_written:
            twinned.append(max(hand_written, key=lambda name: entries[name].values("objective").mean()))
        for name in twinned if config.controls else ():
            twins = []  # for each training seed, the outcomes with equal host epochs and with equal FLOPs
            for outcome in entries[name].outcomes:
                with seeded_generators(0):
                    twins.append(play_static(pool, TWIN_PREFIX + name, outcome, rng_seeds=rng_seeds))
            for outcomes in zip(*twins, strict=True):
                twin_name = outcomes[0].controller
                entries[twin_name] = Entry(twin_name, list(outcomes), entries[name].training_seeds)

        reference = TAMIYO if policies else (config.against or [UNGROWN_HOST])[0]
        reference = RIVAL_PREFIX + reference if reference in self.rivals else reference
        rows = sorted(entries.values(), key=lambda entry: entry.name != reference)
        return ComparisonResult(list(policies), rng_seeds, rows, schedules, notes, pool.task.score_name)

    def _common_schedules(
        self, policies: Sequence[LearnedController], grown: Sequence[Outcome]
    ) -> tuple[dict[str, Schedule], list[str]]:
        """Return the most frequent schedule of each policy, by file name without suffix, and notes for the reader."""
        schedules, notes, hosts = {}, [], self.config.hosts
        for number, (policy, outcome) in enumerate(zip(policies, grown, strict=True)):
            common, frequency = Counter(outcome.schedules).most_common(1)[0]
            name, suffix = "schedule", ""
            if len(policies) > 1:
                name, suffix = f"schedule{number}", f" of training seed {policy.training_seed}"
            schedules[name] = common
            notes.append(
                f"{frequency} of {hosts} hosts{suffix} grew by the same schedule: {name}.json; "
                f"different schedules: {len(set(outcome.schedules))}"
            )
        hosts_by_context = Counter(grown[0].contexts if grown else ())
        alone = sum(number == 1 for number in hosts_by_context.values())
        if alone and self.includes(YOKED):
            notes.append(
                f"{alone} of {hosts} hosts were the only ones of their kind: {YOKED} plays their own schedules"
            )
        return schedules, notes
