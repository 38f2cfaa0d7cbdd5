"""Write the generated parts of the reference pages: settings, TensorBoard plots, and anomaly rules.

python -m benchmarks.reference          # writes docs/reference/{cli,telemetry,anomalies}.md
python -m benchmarks.reference --check  # names the pages that are not up to date, and exits with 1
"""

import argparse
import ast
import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args
from unittest.mock import patch

from jsonargparse import Namespace
from lightning.pytorch.cli import LightningArgumentParser

from esper_lightning.cli import main as cli
from esper_lightning.telemetry.anomaly_rules import RULES, AnomalyConfig, Rule
from esper_lightning.telemetry.tags import guide

PAGES = Path(__file__).parent.parent / "docs" / "reference"

GENERATED = re.compile(r"(<!-- generated: (\w+) -->\n\n).*?(\n\n<!-- end -->)", re.DOTALL)
"""Pattern of the generated parts of a page."""

LIGHTNING_GROUPS = ("trainer", "best", "latest", "optimizer", "lr_scheduler")
"""Groups of settings of Lightning itself, which its documentation explains."""

SKIPPED = ("help", "config", "print_config", "print_shtab")
"""Options that are left out."""

UNGROUPED_TITLE = "command line"
"""Title of the section for settings without a group."""

Setting = tuple[str, str, str]
"""Name, default and meaning of a setting."""


class ParserFound(Exception):
    """Exception that carries the parser out of the constructor of the command line."""


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


def settings(command: str) -> Iterator[Setting]:
    """Yield every setting of a command, except those of Lightning itself."""
    parser = parsers()[command]
    defaults = parser.get_defaults()
    for action in parser._actions:
        name = action.dest
        known = name in defaults and not isinstance(defaults[name], Namespace)
        if known and action.option_strings and name.split(".")[0] not in (*LIGHTNING_GROUPS, *SKIPPED):
            yield name, format_default(defaults[name]), " ".join((action.help or "").split())
            for kind in filter(dataclasses.is_dataclass, get_args(getattr(action, "_typehint", None))):
                yield from fields_of(kind, name)  # the fields of a group whose default is null


def fields_of(config: type, prefix: str) -> Iterator[Setting]:
    """Yield the settings of a dataclass; the docstring under a field is its meaning."""
    body = ast.parse(textwrap.dedent(inspect.getsource(config))).body[0].body
    docs = {a.target.id: inspect.cleandoc(b.value.value) for a, b in pairwise(body) if isinstance(a, ast.AnnAssign)}
    for field in dataclasses.fields(config):
        yield f"{prefix}.{field.name}", format_default(field.default), " ".join(docs[field.name].split())


def format_default(value: Any) -> str:
    """Return a default in YAML notation."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None or isinstance(value, bool):
        value = json.dumps(value)
    return f"`{value}`".replace("|", "\\|")


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
    print(f"{'not up to date' if check else 'written'}: {', '.join(outdated) or 'none'}")
    if check and outdated:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
