"""Suggestions for mistyped options, commands, classes and settings, at the end of an error line."""

import importlib
import inspect
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches

OPTION = re.compile(r"(?:unrecognized arguments: --|does not accept option ')([\w.+]+)")
COMMAND = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
CLASS = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
BARE_CLASS = re.compile(r'Parser key "data\.(task|host)":.*import path string: (\w+)', re.DOTALL)
ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
OF_CLASS = re.compile(r"class_path ?=?'([\w.]+)'")
CHOICE = re.compile(r"Literal\[(.*)\]\. Got value: (\S+)")

HOMES = {"task": "esper_lightning.tasks", "host": "esper_lightning.hosts"}
"""Modules that contain this package's classes for a setting."""


def suggestion(message: str, parser: ArgumentParser) -> str:
    """Return `; did you mean …?`, or an empty string.

    Args:
        message: Error message of the parser.
        parser: Parser whose options are candidates.
    """
    for pattern, candidates in TABLE:
        if found := pattern.search(message):
            near = candidates(found, message, parser)
            return f"; did you mean {near!r}?" if near else ""
    return ""


def nearest_of(name: str, available: Iterable[str]) -> str | None:
    """Return the first name that ends in `.name`, else the name with the most similar spelling, or None."""
    available = list(available)
    ending = [option for option in available if option.endswith(f".{name}")]
    return next(iter(ending or get_close_matches(name, available, n=1)), None)


def options_of(parser: ArgumentParser) -> Iterator[str]:
    """Yield all long options of a parser and its subcommands, without dashes."""
    for action in parser._actions:
        yield from (option.removeprefix("--") for option in action.option_strings if option.startswith("--"))
    for below in commands_of(parser).values():
        yield from options_of(below)


def commands_of(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parser of each subcommand, by name."""
    found = [getattr(action, "_name_parser_map", None) or {} for action in parser._actions]
    return {name: below for one in found for name, below in one.items()}


def like_an_option(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    near = nearest_of(found[1], options_of(parser))
    return near and f"--{near}"


def like_a_command(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    return nearest_of(found[1], re.findall(r"[\w-]+", found[2]))


def like_a_class(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    module, name = found.groups()
    near = nearest_of(name, dir(importlib.import_module(module)))
    return near and f"{module}.{near}"


def like_one_of_ours(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    home = HOMES[found[1]]
    near = nearest_of(found[2], importlib.import_module(home).__all__)
    return near and f"{home}.{near}"


def like_an_argument(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    if (named := OF_CLASS.search(message)) is None:
        return None
    module, _, name = named[1].rpartition(".")
    made = getattr(importlib.import_module(module), name)
    return nearest_of(found[1], inspect.signature(made).parameters)


def like_a_choice(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    return nearest_of(found[2], re.findall(r"'([^']*)'", found[1]))


TABLE: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str, ArgumentParser], str | None]], ...] = (
    (OPTION, like_an_option),
    (COMMAND, like_a_command),
    (CLASS, like_a_class),
    (BARE_CLASS, like_one_of_ours),
    (ARGUMENT, like_an_argument),
    (CHOICE, like_a_choice),
)
"""Patterns of error messages, each with the function that finds the nearest valid name."""
