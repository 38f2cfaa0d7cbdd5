"""Mistakes in parts of the user: one line names the part, the problem and the way out, or whose the traceback is."""

import importlib
import shlex
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from esper_lightning.__main__ import main
from esper_lightning.errors import EXIT_USER_CODE
from tests.runs import TINY, SharedParserCLI, forgotten_parts
from tests.tiers import rest_is_slow

PARTS = """
import math

import torch
from torch import nn

from esper_lightning import blueprints, controllers, rewards
from esper_lightning.blueprints import Residual
from esper_lightning.envs import Op
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.growth import SeedSlot
from esper_lightning.tasks import Digits, Split, Task, TaskData
from esper_lightning.tasks.task import Measures


@rewards.register("shapeless", ["gain"])
def shapeless(step, config):
    return {"gain": torch.zeros(3)}


@rewards.register("mistyped", ["gain"])
def mistyped(step, config):
    return {"gain": step.acuracy}


class Own:
    rows = [[0]]

    def reset(self, pool):
        self.tick = 0

    def act(self, pool):
        self.tick += 1
        return to_action(self.rows * pool.n_envs, pool.device)


class Early(Own):
    rows = [[int(Op.FOSSILIZE)]]


class Late(Own):
    def act(self, pool):
        row = [int(Op.FOSSILIZE if self.tick else Op.WAIT)]
        self.tick += 1
        return to_action([row] * pool.n_envs, pool.device)


class Far(Own):
    rows = [[1, 99]]


class Wide(Own):
    rows = [[0] * 9]


class Flat(Own):
    def act(self, pool):
        return to_action([0] * pool.n_envs, pool.device)


class Few(Own):
    def act(self, pool):
        return to_action([[0]], pool.device)


class Silent(Own):
    def act(self, pool):
        pass


class Raises(Own):
    def act(self, pool):
        return pool.hosts


def blueprint(name):
    return blueprints.register(name, {"image"}, parameters=lambda c: c * c, flops=lambda c, n: 2 * n * c * c)


@blueprint("wider")
def wider(channels):
    return Residual(nn.Conv2d(channels, channels + 1, 1))


@blueprint("nothing")
def nothing(channels):
    pass


@blueprint("miscounted")
def miscounted(channels):
    return Residual(nn.Conv2d(channels, channels, 3, padding=1))


class Crooked(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1, bias=False)

    def start_as_identity(self):
        pass

    def forward(self, x):
        return self.convolution(x)


@blueprint("crooked")
def crooked(channels):
    return Crooked(channels)


class TwoClasses(Task):
    def load(self):
        return TaskData(*Digits(validation=100, test=100).load()[:3], classes=2)


class MeanLoss(Digits):
    def measure(self, outputs, targets):
        measures = super().measure(outputs, targets)
        return Measures(measures.loss.mean(), measures.correct)


class Host(nn.Module):
    def __init__(self, input_shape, outputs):
        super().__init__()
        width = math.prod(input_shape)
        self.slot, self.head = SeedSlot("only", "vector", width), nn.Linear(width, self.count(outputs))

    def count(self, outputs):
        return outputs

    def forward(self, x):
        return self.head(self.slot(x.flatten(1)))


class FewOutputs(Host):
    def count(self, outputs):
        return outputs - 3


class NoSlots(Host):
    def __init__(self, input_shape, outputs):
        super().__init__(input_shape, outputs)
        self.slot = nn.Identity()


class Lost(Host):
    def forward(self, x):
        return self.haed(x)


class NoPart:
    pass
"""

FILES = {
    "own.py": PARTS,
    "no_python.py": "def f(:",
    "needy.py": "import not_installed",
    "zero.py": "1 / 0",
}

REFUSED = {
    "--model.evaluation.against=[own.Early]": "controller 'own.Early': host 0: FOSSILIZE block1.pool is masked; ",
    "--model.evaluation.against=[own.Far]": "controller 'own.Far': host 0: (1, 99, 0, 0, 0, 0, 0, 0) is no action",
    "--model.evaluation.against=[own.Wide]": "controller 'own.Wide': an action has at most 8 indices, op, slot",
    "--model.evaluation.against=[own.Flat]": "controller 'own.Flat': the action of one host is a list, as [op, slot, bl",
    "--model.evaluation.against=[own.Few]": "for each of the 2 hosts; got 8 × torch.int64 of shape (1,)",
    "--model.evaluation.against=[own.Silent]": "an action is made by to_action([[op, slot, blueprint, …], …], pool.dev",
    "--model.evaluation.against=[own.NoPart]": "controller 'own.NoPart': NoPart has no method 'reset'; give it one",
    "--data.env.actions.blueprints=[own.wider]": "must match the size of tensor b (5)",
    "--data.env.actions.blueprints=[own.nothing]": "blueprint 'nothing' built a NoneType; return an nn.Module",
    "--data.env.actions.blueprints=[own.miscounted]": "parameters(4) returns 16, and its module for 4 channels has",
    "--data.task=own.TwoClasses": "correct `classes` or the targets, or get the data set again",
    "--data.task=own.MeanLoss": "task MeanLoss: measure returned as loss shape () for 32 samples; return Measures",
    "--data.task=own.NoPart": "data.task: own.NoPart is no subclass of Task; derive it from Task",
    "--data.task=own.TwoClasse": "data.task: own has no 'TwoClasse'; did you mean 'TwoClasses'?",
    "--data.task=nowhere.Task": "data.task: cannot import 'nowhere' for 'nowhere.Task': No module named 'nowhere'; it",
    "--data.host=own.FewOutputs": "the host's outputs have shape (32, 7), and the task has 10 classes; end the",
    "--data.host=own.NoSlots": "the host has no slots; name at least one where seeds may grow",
    "--data.host=own.NoPart": "data.host: own.NoPart is no nn.Module, nor a function annotated as returning",
    "--data.host=own.blueprint": "data.host: own.blueprint is no nn.Module, nor a function annotated",
    "--imports=no_python": "imports: cannot import 'no_python': invalid syntax (",
    "--data.host=no_python.Host": "no_python.py, line 1: invalid syntax; correct this file",
}
"""Mistakes that are answered before a run begins, with a part of the answer."""

IN_THE_RUN = {
    "--data.env.reward.mode=own.shapeless": "'own.shapeless' returned a Tensor of shape (3,) as its term",
    "--model.evaluation.against=[own.Late]": "the policy is trained and saved, so compare again by esper-lightning eval",
}
"""Mistakes of parts that show in the run."""

TRACEBACKS = {
    "--data.env.reward.mode=own.mistyped": "error: data.env.reward.mode (own.mistyped) raised AttributeError",
    "--model.evaluation.against=[own.Raises]": "error: evaluation.against[0] (own.Raises) raised AttributeError",
    "--data.env.actions.blueprints=[own.crooked]": "error: data.env.actions.blueprints[0] (own.crooked) rai",
    "--data.host=own.Lost": "error: data.host (own.Lost) raised AttributeError",
    "--imports=needy": "error: your code in needy.py raised ModuleNotFoundError: No module named 'not_installed",
    "--imports=zero": "error: your code in zero.py raised ZeroDivisionError",
    "--data.task=needy.Task": "error: your code in needy.py raised ModuleNotFoundError",
}
"""Errors in code of the user, with the beginning of the line behind their traceback."""


def answer(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, list[str]]:
    """Return the exit code of a tiny run with a further option, and what it says on stderr."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    given = (
        *TINY,
        "--trainer.max_epochs=1",
        "--model.evaluation.hosts=2",
        "--model.evaluation.controls=false",
        *shlex.split(line),
    )
    if "against" not in line:
        given += ("--model.evaluation.hosts=0",)
    try:
        with (
            forgotten_parts(),
            patch("esper_lightning.cli.EsperCLI", SharedParserCLI),
            patch.object(sys, "argv", sys.argv[:1]),
            pytest.raises(SystemExit) as ended,
        ):
            main(["fit", *given])
    finally:
        for name in FILES:
            sys.modules.pop(Path(name).stem, None)
    assert isinstance(ended.value.code, int)
    said = [line for line in capsys.readouterr().err.splitlines() if "`Trainer.fit` stopped" not in line]
    return ended.value.code, [line for line in said if line]


@pytest.mark.parametrize(("line", "said"), rest_is_slow(list(REFUSED.items()), lambda case: ".Few]" in case[0]))
def test_a_part_that_cannot_be_used_is_refused_in_a_line_before_a_run_begins(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = answer(line, tmp_path, monkeypatch, capsys)

    assert code == 2
    assert len(lines) == 1 and said in lines[0]
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("line", "said"), rest_is_slow(list(IN_THE_RUN.items()), lambda case: "shape" in case[0]))
def test_a_part_that_fails_in_the_run_ends_it_with_a_line(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = answer(line, tmp_path, monkeypatch, capsys)

    assert code == EXIT_USER_CODE
    assert len(lines) == 1 and said in lines[0]


@pytest.mark.parametrize(("line", "said"), rest_is_slow(list(TRACEBACKS.items()), lambda case: "needy." in case[0]))
def test_what_code_of_the_user_raises_is_shown_with_its_traceback_and_its_name(
    line: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, lines = answer(line, tmp_path, monkeypatch, capsys)

    assert code == EXIT_USER_CODE
    assert lines[0].startswith("Traceback") and lines[-1].startswith(said)
    assert not any("esper_lightning" in frame for frame in lines[:-1] if frame.startswith("  File"))
