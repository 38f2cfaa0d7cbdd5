"""Tells errors in code of the user, which a setting names, from errors of this project.

A frame of a traceback is code of the user if its file belongs neither to this project nor to an installed library.
"""

import site
import sys
import sysconfig
import traceback
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

OUR_PACKAGE = "esper_lightning"

LOADER_PACKAGE = "torch.utils.data"
"""Package whose frames count as code of the user: this project makes no loader, and an error in a loader's worker
process has no frames of the user in this process."""

LIBRARY_FOLDERS = tuple(
    {
        str(Path(folder).resolve())
        for folder in (
            *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            *site.getsitepackages(),
            site.getusersitepackages(),
        )
    }
)
"""Folders of installed libraries."""


def find_user_part(error: BaseException, named: Iterable[str] = ()) -> TracebackType | None:
    """Return the part of an error's traceback in code of the user, or None if that code has not raised it.

    The innermost frame that is not a library's decides.

    Args:
        error: An exception that was raised.
        named: Import paths that settings name. The class or function of such a path counts as code of the user even
            if a library defines it.
    """
    places = list(_places(error.__traceback__))
    definitions = {found for path in named for found in _definitions(path)}
    for number in reversed(range(len(places))):
        frame = places[number].tb_frame
        if _package(frame) == OUR_PACKAGE:
            return None
        if _is_user_code(frame) or any(_defines(definition, frame) for definition in definitions):
            inside = range(number)
            after_ours = max((i + 1 for i in inside if _package(places[i].tb_frame) == OUR_PACKAGE), default=0)
            first = next(i for i in range(after_ours, number + 1) if i == number or _is_user_code(places[i].tb_frame))
            return places[first]
    return None


def find_setting(part: TracebackType, config: Any) -> tuple[str, str] | None:
    """Return the setting that names the code in a traceback, with its import path, or None if there is none.

    Args:
        part: Traceback that begins in code of the user.
        config: Nested settings.
    """
    frames = [place.tb_frame for place in _places(part)][::-1]
    paths = list(named_paths(config))
    for matches in (_is_of_object, _is_of_module, _is_of_package):
        for frame in frames:
            for setting, path in paths:
                if matches(path, frame):
                    return setting, path
    return None


def named_paths(config: Any) -> Iterator[tuple[str, str]]:
    """Yield every setting that names a class or function of another package, with the import path."""
    for setting, path in _all_named_paths(config, ""):
        if path.partition(".")[0] != OUR_PACKAGE:
            yield setting, path


def _all_named_paths(config: Any, setting: str) -> Iterator[tuple[str, str]]:
    if callable(config) and hasattr(config, "__qualname__"):
        yield setting, f"{config.__module__}.{config.__qualname__}"
    elif isinstance(config, str):
        module, _, name = config.rpartition(".")
        is_import_path = module and setting.endswith((".class_path", ".network"))  # even if its import has failed
        if is_import_path or callable(getattr(sys.modules.get(module), name, None)):
            yield setting.removesuffix(".class_path"), config
    elif isinstance(config, list | tuple):
        for number, part in enumerate(config):
            yield from _all_named_paths(part, f"{setting}[{number}]")
    elif isinstance(config, Mapping | Namespace):
        parts = config if isinstance(config, Mapping) else vars(config)
        for name, part in parts.items():
            yield from _all_named_paths(part, f"{setting}.{name}" if setting else str(name))


def describe(error: BaseException) -> str:
    """Return `KeyError: 'x'`; an error whose own text cannot be made is no further error."""
    return traceback.format_exception_only(error)[-1].strip()


def _places(part: TracebackType | None) -> Iterator[TracebackType]:
    while part is not None:
        yield part
        part = part.tb_next


def _package(frame: FrameType) -> str:
    """Return the top-level package of a frame; that of `python -m package` is `__main__`'s own."""
    names = frame.f_globals
    return str(names.get("__package__") or names.get("__name__")).partition(".")[0]


def _is_user_code(frame: FrameType) -> bool:
    name, file = str(frame.f_globals.get("__name__")), frame.f_code.co_filename
    if name == LOADER_PACKAGE or name.startswith(f"{LOADER_PACKAGE}."):
        return True
    if file.startswith("<") or _package(frame) == OUR_PACKAGE:
        return False
    path = Path(file).resolve()
    return not any(path.is_relative_to(folder) for folder in LIBRARY_FOLDERS)


def _definitions(path: str) -> set[tuple[str, str]]:
    """Return module and name of the object with an import path: those of the path, and where it is defined."""
    module, _, name = path.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    own = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
    return {(module, name), *([own] if None not in own else [])}  # pyright: ignore[reportReturnType]


def _defines(definition: tuple[str, str], frame: FrameType) -> bool:
    module, name = definition
    return frame.f_globals.get("__name__") == module and _is_within(frame.f_code, name)


def _is_within(code: CodeType, name: str) -> bool:
    return code.co_qualname == name or code.co_qualname.startswith(f"{name}.")


def _is_of_object(path: str, frame: FrameType) -> bool:
    return any(_defines(definition, frame) for definition in _definitions(path))


def _is_of_module(path: str, frame: FrameType) -> bool:
    return any(module == frame.f_globals.get("__name__") for module, _ in _definitions(path))


def _is_of_package(path: str, frame: FrameType) -> bool:
    return path.partition(".")[0] == _package(frame)
