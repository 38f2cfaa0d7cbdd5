"""Every setting can be set from YAML and is explained in the help."""

import ast
import importlib
import inspect
import itertools
import pkgutil
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
import yaml

import esper_lightning
from esper_lightning.__main__ import main
from esper_lightning.callbacks import Governor
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.module import TamiyoModule
from esper_lightning.telemetry.anomalies import RULES, Rule
from tests.runs import CONFIGS, with_callback

LINKED = {"gamma", "horizon_is_end"}
"""Fields of the reward that are linked to those of PPO and cannot be set themselves."""


def is_settings(thing: object) -> bool:
    """Return True for classes of settings: frozen dataclasses, all of whose fields are keyword-only."""
    frozen = inspect.isclass(thing) and is_dataclass(thing) and thing.__dataclass_params__.frozen
    return frozen and all(field.kw_only for field in fields(thing))


def groups_of(path: str, hint: Any) -> Iterator[tuple[str, type]]:
    """Yield the classes of settings within a type, with the dotted name under which each is always in the config.

    The name is empty for a class that is null, or an entry of a dictionary or list, by default.
    """
    if is_settings(hint):
        yield path, hint
        for name, part in get_type_hints(hint).items():
            yield from groups_of(f"{path}.{name}" if path else "", part)
    for part in get_args(hint):
        yield from groups_of("", part)


GROUPS = [
    group
    for name, made in (("model", TamiyoModule), ("data", HostPoolData), ("", Governor))
    for argument, hint in get_type_hints(made.__init__).items()
    for group in groups_of(f"{name}.{argument}" if name else "", hint)
]


def field_docs(config: type) -> dict[str, str]:
    """Return the docstring under each field of a dataclass."""
    body = ast.parse(inspect.getsource(config)).body[0].body
    return {
        field.target.id: doc.value.value
        for field, doc in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr) and isinstance(doc.value, ast.Constant)
    }


def printed(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """Return the output of `fit` with arguments by which it prints and exits."""
    with pytest.raises(SystemExit):
        main(["fit", *args])
    return capsys.readouterr().out


def test_every_class_of_settings_is_within_reach_and_says_what_its_fields_mean() -> None:
    """A8: every class of settings in the project is an argument of the module, the data module or a callback."""
    defined = set()
    for found in pkgutil.walk_packages(esper_lightning.__path__, "esper_lightning."):
        if not found.name.endswith("__main__"):
            defined |= set(filter(is_settings, vars(importlib.import_module(found.name)).values()))

    assert len(defined) > 15
    assert defined - {Rule} == {settings for _, settings in GROUPS}
    for settings in defined - {Rule}:
        assert set(field_docs(settings)) == {field.name for field in fields(settings)}, settings


def test_every_setting_is_in_the_printed_yaml_and_explained_by_help(capsys: pytest.CaptureFixture[str]) -> None:
    """A8: every field of a group that is always there is in the printed YAML, and its docstring in the help."""
    config = yaml.safe_load(printed(capsys, "--config", str(CONFIGS / "smoke.yaml"), "--print_config"))
    said = "".join(printed(capsys, "--help").split())  # help breaks lines anywhere

    named = {path: settings for path, settings in GROUPS if path}
    assert len(named) > 10
    for path, settings in named.items():
        section, docs = config, field_docs(settings)
        for key in path.split("."):
            section = section[key]
        assert set(docs) == set(section) | (LINKED if path == "data.env.reward" else set()), path
        for name in section:
            assert f"--{path}.{name}" in said and "".join(docs[name].split()).rstrip(".") in said, f"{path}.{name}"


def test_the_settings_of_a_callback_can_be_given_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    given = asdict(GovernorConfig())
    options = with_callback(Governor, rules=given)

    text = printed(capsys, "--config", str(CONFIGS / "smoke.yaml"), *options, "--print_config")

    assert yaml.safe_load(text)["trainer"]["callbacks"][-1]["init_args"] == {"rules": given}


def test_anomalies_point_to_settings_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    config = yaml.safe_load(printed(capsys, "--config", str(CONFIGS / "smoke.yaml"), "--print_config"))
    config["Governor"] = {"rules": asdict(GovernorConfig())}
    for name in {name for rule in RULES for name in rule.settings}:
        section: Any = config
        for key in name.split("."):
            assert key in section, name
            section = section[key]
