"""Write the generated parts of the reference pages and the table of options of the command line.

python -m benchmarks.reference          # writes docs/reference/{cli,telemetry,anomalies}.md and cli/options.json
python -m benchmarks.reference --check  # names the files that are not up to date, and exits with 1
"""

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.cli import main as cli
from esper_lightning.cli.export import COMMAND as EXPORT
from esper_lightning.cli.export import export_parser
from esper_lightning.cli.options import GROUP, LIGHTNING_GROUPS, TABLE, Option
from esper_lightning.cli.parser import CLASS_MODULES
from esper_lightning.cli.sweep import COMMAND as SWEEP
from esper_lightning.cli.sweep import sweep_parser
from esper_lightning.cli.trust import KNOWN_CLASSES
from esper_lightning.cli.type_words import choices_of, is_open, type_words
from esper_lightning.telemetry.anomaly_rules import RULES, AnomalyConfig, Rule
from esper_lightning.telemetry.tags import guide

PAGES = Path(__file__).parent.parent / "docs" / "reference"

GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""Pattern of the generated parts of a page."""

SKIPPED = ("help", "config", "print_config")
"""Options that the page leaves out."""

CONFIG_HELP = (
    "YAML file with settings, or the name of a config of the package. May be repeated: later ones win, then flags."
)

GROUP_ACTION = "_ActionConfigLoad"
"""Class of the actions that stand for a group of settings."""

SKIPPED_ACTIONS = ("_ActionHelpClassPath", "ActionLink", "ShtabAction")
"""Classes of actions that are no options of their own: the help of classes, linked settings."""

UNGROUPED_TITLE = "command line"
"""Title of the section for settings without a group."""

Setting = tuple[str, str, str]
"""Name, default and meaning of a setting."""


class ParserFound(Exception):
    """Exception that carries the parser out of the constructor of the command line."""


OTHER_PARSERS = {EXPORT: export_parser, SWEEP: sweep_parser}
"""Functions that make the parsers of commands without settings."""


class ParserOnly(cli.EsperCLI):
    """Command line that stops before it parses its arguments."""

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        raise ParserFound(parser)


@cache
def parsers() -> dict[str, LightningArgumentParser]:
    """Return the parser of each command, by name."""
    # The command line would take the exception for an error in code of the user.
    with patch.object(cli, "EsperCLI", ParserOnly), patch.object(cli, "user_code_told_apart", lambda _: nullcontext()):
        try:
            cli.run(["fit"])
        except ParserFound as found:
            (commands,) = (action for action in found.args[0]._actions if hasattr(action, "_name_parser_map"))
            return dict(commands._name_parser_map)
    raise AssertionError("the command line has parsed its arguments")


@cache
def options(command: str) -> list[Option]:
    """Return all options of a command."""
    parser = OTHER_PARSERS[command]() if command in OTHER_PARSERS else parsers()[command]
    defaults, rows = parser.get_defaults(), []
    for action in parser._actions:
        if type(action).__name__ == GROUP_ACTION:
            title = " ".join((parser.groups[action.dest].title or "").split()).rstrip(".")
            rows.append(Option(action.dest, GROUP, "", f"{title}.", [], False, [command]))
        if type(action).__name__ in (GROUP_ACTION, *SKIPPED_ACTIONS):
            continue
        hint = getattr(action, "_typehint", None) or action.type
        name = option_name(action)
        value = defaults.get(action.dest)
        is_required = (action.required or name in parser._extra_required_keys) and value is None
        has_value = hint is not None and action.dest in defaults
        default = "required" if is_required else format_default(value) if has_value else ""
        text = " ".join((action.help or "").split()) + classes_of(name)
        kind = type_words(hint) if has_value else ""
        if name == "config":
            kind, text = "a path or a name", CONFIG_HELP
        rows.append(
            Option(name, kind, default, text, choices(name, hint), hint is not None and is_open(hint), [command])
        )
        for settings_class in filter(dataclasses.is_dataclass, get_args(hint)):
            rows += fields_of(settings_class, name, value, command)  # of a group that is null or a number, too
    return rows


def option_name(action: argparse.Action) -> str:
    """Return the long name of an option, or the word in capitals that stands for an argument without a name."""
    long = [option for option in action.option_strings if option.startswith("--") and not option.endswith("+")]
    return long[-1].removeprefix("--") if long else action.dest.upper()


def classes_of(name: str) -> str:
    """Return the classes of this package that a setting may name, as a sentence, or an empty string."""
    names = choices(name, None)
    return f" Of this package: {', '.join(names)}." if names else ""


def choices(name: str, hint: Any) -> list[str]:
    """Return the values of a setting that tab completion offers."""
    group, _, last = name.rpartition(".")
    if group == "data" and last in CLASS_MODULES:
        module = importlib.import_module(CLASS_MODULES[last])
        found = [getattr(module, one) for one in module.__all__]
        return [f"{module.__name__}.{one.__name__}" for one in found if isinstance(one, type) and makes(one, last)]
    return [] if hint is None else choices_of(hint)


def makes(found: type, setting: str) -> bool:
    """Return True if a class of `CLASS_MODULES` can be the value of its setting."""
    return (
        issubclass(found, KNOWN_CLASSES[CLASS_MODULES[setting]]) and found is not KNOWN_CLASSES[CLASS_MODULES[setting]]
    )


def all_options() -> str:
    """Return the table of options of all commands as JSON, with one option per line."""
    merged: dict[str, Option] = {}
    for command in (*parsers(), *OTHER_PARSERS):
        for option in options(command):
            same = json.dumps(option._replace(commands=[]))
            merged[same] = (
                option if same not in merged else merged[same]._replace(commands=[*merged[same].commands, command])
            )
    rows = ",\n".join(json.dumps(option._asdict(), ensure_ascii=False) for option in merged.values())
    return f'{{"lightning": "{version("lightning")}", "options": [\n{rows}\n]}}\n'


def same_options(one: str, other: str) -> bool:
    """Return True if two tables hold the same options, but for those of Lightning if its versions differ."""
    tables = [json.loads(text) for text in (one, other)]
    if tables[0]["lightning"] == tables[1]["lightning"]:
        return one == other
    first, second = (
        [row for row in table["options"] if row["name"].split(".")[0] not in LIGHTNING_GROUPS] for table in tables
    )
    return first == second


def settings(command: str) -> Iterator[Setting]:
    """Yield every setting of a command, except those of Lightning itself."""
    for option in options(command):
        if option.default and option.name.split(".")[0] not in (*LIGHTNING_GROUPS, *SKIPPED):
            default = option.default if option.default == "required" else f"`{option.default}`".replace("|", "\\|")
            yield option.name, default, option.help


def fields_of(config: type, prefix: str, default: Any, command: str) -> Iterator[Option]:
    """Yield the settings of a dataclass; the docstring under a field is its meaning."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    docs = {a.target.id: inspect.cleandoc(b.value.value) for a, b in pairwise(body) if isinstance(a, ast.AnnAssign)}
    hints = get_type_hints(config)
    for field in dataclasses.fields(config):
        value = default[field.name] if isinstance(default, Namespace) else field.default
        hint = hints[field.name]
        yield Option(
            f"{prefix}.{field.name}",
            type_words(hint),
            format_default(value),
            " ".join(docs[field.name].split()),
            choices_of(hint),
            is_open(hint),
            [command],
        )


def format_default(value: Any) -> str:
    """Return a default in YAML notation."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value.as_dict() if isinstance(value, Namespace) else value)


def table(rows: list[Setting]) -> str:
    """Return settings as a Markdown table."""
    cells = [(f"`{name}`", default, escape_cell(meaning)) for name, default, meaning in rows]
    lines = ["| setting | default | meaning |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines)


def escape_cell(text: str) -> str:
    """Return a text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def all_settings() -> str:
    """Return tables of all settings of `fit`, one section per group, then those that other commands add."""
    fit = list(settings("fit"))
    groups: dict[str, list[Setting]] = {}
    for name, default, meaning in fit:
        groups.setdefault(name.rpartition(".")[0] or UNGROUPED_TITLE, []).append((name, default, meaning))
    order = list(dict.fromkeys(group.split(".")[0] for group in groups))
    by_place = sorted(groups, key=lambda group: (order.index(group.split(".")[0]), group))
    parts = [f"## {group}\n\n{table(groups[group])}" for group in by_place]
    known = {name for name, *_ in fit}
    for command in ("evaluate", "information", "grow"):
        rows = [row for row in settings(command) if row[0] not in known]
        parts.append(f"## Only in {command}\n\n{table(rows)}")
    return "\n\n".join(parts)


def rule_row(rule: Rule, config: AnomalyConfig) -> str:
    """Return an anomaly rule as a row of the table."""
    bounds = config.bounds(rule)
    sign = "> " if rule.side == "above" else "< "
    limits = ["–" if limit is None else f"{sign}{limit:g}" for limit in (bounds.warning, bounds.critical)]
    cause = rule.cause.format(what="`…`")
    named = ", ".join(f"`{name}`" for name in rule.settings)
    cells = [f"`{rule.name}`", f"`{rule.metric}`", *limits, f"{bounds.updates} / {bounds.clear}", cause, named]
    return f"| {' | '.join(cells)} |"


def all_rules() -> str:
    """Return the table of anomaly rules."""
    head = "| anomaly | metric | warning | critical | updates | likely cause | look at |\n|---|---|---|---|---|---|---|"
    config = AnomalyConfig()
    return "\n".join([head, *(rule_row(rule, config) for rule in RULES)])


GENERATORS = {"settings": all_settings, "plots": guide, "rules": all_rules}
"""Function that generates each kind of part."""


def updated(text: str) -> str:
    """Return the text of a page with its generated parts replaced by new ones."""
    return GENERATED.sub(lambda part: part[1] + GENERATORS[part[2]]() + part[3], text)


def main(args: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, exit with 1 if a page is not up to date")
    check = parser.parse_args(args).check
    outdated = []
    for page in sorted(PAGES.glob("*.md")):
        before = page.read_text()
        after = updated(before)
        if after != before:
            outdated.append(page.name)
            if not check:
                page.write_text(after)
    before, after = TABLE.read_text(), all_options()
    if not same_options(before, after):
        outdated.append(TABLE.name)
        if not check:
            TABLE.write_text(after)
    print(f"{'not up to date' if check else 'written'}: {', '.join(outdated) or 'none'}")
    if check and outdated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
