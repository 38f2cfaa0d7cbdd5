"""Selection of the cases of a long table for the fast tier; the others are marked slow and run with `make test-all`."""

from collections.abc import Callable, Container, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from _pytest.mark import ParameterSet


def rest_is_slow(cases: Iterable[Any], fast: Container[Any] | Callable[[Any], bool]) -> list[ParameterSet]:
    """Return all `cases` as parameters of a test, marked slow unless they are in `fast` or satisfy it.

    A case that is a tuple gives a value to each argument of the test, any other case to its only one."""
    chosen = fast if callable(fast) else fast.__contains__
    cases = list(cases)
    assert any(chosen(case) for case in cases), "some case must run in the fast tier"
    return [_parameters(case, slow=not chosen(case)) for case in cases]


def pairs_of(*axes: Sequence[Any]) -> list[ParameterSet]:
    """All combinations of the values in `axes`; the fast tier has enough of them for each pair of values to meet.

    Most defects that need two settings to meet show in one of these combinations, which are far fewer than all: 4 × 4 ×
    4 are 64, of which 16 to 20 have all pairs (Kuhn, Wallace, Gallo 2004, doi:10.1109/TSE.2004.24).
    """
    every = list(product(*axes))
    missing = {pair for case in every for pair in _pairs(axes, case)}
    fast = set()
    while missing:  # greedy: the combination with most pairs that have not met yet
        best = max(range(len(every)), key=lambda i: len(missing & _pairs(axes, every[i])))
        fast.add(best)
        missing -= _pairs(axes, every[best])
    return [_parameters(case, slow=i not in fast) for i, case in enumerate(every)]


def _pairs(axes: Sequence[Sequence[Any]], case: Sequence[Any]) -> set[tuple[tuple[int, int], ...]]:
    """Return the pairs of (axis, index of the value) in a combination."""
    places = [(axis, list(values).index(value)) for axis, (values, value) in enumerate(zip(axes, case, strict=True))]
    return set(combinations(places, 2))


def _parameters(case: Any, slow: bool) -> ParameterSet:
    values = case if type(case) is tuple else (case,)
    return pytest.param(*values, marks=[pytest.mark.slow] if slow else [])
