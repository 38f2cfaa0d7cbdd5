"""Every setting can be set from YAML and is explained in the help."""

import ast
import importlib
import inspect
import itertools
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import pytest
import yaml
from lightning import Callback

import esper_lightning
from esper_lightning.__main__ import main
from esper_lightning.callbacks import Governor
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.module import TamiyoModule
from esper_lightning.telemetry.anomalies import RULES, Rule
from tests.runs import CONFIGS, with_callback

ENTRY = "entry"
"""Key of the only entry in a dictionary of settings."""

REQUIRED = {"task": "esper_lightning.tasks.Digits", "host": "esper_lightning.hosts.CNN"}
"""Settings without a default."""

LINKED = {("data", "env", "reward"): {"gamma", "horizon_is_end"}}
"""Fields that are linked to another setting and cannot be set themselves."""


NO_SETTINGS = {Rule}
"""Records that look like settings but are none: rows of the table of anomalies."""


class Group(NamedTuple):
    """A group of settings."""

    command: str
    path: tuple[str, ...]
    """Keys in YAML."""
    settings: type
    """Dataclass of these settings."""
    there: bool
    """True: the group always has values. False: it is null unless it is set."""

    def __str__(self) -> str:
        return f"{self.command} {'.'.join(self.path)}"

    @property
    def option(self) -> str:
        """Name on the command line."""
        return ".".join(key for key in self.path if key != ENTRY)


def is_settings(thing: object) -> bool:
    """Return True for classes of settings: frozen dataclasses, all of whose fields are keyword-only."""
    frozen = inspect.isclass(thing) and is_dataclass(thing) and thing.__dataclass_params__.frozen
    return frozen and all(field.kw_only for field in fields(thing))


def settings_within(hint: Any, path: tuple[str, ...]) -> Iterator[tuple[type, tuple[str, ...]]]:
    """Yield the classes of settings within a type, with the keys that lead to them."""
    if is_settings(hint):
        yield hint, path
    below = (*path, ENTRY) if get_origin(hint) is dict else path
    for part in get_args(hint):
        yield from settings_within(part, below)


def groups_of(command: str, path: tuple[str, ...], target: Callable[..., Any], known: set[type]) -> Iterator[Group]:
    """Yield the groups of settings among the parameters of a class or function, and the groups within them.

    Args:
        command: Name of the command.
        path: Keys that lead to the class or function.
        target: The class or function.
        known: Classes found so far; a class that is null by default is yielded only once."""
    hints = get_type_hints(target.__init__ if inspect.isclass(target) and not is_settings(target) else target)
    for name, hint in hints.items():
        for settings, below in settings_within(hint, (*path, name)):
            if settings is hint or settings not in known:
                known.add(settings)
                yield Group(command, below, settings, there=settings is hint)
                yield from groups_of(command, below, settings, known)


def all_groups() -> Iterator[Group]:
    """Yield the groups of settings of the module, the data module and the callbacks."""
    known: set[type] = set()
    yield from groups_of("fit", ("model",), TamiyoModule, known)
    yield from groups_of("fit", ("data",), HostPoolData, known)
    for callback in CALLBACKS:
        yield from groups_of(callback.__name__, (), callback, known)


CALLBACKS = (Governor,)
"""Callbacks with classes of settings among their arguments."""

GROUPS = list(all_groups())
IN_CONFIG = [group for group in GROUPS if group.command == "fit"]


def printed(command: str, *args: str) -> str:
    """Return the output of a command that prints and exits."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(sys, "argv", sys.argv[:1])
        patch.setattr(sys.stdout, "write", lambda text: lines.append(text) or len(text))
        main([command, *args])
    return "".join(lines)


def squeezed(text: str) -> str:
    """Remove white space, because help breaks lines anywhere."""
    return re.sub(r"\s+", "", text)


@cache
def help_of_options(command: str, *args: str) -> dict[str, str]:
    """Return the help text of each option; for an option with suboptions, the title above them."""
    said = {}
    title = ""
    for block in re.split(r"^(?=  --|\S)", printed(command, *args), flags=re.MULTILINE):
        if block.startswith("  --"):
            said[block.split()[0].removeprefix("--").rstrip(",")] = squeezed(title + block)
            title = ""
        else:
            title = block.replace(":", ".")
    return said


@pytest.fixture(scope="module")
def printed_config(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """`printed_config(command)` returns every setting as YAML, including groups that are null by default."""
    folder = tmp_path_factory.mktemp("config")

    @cache
    def of(command: str) -> dict[str, Any]:
        asked: dict[str, Any] = {}
        for group in GROUPS:
            if group.command == command and not group.there:
                section = asked
                for key in group.path:
                    section = section.setdefault(key, {})
                section.update(
                    {field.name: REQUIRED[field.name] for field in fields(group.settings) if field.name in REQUIRED}
                )
        (folder / f"{command}.yaml").write_text(yaml.safe_dump(asked))
        files = (str(CONFIGS / "smoke.yaml"), str(folder / f"{command}.yaml"))
        return yaml.safe_load(
            printed(command, *(part for file in files for part in ("--config", file)), "--print_config")
        )

    return of


def field_docs(config: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass."""
    body = ast.parse(inspect.getsource(config)).body[0].body
    return {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def test_no_class_of_settings_is_out_of_reach() -> None:
    """A8: every class of settings in the project is on the command line."""
    defined = set()
    for found in pkgutil.walk_packages(esper_lightning.__path__, "esper_lightning."):
        if not found.name.endswith("__main__"):
            defined |= set(filter(is_settings, vars(importlib.import_module(found.name)).values()))

    assert len(defined) > 15
    assert defined - NO_SETTINGS == {group.settings for group in GROUPS}


@pytest.mark.parametrize("group", IN_CONFIG, ids=str)
def test_every_setting_is_reachable_from_yaml_and_explained_by_help(
    group: Group, printed_config: Callable[[str], dict[str, Any]]
) -> None:
    """A8: every field of every class of settings is in the printed YAML, and its docstring in the help."""
    docs = field_docs(group.settings)
    section: Any = printed_config(group.command)
    for key in group.path:
        section = section[key]
    assert set(docs) == {field.name for field in fields(group.settings)}
    assert set(section) == set(docs) - LINKED.get(group.path, set())

    said = help_of_options(group.command, "--help" if group.there else f"--{group.option}.help")
    for name in section:
        assert squeezed(docs[name]) in said[f"{group.option}.{name}"], name


@pytest.mark.parametrize("callback", CALLBACKS)
def test_every_setting_of_a_callback_can_be_given_on_the_command_line(callback: type[Callback]) -> None:
    """A8: every field of the settings of a callback is accepted, and is in the printed YAML."""
    settings = {name: hint for name, hint in get_type_hints(callback.__init__).items() if is_settings(hint)}
    given = {name: asdict(hint()) for name, hint in settings.items()}
    assert given

    text = printed("fit", "--config", str(CONFIGS / "smoke.yaml"), *with_callback(callback, **given), "--print_config")

    *_, last = yaml.safe_load(text)["trainer"]["callbacks"]
    assert {name: last["init_args"][name] for name in given} == given


def test_anomalies_point_to_settings_that_there_are(printed_config: Callable[[str], dict[str, Any]]) -> None:
    for name in {name for rule in RULES for name in rule.settings}:
        section: Any = printed_config("fit")
        first, *keys = name.split(".")
        owner = next((one for one in CALLBACKS if one.__name__ == first), None)
        if owner is None:
            keys.insert(0, first)
        else:
            hints = get_type_hints(owner.__init__)
            section = {argument: asdict(hint()) for argument, hint in hints.items() if is_settings(hint)}
        for key in keys:
            assert key in section, name
            section = section[key]
