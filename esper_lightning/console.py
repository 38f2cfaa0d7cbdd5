"""Output on the terminal: status lines, and a console that is wide enough for tables."""

from rich.console import Console, RenderableType

MIN_WIDTH = 110
"""Minimum width of tables in columns. A narrower terminal wraps their lines; a file has room."""


def print_status(*parts: RenderableType) -> None:
    """Print status lines to the console."""
    for part in parts:
        Console().print(part, soft_wrap=isinstance(part, str))


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    return console
