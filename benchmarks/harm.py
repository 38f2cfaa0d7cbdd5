"""Measure on which hosts waiting wins, whether a first look tells, and what a check by forking is worth.

    python -m benchmarks.harm play --hosts 24 --controllers waiting tamiyo "best rule" "dearest first" "best schedule"
    python -m benchmarks.harm play --where "another table"
    python -m benchmarks.harm table
    python -m benchmarks.harm look
    python -m benchmarks.harm checks

play: play controllers on fresh hosts of the training distribution of a config, or of held-out settings of
    `benchmarks.zero_shot`, and append a row for each host. A place, as `--where` names it, is one or the other.
table: Markdown tables of the lead of waiting, on validation and on test data, by place and by variable.
look: fit ridge regressions of the lead of waiting over the policy on observations after 1, 2 and 3 ticks of waiting.
    Each host is judged by the fit to the hosts of other folds, and by the fit to the hosts of other tasks.
checks: Markdown table of the leads over waiting of the policy, of the better of both, and of checks by forking, whose
    rows are kept. They compared a network in which a seed was about to become permanent with the network that had
    trained without this seed since its germination, and went on with the latter unless the seed was ahead.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
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
from esper_lightning.envs import HostPool
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.statistics import mean_interval

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
    forks: float  # of networks that were trained beside it, for a check of each seed
    context: str  # in the rows of waiting


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
    env = replace(data.env, observation=observation)
    blueprints = setting.blueprints or data.task_configs[setting.like].blueprints
    return zero_shot.make_pool(setting._replace(hosts=hosts), env, blueprints, data.governor)


def make_player(name: str, data: HostPoolData, place: str, pool: HostPool) -> Controller:
    """Return the controller of a name. Raises ValueError if there is none."""
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
        raise ValueError(f"no controller {name!r}; there are {', '.join([*rules, POLICY, 'best schedule'])}")
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
                controller = make_player(name, data, place, pool)
                validation, end = zero_shot.play_to_the_end(pool, name, controller, rng_seeds=rng_seeds)
                append(
                    Row(
                        place,
                        name,
                        host,
                        *(float(f"{value:.5g}") for value in (validation[host], end.objective[host])),
                        int(end.fossils[host]),
                        float(f"{end.flops[host] / 1e6:.5g}"),
                        0.0,
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
            return (x @ weights.double())[:, 0].numpy() > 0.0

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
    names = [POLICY, *(name for name in found if any(row.forks for row in found[name].values()))]
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
            shares.append(f"{(np.array([row.flops + row.forks for row in own]) / waiting[:, 1]).mean():.2f}")
        is_ahead = lead(found, POLICY, WAITING, hosts=hosts, split="validation") > 0.0
        end = np.where(is_ahead, lead(found, POLICY, WAITING, hosts=hosts), 0.0)
        share = 1.0 + (np.array([found[POLICY][host].flops for host in hosts]) / waiting[:, 1]).mean()
        head = f"{place} | {len(hosts)} | {number(waiting[:, 0].mean())}"
        lines.append(f"| {' | '.join([head, *cells, shown(mean_interval(end), True)])} |")
        costs.append(f"| {' | '.join([place, *shares])} | {share:.2f}; grown {int(is_ahead.sum())} |")
    return [*lines, "", "FLOPs over those of waiting:", "", *costs]


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
