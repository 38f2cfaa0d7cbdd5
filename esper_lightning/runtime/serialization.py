"""Files that are replaced whole, and checks of settings and states that another run or machine has written."""

import glob
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from itertools import count
from pathlib import Path
from textwrap import shorten
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

Settings = TypeVar("Settings")

GENERATOR_STATE_BYTES = {5056: "cpu", 16: "cuda"}
"""Type of device by the size of its generators' states in torch."""


def replace_file(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with the path of a draft, flush it and rename it to `path`; remove drafts of killed processes."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        try:
            os.kill(int(left.suffixes[-2].removeprefix(".")), 0)  # asks whether the process is there
        except ProcessLookupError:
            left.unlink(missing_ok=True)
        except (ValueError, PermissionError):
            continue
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # two processes may write one file
    draft.unlink(missing_ok=True)
    try:
        write(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_and_keep(path: Path, text: str) -> None:
    """Replace a file by `text`, with a copy of the earlier file under the first free name like `name.1.suffix`."""
    if path.is_file():
        numbered = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
        shutil.copy2(path, next(other for other in numbered if not other.exists()))
    replace_file(path, lambda draft: draft.write_text(text))


def excerpt(value: Any, length: int = 200) -> str:
    """Return the beginning of a value's text, for an error message."""
    return shorten(str(value), length, placeholder=" …")


def generator_device(state: Any) -> str | None:
    """Return the type of device of the generator that a saved state is of; None if it is of none."""
    return GENERATOR_STATE_BYTES.get(state.numel()) if isinstance(state, Tensor) else None


def check_generator_state(saved: Tensor, generator: torch.Generator) -> Tensor:
    """Return the saved state of a generator. Raises ValueError if it is of another type of device."""
    if (found := generator_device(saved)) not in (None, generator.device.type):
        raise ValueError(f"the generator's state is of a generator on {found}, not on {generator.device.type}")
    # A clone, because torch reads the storage of a state from its start, which is wrong for a view.
    return saved.cpu().clone()


REMOVED_SETTINGS = {
    *("advantage_floor", "alpha_target", "auto_blend", "auto_probation", "clip", "masks", "max_gradient_norm"),
    *("max_seeds", "min_alpha_reached", "min_potential", "probation_share", "probation_ticks", "styles"),
}
"""Settings of earlier versions that saved data may still name."""


def load_settings(kind: type[Settings], saved: Any) -> Settings:
    """Return settings of type `kind`, a dataclass, given such settings or the plain data that `asdict` makes of them.

    Names that the data lack have their defaults. Raises ValueError for a name that has never existed, and for a value
    out of range.
    """
    if isinstance(saved, kind):
        return saved
    types, values = get_type_hints(kind), {name: value for name, value in saved.items() if name not in REMOVED_SETTINGS}
    for name, value in values.items():
        hint = types.get(name)
        nested: Any = next((part for part in (hint, *get_args(hint)) if is_dataclass(part)), None)
        if nested is not None and isinstance(value, Mapping):
            values[name] = load_settings(nested, value)
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"the settings {kind.__name__} do not fit: {error}") from error
