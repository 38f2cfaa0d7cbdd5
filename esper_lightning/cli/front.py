"""First look at the command line: answers what needs neither torch nor Lightning, and checks the rest.

Importing torch and Lightning takes seconds. Help, versions, configs, tab completion and mistyped names come from here,
which imports neither.
"""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from esper_lightning import __version__
from esper_lightning.cli import PROGRAM
from esper_lightning.cli.completion import COMPLETION, completion_script
from esper_lightning.cli.configs import SUFFIXES, config_names, copy_config, find_config, purpose
from esper_lightning.cli.names import nearest_name
from esper_lightning.cli.options import GROUP, Option, help_text, is_known, option_table, schedule_names, unknown_option
from esper_lightning.cli.yaml_limits import check_limits, check_unique_keys
from esper_lightning.console import exit_with_error
from esper_lightning.process import EXIT_OUTPUT_FAILED

USAGE = "[--config FILE_OR_NAME …] [--SETTING VALUE …]"

SETTINGS_COMMANDS = {
    "fit": "Train a policy, and compare it with baselines at the end.",
    "evaluate": "Compare a trained policy, rules and schedules on fresh hosts.",
    "information": "Measure the value of knowing in what the hosts of a family differ.",
    "grow": "Grow one network and save it.",
}
"""Commands that take a config, with what they do."""

COMMANDS = {
    **SETTINGS_COMMANDS,
    "sweep": "Train with several RNG seeds and settings side by side, and tabulate the results.",
    "export": "Write a grown network to a file for other programs.",
    "configs": "List the configs that come with the package.",
    "init": "Copy a config of the package into the current folder.",
}
"""All commands, with what they do."""

USAGES = {
    **{command: f"{PROGRAM} {command} {USAGE}" for command in SETTINGS_COMMANDS},
    "sweep": f"{PROGRAM} sweep --config FILE_OR_NAME [--seeds N] [--set SETTING=VALUES …] [--jobs N] "
    "[--executor PATH] [--out FOLDER]",
    "export": f"{PROGRAM} export FOLDER_OR_FILE --to FORMAT [--out FILE] [--trust PACKAGES] [--network PATH …]",
    "configs": f"{PROGRAM} configs",
    "init": f"{PROGRAM} init NAME",
}

HELP = ("--help", "-h")

CONFIG, PRINT_CONFIG = "config", "print_config"

CLASS_HELP = ".help"
"""Ending of the options that explain the arguments of a class."""

NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")

WITHOUT_VALUE = ("help", PRINT_CONFIG)
"""Options that take no value from the next word."""

NO_POLICY = """evaluate needs a trained policy or hosts: give --ckpt_path, or --config to compare rules and schedules
alone"""

NO_CONFIG = """{command} needs a config, as in: esper-lightning {command} --config digits; `esper-lightning configs`
lists those that come with the package"""


class Word(NamedTuple):
    """An option on the command line."""

    name: str
    """Name without dashes."""
    value: str | None

    def as_argument(self, paths: Mapping[str, str]) -> str:
        """Return the option as one argument; a config that is a key of `paths` is named by its path."""
        if self.value is None:
            return f"--{self.name}"
        return f"--{self.name}={paths.get(self.value, self.value) if self.name == CONFIG else self.value}"


def prepare(args: Sequence[str]) -> list[str]:
    """Answer arguments that need no settings, and exit; else return them with the names of configs as paths.

    Exits with one line if they cannot be right.
    """
    command, *rest = args or [""]
    try:
        if command in (*HELP, "--version", COMPLETION):
            _answer(overview() if command in HELP else _special(command))
        check_command(command, rest)
        if any(word in HELP for word in rest):
            _answer(command_help(command))
        if command == "configs":
            _refuse_more(command, rest)
            _answer(list_configs())
        if command == "init":
            _answer(init(rest))
        if command not in SETTINGS_COMMANDS:
            check_options(command, words(rest, takes_positional=True))
            return [command, *name_configs(rest)]
        return [command, *prepare_settings(command, rest)]
    except (ValueError, OSError) as error:
        exit_with_error(str(error))


def _answer(text: str) -> None:
    print(text.rstrip("\n"))
    raise SystemExit(0)


def _special(option: str) -> str:
    if option == COMPLETION:
        return completion_script(PROGRAM, list(COMMANDS), option_table(), config_names())
    return f"{PROGRAM} {__version__}"


def overview() -> str:
    """Return the help text of the program."""
    commands = "\n".join(f"  {command:<12} {what}" for command, what in COMMANDS.items())
    return f"""usage: {PROGRAM} COMMAND …

Grows neural networks while they train, under a learned policy.

commands:
{commands}

options:
  --help       Explain the program; behind a command: explain the command and all its options.
  --version    Print the version.
  {COMPLETION} Print a script for tab completion; in bash: eval "$({PROGRAM} {COMPLETION})"
"""


def command_help(command: str) -> str:
    """Return the help text of a command."""
    return help_text(USAGES[command], COMMANDS[command], option_table().of(command).values())


def check_command(command: str, rest: Sequence[str]) -> None:
    """Raise ValueError unless `command` is the name of a command."""
    if command in COMMANDS:
        return
    if not command:
        raise ValueError(f"name a command: {', '.join(COMMANDS)}; {PROGRAM} --help explains them")
    if command.startswith("-"):
        raise ValueError(f"the command comes first, as in: {PROGRAM} fit {shlex.join([command, *rest])}")
    if command.endswith(SUFFIXES) or command in config_names():
        raise ValueError(f"{command!r} is no command; did you mean: {PROGRAM} fit --config {shlex.quote(command)}")
    near = nearest_name(command, COMMANDS)
    names = f"did you mean {near!r}?" if near else f"there are: {', '.join(COMMANDS)}"
    raise ValueError(f"unknown command {command!r}; {names}")


def list_configs() -> str:
    """Return the names and purposes of the configs that come with the package."""
    width = max(map(len, config_names()))
    lines = [f"{name:<{width}}  {purpose(name)}" for name in config_names()]
    return "\n".join([*lines, "", f"{PROGRAM} fit --config NAME; {PROGRAM} init NAME copies one to change it."])


def init(args: Sequence[str]) -> str:
    """Copy a config of the package into the current folder, and return what to do with it."""
    if not args:
        raise ValueError(f"init needs the name of a config: {', '.join(config_names())}")
    _refuse_more("init", args[1:])
    try:
        path = copy_config(args[0], Path())
    except OSError as error:
        exit_with_error(f"{error.filename or args[0]} cannot be written: {error.strerror}", EXIT_OUTPUT_FAILED)
    return f"written to {path}; change it, then: {PROGRAM} fit --config {path}"


def _refuse_more(command: str, args: Sequence[str]) -> None:
    if args:
        raise ValueError(f"{command} takes no {args[0]!r}; usage: {USAGES[command]}")


def words(args: Sequence[str], *, takes_positional: bool = False) -> Iterator[Word]:
    """Yield the options of a command. Raises ValueError for a word that is neither an option nor the value of one."""
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return
        if not word.startswith("-") or re.fullmatch(r"-[\d.].*", word):
            if takes_positional:
                continue
            config = word.endswith(SUFFIXES) or word in config_names()
            way = f"did you mean --config {shlex.quote(word)}?" if config else "options begin with --"
            raise ValueError(f"unknown argument {word!r}; {way}")
        flag, equals, value = word.partition("=")
        name = CONFIG if flag == "-c" else flag.lstrip("-")
        if equals or name in WITHOUT_VALUE:
            yield Word(name, value if equals else None)
        elif rest and not rest[0].startswith("--"):
            yield Word(name, rest.pop(0))
        else:
            yield Word(name, None)


def check_options(command: str, given: Iterator[Word]) -> list[Word]:
    """Return the options of a command. Raises ValueError for one that is unknown or has no value."""
    table = option_table()
    options = table.of(command)
    checked = list(given)
    for name, value in checked:
        if options and not is_known(name.removesuffix(CLASS_HELP), options) and not table.may_lack(name):
            raise ValueError(f"unknown option '--{name}'; {unknown_option(name, options)}")
        if value is None and name in options and name not in WITHOUT_VALUE:
            raise ValueError(f"--{name} needs a value: {options[name].kind}")
    return checked


def name_configs(args: Sequence[str]) -> list[str]:
    """Return the arguments with the names of configs of the package as paths. Raises ValueError for a missing one."""
    named, in_config = [], False
    for arg in args:
        flag, equals, name = arg.partition("=")
        if equals and flag == f"--{CONFIG}":
            named.append(f"{flag}={find_config(name)}")
        else:
            named.append(find_config(arg) if in_config and not arg.startswith("-") else arg)
        in_config = arg == f"--{CONFIG}" or (in_config and not arg.startswith("-"))
    return named


def prepare_settings(command: str, args: Sequence[str]) -> list[str]:
    """Return the options of a command with settings, in which configs are named by their paths.

    Raises ValueError for an unknown option or setting, a config that cannot be read, or a setting that is missing.
    """
    given = check_options(command, words(args))
    configs = [word.value for word in given if word.name == CONFIG and word.value is not None]
    paths = {name: find_config(name) for name in configs if _is_name(name)}
    known = {word.name for word in given}
    for path in paths.values():
        known |= set(check_config(command, Path(path)))
    is_complete = set(configs) == set(paths)  # no text in place of a file
    if is_complete and PRINT_CONFIG not in known and not any(name.endswith(CLASS_HELP) for name in known):
        check_required(command, known)
    return [word.as_argument(paths) for one in given for word in expand_schedule(one)]


def expand_schedule(word: Word) -> list[Word]:
    """Return an option that gives a schedule a number as the two options of the constant schedule."""
    if word.name not in schedule_names() or word.value is None or not NUMBER.fullmatch(word.value):
        return [word]
    return [Word(f"{word.name}.{end}", word.value) for end in ("start", "end")]


def _is_name(value: str) -> bool:
    """Return True if a value of --config names a file, False for settings as text or the standard input."""
    return value != "-" and not re.search(r"[{\n]|: ", value)


def check_config(command: str, path: Path) -> list[str]:
    """Return the names of all settings in a config. Raises ValueError if it cannot be read or has unknown settings."""
    if not path.is_file():  # a pipe is read once, by the parser
        return list(option_table().of(command))
    try:
        text = path.read_text(encoding="utf-8")
        check_limits(text)
        check_unique_keys(text)
        settings = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"config {str(path)!r} cannot be read: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"config {str(path)!r}{where}: {error.problem or error.context}; correct it") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"config {str(path)!r}: {error}") from error
    if settings is None:
        raise ValueError(f"config {str(path)!r} is empty; `{PROGRAM} configs` lists some to begin with")
    if not isinstance(settings, Mapping):
        raise ValueError(f"config {str(path)!r} holds no settings, which look like `data: …`")
    table = option_table()
    options, found = table.of(command), []
    for name, value in flat_settings(settings, options):
        if not is_known(name, options) and not table.may_lack(name):
            raise ValueError(f"config {str(path)!r}: unknown setting {name!r}; {unknown_option(name, options)}")
        has_parts = any(option.startswith(f"{name}.") for option in options)
        is_group = options[name].kind == GROUP if name in options else has_parts
        is_constant = name in schedule_names() and isinstance(value, int | float)
        if is_group and not (isinstance(value, Mapping | str) or is_constant):
            raise ValueError(f"config {str(path)!r}: {name} is a group of settings, got {value!r:.80}; leave it out")
        found.append(name)
    return found


def flat_settings(
    settings: Mapping[Any, Any], options: Mapping[str, Option], prefix: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of all settings in a nested config, down to those that are options."""
    for key, value in settings.items():
        name = f"{prefix}{key}".removesuffix("+")
        if isinstance(value, Mapping) and not (name in options and options[name].is_open):
            if name in options or not any(option.startswith(f"{name}.") for option in options):
                yield name, value
            yield from flat_settings(value, options, f"{name}.")
        else:
            yield name, value


def check_required(command: str, known: set[str]) -> None:
    """Raise ValueError if a command lacks a config, or a setting that has no default."""
    if command == "evaluate" and CONFIG not in known:
        if "ckpt_path" not in known:
            raise ValueError(NO_POLICY)
        return  # the settings are those beside the checkpoint
    options = option_table().of(command).values()
    required = [option for option in options if option.default == "required"]
    missing = [option for option in required if not any(f"{name}.".startswith(f"{option.name}.") for name in known)]
    if CONFIG not in known and any(option.name in ("data.task", "data.host") for option in missing):
        raise ValueError(NO_CONFIG.format(command=command))
    for option in missing:
        raise ValueError(f"{command} needs --{option.name}: {option.help}")
