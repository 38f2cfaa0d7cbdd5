"""Excerpts of values: short, whatever the value, and made without the whole text."""

import time
from typing import Any

import pytest

from esper_lightning.serialization.excerpt import excerpt


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (6, "6"),
        ("a host of 7 parameters", "a host of 7 parameters"),
        (["SLOW", 0.5, None], "['SLOW', 0.5, None]"),
        ({"a": (1, 2)}, "{'a': (1, 2)}"),
        ("x" * 200, "x" * 200),
        ("x" * 201, "x" * 199 + "…"),
    ],
)
def test_a_short_value_is_shown_whole_and_a_long_text_cut(value: Any, shown: str) -> None:
    assert excerpt(value) == shown


def doubled(levels: int) -> list[Any]:
    """Return lists in lists, which stand for 2 ** levels texts of half a megabyte."""
    value: list[Any] = ["x" * 500_000]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "value", [["x" * 500_000] * 20_000, {"k": ["x" * 500_000] * 20_000}, doubled(40), "x" * 10**7, list(range(10**6))]
)
def test_a_value_whose_text_is_gigabytes_long_is_cut_before_it_is_formatted(value: Any) -> None:
    started = time.process_time()

    assert len(excerpt(value, 50)) <= 50
    assert time.process_time() - started < 2.0
