"""`esper-lightning` and `python -m esper_lightning`."""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

CHATTER = (
    "Tip:",
    "GPU available",
    "TPU available",
    "Seed set to",
    "Detected KeyboardInterrupt",
    "Restor",
    "Received SIGTERM",
)
"""Lightning's advertisements and what the saved config says anyway: they would bury what a run has to say."""

TALKERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.trainer.connectors.signal_connector",
)


def worth_saying(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in CHATTER)


TOO_EARLY = "error: interrupted before training began"


def leave(number: int, frame: FrameType | None) -> NoReturn:
    """Ends at once: modules that are interrupted while they are imported raise whatever they like."""
    print(TOO_EARLY, file=sys.stderr, flush=True)
    os._exit(130)


def main(args: list[str] | None = None) -> None:
    """Runs the command line (None: that of the process); bad input ends it with one line and exit code 2."""
    for name in TALKERS:
        logging.getLogger(name).addFilter(worth_saying)
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning's, about torch
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # it is on a resume

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)  # a config may name what a user has written beside it; last, so that it hides nothing
    before = signal.signal(signal.SIGINT, leave)
    from esper_lightning.cli import run  # imported late: torch and Lightning take seconds

    signal.signal(signal.SIGINT, before)
    try:
        run(args)
    except KeyboardInterrupt:  # while training, Ctrl-C is taken by Preemption
        print(TOO_EARLY, file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
