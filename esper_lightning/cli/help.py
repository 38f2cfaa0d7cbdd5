"""Argument parser of the command line: errors in one line with a suggestion, short help texts, tab completion.

Functions `suggest_…` find the valid name nearest to an unknown one in the parser's error message.
"""

import argparse
import importlib
import inspect
import os
import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NoReturn

from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.errors import exit_with_error

PROGRAM = "esper-lightning"
USAGE = "%(prog)s [--config FILE …] [--SETTING VALUE …]"

COMPLETION = "--completion"
COMPLETION_HELP = f'Print a script for tab completion; in bash: eval "$({PROGRAM} {COMPLETION})"'

UNKNOWN_OPTION = re.compile(r"(?:unrecognized arguments: --|does not accept option ')([\w.+]+)")
UNKNOWN_COMMAND = re.compile(r"invalid choice: '([^']*)' \(choose from (.*)\)")
UNKNOWN_CLASS = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
UNKNOWN_BARE_CLASS = re.compile(r'Parser key "data\.(task|host)":.*import path string: (\w+)', re.DOTALL)
UNKNOWN_ARGUMENT = re.compile(r"Option '(\w+)' is not accepted")
CLASS_PATH = re.compile(r"class_path ?=?'([\w.]+)'")
UNKNOWN_CHOICE = re.compile(r"Literal\[(.*)\]\. Got value: (\S+)")

CLASS_MODULES = {"task": "esper_lightning.tasks", "host": "esper_lightning.hosts"}
"""Modules that contain this package's classes for a setting."""


def suggestion(message: str, parser: ArgumentParser) -> str:
    """Return `; did you mean …?`, or an empty string.

    Args:
        message: Error message of the parser.
        parser: Parser whose options are candidates.
    """
    for pattern, candidates in SUGGESTERS:
        if found := pattern.search(message):
            near = candidates(found, message, parser)
            return f"; did you mean {near!r}?" if near else ""
    return ""


def nearest_name(name: str, available: Iterable[str]) -> str | None:
    """Return the first name that begins with `name`, else that ends in `.name`, else the one most alike, or None."""
    available = list(available)
    starting = [option for option in available if name and option.startswith(name)]
    ending = [option for option in available if option.endswith(f".{name}")]
    return next(iter(starting or ending or get_close_matches(name, available, n=1)), None)


def all_options(parser: ArgumentParser) -> Iterator[str]:
    """Yield all long options of a parser and its subcommands, without dashes."""
    for action in parser._actions:
        yield from (option.removeprefix("--") for option in action.option_strings if option.startswith("--"))
    for subparser in command_parsers(parser).values():
        yield from all_options(subparser)


def command_parsers(parser: ArgumentParser) -> dict[str, ArgumentParser]:
    """Return the parser of each subcommand, by name."""
    maps = [getattr(action, "_name_parser_map", None) or {} for action in parser._actions]
    return {name: subparser for map_of_action in maps for name, subparser in map_of_action.items()}


def suggest_option(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    near = nearest_name(found[1], all_options(parser))
    return near and f"--{near}"


def suggest_command(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    return nearest_name(found[1], re.findall(r"[\w-]+", found[2]))


def suggest_class(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    module, name = found.groups()
    near = nearest_name(name, dir(importlib.import_module(module)))
    return near and f"{module}.{near}"


def suggest_bare_class(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    module = CLASS_MODULES[found[1]]
    near = nearest_name(found[2], importlib.import_module(module).__all__)
    return near and f"{module}.{near}"


def suggest_argument(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    if (named := CLASS_PATH.search(message)) is None:
        return None
    module, _, name = named[1].rpartition(".")
    named_class = getattr(importlib.import_module(module), name)
    return nearest_name(found[1], inspect.signature(named_class).parameters)


def suggest_choice(found: re.Match[str], message: str, parser: ArgumentParser) -> str | None:
    return nearest_name(found[2], re.findall(r"'([^']*)'", found[1]))


SUGGESTERS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str], str, ArgumentParser], str | None]], ...] = (
    (UNKNOWN_OPTION, suggest_option),
    (UNKNOWN_COMMAND, suggest_command),
    (UNKNOWN_CLASS, suggest_class),
    (UNKNOWN_BARE_CLASS, suggest_bare_class),
    (UNKNOWN_ARGUMENT, suggest_argument),
    (UNKNOWN_CHOICE, suggest_choice),
)
"""Patterns of error messages, each with the function that finds the nearest valid name."""


KNOWN_SUBCLASSES = re.compile(r"known\s+subclasses:([^()]*)\)")
"""Pattern of the list of known subclasses in an option's help text, which may contain every module of torch."""


class Parser(LightningArgumentParser):
    """Argument parser that reports an error in one line with a suggestion, without the usage of 200 options.

    A part of an option's name is unknown: it may be mistyped, and a new option could change what it stands for.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        exit_with_error(message + suggestion(message, self))

    def parse_path(self, path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Namespace:
        """Return the settings of a config file. Raises ValueError for bytes that are no text in UTF-8."""
        try:
            return super().parse_path(path, *args, **kwargs)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"config {os.fspath(path)!r}, or a file that it names, is no text in UTF-8; name a YAML file"
            ) from error

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        """Return the help text, with lists of known subclasses shortened to the classes of this package."""
        return KNOWN_SUBCLASSES.sub(_our_classes, super().format_help(*args, **kwargs))


def _our_classes(found: re.Match[str]) -> str:
    all_classes = re.sub(r"\s+", "", found[1]).split(",")  # long names may be broken at any character
    package_classes = [name for name in all_classes if re.fullmatch(r"esper_lightning\.(hosts|tasks)\.\w+", name)]
    return f"ours: {', '.join(package_classes)})" if package_classes else found[0]


SCRIPT_TEMPLATE = """\
# bash: eval "$({program} {flag})"; in zsh first: autoload -U +X bashcompinit && bashcompinit
_{function}() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    COMPREPLY=($(compgen -W "{commands}" -- "$word")); return
  fi
  if [[ "$word" != -* ]]; then
    COMPREPLY=($(compgen -f -- "$word")); return
  fi
  case "${{COMP_WORDS[1]}}" in
{cases}
  esac
}}
complete -o filenames -F _{function} {program}
"""


def completion_script(program: str, flag: str, options: Mapping[str, Iterable[str]]) -> str:
    """Return the completion script for bash; zsh can use it through bashcompinit.

    Args:
        program: Name of the program.
        flag: Option that prints the script.
        options: Options of each command, without dashes.
    """
    cases = [
        f'    {command}) COMPREPLY=($(compgen -W "{" ".join(f"--{name}" for name in names)}" -- "$word"));;'
        for command, names in options.items()
    ]
    return SCRIPT_TEMPLATE.format(
        program=program,
        flag=flag,
        function=program.replace("-", "_"),
        commands=" ".join([*options, "--help", flag]),
        cases="\n".join(cases),
    )


class PrintCompletion(argparse.Action):
    """Option that prints the script for tab completion and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        options = {
            command: sorted(set(all_options(subparser))) for command, subparser in command_parsers(parser).items()
        }
        print(completion_script(PROGRAM, COMPLETION, options), end="")
        parser.exit()


def add_completion(parser: LightningArgumentParser) -> None:
    """Add the option that prints the script for tab completion."""
    parser.add_argument(COMPLETION, action=PrintCompletion, nargs=0, default=argparse.SUPPRESS, help=COMPLETION_HELP)
