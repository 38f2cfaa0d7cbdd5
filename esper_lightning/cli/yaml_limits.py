"""Limits of YAML texts, held before they are read: a text of 1 kB may otherwise take any amount of memory."""

from collections import Counter
from collections.abc import Iterator

import yaml

MAX_SIZE = 2**20
"""Largest number of characters and values in a text, in which every alias counts as all that it stands for."""

MAX_DEPTH = 50
"""Largest number of lists and mappings inside each other. Settings of this project have at most 12."""

TOO_DEEP = f"values are nested more than {MAX_DEPTH} deep"

HARMLESS_LENGTH = 100
"""Length in characters up to which a text without aliases keeps the limits, or nearly."""

INTEGER_TAG = "tag:yaml.org,2002:int"

MAX_DIGITS = 15
"""Largest number of characters of an integer as a key: integers from 2^61 on share hashes with smaller ones, so the
time to read many of them grows with the square of their number."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def check_limits(text: str) -> None:
    """Raise YAMLError if a text is too long, nested too deeply, or has aliases that repeat too much or themselves."""
    if len(text) <= HARMLESS_LENGTH and "*" not in text:
        return
    if len(text) > MAX_SIZE:
        raise yaml.YAMLError(f"the text has {len(text)} characters, more than {MAX_SIZE}")
    size = 0
    sizes: dict[str, int] = {}  # of what an anchor names, once it is complete
    around: list[tuple[str | None, int]] = []  # lists and mappings that are not complete: anchor, and `size` before
    for event in _events(text):
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise yaml.YAMLError(f"alias {event.anchor[:50]!r} stands for what is around it, or for nothing")
            size += sizes[event.anchor]
        elif isinstance(event, yaml.ScalarEvent):
            length = max(1, len(event.value))
            size += length
            if event.anchor is not None:
                sizes[event.anchor] = length
        elif isinstance(event, yaml.CollectionStartEvent):
            if event.anchor is not None:
                sizes.pop(event.anchor, None)
            around.append((event.anchor, size))
            size += 1
            if len(around) > MAX_DEPTH:
                raise yaml.YAMLError(TOO_DEEP)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
            if anchor is not None:
                sizes[anchor] = size - before
        if size > MAX_SIZE:
            raise yaml.YAMLError(f"aliases make the text longer than {MAX_SIZE} characters")


def _events(text: str) -> Iterator[yaml.Event]:
    """Yield the events of a text; raise YAMLError with `TOO_DEEP` where the loader refuses its depth by itself.

    libyaml 0.2.6 refuses more than 1000 levels. It reads ahead, so this may come before the event of level 51.
    """
    try:
        yield from yaml.parse(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        if error.problem == "exceeded maximum nesting depth":
            raise yaml.YAMLError(TOO_DEEP) from error
        raise


def check_unique_keys(text: str) -> None:
    """Raise YAMLError, with the line, if a mapping in the text has a key twice, or a very large number as a key."""
    nodes = [yaml.compose(text, Loader=_Loader)]
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
