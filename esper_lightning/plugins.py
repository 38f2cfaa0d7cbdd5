"""Parts by name: those of this package, those of modules that the user imports, and those of installed packages.

A setting names a part by the name under which it is registered, or by its import path, as in `mine.Patient`. Each kind
of part has one registry. A part that settings do not name changes nothing, however many are registered.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import entry_points
from inspect import signature
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

ENTRY_POINTS = "esper_lightning.plugins"
"""Group of the entry points of installed packages; each names a module that registers parts."""

IMPORT_ERRORS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, ValueError)
"""Errors of a package that is broken, or that was made for other versions of what it imports."""

EXTENDING_HINT = "see docs/guides/extending.md for how to write and register one"
"""End of the errors about an object that is no part."""

Part = TypeVar("Part")
Definition = TypeVar("Definition", bound=Callable[..., Any])


class PartError(ValueError):
    """Error of a part of the user that cannot be registered, or that does not do what such a part must do.

    The message names the part, the problem and the way out. The command line prints it without a traceback.
    """


class Registry(dict[str, Part], Generic[Part]):
    """Parts of one kind by name.

    Args:
        kind: Name of the kind in error messages.
        parts: Parts of this package; those of others are added by `add`.
        takes: Function that returns True for an object that is a part as it is, without being registered. None: an
            object must be registered.
    """

    def __init__(
        self, kind: str, parts: Mapping[str, Part] | None = None, takes: Callable[[Any], bool] | None = None
    ) -> None:
        super().__init__(parts or {})
        self.kind = kind
        self.takes = takes
        self.registered: dict[str, Any] = {}
        """Classes and functions that were registered by `add`, by name."""
        self._found: dict[str, Part] = {}  # by import path

    def register(self, name: str) -> Callable[[Definition], Definition]:
        """Return a decorator that registers a class or function as the part `name`.

        A second definition of the same class or function, as when a cell of a notebook runs again, replaces the first.
        Raises PartError if the name is taken or has a dot, or if the class or function cannot be such a part.
        """
        check_part_name(self.kind, name)

        def add(made: Definition) -> Definition:
            if self.takes is not None and not self.takes(made):
                raise PartError(f"{self.kind} {name!r}: {describe_definition(made)} is not one; {EXTENDING_HINT}")
            self.add(name, cast(Part, made), made)
            return made

        return add

    def add(self, name: str, part: Part, made_from: Any) -> None:
        """Add a part that was made from a class or function. Raises PartError if the name is taken."""
        if name in self and not is_same_definition(self.registered.get(name), made_from):
            raise PartError(f"{self.kind} {name!r} is already registered; choose another name")
        self[name] = part
        self.registered[name] = made_from
        self._found.clear()

    def find(self, name: str, others: Sequence[str] = ()) -> Part:
        """Return the part with a name or an import path.

        Raises ValueError if there is none. It then suggests a registered name or one of `others`.
        """
        if name in self:
            return self[name]
        if "." in name:
            if name not in self._found:
                self._found[name] = self._import(name)
            return self._found[name]
        import_installed()
        if name not in self:
            suggestion = suggest_name(name, list(dict.fromkeys([*others, *self])))
            hint = "" if suggestion.endswith("?") else f"; name a {self.kind} of your own by its import path"
            raise ValueError(f"unknown {self.kind} {name!r}; {suggestion}{hint}")
        return self[name]

    def _import(self, path: str) -> Part:
        found = import_object(path, self.kind)
        for name, registered in self.registered.items():
            if registered is found:
                return self[name]
        if self.takes is None or not self.takes(found):
            raise ValueError(f"{self.kind} {path!r} is not one; {EXTENDING_HINT}")
        return found


def is_same_definition(known: Any, made: Any) -> bool:
    """Return True if two classes or functions have the same place at the top of a module: one is made again."""
    places = [(getattr(one, "__module__", None), getattr(one, "__qualname__", "<unknown>")) for one in (known, made)]
    return places[0] == places[1] and "<" not in places[0][1]


def check_takes(function: Callable[..., Any], what: str, *arguments: str) -> None:
    """Raise PartError, which begins with `what`, unless a function can be called with these positional arguments."""
    call = ", ".join(arguments)
    if not callable(function):
        raise PartError(f"{what} must be a function of ({call}), got {function!r:.50}")
    try:
        taken = signature(function)
    except ValueError:  # some functions in C do not tell
        return
    try:
        taken.bind(*arguments)
    except TypeError as error:
        raise PartError(f"{what} is called with ({call}), which its arguments do not fit: {error}") from error


def describe_definition(made: Any) -> str:
    """Return the name of a class or function, or the type of another object."""
    return str(getattr(made, "__name__", f"a {type(made).__name__}"))


def check_part_name(kind: str, name: Any) -> None:
    """Raise PartError if a name to register is no text, or could be taken for an import path."""
    if not isinstance(name, str):
        raise PartError(
            f'{kind} {describe_definition(name)} is registered without a name; write @register("…") with one'
        )
    if "." in name:
        raise PartError(f"{kind} {name!r}: a name has no dot, which is for import paths; choose another name")


def import_object(path: str, what: str) -> Any:
    """Return the object with the import path `package.module.name`.

    Raises ValueError, which begins with `what`, if there is none. Other errors of the module pass.
    """
    module, _, name = path.rpartition(".")
    found = import_module(module, what, f" for {path!r}")
    if not hasattr(found, name):
        raise ValueError(f"{what}: {module} has no {name!r}; {suggest_name(name, dir(found))}")
    return getattr(found, name)


def import_module(name: str, what: str, purpose: str = "") -> ModuleType:
    """Import a module of the user.

    Raises ValueError, which begins with `what`, if there is no such module, if it is no Python, or if its parts cannot
    be registered. What else the module raises passes: it is an error of its code.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a module that this one imports is missing
        problem = f"{error}; it must lie in the current folder, or be installed"
    except SyntaxError as error:
        problem = f"{error.msg} ({error.filename}, line {error.lineno})"
    except (PartError, TypeError, ValueError) as error:
        if not isinstance(error, PartError) and is_package_name(name):
            raise
        problem = str(error)
    raise ValueError(f"{what}: cannot import {name!r}{purpose}: {problem}")


def is_package_name(name: str) -> bool:
    """Return True if a name can be that of a module."""
    return all(part.isidentifier() for part in name.split("."))


@cache
def import_installed() -> None:
    """Import the modules that installed packages name as their parts, once.

    Raises ValueError, naming the package, if one cannot be imported.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except IMPORT_ERRORS as error:
            package = point.dist.name if point.dist else point.value
            raise ValueError(
                f"the parts of the installed package {package!r} cannot be imported: {type(error).__name__}: {error}; "
                "repair or uninstall it"
            ) from error


def is_of_this_package(made: Any) -> bool:
    """Return True if a class or function is defined in this package."""
    return made.__module__.partition(".")[0] == __name__.partition(".")[0]


def describe_factory(factory: Any, architecture: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a class or function with its arguments, as in a config; both are plain text and numbers.

    Args:
        factory: A class or function, or one with arguments, as a config or `functools.partial` gives it.
        architecture: Further arguments, such as those by which hosts of a family differ.
    """
    arguments: dict[str, Any] = {}
    while isinstance(factory, partial):
        arguments = {**factory.keywords, **arguments}
        # A config gives partial(make, …, class), where `make` calls the class.
        factory = next((arg for arg in reversed(factory.args) if callable(arg)), factory.func)
    module, name = factory.__module__, factory.__qualname__
    package = module.rpartition(".")[0]
    if getattr(importlib.import_module(package) if package else None, name, None) is factory:
        module = package  # the public name, such as esper_lightning.hosts.CNN
    return {"class_path": f"{module}.{name}", "init_args": arguments | dict(architecture or {})}


def suggest_name(name: str, available: Sequence[str]) -> str:
    """Return the end of an error message for an unknown `name`: the most similar available name, or all of them."""
    matches = difflib.get_close_matches(name, available, n=1)
    if matches:
        return f"did you mean {matches[0]!r}?"
    return f"there are: {', '.join(repr(one) if ',' in one else one for one in available)}"
