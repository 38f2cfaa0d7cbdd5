"""Parts by name: those of this package, those of modules that the user imports, and those of installed packages.

A setting names a part by the name under which it is registered, or by its import path, as in `mine.Patient`. Each kind
of part has one registry. A part that settings do not name changes nothing, however many are registered.
"""

import difflib
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

ENTRY_POINTS = "esper_lightning.plugins"
"""Group of the entry points of installed packages; each names a module that registers parts."""

PLUGIN_SETTINGS = frozenset({"against", "blueprints", "executor", "mode"})
"""Last words of the settings whose texts may be import paths of parts; what is not trusted is checked in these."""

IMPORTS = "imports"
"""Setting with the modules to import before all others are read."""

Part = TypeVar("Part")


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

    def add(self, name: str, part: Part, made_from: Any) -> None:
        """Add a part that was made from a class or function. Raises ValueError if the name is taken or has a dot."""
        check_part_name(self.kind, name)
        if name in self:
            raise ValueError(f"{self.kind} {name!r} is already registered; choose another name")
        self[name] = part
        self.registered[name] = made_from

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
            raise ValueError(
                f"unknown {self.kind} {name!r}; {suggest_name(name, list(dict.fromkeys([*others, *self])))}"
            )
        return self[name]

    def _import(self, path: str) -> Part:
        found = import_object(path, self.kind)
        for name, registered in self.registered.items():
            if registered is found:
                return self[name]
        if self.takes is None or not self.takes(found):
            raise ValueError(f"{self.kind} {path!r} is not one; register it, as docs/guides/extending.md shows")
        return found


def check_part_name(kind: str, name: str) -> None:
    """Raise ValueError if a name to register could be taken for an import path."""
    if "." in name:
        raise ValueError(f"{kind} {name!r}: a name has no dot, which is for import paths; choose another name")


def import_object(path: str, what: str) -> Any:
    """Return the object with the import path `package.module.name`.

    Raises ValueError, which begins with `what`, if there is none. Other errors of the module pass.
    """
    module, _, name = path.rpartition(".")
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as error:
        raise ValueError(f"{what}: cannot import {module!r} for {path!r}: {error}") from error
    if not hasattr(found, name):
        raise ValueError(f"{what}: {module} has no {name!r}; {suggest_name(name, dir(found))}")
    return getattr(found, name)


def module_names(value: Any) -> list[str]:
    """Return the modules that a value of the setting names. Raises ValueError if it is no list of names."""
    names = value.split(",") if isinstance(value, str) else [] if value is None else value
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{IMPORTS} must be a list of modules, got {value!r:.80}")
    return [name.strip() for name in names]


_imported: dict[str, None] = {}  # names of modules in the order of their import


def imported_modules() -> tuple[str, ...]:
    """Return the names of the modules that `import_modules` has imported, for a further process."""
    return tuple(_imported)


def import_modules(names: Sequence[str]) -> None:
    """Import modules that register parts. Raises ValueError, naming the module, if one cannot be imported."""
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, ValueError) as error:
            raise ValueError(f"{IMPORTS}: cannot import {name!r}: {error}") from error
        _imported[name] = None


@cache
def import_installed() -> None:
    """Import the modules that installed packages name as their parts, once.

    Raises ValueError, naming the package, if one cannot be imported.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except ImportError as error:
            package = point.dist.name if point.dist else point.value
            raise ValueError(
                f"the parts of the installed package {package!r} cannot be imported: {error}; repair or uninstall it"
            ) from error


def is_of_this_package(made: Any) -> bool:
    """Return True if a class or function is defined in this package."""
    return made.__module__.partition(".")[0] == __name__.partition(".")[0]


def suggest_name(name: str, available: Sequence[str]) -> str:
    """Return the end of an error message for an unknown `name`: the most similar available name, or all of them."""
    matches = difflib.get_close_matches(name, available, n=1)
    return f"did you mean {matches[0]!r}?" if matches else f"there are: {', '.join(available)}"
