"""Measure what it is worth to know the kind of a host in a family, and make the controllers that are told it.

    python -m benchmarks.family search --config configs/digits_budget.yaml --steps 46080
    python -m benchmarks.family value --config configs/digits_budget.yaml --hosts 48

`search` finds schedules on training hosts, with `--steps` host epochs for each of three kinds of knowledge: the best
schedule of all hosts; the best one of each kind of host, which a first observation may show (all variables but `fail`);
and the best one of each context. It also fits a linear classifier of the kind to observations after one host epoch.
All goes to `benchmarks/settings/NAME/knowledge.json`, and the best schedule of all hosts to `best_schedule.json` in the
same folder, too, for `model.evaluation.schedules`. `value` plays the schedules on fresh training hosts of each context,
and prints what each knowledge is worth over the best single schedule, on validation data.

In a comparison, `benchmarks.family.Oracle` plays the schedule of each host's context, which it is told, and
`benchmarks.family.Classified`, a rule written for this family, that of the kind in which the classifier puts a host.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.tables import shown
from benchmarks.tune import open_data
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, ScheduledAction, write_schedule
from esper_lightning.envs import Action, HostPool
from esper_lightning.envs.family import FAIL, Context
from esper_lightning.evaluation.search import Racing, SearchConfig, sample_host_seeds, search
from esper_lightning.evaluation.statistics import mean_interval

KNOWLEDGE = Path("benchmarks/settings/digits_budget/knowledge.json")
"""File that the controllers of this module read."""
ENVS = 96
"""Number of environments side by side."""
TOLD = ("benchmarks.family.Oracle", "benchmarks.family.Classified")
"""Controllers of this module, as `model.evaluation.against` names them."""
EPISODES = 4
"""Number of episodes of ENVS hosts whose first observations train the classifier."""
RIDGE = 1.0
"""Weight of the squared norm in the loss of the classifier, whose features have unit variance."""

Variables = dict[str, Any]
"""Values of variables by name."""


class Known(NamedTuple):
    """Best schedule of the hosts with these values of variables."""

    variables: Variables
    schedule: Schedule


class Knowledge(NamedTuple):
    """Best schedules by what is known of a host, and the classifier of its kind."""

    single: Schedule
    kinds: list[Known]
    contexts: list[Known]
    weights: Tensor  # [features + 1, kinds]: of the features after one host epoch, and of 1

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {**self._asdict(), "weights": [[round(w, 5) for w in row] for row in self.weights.tolist()]}
        path.write_text(json.dumps(document) + "\n")


def read_knowledge(path: Path = KNOWLEDGE) -> Knowledge:
    """Read what `search` has written."""

    def schedule(pair: list[list[Any]]) -> Schedule:
        return Schedule(tuple(pair[0]), tuple(ScheduledAction(*entry) for entry in pair[1]))

    read = json.loads(path.read_text())
    kinds, contexts = ([Known(v, schedule(own)) for v, own in read[name]] for name in ("kinds", "contexts"))
    return Knowledge(schedule(read["single"]), kinds, contexts, torch.tensor(read["weights"]))


def visible(context: Context) -> Variables:
    """Return the variables of a context that a first observation may show."""
    return {name: value for name, value in context.variables if name.partition(".")[0] != FAIL}


def nearest(known: Sequence[Known], variables: Variables) -> Known:
    """Return the entry with the most similar values; a held-out host has none with the same ones."""

    def distance(entry: Known) -> float:
        pairs = [(value, entry.variables.get(name)) for name, value in variables.items()]
        return sum(
            min(1.0, abs(math.log(a / b))) if isinstance(a, float) and isinstance(b, float) and a * b > 0 else a != b
            for a, b in pairs
        )

    return min(known, key=distance)


class Oracle(FixedSchedule):
    """Plays on each host the best known schedule of its context, which it is told."""

    def __init__(self) -> None:
        super().__init__(())
        self.knowledge = read_knowledge()

    def reset(self, pool: HostPool) -> None:
        contexts = [dict(env.context.context.variables) for env in pool.envs]
        self.schedules = [nearest(self.knowledge.contexts, variables).schedule for variables in contexts]
        super().reset(pool)


class Classified(FixedSchedule):
    """Waits for one host epoch, classifies each host by its observation, and plays the best schedule of its kind."""

    def __init__(self) -> None:
        super().__init__(())
        self.knowledge = read_knowledge()

    def reset(self, pool: HostPool) -> None:
        self.schedules = [self.knowledge.single] * pool.n_envs
        super().reset(pool)

    def act(self, pool: HostPool) -> Action:
        if pool.envs[0].tick == 0:
            return WaitOnly().act(pool)
        if pool.envs[0].tick == 1:
            kinds = (features(pool) @ self.knowledge.weights).argmax(1).tolist()
            self.schedules = [self.knowledge.kinds[kind].schedule for kind in kinds]
            super().reset(pool)
        return super().act(pool)


def features(pool: HostPool) -> Tensor:  # [N, features + 1]
    """Return the observation of each host as one row, behind it a 1."""
    return torch.cat([pool.observation.features.flatten(1).cpu(), torch.ones(pool.n_envs, 1)], 1)


def fit_classifier(pool: HostPool, kinds: Sequence[Variables]) -> Tensor:  # [features + 1, kinds]
    """Return the weights of a ridge regression of one-hot kinds on observations after one host epoch of waiting."""
    rng, rows, labels, wait = Random("classifier"), [], [], WaitOnly()
    contexts = pool.env_factory.context_distribution.contexts
    for _ in range(EPISODES):
        seeds = sample_host_seeds(pool, -(-pool.n_envs // len(contexts)), rng).T.ravel()[: pool.n_envs]
        pool.reset(seeds.tolist())
        pool.step(wait.act(pool))
        rows.append(features(pool))
        labels += [kinds.index(visible(env.context.context)) for env in pool.envs]
    return solve_ridge(torch.cat(rows).double(), torch.nn.functional.one_hot(torch.tensor(labels)).double())


def solve_ridge(x: Tensor, y: Tensor, weight: float = RIDGE) -> Tensor:  # [n, F + 1], [n, outputs] -> [F + 1, outputs]
    """Return the weights of a ridge regression of y on x, whose last feature is 1."""
    mean, scale = x.mean(0), x.std(0).clamp(min=1e-6)
    mean[-1], scale[-1] = 0.0, 1.0
    normal = (x - mean) / scale
    found = torch.linalg.solve(normal.T @ normal + weight * torch.eye(x.shape[1]).double(), normal.T @ y)
    weights = found / scale[:, None]
    weights[-1] -= mean @ weights
    return weights.float()


def find_knowledge(pool: HostPool, steps: int, rng_seed: int) -> Knowledge:
    """Search the best schedules with `steps` host epochs for each kind of knowledge, and fit the classifier."""
    contexts = pool.env_factory.context_distribution.contexts
    kinds: list[Variables] = []
    for context in contexts:
        if visible(context) not in kinds:
            kinds.append(visible(context))
    found = [
        Known(
            dict(one.variables), search(pool, SearchConfig(steps=steps // len(contexts), seed=rng_seed), contexts=[one])
        )
        for one in contexts
    ]
    print("\n".join(f"{entry.variables}: {entry.schedule}" for entry in found), flush=True)
    known = list(dict.fromkeys(entry.schedule for entry in found))
    of_kinds = []
    for kind in kinds:
        own = [context for context in contexts if visible(context) == kind]
        config = SearchConfig(steps=steps // len(kinds), seed=rng_seed)
        of_kinds.append(Known(kind, search(pool, config, known, contexts=own)))
    known += [entry.schedule for entry in of_kinds]
    single = search(pool, SearchConfig(steps=steps, seed=rng_seed), list(dict.fromkeys(known)))
    return Knowledge(single, of_kinds, found, fit_classifier(pool, kinds))


def value_of_knowledge(pool: HostPool, knowledge: Knowledge, hosts: int) -> list[str]:
    """Return the lines of a table: the objective on validation data by context and by what is known."""
    contexts = pool.env_factory.context_distribution.contexts
    never = Schedule(knowledge.single.slots, ())
    choices = [
        [never] * len(contexts),
        [knowledge.single] * len(contexts),
        [nearest(knowledge.kinds, visible(context)).schedule for context in contexts],
        [nearest(knowledge.contexts, dict(context.variables)).schedule for context in contexts],
    ]
    table = np.empty((len(choices), len(contexts), hosts))
    for c, context in enumerate(contexts):
        chosen = [row[c] for row in choices]
        schedules = list(dict.fromkeys(chosen))
        racing = Racing(pool, 10_000, [context], episodes=0)  # hosts that no search has met
        played = racing.play(schedules, hosts)
        table[:, c] = [played[schedules.index(schedule)] for schedule in chosen]
    lines = ["| context | never growing | best single | of its kind | of its context |", "|---|---|---|---|---|"]
    for context, row in zip(contexts, table.mean(2).T, strict=True):
        lines.append(f"| {context} | {' | '.join(f'{value:.3f}' for value in row)} |")
    gains = [shown(mean_interval((row - table[1]).reshape(1, -1)), signed=True) for row in table]
    means = [f"{row.mean():.3f}" for row in table]
    return [*lines, f"| all | {' | '.join(means)} |", f"| over the best single | {' | '.join(gains)} |"]


def main(args: Sequence[str] | None = None) -> None:
    """Run one of the two commands."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("verb", choices=("search", "value"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--knowledge", type=Path, default=KNOWLEDGE, help="the file to write or to read")
    parser.add_argument("--steps", type=int, default=46_080, help="host epochs for each kind of knowledge")
    parser.add_argument("--hosts", type=int, default=48, help="fresh hosts of each context")
    parser.add_argument("--seed", type=int, default=0, help="RNG seed of the search")
    chosen = parser.parse_args(args)
    torch.set_num_threads(1)
    pool = open_data(chosen.config).make_pool(ENVS)
    if chosen.verb == "search":
        knowledge = find_knowledge(pool, chosen.steps, chosen.seed)
        knowledge.write(chosen.knowledge)
        write_schedule(knowledge.single, chosen.knowledge.with_name("best_schedule.json"))
        print(f"written to {chosen.knowledge}; model.evaluation.against may now name {', '.join(TOLD)}")
    else:
        print("\n".join(value_of_knowledge(pool, read_knowledge(chosen.knowledge), chosen.hosts)))


if __name__ == "__main__":
    main()
