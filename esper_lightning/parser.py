"""Argument parser of the command line, with short help texts and one-line errors with suggestions."""

import argparse
import re
from typing import NoReturn

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.completion import completion_script
from esper_lightning.endings import fail
from esper_lightning.suggestions import commands_of, options_of, suggestion

PROGRAM = "esper-lightning"
USAGE = "%(prog)s [--config FILE …] [--SETTING VALUE …]"

KNOWN_CLASSES = re.compile(r"known\s+subclasses:([^()]*)\)")
"""Pattern of the list of known subclasses in an option's help text, which may contain every module of torch."""

COMPLETION = "--completion"
COMPLETION_HELP = f'Print a script for tab completion; in bash: eval "$({PROGRAM} {COMPLETION})"'


class Parser(LightningArgumentParser):
    """Argument parser that reports an error in one line with a suggestion, without the usage of 200 options."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        fail(message + suggestion(message, self))

    def format_help(self) -> str:
        """Return the help text, with lists of known subclasses shortened to the classes of this package."""
        return KNOWN_CLASSES.sub(_our_classes, super().format_help())


def _our_classes(found: re.Match[str]) -> str:
    every = re.sub(r"\s+", "", found[1]).split(",")  # long names may be broken at any character
    ours = [name for name in every if re.fullmatch(r"esper_lightning\.(hosts|tasks)\.\w+", name)]
    return f"ours: {', '.join(ours)})" if ours else found[0]


class PrintCompletion(argparse.Action):
    """Option that prints the script for tab completion and exits."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        options = {command: sorted(set(options_of(below))) for command, below in commands_of(parser).items()}
        print(completion_script(PROGRAM, COMPLETION, options), end="")
        parser.exit()


def add_completion(parser: LightningArgumentParser) -> None:
    """Add the option that prints the script for tab completion."""
    parser.add_argument(COMPLETION, action=PrintCompletion, nargs=0, default=argparse.SUPPRESS, help=COMPLETION_HELP)
