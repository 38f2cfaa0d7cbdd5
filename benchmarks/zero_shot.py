"""Evaluate policies over sets on hosts that their training has left out, beside rules and schedules.

    python -m benchmarks.zero_shot baselines
    python -m benchmarks.zero_shot result
    python -m benchmarks.zero_shot result --policies runs/general/version_0/checkpoints/last.ckpt …
    python -m benchmarks.zero_shot table
    python -m benchmarks.zero_shot publish runs/general/version_0/checkpoints/last.ckpt

baselines: on the training hosts of the config, play every rule, and search the best fixed schedule of each task. The
    results lie in a folder of `benchmarks/settings`.
result: play waiting; the default rule of `Grow`; the rule that was best on the training hosts; the schedule of the most
    similar task of training, its slots paired in order; the policy of the package, or a checkpoint for each RNG seed of
    a training; its most frequent schedule on every host (`replayed`), and its actions on the next host (`yoked`). Most
    held-out settings have 24 fresh hosts, two have fewer; each has test data.
table: Markdown tables of the objectives, and of leads over waiting, of the policies of all trainings, or of that of one
    RNG seed. `better of both` is the policy on hosts on which it ends ahead of waiting on validation data, and waiting
    on all others. The leads over all settings weigh each setting alike.
publish: write the policy of a checkpoint, with its tables, to the file that comes with the package as `tamiyo`.

Results are rows of a CSV file. Rows that it has got are not measured again.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.rows import appended_rows, read_rows
from benchmarks.tables import number, shown
from benchmarks.tune import open_data
from esper_lightning import load_controller
from esper_lightning.cli.commands import governor_of, load_config
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import (
    ClimbingConfig,
    Heuristic,
    HillClimbing,
    Periodic,
    PeriodicConfig,
    WaitOnly,
)
from esper_lightning.controllers.schedules import FixedSchedule, Schedule, read_schedule, write_schedule
from esper_lightning.envs import EnvConfig, HostPool, StepResult
from esper_lightning.envs.config import HostFactory
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds
from esper_lightning.evaluation.play import play_episode
from esper_lightning.evaluation.search import SearchConfig, final_objectives, search
from esper_lightning.evaluation.statistics import mean_interval
from esper_lightning.hosts import CNN, GPT, MLP, Attached
from esper_lightning.runtime.checkpoint import MODULE_KEY, NAMED_POLICIES, POLICIES, read_policy, write_policy
from esper_lightning.tasks import Digits, Tabular, Task, Text

CONFIG = Path("configs/general.yaml")
RESULTS = Path("benchmarks/results/zero_shot.csv")
BASELINES = Path("benchmarks/settings/zero_shot")
RULES_FILE = "rules.csv"

TAMIYO, WAITING, DEFAULT, RULE, SCHEDULE = "tamiyo", "waiting", "heuristic", "best rule", "best schedule"

REPLAYED, YOKED, BETTER = "replayed", "yoked", "better of both"

RULE_HOSTS = 24
"""Hosts of a task on which a rule is played."""

SEARCHED_CONTEXTS = 8
"""Contexts of a task for which a schedule is searched, all with episodes of the same length."""

RULES: dict[str, Callable[[], Controller]] = {
    "heuristic": Heuristic,
    **{f"periodic, every {every}": partial(Periodic, PeriodicConfig(every=every)) for every in (1, 3, 6)},
    **{
        f"climbing, {order}, {at_once} at once": partial(HillClimbing, ClimbingConfig(order=order, at_once=at_once))
        for order in ("cheapest", "dearest")
        for at_once in (1, 3)
    },
}
"""Rules of which the best is played, by name."""


class OneChannel(nn.Module):
    """Torchvision's ShuffleNet V2 ×0.5 for images of one channel, which it enlarges four times."""

    def __init__(self, num_classes: int) -> None:
        from torchvision.models import shufflenet_v2_x0_5  # imported late: it takes a second

        super().__init__()
        self.network = shufflenet_v2_x0_5(num_classes=num_classes)

    def forward(self, x: Tensor) -> Tensor:  # [B, 1, S, S] -> [B, classes]
        return self.network(functional.interpolate(x, scale_factor=4).expand(-1, 3, -1, -1))


class Setting(NamedTuple):
    """Hosts that training leaves out."""

    task: Callable[[], Task]
    host: HostFactory
    like: str
    """Task of the training whose schedule is played here."""
    training: HostTraining
    horizon: int = 12
    price: float = 0.05
    hosts: int = 24
    blueprints: tuple[str, ...] | None = None
    """Blueprints on offer. None: those of the task of the training."""
    executor: str = "fused"


FEW_BATCHES = HostTraining(batches=8, lr=0.02, max_grad_norm=None)
"""Training of tiny hosts as in the config."""

cnn = partial(CNN, pools=2, isolate=False, channels_last=False)

SETTINGS: dict[str, Setting] = {
    "seven blocks": Setting(
        Digits, partial(cnn, widths=[4, 6, 6, 8, 8, 12, 12], kernel=1), "deep", FEW_BATCHES, horizon=16
    ),
    "residual, kernels of 5": Setting(
        Digits, partial(cnn, widths=[4, 6, 6, 8], kernel=5, residual=True), "deep", FEW_BATCHES
    ),
    "another table": Setting(
        partial(Tabular, "breast_cancer"),
        partial(MLP, width=6, layers=3),
        "table",
        HostTraining(batches=8, batch_size=16, lr=0.01),
    ),
    "another text": Setting(
        partial(Text, argparse.__file__, length=32, validation=0.02, test=0.05),
        partial(GPT, width=24, blocks=4, heads=2, context=32, slots=["layer1", "layer2", "layer3", "layer4"]),
        "text",
        HostTraining(batches=12, batch_size=16, lr=0.003),
        hosts=12,
        executor="loop",
    ),
    "twelve slots": Setting(
        Digits,
        partial(
            cnn,
            widths=[4, 4, 6, 6, 6, 8, 8, 8, 12],
            kernel=1,
            pools=3,
            slots=[
                *(f"block{i + 1}{end}" for i in range(3) for end in ("", ".pool")),
                *(f"block{i}" for i in range(4, 10)),
            ],
        ),
        "deep",
        FEW_BATCHES,
        horizon=20,
    ),
    "unknown blueprint": Setting(
        Digits, partial(cnn, widths=[4, 8, 12], kernel=1), "Digits", FEW_BATCHES, blueprints=("norm", "bottleneck")
    ),
    "forty ticks": Setting(Digits, partial(cnn, widths=[4, 8, 12], kernel=1), "Digits", FEW_BATCHES, horizon=40),
    "torchvision": Setting(
        Digits,
        partial(
            Attached,
            network="benchmarks.zero_shot.OneChannel",
            slots=["network.maxpool", "network.stage2", "network.stage3", "network.stage4"],
        ),
        "deep",
        HostTraining(batches=16, lr=0.005),
        hosts=6,
        executor="loop",
    ),
    # Fixed before a policy was trained that is to do no harm: hosts that may be better off without growth.
    "sgd, falling rate": Setting(
        Digits,
        partial(cnn, widths=[16, 24, 24], kernel=3),
        "wide",
        HostTraining(optimizer="sgd", batches=16, lr=0.05, lr_schedule="cosine", weight_decay=0.0005),
        horizon=15,
    ),
    "five ticks": Setting(
        Digits, partial(cnn, widths=[8, 12, 16], kernel=3), "Digits", HostTraining(batches=16, lr=0.01), horizon=5
    ),
    "97 images": Setting(
        partial(Digits, test=1500),
        partial(cnn, widths=[8, 12, 16], kernel=3),
        "wide",
        HostTraining(optimizer="adamw", batches=8, lr=0.01, weight_decay=0.01),
    ),
    "a quantity": Setting(
        partial(Tabular, "diabetes", score="r2"),
        partial(MLP, width=8, layers=2),
        "table",
        HostTraining(batches=8, batch_size=16, lr=0.01, lr_schedule="decay"),
    ),
}
"""Held-out settings by name."""


class Score(NamedTuple):
    """Mean objective of a rule on the training hosts of a task, on validation samples."""

    task: str
    rule: str
    objective: float


class Row(NamedTuple):
    """Result on one host."""

    setting: str
    controller: str
    training_seed: str  # empty for controllers without training
    host: int
    validation: float  # objective
    objective: float  # on test samples
    fossils: int
    flops: float  # of training, in millions


def find_baselines(config: Path, folder: Path, steps: int) -> None:
    """Score every rule on the training hosts of each task, and search its best schedule."""
    data = open_data(config)
    known = {(score.task, score.rule) for score in read_rows(folder / RULES_FILE, Score)}
    with appended_rows(folder / RULES_FILE, Score) as append:
        for task in data.pools:
            pool = data.make_pool(RULE_HOSTS, task=task)
            rng_seeds = [2 * seed for seed in range(RULE_HOSTS)]  # even, as those of training
            for name, make in RULES.items():
                if (task, name) not in known:
                    append([Score(task, name, statistics.mean(final_objectives(pool, make(), rng_seeds)))])
            if not (file := folder / f"{task}.json").exists():
                contexts, horizon = pool.env_factory.context_distribution.contexts, searched_horizon(pool.config)
                alike = [context for context in contexts if (context.horizon or pool.config.horizon) == horizon]
                chosen = random.Random(0).sample(alike, min(SEARCHED_CONTEXTS, len(alike)))
                waiting = Schedule(tuple(pool.space.slot), ())
                found = search(pool, SearchConfig(steps=steps), [waiting], contexts=chosen)
                write_schedule(found, file)
                print(f"{task}: {steps} host epochs\n{found}", flush=True)
    print(f"best rule: {best_rule(folder)}")


def best_rule(folder: Path) -> str:
    """Return the rule with the best mean objective over the tasks. Raises ValueError if none was scored."""
    scores: dict[str, list[float]] = {}
    for score in read_rows(folder / RULES_FILE, Score):
        scores.setdefault(score.rule, []).append(score.objective)
    if not scores:
        raise ValueError(f"{folder} has no scores of rules; run the command baselines first")
    return max(scores, key=lambda rule: statistics.mean(scores[rule]))


def searched_horizon(config: EnvConfig) -> int:
    """Return the length of the episodes for which the schedule of a task is searched: the median of its contexts."""
    return statistics.median_low(context.horizon or config.horizon for context in config.family.contexts())


def fit_schedule(schedule: Schedule, pool: HostPool, horizon: int) -> Schedule:
    """Return the schedule for hosts with other slots, which are paired in order, and episodes of another length.

    Its ticks are stretched from `horizon` to the horizon of the pool. Seeds that cannot grow there are left out.
    """
    space, growable = pool.space, pool.growable
    slots = dict(zip(schedule.slots, space.slot, strict=False))
    grows = {
        (slot, name) for k, slot in enumerate(space.slot) for b, name in enumerate(space.blueprint) if growable[k, b]
    }
    entries = tuple(
        entry._replace(slot=slots[entry.slot], tick=entry.tick * pool.horizon // horizon)
        for entry in schedule.entries
        if entry.slot in slots
        and entry.tick < horizon
        and (entry.blueprint is None or (slots[entry.slot], entry.blueprint) in grows)
    )
    return Schedule(tuple(space.slot), entries)


def make_pool(
    setting: Setting, env: EnvConfig, blueprints: Sequence[str] | None, governor: GovernorConfig | None
) -> HostPool:
    """Return the hosts of a setting, with the rules of the training."""
    task = setting.task()
    config = replace(
        env,
        horizon=setting.horizon,
        executor=setting.executor,
        training=setting.training,
        actions=replace(env.actions, blueprints=None if blueprints is None else list(blueprints)),
        objective=replace(env.objective, price=setting.price),
        family=FamilyConfig(),
    )
    device = torch.device("cpu")
    return HostPool(
        task, task.load(), setting.host, config=config, n_envs=setting.hosts, device=device, governor=governor
    )


def measure(
    csv: Path,
    config: Path,
    folder: Path,
    *,
    settings: Mapping[str, Setting],
    policies: Sequence[str],
) -> None:
    """Play all controllers on all settings and append the rows that are missing."""
    made = load_config(config)
    data, governor = made.datamodule, governor_of(made.trainer)
    rule = best_rule(folder)
    done = {(row.setting, row.controller, row.training_seed) for row in read_rows(csv, Row)}
    seeds = {path: training_seed(path) for path in policies}
    if len(set(seeds.values())) < len(seeds):
        raise ValueError(f"two of the policies are of one RNG seed of training: {', '.join(seeds.values())}")
    with appended_rows(csv, Row) as append:
        for title, setting in settings.items():
            schedule = read_schedule(folder / f"{setting.like}.json")
            horizon = searched_horizon(data.task_configs[setting.like].env_config(data.env))
            fit = partial(fit_schedule, schedule, horizon=horizon)
            blueprints = setting.blueprints or data.task_configs[setting.like].blueprints
            make_hosts = partial(make_pool, setting, blueprints=blueprints, governor=governor)
            baselines: dict[str, Callable[[HostPool], Controller]] = {
                WAITING: lambda pool: WaitOnly(),
                DEFAULT: lambda pool: Heuristic(),
                RULE: lambda pool: RULES[rule](),
                SCHEDULE: lambda pool, fit=fit: FixedSchedule(fit(pool)),
            }
            due = {key: make for key, make in baselines.items() if (title, key, "") not in done}
            if due:
                pool = make_hosts(data.env)
                for key, make in due.items():
                    append(play(pool, title, key, "", make(pool))[0])
            for path, seed in seeds.items():
                if (title, YOKED, seed) not in done:
                    policy = load_controller(path)
                    pool = make_hosts(replace(data.env, observation=policy.observation or data.env.observation))
                    rows, schedules = play(pool, title, TAMIYO, seed, policy)
                    common = Counter(schedules).most_common(1)[0][0]
                    replayed, yoked = FixedSchedule(common), FixedSchedule(schedules[1:] + schedules[:1])
                    for key, controller in ((REPLAYED, replayed), (YOKED, yoked)):
                        rows += play(pool, title, key, seed, controller)[0]
                    append(rows)


def training_seed(policy: str | Path) -> str:
    """Return the RNG seed of the training of a policy, as in the rows."""
    return str(read_policy(policy)[MODULE_KEY].get("seed"))


def play(
    pool: HostPool, setting: str, name: str, training_seed: str, controller: Controller
) -> tuple[list[Row], list[Schedule]]:
    """Play a controller on fresh hosts, the same for all controllers of a setting, and return a row for each.

    The second value has the actions that were carried out on each host.
    """
    validation: list[float] = []

    def keep(step: StepResult) -> None:
        validation[:] = step.metrics.objective.tolist()

    begin = time.process_time()
    rng_seeds = episode_rng_seeds(0, EVALUATION, 0, n_envs=pool.n_envs)
    outcome = play_episode(pool, name, controller, rng_seeds=rng_seeds, on_step=keep)
    seconds = time.process_time() - begin
    print(f"{setting}, {name} {training_seed}: {outcome.objective.mean():.3f}, {seconds:.0f} s", flush=True)
    rows = [
        Row(setting, name, training_seed, host, *(float(f"{value:.6g}") for value in objectives), int(fossils), mflops)
        for host, (*objectives, fossils, mflops) in enumerate(
            zip(validation, outcome.objective, outcome.fossils, [round(n / 1e6, 2) for n in outcome.flops], strict=True)
        )
    ]
    return rows, outcome.schedules


Results = dict[str, dict[str, dict[str, np.ndarray]]]
"""Results by setting, controller and name of the column: [S, H], S = 1 for controllers without training."""


def group(rows: Sequence[Row]) -> Results:
    """Return the results of all rows, and those of the better of both of waiting and of the policies.

    Raises ValueError if no policy was measured.
    """
    columns = ("validation", "objective", "fossils", "flops")
    values: dict[str, dict[str, dict[str, list[Row]]]] = {}
    for row in rows:
        of_seed = values.setdefault(row.setting, {}).setdefault(row.controller, {})
        of_seed.setdefault(row.training_seed, []).append(row)
    results: Results = {
        setting: {
            controller: {
                column: np.array([[getattr(row, column) for row in own] for own in seeds.values()])
                for column in columns
            }
            for controller, seeds in of.items()
        }
        for setting, of in values.items()
        if TAMIYO in of
    }
    if not results:
        raise ValueError("there are no results of a policy; run the command result")
    for of in results.values():
        ahead = of[TAMIYO]["validation"] > of[WAITING]["validation"]
        of[BETTER] = {"objective": np.where(ahead, of[TAMIYO]["objective"], of[WAITING]["objective"])}
    return results


def table(rows: Sequence[Row], seed: str | None = None) -> list[str]:
    """Return the lines of a table of objectives, and of a table of leads over waiting, on test data.

    They are of the policies of all trainings, or of the training with one RNG seed. The last columns of the first
    table are the share of hosts on which the policies keep no seed, and their FLOPs over those of waiting.
    """
    results = group([row for row in rows if seed is None or row.training_seed in ("", seed)])
    controllers = [one for one in next(iter(results.values())) if one != BETTER]
    heads = ["setting", "hosts", *controllers, "keeps nothing", "FLOPs"]
    lines = [f"| {' | '.join(heads)} |", "|---|--:|" + "---|" * (len(heads) - 2)]
    for setting, of in results.items():
        means = [number(float(of[one]["objective"].mean())) for one in controllers]
        nothing = f"{(of[TAMIYO]['fossils'] == 0).mean():.0%}"
        cost = f"{(of[TAMIYO]['flops'] / of[WAITING]['flops']).mean():.2f}"
        lines.append(f"| {' | '.join([setting, str(of[TAMIYO]['objective'].shape[1]), *means, nothing, cost])} |")
    others = [TAMIYO, BETTER, *(one for one in controllers if one not in (TAMIYO, WAITING))]
    lines += ["", f"| ahead of waiting | {' | '.join(others)} |", "|---|" + "---|" * len(others)]
    leads = {
        setting: {one: of[one]["objective"] - of[WAITING]["objective"] for one in others}
        for setting, of in results.items()
    }
    for setting, of_setting in leads.items():
        cells = [shown(mean_interval(of_setting[one]), signed=True) for one in others]
        lines.append(f"| {setting} | {' | '.join(cells)} |")
    cells = [shown(mean_interval(weigh([of[one] for of in leads.values()])), signed=True) for one in others]
    return [*lines, f"| all settings | {' | '.join(cells)} |"]


def weigh(leads: Sequence[np.ndarray]) -> np.ndarray:  # [S, H] each -> [S, sum of H]
    """Return the leads of all settings side by side, weighted so that their mean is that of the settings' means.

    Settings without all training seeds keep those that all settings have.
    """
    seeds = min(len(lead) for lead in leads)
    hosts = sum(lead.shape[1] for lead in leads)
    return np.concatenate([lead[:seeds] * hosts / (len(leads) * lead.shape[1]) for lead in leads], 1)


def main(args: Sequence[str] | None = None) -> None:
    """Run one of the four commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    finding, measuring = commands.add_parser("baselines"), commands.add_parser("result")
    for command in (finding, measuring):
        command.add_argument("--config", type=Path, default=CONFIG, help="the training distribution")
        command.add_argument("--baselines", type=Path, default=BASELINES, help="folder of the baselines")
    finding.add_argument("--steps", type=int, default=15_000, help="host epochs of the search for each task")
    measuring.add_argument("--policies", nargs="*", default=[TAMIYO], help="a checkpoint for each training seed")
    measuring.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    measuring.add_argument("--hosts", type=int, help="of each setting, at most as many as it has")
    shown_table, publishing = commands.add_parser("table"), commands.add_parser("publish")
    shown_table.add_argument("--seed", help="RNG seed of one training; without it, all trainings")
    publishing.add_argument("policy", type=Path, help="a checkpoint")
    publishing.add_argument("--out", type=Path, default=POLICIES / NAMED_POLICIES["tamiyo"], help="a safetensors file")
    for command in (measuring, shown_table, publishing):
        command.add_argument("--csv", type=Path, default=RESULTS, help="rows of results")
    chosen = parser.parse_args(args)
    torch.set_num_threads(1)
    try:
        if chosen.command == "baselines":
            find_baselines(chosen.config, chosen.baselines, chosen.steps)
        elif chosen.command == "table":
            print("\n".join(table(read_rows(chosen.csv, Row), chosen.seed)))
        elif chosen.command == "publish":
            lines = table(read_rows(chosen.csv, Row), training_seed(chosen.policy))
            write_policy(chosen.policy, chosen.out, {"zero shot": "\n".join(lines)})
        else:
            settings = {name: SETTINGS[name] for name in chosen.settings}
            if chosen.hosts is not None:
                settings = {n: one._replace(hosts=min(chosen.hosts, one.hosts)) for n, one in settings.items()}
            measure(chosen.csv, chosen.config, chosen.baselines, settings=settings, policies=chosen.policies)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
