"""Output on the terminal: status lines, and a console that is wide enough for tables.

Texts may come from files of others. They are printed as they are: no markup of rich, no emoji codes, and characters
that control a terminal are shown as escapes.
"""

from rich.console import Console, RenderableType

MIN_WIDTH = 110
"""Minimum width of tables in columns. A narrower terminal wraps their lines; a file has room."""

MAX_LENGTH = 2000
"""Largest length of a status line or an error in characters."""


def print_status(*parts: RenderableType) -> None:
    """Print status lines to the console."""
    for part in parts:
        is_text = isinstance(part, str)
        Console(markup=False, emoji=False).print(printable(part) if is_text else part, soft_wrap=is_text)


def printable(text: str) -> str:
    """Return a text in which control characters, but for line ends and tabs, are escapes such as `\\x1b`.

    A text longer than `MAX_LENGTH` loses its middle: an error ends with the way out.
    """
    half = MAX_LENGTH // 2
    shown = text if len(text) <= MAX_LENGTH else f"{text[:half]} … {text[-half:]}"
    return "".join(
        character if character.isprintable() or character in "\n\t" else character.encode("unicode_escape").decode()
        for character in shown
    )


def wide_console() -> Console:
    """Return a console wide enough to print tables without cutting them."""
    console = Console(markup=False, emoji=False)
    console.width = max(console.width, MIN_WIDTH)
    return console
