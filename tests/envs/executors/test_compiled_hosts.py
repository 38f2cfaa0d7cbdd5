"""Hosts and functions that run through torch.compile: equal results, no silent fallback, failures that do no harm."""

import re
import shutil
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch._dynamo.config
from torch import Tensor, nn

from esper_lightning.envs import HostFactory, HostPool
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, MLP, Attached
from esper_lightning.runtime import compiled
from esper_lightning.runtime.compiled import Compiled
from esper_lightning.tasks import Digits, Task
from tests.conftest import SMALL, small_host
from tests.envs.executors.episodes import episode, same

HAS_COMPILER = shutil.which("g++") is not None or shutil.which("clang++") is not None

TRAINING = HostTraining(batches=2, batch_size=16, lr=0.01, optimizer="sgd")


@pytest.fixture(autouse=True)
def traced_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace, guard and recompile as always, and run the graphs as they are, because inductor takes a minute for one."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def pool_of(host: HostFactory, task: Task, training: HostTraining, executor: str = "loop") -> HostPool:
    """Return two hosts. In an episode of this length random actions take a host through every stage."""
    config = replace(SMALL, executor=executor, training=training, horizon=12)
    config = replace(config, actions=replace(SMALL.actions, blueprints=None))
    return HostPool(
        task, task.load(), host, config=config, n_envs=2, device=torch.device("cpu"), governor=GovernorConfig()
    )


def dynamo_settings() -> dict[str, Any]:
    """Return the configuration of torch.compile, which is one for the whole process."""
    return torch._dynamo.config.get_config_copy()


class Dropping(nn.Module):
    """Network with BatchNorm and dropout, of whose modules slots are attached to one."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.conv(x)).relu().mean((2, 3))))


DIGITS = Digits(validation=50, test=50)
DROPPING = partial(Attached, network=f"{__name__}.Dropping", slots=["norm"])
slow = partial(pytest.param, marks=pytest.mark.slow)
inductor = partial(
    pytest.param, marks=[pytest.mark.slow, pytest.mark.skipif(not HAS_COMPILER, reason="no C++ compiler")]
)


@pytest.mark.parametrize(
    ("host", "task", "executor", "backend", "changes"),
    [
        (partial(MLP, width=4, layers=1), DIGITS, "threads", "eager", {}),
        slow(DROPPING, DIGITS, "loop", "aot_eager", {"precision": "bf16", "micro_batches": 2}),
        inductor(DROPPING, DIGITS, "loop", "inductor", {}),
        inductor(partial(CNN, base=4, blocks=1, slots=[], depth=1, most=2), DIGITS, "threads", "inductor", {}),
    ],
)
def test_compiled_hosts_train_as_uncompiled_ones_in_every_stage_and_depth(
    monkeypatch: pytest.MonkeyPatch, host: HostFactory, task: Task, executor: str, backend: str, changes: dict[str, Any]
) -> None:
    """S10: compilation is a setting of a run."""
    monkeypatch.setattr(compiled, "BACKEND", backend)
    training = replace(TRAINING, **changes)
    torch.manual_seed(0)
    expected = episode(pool_of(host, task, training, executor))
    settings, graphs = dynamo_settings(), Compiled.total

    torch.manual_seed(0)
    pool = pool_of(host, task, replace(training, compile=True), executor)
    stages: set[Stage] = set()
    results = episode(pool, stages)

    assert stages in (set(Stage), {Stage.FOSSILIZED})  # blocks of depth are permanent at once
    if backend == "inductor":  # it rounds differently
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(results, expected, strict=True))
    else:
        assert same(results, expected)
    assert pool.executor.compiled.enabled
    assert Compiled.total - graphs == len(pool.executor.compiled._calls) > 1  # hosts of one structure share a graph
    assert dynamo_settings() == settings


def test_fused_refuses_to_compile_and_auto_takes_an_executor_that_can() -> None:
    training = replace(TRAINING, compile=True)

    with pytest.raises(ValueError, match=r"executor fused cannot compile hosts; use env\.executor loop"):
        pool_of(small_host, DIGITS, training, "fused")
    assert pool_of(small_host, DIGITS, TRAINING, "auto").executor_choice == "fused"
    assert pool_of(small_host, DIGITS, training, "auto").executor_choice in ("threads", "loop")


@pytest.mark.parametrize(
    ("message", "reason"),
    [("no C++ compiler was found\nlook for one", "no C++ compiler was found"), ("", "RuntimeError")],
)
def test_a_failure_of_the_compiler_is_one_warning_and_hosts_train_on_uncompiled(
    monkeypatch: pytest.MonkeyPatch, message: str, reason: str
) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError(message)

    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: broken)
    host = partial(MLP, width=4, layers=1)
    expected = episode(pool_of(host, DIGITS, TRAINING))

    with pytest.warns(UserWarning, match=rf"^hosts cannot be compiled, .*: {re.escape(reason)}$"):
        pool = pool_of(host, DIGITS, replace(TRAINING, compile=True), "threads")
        pool.reset(range(pool.n_envs))
        pool.train_without_actions(1)
    with warnings.catch_warnings(action="error"):
        results = episode(pool)

    assert same(results, expected)


class Power(nn.Module):
    """Raises to a power, for each of which torch compiles anew; "none" is an error of the user."""

    def __init__(self, power: str) -> None:
        super().__init__()
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        if self.power == "none":
            raise ValueError("no power")
        return x ** int(self.power)


def test_what_torch_would_leave_uncompiled_without_a_word_is_a_warning() -> None:
    """Torch compiles a function eight times, and then never again."""
    run, other, x = Compiled("powers", enabled=True), Compiled("powers", enabled=True), torch.arange(3.0)
    with torch._dynamo.config.patch(recompile_limit=8):  # importing timm raises it
        with warnings.catch_warnings(action="error"):
            for n in range(12):
                assert torch.equal(run(Power(str(n)), x, kind=n), x**n)
            for n in range(8):
                assert torch.equal(other(Power(str(n)), x, kind="any"), x**n)

        with pytest.warns(UserWarning, match="powers cannot be compiled, and run uncompiled: .*fullgraph"):
            assert torch.equal(other(Power("8"), x, kind="any"), x**8)
    assert run.enabled and not other.enabled


def test_an_error_of_the_user_is_raised() -> None:
    run = Compiled("powers", enabled=True)
    with pytest.warns(UserWarning, match="powers cannot be compiled"), pytest.raises(ValueError, match=r"^no power$"):
        run(Power("none"), torch.ones(1), kind="any")
