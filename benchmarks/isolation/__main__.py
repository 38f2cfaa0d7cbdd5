"""Measure what seeds that learn behind their host are worth.

    python -m benchmarks.isolation worth                 # 324 runs, about half an hour on one core
    python -m benchmarks.isolation stuck                 # 189 runs, about ten minutes
    python -m benchmarks.isolation letters               # 48 runs, about a quarter of an hour
    python -m benchmarks.isolation policies --configs digits
    python -m benchmarks.isolation cost
    python -m benchmarks.isolation table worth           # or stuck, letters, policies

worth: hosts learn alone for three epochs, then with a new seed behind each of their three slots, one blueprint at a
    time. After one and three epochs the test samples are counted that are classified correctly without a seed, and with
    each seed alone at full alpha.
stuck: the same on digits with seven blueprints and three learning rates; the gate is asked whether the gradient of each
    seed is healthy.
letters: a CNN on letters grows three seeds early or late, with each isolation, or has them from the start; accuracy at
    equal training FLOPs.
policies: one `fit` for each isolation, number of ticks in TRAINING and RNG seed, compared with climbing, the best
    fixed schedule of a search, and the actions that the policy chose for another host (yoked).
cost: processor time of a tick with learning seeds in all slots, relative to isolation straight_through in the same run;
    the isolations take turns, and the numbers are medians and quartiles.
table: Markdown tables of the kept results.

Results are rows of a CSV file. Rows that it has got are not measured again.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.isolation import letters, policies, stuck, worth
from benchmarks.isolation.cost import measure_cost
from benchmarks.rows import read_rows

RESULTS = Path(__file__).parents[1] / "results"

FILES = {
    "worth": "isolation.csv",
    "stuck": "isolation_stuck.csv",
    "letters": "isolation_letters.csv",
    "policies": "isolation_policies.csv",
}
"""Kept results by command."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    parsers = {name: commands.add_parser(name) for name in FILES}
    for name, measured in parsers.items():
        measured.add_argument("--csv", type=Path, default=RESULTS / FILES[name], help="rows are added here")
        measured.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parsers["worth"].add_argument("--tasks", nargs="+", choices=worth.TASKS, default=list(worth.TASKS))
    trained, configs, settings = parsers["policies"], list(policies.TRAININGS), list(policies.SETTINGS)
    trained.add_argument("--configs", nargs="+", choices=configs, default=configs)
    trained.add_argument("--settings", nargs="+", choices=settings, default=settings)
    trained.add_argument("--schedules", type=Path, default=Path("runs/isolation_schedules"), help="found schedules")
    trained.add_argument("--jobs", type=int, default=1, help="trainings side by side, a core each")
    shown = commands.add_parser("table")
    shown.add_argument("results", choices=list(FILES))
    shown.add_argument("--csv", type=Path)
    cost = commands.add_parser("cost")
    cost.add_argument("--repeats", type=int, default=30)
    cost.add_argument("--base", type=int, default=8, help="channels of the first block of the hosts")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.command == "worth":
        worth.measure(args.csv, args.seeds, args.tasks)
    elif args.command == "stuck":
        stuck.measure(args.csv, args.seeds)
    elif args.command == "letters":
        letters.measure_plans(args.csv, args.seeds)
    elif args.command == "policies":
        policies.train_all(
            args.csv,
            args.schedules,
            configs=args.configs,
            settings=args.settings,
            rng_seeds=args.seeds,
            jobs=args.jobs,
        )
    elif args.command == "cost":
        measure_cost(args.repeats, args.base)
    else:
        module = {"worth": worth, "stuck": stuck, "letters": letters, "policies": policies}[args.results]
        print("\n".join(module.table(read_rows(args.csv or RESULTS / FILES[args.results], module.Row))))


if __name__ == "__main__":
    main()
