"""Measure how well the Governor distinguishes diverging hosts from healthy ones, and what it costs.

    python -m benchmarks.governor                        # all parts: about an hour on one slow core
    python -m benchmarks.governor --part recorded --traces FILE     # record once, judge many times
    python -m benchmarks.governor --part live --markdown

recorded: hosts of several kinds are trained on real data while seeds grow on them, without a Governor, and its inputs
    are recorded. A host is *healthy* unless its loss exceeds 1.5 times that of guessing in three consecutive ticks, a
    standard that is independent of the Governor's rules. A rollback of a healthy host is a false positive. Faults are
    injected into copies of the healthy traces, each at a random tick from the fourth to the third-last.
live: hosts are broken while they train under the Governor.
cost: share of a tick that judgements and snapshots take.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.governor.costs import measure_costs
from benchmarks.governor.live import judge_live
from benchmarks.governor.recorded import judge_recorded
from benchmarks.governor.traces import load, record_all, save
from esper_lightning.envs.governor import GovernorConfig


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("recorded", "live", "cost"), help="without it, all three")
    parser.add_argument("--traces", type=Path, help="recorded traces: read from this file, or written if there is none")
    parser.add_argument("--hosts", type=int, default=8, help="live: hosts of each kind, for each way to break them")
    parser.add_argument("--rounds", type=int, default=7, help="cost: rounds of measurement")
    parser.add_argument("--markdown", action="store_true", help="tables to paste")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.part in (None, "recorded"):
        if args.traces and args.traces.exists():
            traces = load(args.traces)
        else:
            traces = list(record_all())
            if args.traces:
                save(traces, args.traces)
        judge_recorded(traces, GovernorConfig(), args.markdown)
    if args.part in (None, "live"):
        judge_live(args.hosts, args.markdown)
    if args.part in (None, "cost"):
        measure_costs(args.rounds, args.markdown)


if __name__ == "__main__":
    main()
