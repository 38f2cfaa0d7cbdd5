"""Settings of a run that is not necessarily the user's own: what `evaluate` takes from the config beside a checkpoint.

A config is code: it names classes and functions, which are imported and called. A config that the user names on the
command line may therefore do anything. One that merely lies beside a checkpoint, perhaps downloaded, is read here: only
settings that `evaluate` needs are taken, and every import path in them must belong to a known list of classes or to a
package that the user trusts. Everything is checked before jsonargparse, which imports what it reads, sees the settings.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml
from jsonargparse import get_loader
from jsonargparse.typing import path_type
from torch import nn

from esper_lightning.cli.yaml_limits import MAX_SIZE
from esper_lightning.plugins import IMPORTS, PLUGIN_SETTINGS, module_names
from esper_lightning.tasks import Task

CONFIG_OPTION, TRUST_OPTION = "--config", "--trust"

TAKEN_GROUPS = ("model", "data", "governor", "evaluation")
"""Groups of settings that `evaluate` takes from a config. Results go to the run's folder, whatever the config says."""

TAKEN_SETTINGS = ("seed_everything", "threads_per_operator")
"""Settings outside of groups that `evaluate` takes, if they are plain."""

TAKEN_TRAINER_SETTINGS = ("accelerator", "benchmark", "deterministic", "max_epochs")
"""Settings of the trainer that `evaluate` takes, if they are plain. Loggers, callbacks, plugins and folders are not."""

ACCELERATORS = ("auto", "cpu", "cuda", "gpu", "mps")
"""Names of accelerators that stand for no import path."""

HOSTS, TASKS, TORCHVISION = "esper_lightning.hosts", "esper_lightning.tasks", "torchvision.models"

KNOWN_CLASSES: dict[str, type] = {HOSTS: nn.Module, TASKS: Task, TORCHVISION: nn.Module}
"""Modules whose public subclasses of a class may be named by any config.

Their constructors build networks and load data; what they call by name is checked, too. Nothing else of torch,
torchvision, torchmetrics and Lightning is known: no config of this project needs it, and among it are `torch.hub.load`,
which runs code from any repository, and loggers, which write to any folder.
"""

IMPORT_PATH = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", re.ASCII)
"""Pattern of the import path of a public object."""

MODULE = re.compile(r"[A-Za-z]\w*(\.[A-Za-z]\w*)*", re.ASCII)
"""Pattern of the name of a public module or package."""

UNTRUSTED = "which would run code of a package that is not trusted"

NETWORK = "network"
"""Argument of `hosts.Attached` that is an import path; a family may vary it as `host.network`."""

ReadableFile: Any = path_type("fr")
"""Type of jsonargparse for the name of a file in place of settings."""

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
"""Keys of the settings of an object."""

PLAIN_TYPES = frozenset({str, int, float, bool, Path, PathLike, NoneType, ...})
PLAIN_CONTAINERS = (list, tuple, dict, Sequence, Mapping, Union, UnionType, PathLike)
"""Types of settings, and of collections of them, for which a text is never imported and never a file of settings."""


def settings_beside_checkpoint(config: Path, groups: Mapping[str, type], trusted: Sequence[str]) -> str:
    """Return the settings that `evaluate` takes from a config that the user has not named, as YAML.

    Args:
        config: The file.
        groups: Classes whose arguments are the groups of settings, by the group's name.
        trusted: Import paths of the packages that the user trusts.

    Raises ValueError, in one line, if the file is no mapping of settings or names anything else to import.
    """
    try:
        with config.open(encoding="utf-8") as file:
            settings = get_loader("yaml")(file.read(MAX_SIZE + 1))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{config} is no valid config: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{config} is no valid config: it holds no settings")
    reader = _Reader(config, tuple(trusted))
    taken = {name: settings[name] for name in TAKEN_SETTINGS if name in settings and is_plain(settings[name])}
    if settings.get(IMPORTS) is not None:
        taken[IMPORTS] = [reader.module(name) for name in module_names(settings[IMPORTS])]
    for name in TAKEN_GROUPS:
        if name in settings:
            taken[name] = reader.group(settings[name], _parameter_hints(groups[name]), name)
    trainer = settings.get("trainer")
    if isinstance(trainer, dict):
        plain = {name: trainer[name] for name in TAKEN_TRAINER_SETTINGS if name in trainer and is_plain(trainer[name])}
        if plain.get("accelerator") not in ACCELERATORS:
            plain.pop("accelerator", None)
        taken["trainer"] = plain
    # Quotes and tags on every value: nothing means anything else when it is read again.
    return yaml.safe_dump(taken, default_style='"', sort_keys=False)


def check_object(file: Path, value: Any, trusted: Sequence[str]) -> dict[str, Any]:
    """Return the settings of an object in a file that the user has not named: the import path of its class, arguments.

    Raises ValueError, in one line, unless the class, and all that the arguments name, is known or trusted.
    """
    if not isinstance(value, dict) or "class_path" not in value:
        raise ValueError(f"{file}: it does not name a class")
    return _Reader(file, tuple(trusted), is_config=False)._object(value, "host")


def is_plain(value: object) -> bool:
    """Return True for a text, a number, a truth value and None."""
    return isinstance(value, str | int | float | None)


def trusted_packages(option: str | None) -> list[str]:
    """Return the packages that the value of `--trust` names, with commas between them.

    Raises ValueError if one is no import path, or is part of Python itself, where anything can be found.
    """
    packages = [] if option is None else [name.strip() for name in option.split(",")]
    for name in packages:
        if not MODULE.fullmatch(name):
            raise ValueError(f"{TRUST_OPTION} takes names of packages, with commas between them; got {name!r:.80}")
        if name.partition(".")[0] in sys.stdlib_module_names:
            raise ValueError(f"{TRUST_OPTION} {name}: it is part of Python, whose functions can do anything")
    return packages


@dataclass(frozen=True)
class _Reader:
    """Checks of the settings in one file. Methods return the settings to take, or raise ValueError."""

    file: Path
    trusted: tuple[str, ...]
    is_config: bool = True
    """True if the user may name the file itself as a config."""

    def group(self, value: Any, hints: Mapping[str, Any], where: str) -> dict[Any, Any]:
        """Return a group of settings whose types are `hints`, by name."""
        if not isinstance(value, dict):
            raise ValueError(f"{self.file}: {where} must be a group of settings, got {value!r:.50}")
        return self._mapping(value, hints, Any, where)

    def _mapping(self, value: Mapping[Any, Any], hints: Mapping[str, Any], other: Any, where: str) -> dict[Any, Any]:
        """Return a mapping whose values have the types `hints`, by key, and else the type `other`."""
        checked = {}
        for key, item in value.items():
            here = f"{where}.{str(key)[:80]}"
            last = str(key).rpartition(".")[2]
            if last in CLASS_KEYS and key not in CLASS_KEYS:
                raise ValueError(f"{self.file}: {here} must be written as {last!r} in a group of its own")
            if last == NETWORK:
                for path in item if isinstance(item, list) else [item]:
                    self._check_network(path, here)
                checked[key] = item
                continue
            if last in PLUGIN_SETTINGS:
                for path in item if isinstance(item, list) else [item]:
                    if isinstance(path, str) and "." in path:
                        self._resolve(path, here)
            checked[key] = self._value(item, hints.get(key, other), here)
        return checked

    def module(self, name: str) -> str:
        """Return the name of a module to import, if it is trusted."""
        if self._trusted_package(f"{name}.") is None:
            self._refuse(name, IMPORTS, UNTRUSTED, MODULE)
        return name

    def _value(self, value: Any, hint: Any, where: str) -> Any:
        """Return a value of the type `hint`."""
        if isinstance(value, dict):
            if "class_path" in value:
                return self._object(value, where)
            return self._mapping(value, *_item_hints(hint), where)
        if isinstance(value, list):
            return [self._value(item, _element_hint(hint), f"{where}[{i}]") for i, item in enumerate(value)]
        if isinstance(value, str) and not _takes_text(hint):
            self._check_text(value, where)
            if IMPORT_PATH.fullmatch(value) or _takes_class(hint):
                return self._object({"class_path": value}, where)
        return value

    def _object(self, value: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the settings of an object: the import path of its class, and arguments."""
        named = self._resolve(value["class_path"], f"{where}.class_path")
        checked: dict[str, Any] = {"class_path": value["class_path"]}
        for key in value:
            if key == "class_path":
                continue
            if key not in CLASS_KEYS:
                raise ValueError(f"{self.file}: {where} has the unknown key {str(key)[:80]!r} beside class_path")
            if value[key] is not None:
                checked[key] = self.group(value[key], _parameter_hints(named), f"{where}.{key}")
        arguments = checked.get("init_args", {})
        if named.__module__.startswith(f"{TASKS}.") and "download" in arguments:
            arguments["download"] = False  # a download writes to a folder that the config names
        return checked

    def _check_network(self, path: Any, where: str) -> None:
        if path is None or isinstance(path, int | float):
            return
        named = self._resolve(path, where)
        if isinstance(named, type) and not issubclass(named, nn.Module):
            self._refuse(path, where, "which is no network")

    def _check_text(self, text: str, where: str) -> None:
        """Raise ValueError if a text could be read as further settings: it is YAML of them, or a file of them."""
        try:
            further = not is_plain(get_loader("yaml")(text))
        except yaml.YAMLError:
            further = False
        if further or _is_file(text):
            raise ValueError(
                f"{self.file}: {where} stands for further settings, which may run code: {text!r:.80}; if you trust "
                f"them, name the file by {CONFIG_OPTION} {self.file}"
            )

    def _resolve(self, path: Any, where: str) -> Callable[..., Any]:
        """Return the class or function with an import path, if it is known or trusted. Imports no other module."""
        if not isinstance(path, str) or not IMPORT_PATH.fullmatch(path):
            self._refuse(path, where, "which is no import path of a public class or function")
        module, _, name = path.rpartition(".")
        package = module if module in KNOWN_CLASSES else self._trusted_package(path)
        if package is None:
            self._refuse(path, where, UNTRUSTED)
        try:
            found = getattr(importlib.import_module(module), name, None)
        except ImportError as error:
            raise ValueError(f"{self.file}: {where}: cannot import {module!r}: {error}") from error
        if not (inspect.isclass(found) or inspect.isfunction(found)):
            self._refuse(path, where, "which is no class or function")
        if not f"{found.__module__}.".startswith(f"{package}."):
            self._refuse(path, where, f"which is from {found.__module__}, not from {package}")
        if module in KNOWN_CLASSES and self._trusted_package(path) is None and not _is_known(module, name, found):
            self._refuse(path, where, f"which is no {KNOWN_CLASSES[module].__name__}")
        return found

    def _trusted_package(self, path: str) -> str | None:
        return next((package for package in self.trusted if path.startswith(f"{package}.")), None)

    def _refuse(self, path: object, where: str, reason: str, pattern: re.Pattern[str] = IMPORT_PATH) -> NoReturn:
        package = str(path).partition(".")[0]
        could_be_trusted = pattern.fullmatch(str(path)) and package not in sys.stdlib_module_names
        ways = [f"{TRUST_OPTION} {package}"] * bool(could_be_trusted) + [
            f"{CONFIG_OPTION} {self.file}"
        ] * self.is_config
        way_out = f"; if you trust it, give {', or '.join(ways)}" if ways else ""
        raise ValueError(f"{self.file}: {where} names {str(path)[:200]!r}, {reason}{way_out}")


def _is_known(module: str, name: str, found: Any) -> bool:
    """Return True if an object of a known module is one of the classes, or a builder of torchvision's list."""
    if isinstance(found, type):
        return issubclass(found, KNOWN_CLASSES[module])
    torchvision = importlib.import_module(TORCHVISION)
    return module == TORCHVISION and name in torchvision.list_models(torchvision)


def _is_file(text: str) -> bool:
    """Return True if jsonargparse would read a file (`-` is the standard input) in place of a text."""
    try:
        ReadableFile(text)
    except (TypeError, ValueError):
        return False
    return True


def _parameter_hints(named: Any) -> dict[str, Any]:
    """Return the types of the arguments of a class or function, by name; those of base classes count, too."""
    makers = (
        [vars(c)["__init__"] for c in reversed(named.__mro__) if "__init__" in vars(c)]
        if isinstance(named, type)
        else [named]
    )
    hints: dict[str, Any] = {}
    for make in makers:
        try:
            hints |= get_type_hints(make)
        except (NameError, TypeError, AttributeError):  # a name in an annotation is known to type checkers alone
            continue
    return hints


def _members(hint: Any) -> Iterator[Any]:
    """Yield the members of a union, or the type itself."""
    yield from get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _item_hints(hint: Any) -> tuple[dict[str, Any], Any]:
    """Return the types of the values of a mapping of the type `hint`: those of known keys, and that of others."""
    for member in _members(hint):
        if get_origin(member) in (dict, Mapping):
            return {}, get_args(member)[1]
        if isinstance(member, type) and hasattr(member, "__dataclass_fields__"):
            return _parameter_hints(member), Any
    return {}, Any


def _element_hint(hint: Any) -> Any:
    """Return the type of the elements of a list of the type `hint`."""
    found = (get_args(member)[0] for member in _members(hint) if get_origin(member) in (list, Sequence))
    return next(found, Any)


def _takes_class(hint: Any) -> bool:
    """Return True if a text of the type `hint` names a class, perhaps without its module."""
    return any(
        get_origin(member) is Callable or (isinstance(member, type) and member not in (*PLAIN_TYPES, Any))
        for member in _members(hint)
    )


def _takes_text(hint: Any) -> bool:
    """Return True if a text of the type `hint` stays a text."""
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin in PLAIN_CONTAINERS:
        return all(_takes_text(part) for part in get_args(hint))
    return hint in PLAIN_TYPES
