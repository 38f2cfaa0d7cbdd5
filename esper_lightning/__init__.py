"""Neural networks that grow while they train, under a learned policy.

Importing this module imports nothing else, so `esper_lightning.growth` and the modules it needs work without Lightning,
in any training loop. The names of `EXPORTS` are imported at their first use.
"""

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

if not (Path(__file__).parent / "callbacks").is_dir():
    # `callbacks` lies at the top of the repository; a clone without symbolic links has a text file for the link.
    __path__.append(str(Path(__file__).parents[1]))

EXPORTS = {
    "train": "api",
    "evaluate": "api",
    "grow": "api",
    "from_config": "cli",
    "default_callbacks": "callbacks",
    "TamiyoModule": "module",
    "EvaluationConfig": "evaluation.comparison",
    "HostPoolData": "datamodules.hosts",
    "HostPool": "envs",
    "EnvConfig": "envs",
    "ActionConfig": "envs",
    "HostTraining": "envs.host_training",
    "LifecycleConfig": "growth.gates",
    "RewardConfig": "rewards",
    "PPOConfig": "ppo.losses",
    "PolicyConfig": "tamiyo.policy",
    "Grow": "callbacks",
    "load_controller": "evaluation.checkpoints",
}
"""Module of each public name, below this package."""


__all__ = [*EXPORTS, "__version__"]  # pyright: ignore[reportUnsupportedDunderAll]  # the stub lists them


def __getattr__(name: str) -> Any:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{EXPORTS[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *EXPORTS])
