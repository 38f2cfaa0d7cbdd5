"""Valid names nearest to a mistyped one."""

from collections.abc import Iterable
from difflib import SequenceMatcher, get_close_matches

MOST_SUGGESTIONS = 3
"""Largest number of names that one line suggests."""

LEAST_LIKENESS = 0.75
"""Least similarity (difflib's ratio) of an option, or of its last part, to a mistyped one."""


def nearest_name(name: str, available: Iterable[str]) -> str | None:
    """Return the first name that begins with `name`, else that ends in `.name`, else the one most alike, or None."""
    available = list(available)
    starting = [option for option in available if name and option.startswith(name)]
    ending = [option for option in available if option.endswith(f".{name}")]
    return next(iter(starting or ending or get_close_matches(name, available, n=1)), None)


def nearest_options(name: str, available: dict[str, str]) -> list[str]:
    """Return the names of the options that a mistyped name may stand for, the likeliest first.

    Options that begin with the name come before those that end in its last part, those that are spelt alike, and those
    whose meaning has the words of its last part; of each kind, those with more of the name's groups come first.

    Args:
        name: Mistyped name, without dashes.
        available: Meaning of each option, by name without dashes. Where nothing else decides, the order counts.
    """
    groups, _, last = name.rpartition(".")
    is_group = any(option.startswith(f"{groups.partition('.')[0]}.") for option in available)

    def by_groups(options: Iterable[str]) -> list[str]:
        found = sorted(options, key=lambda option: -_likeness(groups, option.rpartition(".")[0]) if is_group else 0.0)
        same = [option for option in found if groups and option.startswith(f"{groups}.")]
        return (same or found)[:MOST_SUGGESTIONS]

    starting = [option for option in available if option.startswith(name)]
    ending = [option for option in available if option.rpartition(".")[2] == last]
    close = get_close_matches(name, available, n=1, cutoff=LEAST_LIKENESS)
    alike = [option for option in available if _likeness(last, option.rpartition(".")[2]) >= LEAST_LIKENESS]
    words = set(last.lower().split("_"))
    meant = [
        option
        for option, meaning in available.items()
        if len(words) > 1 and words <= set(meaning.lower().replace(".", " ").split())
    ]
    spelt = [option for option in close if _likeness(last, option.rpartition(".")[2]) >= LEAST_LIKENESS]
    return starting[:1] or by_groups(ending) or spelt or by_groups(alike)[:1] or by_groups(meant)


def _likeness(first: str, second: str) -> float:
    return SequenceMatcher(None, first, second).ratio()
