"""Neural networks that grow while they train, under a learned policy.

Importing this module imports nothing else, so `esper_lightning.growth` and the modules it needs work without Lightning,
in any training loop. The names of `EXPORTS` are imported at their first use: it takes seconds.
"""

import importlib
import re
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

HERE = Path(__file__).parent

if not (HERE / "callbacks").is_dir():
    # `callbacks` lies at the top of the repository; a clone without symbolic links has a text file for the link.
    __path__.append(str(HERE.parent))

EXPORTS = {
    name: module
    for module, name in re.findall(r"^from (\S+) import (\w+)", (HERE / "__init__.pyi").read_text(), re.MULTILINE)
}
"""Module of each public name: those of the stub, which type checkers and editors read."""

__all__ = [*EXPORTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # the stub lists them


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
