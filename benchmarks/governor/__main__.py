"""How well does the Governor tell hosts that diverge from hosts that learn, and what does it cost?

    python -m benchmarks.governor                        # all of it: half an hour of one core
    python -m benchmarks.governor --part recorded --traces FILE     # recorded once, judged as often as you like
    python -m benchmarks.governor --part live --markdown

recorded: hosts of several kinds are trained on real data while seeds grow on them, and what the Governor would have
    seen is recorded, though nobody acts on it. A host is *healthy* unless for three ticks running it loses more than
    1.5 times what guessing would: a standard that no rule of the Governor knows of. A rollback of a healthy host is a
    false one. Into copies of the healthy traces faults are injected, each at a random tick from the fourth to the last
    but two.
live: hosts are broken while they train, under the Governor.
cost: share of a tick that judging and snapshots take.
"""

import argparse
from pathlib import Path

import torch

from benchmarks.governor.costs import measure_costs
from benchmarks.governor.live import judge_live
from benchmarks.governor.recorded import judge_recorded
from benchmarks.governor.traces import load, record_all, save
from esper_lightning.governor import GovernorConfig


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
