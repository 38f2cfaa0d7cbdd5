"""Output on the terminal: status lines, a console that is wide enough for tables, fewer messages of Lightning.

Texts may come from files of others. They are printed as they are: no markup of rich, no emoji codes, and characters
that control a terminal are shown as escapes.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

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
    """Return False for log records whose message contains one of `IGNORED_MESSAGES`."""
    return not any(words in record.getMessage() for words in IGNORED_MESSAGES)


def quiet_lightning() -> None:
    """Drop the messages and warnings of Lightning in this process that say nothing about the run."""
    for name in NOISY_LOGGERS:
        logging.getLogger(name).addFilter(keep_record)
    warnings.filterwarnings("ignore", message=".*`isinstance\\(treespec, LeafSpec\\)`.*")  # Lightning causes it
    warnings.filterwarnings("ignore", message="Checkpoint directory .* exists and is not empty")  # on resume


@contextmanager
def quieter_lightning() -> Iterator[None]:
    """Drop these messages within a block, and let the process be as it was."""
    loggers = [logger for name in NOISY_LOGGERS if keep_record not in (logger := logging.getLogger(name)).filters]
    with warnings.catch_warnings():
        quiet_lightning()
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(keep_record)


class PlainConsole(Console):
    """Console that shows every text as it is, also in the cells of tables."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        return super().render_str(printable(text), **settings)


def print_status(*parts: RenderableType) -> None:
    """Print status lines to the console."""
    for part in parts:
        PlainConsole().print(part, soft_wrap=isinstance(part, str))


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = PlainConsole()
    console.width = max(console.width, MIN_WIDTH)
    return console


def printable(text: str) -> str:
    """Return a text in which control characters, but for line ends and tabs, are escapes such as `\\x1b`."""
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in text
    )
