"""The fast tier has every pair of values, and no case is lost to the slow tier."""

from itertools import combinations, product

import pytest
from _pytest.mark import ParameterSet

from tests.tiers import pairs_of, rest_is_slow

AXES = ("abc", [1, 2, 3, 4], [True, False], [None, "x", "y"])


def fast(cases: list[ParameterSet]) -> list[tuple[object, ...]]:
    return [case.values for case in cases if not case.marks]


def test_every_pair_of_values_meets_in_the_fast_tier() -> None:
    cases = pairs_of(*AXES)

    assert [case.values for case in cases] == list(product(*AXES)), "the slow tier has the rest"
    assert len(fast(cases)) < 20
    for (i, these), (j, those) in combinations(enumerate(AXES), 2):
        assert {(case[i], case[j]) for case in fast(cases)} == set(product(these, those))


def test_cases_outside_the_fast_tier_are_slow() -> None:
    assert fast(rest_is_slow(range(4), {1, 3})) == [(1,), (3,)]
    assert fast(rest_is_slow([("a", 1), ("b", 2)], lambda case: case[1] == 2)) == [("b", 2)]
    with pytest.raises(AssertionError, match="some case must run"):
        rest_is_slow(range(4), {7})
