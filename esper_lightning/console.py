"""Output for the user on the terminal."""

from rich.console import Console, RenderableType


def print_status(*parts: RenderableType) -> None:
    """Print status lines to the console."""
    for part in parts:
        Console().print(part, soft_wrap=isinstance(part, str))


MIN_WIDTH = 110
"""Minimum width of the tables in columns; a narrower terminal wraps their lines, a file has room."""


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    return console
