"""Messages of a run on the terminal: status lines, tables, the error that ends it, and fewer lines of Lightning."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console, RenderableType

MIN_WIDTH = 110
"""Minimum width of tables in columns. A narrower terminal wraps their lines; a file has room."""

IGNORED_MESSAGES = (
    *("Tip:", "GPU available", "TPU available", "Seed set to", "Detected KeyboardInterrupt", "Restor"),
    *("Received SIGTERM", "Initializing distributed", "distributed_backend"),
)
"""Parts of Lightning's log messages to drop: advertisements, and settings that the saved config holds anyway."""

NOISY_LOGGERS = (
    "lightning.pytorch.utilities.rank_zero",
    "lightning.fabric.utilities.distributed",
    "lightning.fabric.utilities.seed",
    "lightning.pytorch.trainer.connectors.signal_connector",
)
"""Loggers that emit these messages."""


def keep_record(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in IGNORED_MESSAGES)


class DivergedError(ArithmeticError):
    """Error of a run whose policy, or all data to learn from, is not finite; the message names a setting to change."""


@contextmanager
def quieter_lightning() -> Iterator[None]:
    """Drop the messages and warnings of Lightning that say nothing about the run, within a block."""
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning causes it
        warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # on resume
        for logger in map(logging.getLogger, NOISY_LOGGERS):
            if keep_record not in logger.filters:
                logger.addFilter(keep_record)
                stack.callback(logger.removeFilter, keep_record)
        yield


def plain_console() -> Console:
    """Return a console that shows texts, which may come from files of others, without markup and emoji codes."""
    return Console(markup=False, emoji=False)


def print_status(*parts: RenderableType) -> None:
    for part in parts:
        plain_console().print(part, soft_wrap=isinstance(part, str))


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = plain_console()
    console.width = max(console.width, MIN_WIDTH)
    return console
