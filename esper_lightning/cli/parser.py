"""Argument parser of the command line: an error is one line that names the setting, its type, and the nearest name.

Functions `suggest_…` find the valid name nearest to an unknown one in the parser's error message.
"""

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.cli.names import nearest_name
from esper_lightning.cli.options import schedule_names
from esper_lightning.cli.type_words import choices_of, type_words
from esper_lightning.console import exit_with_error
from esper_lightning.plugins import import_object

UNKNOWN_CLASS = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
UNKNOWN_BARE_CLASS = re.compile(r'Parser key "data\.(task|host)":.*import path string: (\w+)', re.DOTALL)
IMPORT_PATH = re.compile(r"Expected a path but ([\w.]+\.\w+) either not accessible or invalid")
NO_SUBCLASS = re.compile(r"does not correspond to a subclass of (\w+)")
NO_MODULE = re.compile(r"Expected '[\w.]+' to be a (?:subclass of|function that returns) <class 'Module'>")
UNKNOWN_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
CLASS_PATH = re.compile(r"class_path ?=?'([\w.]+)'")

CLASS_MODULES = {"task": "esper_lightning.tasks", "host": "esper_lightning.hosts"}
"""Modules that contain this package's classes for a setting."""

MISSING = re.compile(r"the following arguments are required: (.*)")

SETTING = re.compile(r'Parser key "([^"]+)"(?: element \d+)?:\s*')

WRONG_TYPE = re.compile(
    r"(?:- )?(?:Expected a |Does not validate against any of the Union subtypes|Unable to load config|Not of type )"
)
"""Pattern of the problem of a value that has not the type of its setting."""

GIVEN_VALUE = re.compile(
    r"(?:Got value: |Given value: |Unable to load config )(.*)|Not of type \w+: (.*) does not conform", re.DOTALL
)

OTHER_PROBLEMS = ("Problem with given class_path", "is not accepted", "has no attribute", "No module named")
"""Texts of problems that are not those of a type."""


def suggestion(message: str) -> str:
    """Return `; did you mean …?`, or an empty string, for an error message of the parser."""
    for pattern, candidates in SUGGESTERS:
        if found := pattern.search(message):
            near = candidates(found, message)
            return f"; did you mean {near!r}?" if near else ""
    return ""


def suggest_class(found: re.Match[str], message: str) -> str | None:
    module, name = found.groups()
    near = nearest_name(name, dir(importlib.import_module(module)))
    return near and f"{module}.{near}"


def suggest_bare_class(found: re.Match[str], message: str) -> str | None:
    module = CLASS_MODULES[found[1]]
    near = nearest_name(found[2], importlib.import_module(module).__all__)
    return near and f"{module}.{near}"


def suggest_argument(found: re.Match[str], message: str) -> str | None:
    if (named := CLASS_PATH.search(message)) is None:
        return None
    module, _, name = named[1].rpartition(".")
    named_class = getattr(importlib.import_module(module), name)
    return nearest_name(found[1], inspect.signature(named_class).parameters)


SUGGESTERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str], str | None]], ...] = (
    (UNKNOWN_CLASS, suggest_class),
    (UNKNOWN_BARE_CLASS, suggest_bare_class),
    (UNKNOWN_ARGUMENT, suggest_argument),
)
"""Patterns of error messages, each with the function that finds the nearest valid name."""


def _missing(message: str) -> str | None:
    """Return the words about settings that have no value, or None for another problem."""
    found = MISSING.fullmatch(message)
    if found is None:
        return None
    names = [name.partition(".")[2] if "." in name else name for name in found[1].split(", ")]
    return f"without a value: {', '.join(names)}; give it in a config, or as --{names[0]}"


def _import_problem(message: str) -> str | None:
    """Return the words about an import path that leads to no such part, or None for another problem.

    What the code of an imported module raises passes.
    """
    key, path = SETTING.search(message), IMPORT_PATH.search(message)
    if key is None or path is None:
        return None
    try:
        import_object(path[1], key[1])
    except ValueError as error:
        return str(error)
    if (found := NO_SUBCLASS.search(message)) is not None:
        return f"{key[1]}: {path[1]} is no subclass of {found[1]}; derive it from {found[1]}"
    if NO_MODULE.search(message):
        return f"{key[1]}: {path[1]} is no nn.Module, nor a function annotated as returning one; derive or annotate it"
    return None


def _unknown_argument(message: str) -> str | None:
    """Return the words about an argument that a class does not take, or None for another problem."""
    key, argument, named = (pattern.search(message) for pattern in (SETTING, UNKNOWN_ARGUMENT, CLASS_PATH))
    if key is None or argument is None or named is None:
        return None
    return f"{key[1]}: {named[1]} has no argument {argument[1]!r}"


PLAIN_WORDS: tuple[Callable[[str], str | None], ...] = (_missing, _unknown_argument, _import_problem)
"""Functions that return plain words for a problem that they know."""


class Parser(LightningArgumentParser):
    """Argument parser that reports an error in one line, without the usage of 200 options.

    A part of an option's name is unknown: it may be mistyped, and a new option could change what it stands for.
    """

    _file: str | None = None  # config that is read

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_path(self, path: Any, *args: Any, **kwargs: Any) -> Namespace:
        """Return the settings of a config file. Raises ValueError for bytes that are no text in UTF-8."""
        self._file = str(path)
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"config {self._file!r}, or a file that it names, is no text in UTF-8; name a YAML file"
            ) from error
        finally:
            self._file = None

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        where = "" if self._file is None else f"config {self._file!r}: "
        plain = next(filter(None, (find(message) for find in (*PLAIN_WORDS, self._wrong_type))), message)
        exit_with_error(where + plain + ("" if "did you mean" in plain else suggestion(message)))

    def _wrong_type(self, message: str) -> str | None:
        """Return the words about a value that has not the type of its setting, or None for another problem."""
        keys = list(SETTING.finditer(message))
        if not keys or any(text in message for text in OTHER_PROBLEMS):
            return None
        hint = next((hint for name, hint in self._types() if name == keys[-1][1]), None)
        problem = message[keys[-1].end() :]
        if hint is None or not WRONG_TYPE.search(problem) or (given := GIVEN_VALUE.search(problem)) is None:
            return None
        value = (given[2] if given[1] is None else given[1]).strip().strip("'\"")
        near = nearest_name(value, choices_of(hint))
        meant = f"; did you mean {near!r}?" if near else ""
        kind = f"a number or {type_words(hint)}" if keys[-1][1] in schedule_names() else type_words(hint)
        return f"{keys[-1][1]} must be {kind}, got {value!r:.80}{meant}"

    def _types(self) -> Iterator[tuple[str, Any]]:
        """Yield the name and type of every setting, also of the commands."""
        for action in self._actions:
            yield action.dest, getattr(action, "_typehint", None) or getattr(action, "basetype", None) or action.type
            for parser in (getattr(action, "_name_parser_map", None) or {}).values():
                if isinstance(parser, Parser):
                    yield from parser._types()


def link_reward(parser: LightningArgumentParser) -> None:
    """Let the reward take from PPO what both must agree on: the discount factor, and the meaning of the horizon."""
    for name in ("gamma", "horizon_is_end"):
        parser.link_arguments(f"model.ppo.{name}", f"data.env.reward.{name}")
