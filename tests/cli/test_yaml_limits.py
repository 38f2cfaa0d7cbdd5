"""A YAML text that would take much memory or time is refused before it is read; texts of a usual size are not."""

import time

import pytest
import yaml

from esper_lightning.cli.yaml_limits import MAX_DEPTH, MAX_SIZE, check_limits
from tests.runs import CONFIGS


def bomb(levels: int, width: int) -> str:
    """Return a text whose last value has `width ** levels` elements."""
    lines = [f"a0: &a0 [{', '.join(['0'] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


EXCESSIVE = {
    "nine levels of ten aliases": (bomb(9, 10), "aliases make the text longer"),
    "forty levels of two aliases": (bomb(40, 2), "aliases make the text longer"),
    "few aliases of a long text": (f"a: &a {'x' * 2**18}\nb: [*a, *a, *a, *a]", "aliases make the text longer"),
    "a merge of what is merged": (
        "a0: &a0 {k: v}\n" + "\n".join(f"a{n}: &a{n} {{x: *a{n - 1}, y: *a{n - 1}}}" for n in range(1, 30)),
        "aliases make the text longer",
    ),
    "a value that holds itself": ("data: &d {also: *d}", "alias 'd' stands for what is around it"),
    "a list that holds itself": ("&d [*d]", "alias 'd' stands for what is around it"),
    "an anchor that is given again inside": ("a: &a 1\nb: &a [*a]", "alias 'a' stands for what is around it"),
    "an alias of nothing": ("a: *nothing", "'nothing'"),
    "brackets": ("[" * 3000, f"nested more than {MAX_DEPTH} deep"),
    "brackets that close": (f"a: {'[' * 3000}{']' * 3000}", f"nested more than {MAX_DEPTH} deep"),
    "braces": ("{a: " * 3000, f"nested more than {MAX_DEPTH} deep"),
    "indented lines": ("\n".join(" " * n + "a:" for n in range(500)), f"nested more than {MAX_DEPTH} deep"),
    "keys that are mappings": ("? " * 500 + "a", f"nested more than {MAX_DEPTH} deep"),
    "dashes": ("- " * 500 + "a", f"nested more than {MAX_DEPTH} deep"),
    "characters": ("x" * (MAX_SIZE + 1), f"has {MAX_SIZE + 1} characters"),
}


@pytest.mark.parametrize(("text", "named"), EXCESSIVE.values(), ids=list(EXCESSIVE))
def test_a_text_that_would_take_much_memory_is_refused_at_once(text: str, named: str) -> None:
    started = time.process_time()
    with pytest.raises(yaml.YAMLError) as refused:
        check_limits(text)

    assert named in str(refused.value)
    assert len(str(refused.value)) < 200
    assert time.process_time() - started < 5.0


@pytest.mark.parametrize(
    "text",
    [path.read_text() for path in sorted(CONFIGS.glob("*.yaml"))]
    + [
        "",
        bomb(3, 10),
        "a: &a {b: 1}\nc: {<<: *a, d: *a}\ne: *a",
        "[" * MAX_DEPTH + "]" * MAX_DEPTH,
        "x" * MAX_SIZE,
        "2 * 3",
        "block*.pool",
    ],
)
def test_a_text_of_usual_size_is_accepted(text: str) -> None:
    check_limits(text)
