"""Neural networks that grow while they train, under a learned policy.

Importing this module imports nothing else, so `esper_lightning.growth` and the modules it needs work without Lightning,
in any training loop. `load_controller` is imported at its first use.
"""

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "load_controller":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(".evaluation.checkpoints", __name__).load_controller
