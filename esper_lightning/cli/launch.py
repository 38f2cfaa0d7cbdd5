"""The commands by name, their parsers, and those that need neither torch nor Lightning, so that they answer at once."""

import shutil
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from jsonargparse import ArgumentError, ArgumentParser

from esper_lightning.runtime.registry import config_paths, find_config

PROGRAM = "esper-lightning"

SUBCOMMANDS = ("fit", "validate", "test")
"""Commands of LightningCLI. `predict` is left out: it is for models of single samples."""

COMMANDS = {
    "grow": "commands.grow",
    "export": "commands.export_network",
    "expand": "expand.expand",
    "report": "commands.report",
    "configs": "launch.configs",
    "init": "launch.init",
}
"""Other commands, by name: where the function of each is in `esper_lightning.cli`."""


class OneLineParser(ArgumentParser):
    """Argument parser whose error is one line, without the usage of 200 options; a part of a name is unknown."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **settings)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            raise ArgumentError(None, message) from ex
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
        raise SystemExit(2)


def configs() -> None:
    """List the configs that come with the package, with their purpose."""
    for path in config_paths():
        text = path.read_text(encoding="utf-8")
        purpose = text.partition("# Purpose: ")[2].partition("\n")[0]
        print(f"{path.stem:18} {purpose}")


def init(config: str) -> None:
    """Copy a config of the package, with its comments, into the current folder.

    Args:
        config: Name of the config, as `digits`.
    """
    source = find_config(config)
    if Path(source.name).exists():
        raise ValueError(f"{source.name!r} exists already; rename or remove it first")
    shutil.copyfile(source, source.name)
    print(f"written to {source.name}")


def command_function(name: str) -> Callable[..., object]:
    """Return the function of a command, after the import of its module."""
    module, function = COMMANDS[name].split(".")
    return getattr(import_module(f"esper_lightning.cli.{module}"), function)


def command_parser(name: str, **settings: Any) -> OneLineParser:
    """Return the parser of a command that is a function."""
    command = command_function(name)
    description = (command.__doc__ or "").partition("\n")[0]
    parser = OneLineParser(prog=f"{PROGRAM} {name}", description=description, **settings)
    if name == "report":  # several folders, where a list among the others would be written as [a, b]
        parser.add_argument("runs", nargs="*", help="folders of loggers; none: the newest run below `runs`")
    # Not by `auto_cli`, which drops an argument that is called config.
    parser.add_function_arguments(command, as_group=False, as_positional=True, skip={"runs"})
    return parser
