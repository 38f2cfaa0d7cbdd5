"""YAML in which no mapping has a key twice: otherwise the last value wins, and the first is ignored silently."""

from collections import Counter
from typing import Any

import yaml
from jsonargparse import get_loader, set_loader

from esper_lightning.cli.yaml_limits import check_limits

INTEGER_TAG = "tag:yaml.org,2002:int"

MAX_DIGITS = 15
"""Largest number of characters of an integer as a key: integers from 2^61 on share hashes with smaller ones, so the
time to read many of them grows with the square of their number."""

_load_yaml = get_loader("yaml")


def refuse_duplicate_keys() -> None:
    """Make every parser refuse configs and flags in which a mapping has a key twice, or that exceed the limits."""
    set_loader("yaml", load_with_unique_keys, exceptions=(yaml.YAMLError,))


def load_with_unique_keys(text: str) -> Any:
    """Return the value of a YAML text as jsonargparse does.

    Raises YAMLError if a mapping has a key twice, or if the text exceeds the limits of `check_limits`.
    """
    check_limits(text)
    if text.count(":") > 1:  # most texts are the value of one flag
        check_unique_keys(text)
    return _load_yaml(text)


def check_unique_keys(text: str) -> None:
    """Raise YAMLError, with the line, if a mapping in the text has a key twice, or a very large number as a key."""
    nodes = [yaml.compose(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    seen = set[int]()  # an alias leads to a node that was visited already
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.SequenceNode):
            nodes += node.value
        elif isinstance(node, yaml.MappingNode):
            nodes += [value for _, value in node.value]
            counts = Counter((key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    continue
                line = key.start_mark.line + 1
                if key.tag == INTEGER_TAG and len(key.value) > MAX_DIGITS:
                    raise yaml.YAMLError(
                        f"key {key.value!r:.80} in line {line} is a number of more than {MAX_DIGITS} digits"
                    )
                if counts[key.tag, key.value] > 1:
                    raise yaml.YAMLError(f"key {key.value!r:.80} is given twice, first in line {line}; remove one")
