"""Options of the commands: what they mean, their help text, and which a mistyped one may stand for.

The table in `options.json` is generated from the parsers by `python -m benchmarks.reference`, so that nothing here
imports torch or Lightning, which takes seconds.
"""

import json
import shutil
import textwrap
from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from esper_lightning.cli.names import nearest_options

TABLE = Path(__file__).with_name("options.json")

LIGHTNING_GROUPS = ("trainer", "best", "latest", "optimizer", "lr_scheduler")
"""Groups of settings of Lightning itself, which differ between its versions."""

GROUP = "a group of settings"
"""Kind of an option that stands for a group of options."""

HELP_WIDTH = 100
"""Largest width of help texts in columns."""


class Option(NamedTuple):
    """One option of a command."""

    name: str
    """Name without dashes, or the word that stands for an argument without a name."""
    kind: str
    """Type of the value in words."""
    default: str
    """Default in YAML. `required`: there is none. Empty: the option has no value."""
    help: str
    choices: list[str]
    """Values that tab completion offers."""
    is_open: bool
    """True if the value has parts with options of their own, such as the arguments of a class."""
    commands: list[str]
    """Commands that have this option."""


class OptionTable(NamedTuple):
    """Options of all commands."""

    lightning: str
    """Version of Lightning whose options these are."""
    options: list[Option]

    def of(self, command: str) -> dict[str, Option]:
        """Return the options of a command by name."""
        return {option.name: option for option in self.options if command in option.commands}

    def may_lack(self, name: str) -> bool:
        """Return True if the option is one of Lightning's groups, and the installed version may know more of them."""
        return name.partition(".")[0] in LIGHTNING_GROUPS and version("lightning") != self.lightning


@cache
def option_table() -> OptionTable:
    """Return the table of all options."""
    content = json.loads(TABLE.read_text(encoding="utf-8"))
    return OptionTable(content["lightning"], [Option(**row) for row in content["options"]])


def is_known(name: str, options: dict[str, Option]) -> bool:
    """Return True if `name` is an option, a group of options, or a part of the value of an option that has parts.

    Args:
        name: Name without dashes; `+` at its end adds to a list.
        options: Options of the command, by name.
    """
    name = name.removesuffix("+")
    parts = name.split(".")
    above = (".".join(parts[:number]) for number in range(1, len(parts)))
    is_group = any(option.startswith(f"{name}.") for option in options)
    return name in options or is_group or any(one in options and options[one].is_open for one in above)


@cache
def schedule_names() -> list[str]:
    """Return the names of the groups of settings that are schedules, from a start to an end."""
    names = {option.name for option in option_table().options}
    groups = {name.removesuffix(".start") for name in names if name.endswith(".start")}
    return sorted(group for group in groups if f"{group}.end" in names)


def expand_schedules(settings: Any) -> Any:
    """Return settings in which every number in place of a schedule is the constant schedule of this number."""
    for group in schedule_names():
        *above, last = group.split(".")
        parent = settings
        for key in above:
            parent = parent.get(key) if isinstance(parent, dict) else None
        if not isinstance(parent, dict):
            continue
        value = parent.get(last)
        if isinstance(value, int | float) and not isinstance(value, bool):
            parent[last] = {"start": value, "end": value}
    return settings


def unknown_option(name: str, options: dict[str, Option]) -> str:
    """Return the words about an unknown option, with what it may stand for."""
    own_first = sorted(options.values(), key=lambda option: len(option.commands))
    meanings = {option.name: option.help for option in own_first}
    near = nearest_options(name, meanings)
    names = " or ".join(f"'--{option}'" for option in near)
    return f"did you mean {names}?" if near else "--help lists all options"


def help_text(usage: str, description: str, options: Iterable[Option]) -> str:
    """Return the help text of a command, with one section per group of options."""
    width = min(HELP_WIDTH, shutil.get_terminal_size().columns) - 2
    wrapper = textwrap.TextWrapper(
        width, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False
    )
    parts = [f"usage: {usage}", description]
    ungrouped_first = sorted(options, key=lambda option: "." in option.name)
    for group, members in groupby(ungrouped_first, lambda option: option.name.rpartition(".")[0]):
        lines = [f"{group}:" if group else "options:"]
        for option in members:
            notes = [option.kind, f"default: {option.default}" if option.default != "required" else "required"]
            note = ", ".join(part for part in notes if part) if option.default else option.kind
            text = f"{option.help} ({note})" if note else option.help
            dashes = "" if option.name.isupper() else "--"
            lines += [f"  {dashes}{option.name}", wrapper.fill(text.strip())]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)
