"""Measure on which hosts waiting wins, whether a first look tells, and what a check by forking is worth.

    python -m benchmarks.harm play --hosts 24 --controllers waiting tamiyo "best rule" "dearest first" "best schedule"
    python -m benchmarks.harm play --controllers waiting tamiyo "score, 0" "price" --hosts 12 --where "another table"
    python -m benchmarks.harm table
    python -m benchmarks.harm look
    python -m benchmarks.harm checks

play: play controllers on fresh hosts of the training distribution of a config, or of held-out settings of
    `benchmarks.zero_shot`, and append a row for each host. A place, as `--where` names it, is one or the other.
table: Markdown tables of the lead of waiting, on validation and on test data, by place and by variable.
look: fit ridge regressions of the lead of waiting over the policy on observations after 1, 2 and 3 ticks of waiting.
    Each host is judged by the fit to the hosts of other folds, and by the fit to the hosts of other tasks.
checks: Markdown table of the leads over waiting with and without the check, and of its cost.

A check by forking compares a network in which a seed is about to become permanent with the network that has trained
without this seed since its germination, on validation data, and goes on with the latter unless the seed is ahead.
Hosts are deterministic, so the network without the seed is the host, played again without the actions on the seed.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks import zero_shot
from benchmarks.family import solve_ridge
from benchmarks.rows import appended_rows, read_rows
from benchmarks.tables import number, parse_context, shown
from benchmarks.tune import open_data
from esper_lightning import load_controller
from esper_lightning.cli.commands import load_config
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, read_schedule
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import Action, HostPool, Op, StepResult
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.envs.rewards import rent
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.tasks import Batches

RESULTS = Path("benchmarks/results/harm.csv")

RUN_RNG_SEED = 7
"""RNG seed of the hosts, other than that of any evaluation."""

WAITING, POLICY = "waiting", "tamiyo"

TICKS = 3
"""Ticks of waiting after which a host is looked at."""

FOLDS = 8

LOOK_RIDGE = 30.0
"""Weight of the squared norm: there are about as many features as hosts."""


class Row(NamedTuple):
    """Result on one host. FLOPs are those of training, in millions."""

    place: str
    controller: str
    host: int
    validation: float  # objective
    test: float  # objective
    fossils: int
    flops: float  # of the network, as in every comparison
    forks: float  # of the networks that were trained beside it
    checks: int
    dropped: int
    context: str  # in the rows of waiting


class Check(NamedTuple):
    """Condition on which a seed is kept, by paired differences on the samples of validation."""

    measure: str = "score"  # or loss
    errors: float = 0.0  # standard errors by which the network with the seed must be ahead
    priced: bool = False  # it must be ahead by its rent, too
    undo: bool = False  # a seed that is culled, or that is not permanent at the end, has never been
    race: float | None = None  # share of the training after which the host without any growth is compared, once


CHECKS = {
    "score": Check(),
    "score, 1 SE": Check(errors=1.0),
    "loss": Check("loss"),
    "price": Check(priced=True),
    "price, −1 SE": Check(priced=True, errors=-1.0),
    "price, undo": Check(priced=True, undo=True),
    "half, price": Check(priced=True, race=0.5),
    "half, loss": Check("loss", race=0.5),
    "three quarters, price": Check(priced=True, race=0.75),
}
"""Checks by name."""


class Checked:
    """Plays a controller, and goes on without each seed that does not pass the check."""

    def __init__(self, controller: Controller, check: Check) -> None:
        self.controller, self.check = controller, check

    def reset(self, pool: HostPool) -> None:
        self.controller.reset(pool)
        self.states: list[list[dict[str, object]]] = []  # before the actions of each tick, of each host
        self.actions: list[list[tuple[int, ...]]] = []
        self.lost = [False] * pool.n_envs  # the host without growth has won
        self.flops, self.checks, self.dropped = (np.zeros(pool.n_envs, dtype=np.int64) for _ in range(3))

    def act(self, pool: HostPool) -> Action:
        """Return the action of the controller; WAIT where it is on a seed without which the host goes on."""
        rows, check = pool.read_action(self.controller.act(pool)), self.check
        self.states.append(pool.state_dict()["envs"])
        judged: dict[int, set[int]] = {}
        undone: dict[int, set[int]] = {}
        for host, (env, (op, slot, *_)) in enumerate(zip(pool.envs, rows, strict=True)):
            is_last = env.tick == env.horizon - 1
            if env.ended or self.lost[host]:
                rows[host] = WAIT_ACTION
            elif check.race is not None:
                if env.tick == round(check.race * env.horizon):
                    judged[host] = set(range(len(env.slots)))
            elif op == Op.FOSSILIZE:
                judged[host] = {slot}
            elif check.undo and op == Op.CULL:
                undone[host] = {slot}
            if check.undo and is_last:
                undone[host] = {k for k, one in enumerate(env.slots) if one.live and k not in judged.get(host, set())}
        for asked, is_judged in ((judged, True), (undone, False)):
            for host in self._fork(pool, asked, is_judged) if any(asked.values()) else ():
                self.lost[host] = check.race is not None
                if rows[host][1] in asked[host]:
                    rows[host] = WAIT_ACTION
        self.actions.append(rows)
        return to_action(rows, pool.device)

    def _fork(self, pool: HostPool, asked: dict[int, set[int]], is_judged: bool) -> set[int]:
        """Replace each asked host by itself without the seeds in the asked slots, unless it is judged and loses.

        Returns the hosts that were replaced.
        """
        births = {
            host: min((self._birth(host, slot) for slot in slots), default=len(self.actions))
            for host, slots in asked.items()
        }
        with_seeds = {host: self._measure(pool, host, asked[host]) for host in asked}
        first, forks = min(births.values()), {}
        counts = [env.on_batches for env in pool.envs]
        pool.load_state_dict({"envs": self.states[first]})
        for host, env in enumerate(pool.envs):
            env.on_batches = partial(self._count, env, host, births[host]) if host in asked else None
        for tick in range(first, len(self.actions)):
            rows = list(self.actions[tick])
            for host, row in enumerate(rows):
                left_out = host in asked and row[1] in asked[host] and tick >= self._birth(host, row[1])
                if left_out or not pool.masks_on_cpu.allows(host, row):  # the latter after a rollback of one of both
                    rows[host] = WAIT_ACTION
            pool.step(to_action(rows, pool.device))
            forks[tick] = rows, pool.state_dict()["envs"]
        replaced = set()
        for host in asked:
            gains = with_seeds[host] - self._measure(pool, host, set())
            error = float(gains.std()) / len(gains) ** 0.5
            self.checks[host] += 1
            if not is_judged or float(gains.mean()) <= self.check.errors * error:
                replaced.add(host)
                self.dropped[host] += 1
        for host in replaced:
            for tick in range(births[host], len(self.actions)):
                rows, states = forks[tick]
                self.actions[tick][host], self.states[tick + 1][host] = rows[host], states[host]
        pool.load_state_dict({"envs": self.states[-1]})
        for env, count in zip(pool.envs, counts, strict=True):
            env.on_batches = count
        return replaced

    def _birth(self, host: int, slot: int) -> int:
        """Return the tick from which a seed in a slot is left out; the present one if there was none."""
        if self.check.race is not None:
            return 0
        germinated = (Op.GERMINATE, slot)
        return max(
            (t for t, rows in enumerate(self.actions) if rows[host][:2] == germinated), default=len(self.actions)
        )

    def _count(self, env: HostEnv, host: int, birth: int, batches: Batches) -> None:
        if env.tick >= birth:
            self.flops[host] += env.flops.of_step(env.slots) * batches.indices.numel()

    @torch.no_grad()
    def _measure(self, pool: HostPool, host: int, slots: set[int]) -> Tensor:  # [samples]; more is better
        """Return score or negative loss of a host with all its seeds on each sample of validation.

        If the check is priced, the rent is subtracted, as if the seeds in `slots` were permanent.
        """
        env = pool.envs[host]
        data = pool.data.validation.variant(env.context.variant_index).batch()
        env.network.eval()
        measures = pool.task.measure(env.network(data.inputs), data.targets)
        values = (measures.score if self.check.measure == "score" else -measures.loss).double()
        live = sum(env.slots[k].size for k in slots if env.slots[k].live)
        parameters = torch.tensor(env.fossilized_parameters + live)
        return values - float(rent(parameters, env.host_parameters, env.price)) * self.check.priced


class Stretched(FixedSchedule):
    """Plays a schedule for episodes of some length on hosts whose episodes are longer or shorter."""

    def __init__(self, schedule: Schedule, length: int) -> None:
        super().__init__(())
        self.schedule, self.length = schedule, length

    def reset(self, pool: HostPool) -> None:
        self.schedules = [
            self.schedule._replace(
                entries=tuple(e._replace(tick=e.tick * env.horizon // self.length) for e in self.schedule.entries)
            )
            for env in pool.envs
        ]
        super().reset(pool)


def make_hosts(data: HostPoolData, place: str, hosts: int, policy: Controller) -> HostPool:
    """Return hosts of a task of the training distribution, or of a held-out setting, which show what a policy reads."""
    observation = policy.observation
    if place in data.task_configs:
        return data.make_pool(hosts, task=place, observation=observation)
    setting = zero_shot.SETTINGS[place]
    env = zero_shot.replace(data.env, observation=observation)
    blueprints = setting.blueprints or data.task_configs[setting.like].blueprints
    return zero_shot.make_pool(setting._replace(hosts=hosts), env, blueprints, data.governor)


def make_player(name: str, data: HostPoolData, place: str, pool: HostPool) -> Controller:
    """Return the controller of a name. Raises ValueError if there is none."""
    if name in CHECKS:
        return Checked(load_controller(POLICY), CHECKS[name])
    if name == POLICY:
        return load_controller(POLICY)
    if name == "best schedule":
        like = place if place in data.task_configs else zero_shot.SETTINGS[place].like
        schedule = read_schedule(zero_shot.BASELINES / f"{like}.json")
        length = zero_shot.searched_horizon(data.task_configs[like].env_config(data.env))
        if place in data.task_configs:
            return Stretched(schedule, length)
        return FixedSchedule(zero_shot.fit_schedule(schedule, pool, length))
    rules: dict[str, Callable[[], Controller]] = {
        WAITING: WaitOnly,
        "best rule": zero_shot.RULES[zero_shot.best_rule(zero_shot.BASELINES)],
        "dearest first": zero_shot.RULES["climbing, dearest, 3 at once"],
    }
    if name not in rules:
        raise ValueError(f"no controller {name!r}; there are {', '.join([*rules, POLICY, 'best schedule', *CHECKS])}")
    return rules[name]()


def play(csv: Path, config: Path, places: Sequence[str], controllers: Sequence[str], hosts: int) -> None:
    """Play controllers on hosts of places, and append the rows that are missing."""
    done = {(row.place, row.controller) for row in read_rows(csv, Row)}
    data, policy = load_config(config).datamodule, load_controller(POLICY)
    if any(place in data.task_configs for place in places):
        data = open_data(config)
    with appended_rows(csv, Row) as append:
        for place in places:
            if not (due := [name for name in controllers if (place, name) not in done]):
                continue
            pool = make_hosts(data, place, hosts, policy)
            rng_seeds = episode_rng_seeds(RUN_RNG_SEED, EVALUATION, 0, n_envs=hosts)
            for name in due:
                controller, steps = make_player(name, data, place, pool), []

                def keep(step: StepResult, steps: list[list[float]] = steps) -> None:
                    steps[:] = [step.metrics.objective.tolist()]

                end = play_episode(pool, name, controller, rng_seeds=rng_seeds, on_step=keep)
                checked = controller if isinstance(controller, Checked) else None
                zeros = np.zeros(hosts, dtype=np.int64)
                forks, checks, dropped = (
                    (checked.flops, checked.checks, checked.dropped) if checked else (zeros, zeros, zeros)
                )
                append(
                    Row(
                        place,
                        name,
                        host,
                        *(float(f"{value:.5g}") for value in (steps[0][host], end.objective[host])),
                        int(end.fossils[host]),
                        *(float(f"{value / 1e6:.5g}") for value in (end.flops[host], forks[host])),
                        int(checks[host]),
                        int(dropped[host]),
                        end.contexts[host] if name == WAITING else "",
                    )
                    for host in range(hosts)
                )
                print(f"{place}, {name}: {end.objective.mean():.3f}, {end.seconds:.0f} s", flush=True)


Host = tuple[str, int]
"""Place and index of a host."""

Found = dict[str, dict[Host, Row]]
"""Rows by controller and host."""


def group(rows: Sequence[Row]) -> Found:
    """Return rows by controller and host."""
    found: Found = {}
    for row in rows:
        found.setdefault(row.controller, {})[row.place, row.host] = row
    return found


def lead(found: Found, ahead: str, behind: str, *, hosts: Iterable[Host], split: str = "test") -> np.ndarray:  # [H]
    """Return the lead in the objective of one controller over another on hosts that both have met."""
    return np.array([getattr(found[ahead][host], split) - getattr(found[behind][host], split) for host in hosts])


def table(rows: Sequence[Row]) -> list[str]:
    """Return the lines of a table of the lead of waiting over the policy, by place and by the value of each variable.

    The best other controller is the one with the highest mean on the validation data of the hosts that all have met.
    """
    found = group([row for row in rows if row.place not in zero_shot.SETTINGS])
    kinds: dict[str, list[Host]] = {"**all**": list(found[WAITING])}
    for host, row in found[WAITING].items():
        context = parse_context(row.context)
        names = [f"{name} {value}" for name, value in context.items() if name != "host.widths"]
        for kind in (f"**{row.place}**", f"{row.place}, price {context.get('objective.price')}", *names):
            kinds.setdefault(kind, []).append(host)
    heads = (
        "number",
        "waiting",
        "ahead of tamiyo, validation",
        "test",
        "wins, level, loses",
        "best other",
        "ahead of it",
    )
    lines = [f"| hosts | {' | '.join(heads)} |", "|---|--:|" + "---|" * (len(heads) - 1)]
    for kind, hosts in sorted(kinds.items()):
        ahead = {split: lead(found, WAITING, POLICY, hosts=hosts, split=split) for split in ("validation", "test")}
        names = [name for name in found if name != WAITING and any(host in found[name] for host in hosts)]
        common = [host for host in hosts if all(host in found[name] for name in names)]
        others = {name: lead(found, WAITING, name, hosts=common, split="validation").mean() for name in names}
        best = min(others, key=others.__getitem__)
        cells = [
            str(len(hosts)),
            number(float(np.mean([found[WAITING][host].test for host in hosts]))),
            *(shown(mean_interval(values), True) for values in ahead.values()),
            ", ".join(str(int((np.sign(ahead["test"]) == sign).sum())) for sign in (1, 0, -1)),
            best,
            shown(mean_interval(lead(found, WAITING, best, hosts=common)), True),
        ]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def summary(pool: HostPool) -> Tensor:  # [N, features + 1]
    """Return the features of each host, the means of those of its slots and of blueprints that grow there, and a 1."""
    host, slots, blueprints = pool.rows.split(pool.observation.features.double())

    def mean(parts: Tensor) -> Tensor:  # [N, n, F] -> [N, F]; the first feature is 1 if the part is there
        return parts.sum(1) / parts[..., :1].sum(1).clamp(min=1.0)

    return torch.cat([host, mean(slots), mean(blueprints.flatten(1, 2)), torch.ones(pool.n_envs, 1).double()], 1)


def look(rows: Sequence[Row], config: Path) -> list[str]:
    """Return the lines of a table of how well ridge regressions foretell where waiting is ahead, on test data.

    The last column is the lead over the policy of waiting where this is foretold, and the policy elsewhere.
    """
    data, policy, found = open_data(config), load_controller(POLICY), group(rows)
    hosts: list[Host] = []
    looks: list[list[Tensor]] = [[] for _ in range(TICKS + 1)]  # by tick and task
    for place in data.task_configs:
        own = sorted(host for host in found[WAITING] if host[0] == place)
        hosts += own
        pool = make_hosts(data, place, len(own), policy)
        pool.reset(episode_rng_seeds(RUN_RNG_SEED, EVALUATION, 0, n_envs=len(own)))
        for of_tick in looks:
            of_tick.append(summary(pool))
            pool.step(WaitOnly().act(pool))
    y = lead(found, WAITING, POLICY, hosts=hosts)
    wins, places, folds = y > 0.0, np.array([place for place, _ in hosts]), np.array([i % FOLDS for _, i in hosts])

    def foretell(groups: np.ndarray, fit: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:  # [H] bool
        says = np.zeros(len(y), dtype=bool)
        for left_out in np.unique(groups):
            says[groups == left_out] = fit(groups != left_out)[groups == left_out]
        return says

    def most(known: np.ndarray) -> np.ndarray:
        return np.full(len(y), wins[known].mean() > 0.5)

    def most_in_task(known: np.ndarray) -> np.ndarray:
        return np.array([wins[known & (places == place)].mean() > 0.5 for place in places])

    def ridge(tick: int) -> Callable[[np.ndarray], np.ndarray]:
        x = torch.cat(looks[tick])

        def fit(known: np.ndarray) -> np.ndarray:
            weights = solve_ridge(x[known], torch.from_numpy(y[known, None]), LOOK_RIDGE)
            return (x @ weights)[:, 0].numpy() > 0.0

        return fit

    answers = {
        "the more frequent answer": (foretell(folds, most), foretell(places, most)),
        "the more frequent answer of the task": (foretell(folds, most_in_task), None),
        **{f"after {tick} ticks": (foretell(folds, ridge(tick)), foretell(places, ridge(tick))) for tick in range(4)},
        "hindsight": (wins, wins),
    }
    heads = ("accuracy", "where they differ by .01", "other tasks", "ahead of the policy", "the same, other tasks")
    lines = [f"| answer | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name, (says, elsewhere) in answers.items():
        right = says == wins
        cells = [number(right.mean()), number(right[np.abs(y) > 0.01].mean())]
        cells.append("" if elsewhere is None else number((elsewhere == wins).mean()))
        for answer in (says, elsewhere):
            cells.append("" if answer is None else shown(mean_interval(np.where(answer, y, 0.0)), True))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return [*lines, "", f"{len(y)} hosts; waiting wins on {wins.sum()}, and is level on {(y == 0.0).sum()}"]


def checks(rows: Sequence[Row]) -> list[str]:
    """Return the lines of tables of leads over waiting on test data, and of costs, with each check and without.

    `better at the end` chooses between the policy and waiting by the objective on validation data after the training.
    """
    found = group(rows)
    names = [name for name in (POLICY, *CHECKS) if name in found]
    heads = f"{' | '.join([*names, 'better at the end'])} |"
    lines = [f"| place | hosts | waiting | {heads}", "|---|--:|---|" + "---|" * (len(names) + 1)]
    costs = [f"| place | {heads}", "|---|" + "---|" * (len(names) + 1)]
    for place in dict.fromkeys(row.place for row in rows):
        hosts = [host for host in found[WAITING] if host[0] == place]
        waiting = np.array([(found[WAITING][host].test, found[WAITING][host].flops) for host in hosts])
        cells, shares = [], []
        for name in names:
            if not all(host in found[name] for host in hosts):
                cells.append("")
                shares.append("")
                continue
            own = [found[name][host] for host in hosts]
            cells.append(shown(mean_interval(lead(found, name, WAITING, hosts=hosts)), True))
            share = (np.array([row.flops + row.forks for row in own]) / waiting[:, 1]).mean()
            counts = np.mean([(row.checks, row.dropped, row.fossils) for row in own], 0)
            shares.append(f"{share:.2f}; {counts[0]:.1f}, {counts[1]:.1f}, {counts[2]:.1f}")
        is_ahead = lead(found, POLICY, WAITING, hosts=hosts, split="validation") > 0.0
        end = np.where(is_ahead, lead(found, POLICY, WAITING, hosts=hosts), 0.0)
        share = 1.0 + (np.array([found[POLICY][host].flops for host in hosts]) / waiting[:, 1]).mean()
        head = f"{place} | {len(hosts)} | {number(waiting[:, 0].mean())}"
        lines.append(f"| {' | '.join([head, *cells, shown(mean_interval(end), True)])} |")
        costs.append(f"| {' | '.join([place, *shares])} | {share:.2f}; grown {int(is_ahead.sum())} |")
    return [*lines, "", "FLOPs over those of waiting; checks, seeds that failed, seeds kept, by host:", "", *costs]


def main(args: Sequence[str] | None = None) -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("verb", choices=("play", "table", "look", "checks"))
    parser.add_argument("--config", type=Path, default=zero_shot.CONFIG, help="the training distribution")
    parser.add_argument("--csv", type=Path, default=RESULTS, help="rows of results")
    parser.add_argument("--where", nargs="+", default=[], help="tasks of the config, or held-out settings")
    parser.add_argument("--controllers", nargs="+", default=[WAITING, POLICY])
    parser.add_argument("--hosts", type=int, default=24, help="of each place")
    chosen = parser.parse_args(args)
    torch.set_num_threads(1)
    if chosen.verb == "play":
        play(chosen.csv, chosen.config, chosen.where, chosen.controllers, chosen.hosts)
        return
    rows = read_rows(chosen.csv, Row)
    lines = {"table": table, "look": partial(look, config=chosen.config), "checks": checks}[chosen.verb](rows)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
