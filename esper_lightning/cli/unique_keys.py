"""YAML in which no mapping has a key twice: otherwise the last value wins, and the first is ignored silently."""

from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from esper_lightning.cli.options import expand_schedules
from esper_lightning.cli.yaml_limits import check_limits, check_unique_keys

_load_yaml = get_loader("yaml")


def refuse_duplicate_keys() -> None:
    """Make every parser refuse configs and flags in which a mapping has a key twice, or that exceed the limits."""
    set_loader("yaml", load_with_unique_keys, exceptions=(yaml.YAMLError,))


def load_with_unique_keys(text: str) -> Any:
    """Return the value of a YAML text as jsonargparse does; a number in place of a schedule is a constant one.

    Raises YAMLError if a mapping has a key twice, or if the text exceeds the limits of `check_limits`.
    """
    check_limits(text)
    if text.count(":") > 1:  # most texts are the value of one flag
        check_unique_keys(text)
    return expand_schedules(_load_yaml(text))
