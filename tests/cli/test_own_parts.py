"""Parts of the user by import path: a mistake is a line that names the part; errors of their code stay tracebacks."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.runs import fit, forgotten_parts
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

FILES = {"own.py": PARTS, "no_python.py": "def f(:", "needy.py": "import not_installed"}

AGAINST = "--model.evaluation.against="
REFUSED = {
    f"{AGAINST}[own.Early]": "controller 'own.Early': host 0: FOSSILIZE block1.pool is masked; ",
    f"{AGAINST}[own.Far]": "controller 'own.Far': host 0: (1, 99, 0, 0, 0, 0, 0, 0) is no action",
    f"{AGAINST}[own.Flat]": "controller 'own.Flat': the action of one host is a list, as [op, slot, bl",
    f"{AGAINST}[own.Silent]": "an action is made by to_action([[op, slot, blueprint, …], …], pool.dev",
    f"{AGAINST}[own.NoPart]": "controller 'own.NoPart': NoPart has no method 'reset'; give it one",
    "--data.env.actions.blueprints=[own.miscounted]": "parameters(4) returns 16, and its module for 4 channels has",
    "--data.env.reward.mode=own.shapeless": "'own.shapeless' returned a Tensor of shape (3,) as its term",
    "--data.task=own.TwoClasses": "hold targets 0 … 9, outside of 0 … 1; correct `classes` or the targets",
    "--data.task=own.MeanLoss": "task MeanLoss: measure returned other shapes than (32,) for 32 samples; return",
    "--data.task=own.NoPart": "data.task",
    "--data.task=nowhere.Task": "data.task",
    "--data.host=own.FewOutputs": "the host's forward returned [32, 7], and the task has 10 classes; return a",
    "--data.host=own.NoSlots": "the host has no slots; name at least one where seeds may grow",
    "--data.host=own.NoPart": "data.host",
}
"""Mistakes in parts of the user that end in one line, with a part of it."""

TRACEBACKS = {
    "--data.env.reward.mode=own.mistyped": AttributeError,
    f"{AGAINST}[own.Raises]": AttributeError,
    "--data.env.actions.blueprints=[own.crooked]": AttributeError,
    "--data.host=own.Lost": AttributeError,
}
"""Errors that code of the user raises, which stay tracebacks."""


@pytest.fixture
def fit_with_own_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """`fit_with_own_parts(flag)` starts a tiny run in a folder with the files of the user."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()

    def run(flag: str) -> None:
        hosts = "2" if "against" in flag else "0"
        few = ("--trainer.max_epochs=1", f"--model.evaluation.hosts={hosts}", "--model.evaluation.controls=false")
        fit(tmp_path / "runs", *few, flag)

    with forgotten_parts():
        yield run
    for name in FILES:
        sys.modules.pop(Path(name).stem, None)


@pytest.mark.parametrize(("flag", "said"), rest_is_slow(list(REFUSED.items()), lambda case: "NoSlots" in case[0]))
def test_a_part_that_cannot_be_used_is_refused_in_a_line(
    flag: str, said: str, fit_with_own_parts: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        fit_with_own_parts(flag)

    assert ended.value.code == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "`Trainer.fit` stopped" not in line]
    assert line.startswith("error: ") and said in line


@pytest.mark.parametrize(("flag", "kind"), rest_is_slow(list(TRACEBACKS.items()), lambda case: "mistyped" in case[0]))
def test_what_code_of_the_user_raises_stays_a_traceback(
    flag: str, kind: type[Exception], fit_with_own_parts: Callable[[str], None]
) -> None:
    with pytest.raises(kind):
        fit_with_own_parts(flag)
