"""Names of rivals."""

import pytest

from esper_lightning.evaluation.checkpoints import rival_names


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/runs/a/best.ckpt", "/runs/a/last.ckpt"], ["best.ckpt", "last.ckpt"]),
        (["/runs/a/best.ckpt", "/runs/b/best.ckpt"], ["a/best.ckpt", "b/best.ckpt"]),
        (["/a/v0/files/x", "/b/v0/files/x", "/b/v1/files/x"], ["a/v0/x", "b/v0/x", "v1/x"]),
        (["/b/x", "/a/b/x"], ["x", "a/x"]),
        (["/x", "/b/x"], ["x", "b/x"]),
        (["/runs/policy/best.ckpt"], ["policy/best.ckpt"]),
    ],
)
def test_a_rival_is_named_by_its_file_and_by_the_folders_that_tell_it_from_others(
    paths: list[str], names: list[str]
) -> None:
    compared = [] if len(paths) > 1 else ["/runs/other/best.ckpt"]

    assert rival_names(paths, compared) == [f"rival {name}" for name in names]
