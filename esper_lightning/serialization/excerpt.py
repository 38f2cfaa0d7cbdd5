"""Excerpts of values for error messages, cut before they are formatted."""

import reprlib
from typing import Any

MAX_LEVEL, MAX_ITEMS, MAX_CHARACTERS = 3, 12, 60
"""Most nested containers, items of a container, and characters of a text that an excerpt shows."""


class _Excerpt(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = MAX_LEVEL
        self.maxtuple = self.maxlist = self.maxset = self.maxdict = MAX_ITEMS
        self.maxstring = self.maxlong = self.maxother = MAX_CHARACTERS


def excerpt(value: Any, length: int = 200) -> str:
    """Return the beginning of a text, or of any other value's `repr`, with at most `length` characters.

    The `repr` of a value from a small file may be gigabytes long, because containers can hold one text many times.
    """
    text = value[: length + 1] if isinstance(value, str) else _Excerpt().repr(value)
    return text if len(text) <= length else f"{text[: length - 1]}…"
