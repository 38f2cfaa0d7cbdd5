"""Parts and configs by name: those of this package, of modules that the user imports, and of installed packages.

A setting names a part by the name under which it is registered, or by its import path, as in `mine.Patient`.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

ENTRY_POINTS = "esper_lightning.plugins"
"""Group of the entry points of installed packages; each names a module that registers parts."""

PACKAGE = Path(__file__).parents[1]

CONFIGS = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())
"""Folder of the configs. In a clone without symbolic links it lies beside the package."""

Part = TypeVar("Part")
Definition = TypeVar("Definition", bound=Callable[..., Any])


class Registry(dict[str, Part], Generic[Part]):
    """Parts of one kind by name; `kind` is its name in error messages.

    `takes` tells whether an object is a part without being registered. None: none is. `reserved` are names that mean
    something else in settings.
    """

    def __init__(
        self,
        kind: str,
        parts: Mapping[str, Part] | None = None,
        takes: Callable[[Any], bool] | None = None,
        *,
        reserved: Sequence[str] = (),
    ) -> None:
        super().__init__(parts or {})
        self.kind, self.takes, self.reserved = kind, takes, reserved
        self.registered: dict[str, Any] = {}  # classes and functions by name

    def register(self, name: str) -> Callable[[Definition], Definition]:
        """Return a decorator that registers a class or function as the part `name`; defined again, it is replaced.

        Raises ValueError if the name is taken or has a dot, or if the class or function cannot be such a part.
        """
        check_part_name(self.kind, name)

        def add(made: Definition) -> Definition:
            if self.takes is not None and not self.takes(made):
                raise ValueError(f"{self.kind} {name!r}: {made!r} is not one; see docs/guides/extending.md")
            self.add(name, cast(Part, made), made)
            return made

        return add

    def add(self, name: str, part: Part, made_from: Any) -> None:
        """Add a part that was made from a class or function. Raises ValueError if the name is taken."""
        if name in self.reserved:
            raise ValueError(f"{self.kind} {name!r} is a name of this package; choose another name")
        if name in self and not is_same_definition(self.registered.get(name), made_from):
            raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
        self[name] = part
        self.registered[name] = made_from

    def find(self, name: str, others: Sequence[str] = ()) -> Part:
        """Return the part with a name or an import path. Raises ValueError, with a suggestion, if there is none."""
        if name not in self and "." not in name:
            import_installed()
        if name in self:
            return self[name]
        if "." not in name:
            suggestion = suggest_name(name, list(dict.fromkeys([*others, *self])))
            hint = "" if suggestion.endswith("?") else f"; name a {self.kind} of your own by its import path"
            raise ValueError(f"unknown {self.kind} {name!r}; {suggestion}{hint}")
        part = import_object(name, self.kind)
        for registered, made in self.registered.items():
            if made is part:
                return self[registered]
        if self.takes is None or not self.takes(part):
            raise ValueError(f"{self.kind} {name!r} is not one; see docs/guides/extending.md")
        return part


def check_part_name(kind: str, name: Any) -> None:
    """Raise ValueError if a name to register is no text, or could be taken for an import path."""
    if not isinstance(name, str) or "." in name:
        raise ValueError(f'{kind} {name!r}: register it under a name without a dot, as in @register("mine")')


def is_same_definition(known: Any, made: Any) -> bool:
    """Return True if a class or function is one that is known, defined again in its module, as by a second import."""
    paths = [(getattr(one, "__module__", None), getattr(one, "__qualname__", "<none>")) for one in (known, made)]
    (_, qualified_name), _ = paths
    return paths[0] == paths[1] and "<" not in qualified_name  # names of local functions and lambdas have a <


def import_object(path: str, what: str) -> Any:
    """Return the object with the import path `package.module.name`.

    Raises ValueError, which begins with `what`, if there is none. Errors of the module's own code pass.
    """
    module, _, name = path.rpartition(".")
    if not module:
        raise ValueError(f"{what}: {path!r} is no import path, such as package.module.name")
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that this one imports is missing
        hint = "it must lie in the current folder, or be installed"
        raise ValueError(f"{what}: cannot import {module!r} for {path!r}: {error}; {hint}") from error
    if not hasattr(imported, name):
        raise ValueError(f"{what}: {module} has no {name!r}; {suggest_name(name, dir(imported))}")
    return getattr(imported, name)


@cache
def import_installed() -> None:
    """Import the modules that installed packages name as their parts, once."""
    for point in entry_points(group=ENTRY_POINTS):
        point.load()


def is_of_this_package(made: Any) -> bool:
    return made.__module__.partition(".")[0] == __name__.partition(".")[0]


def plain_factory(factory: Any) -> partial:
    """Return a class or function with its arguments as one `partial` of itself, which other processes can be sent.

    A config gives partial(make, …, class), where `make` calls the class, and holds the command line.
    """
    arguments: dict[str, Any] = {}
    while isinstance(factory, partial):
        arguments = {**factory.keywords, **arguments}
        factory = next((arg for arg in reversed(factory.args) if callable(arg)), factory.func)
    return partial(factory, **arguments)


def describe_factory(factory: Any, architecture: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a class or function, or a `partial`, with its arguments and those of `architecture`, as plain data."""
    plain = plain_factory(factory)
    factory, arguments = plain.func, plain.keywords
    module, name = factory.__module__, factory.__qualname__
    package = module.rpartition(".")[0]
    if package and getattr(importlib.import_module(package), name, None) is factory:
        module = package  # the public name, such as esper_lightning.hosts.CNN
    return {"class_path": f"{module}.{name}", "init_args": arguments | dict(architecture or {})}


def suggest_name(name: str, available: Sequence[str]) -> str:
    """Return the end of an error message for an unknown `name`: the most similar available name, or all of them."""
    matches = difflib.get_close_matches(name, available, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"there are: {', '.join(repr(other) if ',' in other else other for other in available)}"


def config_paths() -> list[Path]:
    return sorted(CONFIGS.glob("*.yaml"))


def find_config(name: str | Path) -> Path:
    """Return the path of a config, given its path or its name in the package. Raises ValueError if there is none."""
    if Path(name).is_file():
        return Path(name)
    packaged = {path.stem: path for path in config_paths()}
    if str(name) not in packaged:
        raise ValueError(f"config {str(name)!r} does not exist; {suggest_name(Path(name).stem, list(packaged))}")
    return packaged[str(name)]
