"""Errors in code of the user are told from errors of this project, and the setting that names the code is found."""

import importlib
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from esper_lightning.blueprints import get_blueprint
from esper_lightning.hosts.attached import make_network
from esper_lightning.tasks.datamodule import concatenate_batches
from esper_lightning.user_code import describe, find_setting, find_user_part, named_paths

SOURCE = """
import torch
from esper_lightning.blueprints import get_blueprint


class Network:
    def __init__(self):
        raise ValueError("mine")


class Parts:
    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise KeyError("leaf")


def by_a_library():
    torch.zeros(2) @ torch.zeros(3)


def by_this_project():
    get_blueprint("nonsense", "image")


def by_another(function):
    function()
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Module of a user."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_parts.py").write_text(SOURCE)
    sys.path.append(str(folder))
    yield importlib.import_module("own_parts")
    sys.path.remove(str(folder))
    del sys.modules["own_parts"]


def raised_by(run: Callable[[], object]) -> BaseException:
    try:
        run()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def frames_of_user(error: BaseException, *named: str) -> list[str]:
    return [frame.name for frame in traceback.extract_tb(find_user_part(error, named))]


def test_what_code_of_the_user_raises_is_its_own_from_where_it_was_called(own: ModuleType) -> None:
    assert frames_of_user(raised_by(lambda: make_network(own.Network, {}))) == ["__init__"]
    assert frames_of_user(raised_by(lambda: make_network(own.by_a_library, {}))) == ["by_a_library"]


def test_what_this_project_raises_is_its_own_even_if_a_user_calls_it(own: ModuleType) -> None:
    error = raised_by(lambda: make_network(own.by_this_project, {}))

    assert find_user_part(error) is None
    assert find_user_part(raised_by(lambda: get_blueprint("nonsense", "image"))) is None


def test_a_library_is_called_by_whom_a_setting_names(own: ModuleType) -> None:
    error = raised_by(lambda: make_network(torch.nn.Linear, {"in_features": -1, "out_features": "x"}))
    wrong = raised_by(lambda: make_network(torch.nn.Conv2d, {"in_channels": 3, "out_channels": 4, "kernel_size": -1}))

    assert find_user_part(error) is None
    assert find_user_part(wrong) is None
    assert frames_of_user(wrong, "torch.nn.Conv2d")[0] == "__init__"
    assert find_user_part(wrong, ["torch.nn.Conv1d"]) is None


@pytest.mark.parametrize("workers", [0, 1])
def test_what_a_loader_raises_is_of_the_user_even_from_a_worker_process(own: ModuleType, workers: int) -> None:
    loader = DataLoader(own.Parts(), num_workers=workers)
    error = raised_by(lambda: concatenate_batches(lambda: loader, "own"))

    assert isinstance(error, KeyError)
    assert find_user_part(error) is not None


SETTINGS: dict[str, Any] = {
    "data": Namespace(
        task=Namespace(
            class_path="esper_lightning.tasks.FromDataModule",
            init_args=Namespace(data=Namespace(class_path="own_parts.Parts", init_args=None)),
        ),
        host=Namespace(class_path="own_parts.Network", init_args=Namespace()),
    ),
    "trainer": {"callbacks": [Namespace(class_path="torch.nn.Linear"), Namespace(class_path="own_parts.by_a_library")]},
    "best": Namespace(dirpath="own.parts", number=3, nothing=None),
}


def test_settings_name_the_classes_of_other_packages(own: ModuleType) -> None:
    assert list(named_paths(SETTINGS)) == [
        ("data.task.init_args.data", "own_parts.Parts"),
        ("data.host", "own_parts.Network"),
        ("trainer.callbacks[0]", "torch.nn.Linear"),
        ("trainer.callbacks[1]", "own_parts.by_a_library"),
    ]
    assert list(named_paths({"data": {"host": own.by_this_project}})) == [("data.host", "own_parts.by_this_project")]


@pytest.mark.slow
def test_the_setting_of_the_class_comes_before_another_one_of_its_module(own: ModuleType) -> None:
    def setting_of(run: Callable[..., object], settings: object = SETTINGS) -> tuple[str, str] | None:
        part = find_user_part(raised_by(lambda: make_network(run, {})))
        assert part is not None
        return find_setting(part, settings)

    assert setting_of(own.Network) == ("data.host", "own_parts.Network")
    assert setting_of(own.by_a_library) == ("trainer.callbacks[1]", "own_parts.by_a_library")
    assert setting_of(lambda: own.by_another(own.by_a_library)) == ("trainer.callbacks[1]", "own_parts.by_a_library")
    other = {"data": {"host": Namespace(class_path="own_parts.Parts")}}
    assert setting_of(own.Network, other) == ("data.host", "own_parts.Parts")
    assert setting_of(own.Network, {"data": {}}) is None and setting_of(own.Network, None) is None


def test_an_error_without_a_text_is_described_all_the_same() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    assert "Mute" in describe(Mute())
    assert describe(KeyError("x")) == "KeyError: 'x'"
    assert describe(SystemExit(3)) == "SystemExit: 3"
