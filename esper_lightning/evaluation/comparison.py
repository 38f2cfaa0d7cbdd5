"""Comparison of a trained policy, other policies, rules and schedules on the same hosts. S training seeds, H hosts."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from esper_lightning.controllers import CONTROLLERS, make_controller
from esper_lightning.controllers.learned import Controller
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
    RecordingController,
    Schedule,
    actions_by_tick,
    read_schedule,
    yoke_schedules,
)
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import HostPool, Op, check_host_count
from esper_lightning.envs.vector_env import EVALUATION, check_rng_seed, episode_rng_seeds
from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.play import Outcome, named_controller, play_episode, play_static
from esper_lightning.evaluation.search import SearchConfig, check_budget, search
from esper_lightning.evaluation.statistics import Interval, mean_interval
from esper_lightning.runtime.checkpoint import NAMED_POLICIES, names_policy
from esper_lightning.runtime.parallel import check_jobs, run_all

TAMIYO = "tamiyo"
"""Name of the compared policy, taking its most likely action."""

REPLAYED, YOKED = DERIVED = ("replayed", "yoked")
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
    by name or import path, and other policies by the paths of their files. None: all of this package."""

    controls: bool = True
    """Play static controls: the final networks of the policy and of the best baseline compared, complete from the first
    tick, with as many host epochs and with as much training compute."""

    held_out: bool = False
    """Draw hosts from the held-out contexts of the family, which training never uses."""

    policies: list[str] | None = None
    """Trained policies to test in place of the module's own: checkpoints, safetensors files, or `tamiyo`, the policy of
    the package. They may have been trained on other hosts. Several are of several training seeds. An empty list: rules
    and schedules are compared alone, with the first of `against`, by default `small static`."""

    search: SearchConfig | None = None
    """Search for the best fixed schedule, which takes minutes. None: no search."""

    schedules: dict[str, str] | None = None
    """Files of schedules to add to the comparison, by the names under which they appear in the table. One named `best
    fixed`, from an earlier comparison, takes the place of a search."""

    jobs: int = 1
    """Processes that play the controllers side by side; each has its own copy of the data. The number does not change
    the result."""

    climbing: ClimbingConfig = ClimbingConfig()
    """Settings of hill climbing."""

    periodic: PeriodicConfig = PeriodicConfig()
    """Settings of the periodic baseline."""

    def __post_init__(self) -> None:
        if self.hosts < 0 or self.hosts == 1:
            raise ValueError(f"model.evaluation.hosts must be 0 or at least 2 (for an interval), got {self.hosts}")
        check_host_count("model.evaluation.hosts", self.hosts, least=0)
        check_rng_seed("model.evaluation.seed", self.seed)
        check_jobs(self.jobs)


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

    policies: list[TrainedPolicy]
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
        """Return the mean lead over `other` with its interval."""
        return mean_interval(self.lead(other))


class Played(NamedTuple):
    """An episode, and what is kept of the hosts as it left them."""

    outcome: Outcome
    schedules: Sequence[Schedule] = ()  # [H] that a trained policy chose; empty for other controllers
    prices: Sequence[float] = ()  # [H] of parameters


def play(pool: HostPool, name: str, controller: Controller, *, rng_seeds: Sequence[int]) -> list[Played]:
    """Play one episode, and record the actions of the policy."""
    recording = RecordingController(controller)
    outcome = play_episode(pool, name, recording if name == TAMIYO else controller, rng_seeds=rng_seeds)
    return [Played(outcome, recording.schedules if name == TAMIYO else (), [env.price for env in pool.envs])]


def play_twin(pool: HostPool, name: str, grown: Outcome, *, rng_seeds: Sequence[int]) -> list[Played]:
    """Play the static controls of an episode: two rows."""
    return [Played(outcome) for outcome in play_static(pool, name, grown, rng_seeds=rng_seeds)]


class Comparison:
    """Compares controllers on the same fresh hosts and the same data.

    Raises ValueError if a controller or a schedule that the settings name does not exist.
    """

    def __init__(self, config: EvaluationConfig) -> None:
        self.config = config
        named = config.against or ()
        self.rivals = [name for name in named if names_policy(name)]
        self.schedules: dict[str, Schedule] = {}
        self.own: list[str] = []
        known = [*DERIVED, *([] if config.search is None else [BEST_FIXED]), *self.make_controllers()]
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
        self.own = [name for name in named if name not in known and name not in self.rivals]
        try:
            for name in self.own:
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
            **{name: make_controller(name) for name in self.own},
        }

    def includes(self, name: str) -> bool:
        """Return True if the comparison includes this controller."""
        return self.config.against is None or name in self.config.against

    def check(self, data: HostPoolData) -> None:
        """Raise ValueError if the settings do not fit the hosts, before anything is played.

        Each controller of the user chooses one action on each of two new hosts. What it raises passes.
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
            for name in self.own:
                pair, controller = data.make_pool(2, task=task), make_controller(name)
                pair.reset(range(2))
                controller.reset(pair)
                with named_controller(name, controller):
                    pair.read_action(controller.act(pair))

    def run(
        self,
        data: HostPoolData,
        policies: Sequence[TrainedPolicy],
        rivals: Sequence[TrainedPolicy] = (),
        *,
        task: str | None = None,
        executor: ProcessPoolExecutor | None = None,
    ) -> ComparisonResult:
        """Run the comparison on hosts of one task (None: the first), in pools of its own.

        There is one of the `policies` per training seed, or none: then rules and schedules are compared alone. Each of
        the `rivals`, policies that `against` names, has a row. `executor` plays episodes in other processes.
        """
        config = self.config
        if not policies:
            for name in config.against or ():
                if name in DERIVED:
                    raise ValueError(f"model.evaluation.against: {name!r} needs a trained policy; name one in policies")
            if config.against == []:
                raise ValueError(
                    "model.evaluation.against is empty and there is no policy, so nothing is compared; name controllers"
                )
        make_pool = partial(data.make_pool, task=task, sight=policies[0].sight if policies else None)
        pool = make_pool(config.hosts, held_out=config.held_out)
        rng_seeds = episode_rng_seeds(config.seed, EVALUATION, 0, n_envs=config.hosts)
        rows_of_rivals = {RIVAL_PREFIX + rival.source: rival for rival in rivals}
        reference = TAMIYO if policies else (config.against or [UNGROWN_HOST])[0]
        reference = RIVAL_PREFIX + reference if reference in self.rivals else reference

        def episode(name: str, controller: Controller, *, own: HostPool = pool) -> partial:
            return partial(play, own, name, controller, rng_seeds=rng_seeds)

        # First everything that needs nothing else: the policies, rivals, each in a pool that it can see, and rules.
        work = {TAMIYO: [episode(TAMIYO, one.greedy()) for one in policies]}
        for name, rival in rows_of_rivals.items():
            sees_other = rival.sight != pool.config.sight
            own = make_pool(config.hosts, held_out=config.held_out, sight=rival.sight) if sees_other else pool
            work[name] = [episode(name, rival.greedy(), own=own)]
        rules = {name: made for name, made in self.make_controllers().items() if self.includes(name)}
        played = run_all(work | {name: [episode(name, made)] for name, made in rules.items()}, executor)

        # Then schedules, with those of the policies among the candidates of the search.
        of_policies = [one for (one,) in played[TAMIYO]]
        common, notes = self._common_schedules(policies, of_policies)
        best: list[Schedule] = []
        if config.search is not None and self.includes(BEST_FIXED):
            known = [*self.schedules.values(), *common.values()]
            searching = partial(search, make_pool(SEARCH_ENVS), config.search, known)
            best = run_all({BEST_FIXED: [searching]}, executor)[BEST_FIXED]
        # What never acts is the ungrown host, whatever replays it: unless asked for by name, its controls are left out.
        acts = config.against is not None or any((one.outcome.ops != Op.WAIT).any() for one in of_policies)
        if of_policies and not acts:
            notes.append(f"{TAMIYO} grew nothing on any host: its controls would be {UNGROWN_HOST} and are left out")
        derived: dict[str, list[Controller]] = {
            BEST_FIXED: [FixedSchedule(schedule) for schedule in best],
            REPLAYED: [FixedSchedule(schedule) for schedule in common.values() if acts],
            YOKED: [
                FixedSchedule(yoke_schedules(one.schedules, one.outcome.contexts, one.prices))
                for one in of_policies
                if acts
            ],
        }
        twinned = [TAMIYO] * acts if config.controls else []
        hand_written = [name for name in (*HAND_WRITTEN, *self.own) if name in played]
        if config.controls and hand_written:
            twinned.append(max(hand_written, key=lambda name: played[name][0][0].outcome.objective.mean()))
        derived = {name: made for name, made in derived.items() if made and self.includes(name)}
        work = {name: [episode(name, one) for one in made] for name, made in derived.items()}
        for name in twinned:
            twin = TWIN_PREFIX + name
            work[twin] = [
                partial(play_twin, pool, twin, grown.outcome, rng_seeds=rng_seeds) for (grown,) in played[name]
            ]
        played |= run_all(work, executor)

        seeds_of = {name: [rival.training_seed] for name, rival in rows_of_rivals.items()}
        for name in (TAMIYO, *DERIVED, TWIN_PREFIX + TAMIYO):
            seeds_of[name] = [policy.training_seed for policy in policies]
        order = [TAMIYO, *rows_of_rivals, *rules, *derived, *(TWIN_PREFIX + name for name in twinned)]
        entries = [
            Entry(row[0].outcome.controller, [one.outcome for one in row], seeds_of.get(name, [None]))
            for name in order
            for row in zip(*played.get(name, ()), strict=True)
        ]
        return ComparisonResult(
            list(policies),
            rng_seeds,
            sorted(entries, key=lambda entry: entry.name != reference),
            common | dict(zip([BEST_FILE], best, strict=False)),
            notes,
            pool.task.score_name,
        )

    def _common_schedules(
        self, policies: Sequence[TrainedPolicy], episodes: Sequence[Played]
    ) -> tuple[dict[str, Schedule], list[str]]:
        """Return the most frequent schedule of each policy, by file name without suffix, and notes for the reader."""
        schedules, notes, hosts = {}, [], self.config.hosts
        for number, (policy, played) in enumerate(zip(policies, episodes, strict=True)):
            ((common, frequency),) = Counter(played.schedules).most_common(1)
            name, suffix = "schedule", ""
            if len(policies) > 1:
                name, suffix = f"schedule{number}", f" of training seed {policy.training_seed}"
            schedules[name] = common
            notes.append(
                f"{frequency} of {hosts} hosts{suffix} grew by the same schedule: {name}.json; "
                f"different schedules: {len(set(played.schedules))}"
            )
        contexts = episodes[0].outcome.contexts if episodes else []
        n_alone = sum(number == 1 for number in Counter(contexts).values())
        if n_alone and self.includes(YOKED):
            notes.append(
                f"{n_alone} of {hosts} hosts were the only ones of their kind: {YOKED} plays their own schedules"
            )
        return schedules, notes
