"""Limits of YAML texts, held before they are read: a text of 1 kB may otherwise take any amount of memory."""

import yaml

MAX_SIZE = 2**20
"""Largest number of characters and values in a text, in which every alias counts as all that it stands for."""

MAX_DEPTH = 50
"""Largest number of lists and mappings inside each other. Settings of this project have at most 12."""

HARMLESS_LENGTH = 100
"""Length in characters up to which a text without aliases keeps the limits, or nearly."""

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
    for event in yaml.parse(text, Loader=_Loader):
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
                raise yaml.YAMLError(f"values are nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = around.pop()
            if anchor is not None:
                sizes[anchor] = size - before
        if size > MAX_SIZE:
            raise yaml.YAMLError(f"aliases make the text longer than {MAX_SIZE} characters")
