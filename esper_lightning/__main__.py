"""Entry point of `esper-lightning` and `python -m esper_lightning`."""

import logging
import os
import signal
import sys
import warnings
from pathlib import Path
from types import FrameType
from typing import NoReturn

IGNORED_MESSAGES = (
    "Tip:",
    "GPU available",
    "TPU available",
    "Seed set to",
    "Detected KeyboardInterrupt",
    "Restor",
    "Received SIGTERM",
)
"""Parts of Lightning's log messages to drop: advertisements, and settings that the saved config holds anyway."""

NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.trainer.connectors.signal_connector",
)
"""Loggers that emit these messages."""


def keep_record(record: logging.LogRecord) -> bool:
    """Return False for log records whose message contains one of `IGNORED_MESSAGES`."""
    return not any(words in record.getMessage() for words in IGNORED_MESSAGES)


INTERRUPTED_MESSAGE = "error: interrupted before training began"
"""Line printed when the program is interrupted before training starts."""


def exit_on_signal(signal_number: int, frame: FrameType | None) -> NoReturn:
    """Exit immediately with code 130: a module that is interrupted during its import may raise any exception."""
    print(INTERRUPTED_MESSAGE, file=sys.stderr, flush=True)
    os._exit(130)


def main(args: list[str] | None = None) -> None:
    """Run the command line.

    Bad input ends the program with one line on stderr and exit code 2.

    Args:
        args: Arguments of the command line. None: those of the process.
    """
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(keep_record)
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning causes it
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # on resume

    working_directory = str(Path.cwd())
    if working_directory not in sys.path:
        sys.path.append(
            working_directory
        )  # so that a config can name the user's own modules; last, so that it hides no package
    previous_handler = signal.signal(signal.SIGINT, exit_on_signal)
    from esper_lightning.cli.main import run  # imported late: importing torch and Lightning takes seconds

    signal.signal(signal.SIGINT, previous_handler)
    try:
        run(args)
    except KeyboardInterrupt:  # during training the Preemption callback handles Ctrl-C
        print(INTERRUPTED_MESSAGE, file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
