"""A config of hosts that are trained in a moment."""

from pathlib import Path
from typing import Any

import yaml

from tests.runs import CONFIGS


def write_config(path: Path, **groups: dict[str, Any]) -> Path:
    """Write configs/smoke.yaml with two minibatches, two ticks and further settings, and return the file."""
    settings = yaml.safe_load((CONFIGS / "smoke.yaml").read_text())
    settings["data"]["env"] |= {"horizon": 2, "executor": "loop", "training": {"batches": 2}}
    for name, group in groups.items():
        settings[name] = settings.get(name, {}) | group
    path.write_text(yaml.safe_dump(settings))
    return path
