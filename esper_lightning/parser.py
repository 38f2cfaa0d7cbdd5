"""The parser of the command line: help that can be read, errors of one line that say what may have been meant."""

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
"""In the help of an option: every network that torch has, for one."""

COMPLETION = "--completion"
COMPLETION_HELP = f'Print a script for tab completion; in bash: eval "$({PROGRAM} {COMPLETION})"'


class Parser(LightningArgumentParser):
    """Says what is wrong in one line, without the usage of two hundred options, and what may have been meant."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        fail(message + suggestion(message, self))

    def format_help(self) -> str:
        """Names our own classes alone where there are some."""
        return KNOWN_CLASSES.sub(_our_classes, super().format_help())


def _our_classes(found: re.Match[str]) -> str:
    every = re.sub(r"\s+", "", found[1]).split(",")  # long names are broken anywhere
    ours = [name for name in every if re.fullmatch(r"esper_lightning\.(hosts|tasks)\.\w+", name)]
    return f"ours: {', '.join(ours)})" if ours else found[0]


class PrintCompletion(argparse.Action):
    """Prints the script for tab completion, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        options = {command: sorted(set(options_of(below))) for command, below in commands_of(parser).items()}
        print(completion_script(PROGRAM, COMPLETION, options), end="")
        parser.exit()


def add_completion(parser: LightningArgumentParser) -> None:
    """Adds the option that prints the script."""
    parser.add_argument(COMPLETION, action=PrintCompletion, nargs=0, default=argparse.SUPPRESS, help=COMPLETION_HELP)
