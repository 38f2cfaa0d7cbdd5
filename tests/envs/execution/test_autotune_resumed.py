"""Executor auto: a resumed run keeps its executor and prints it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from esper_lightning.controllers.random import WaitOnly
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs.execution import LoopExecutor
from esper_lightning.envs.execution.autotune import ExecutorChoice, resume_choice
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.envs.execution.choices import CPU, LOOP, PLAIN_LOOP, PLAIN_THREADS, THREADS, FixedSpeeds, MakePool
from tests.runs import differences, fit, load, only_run

pytestmark = pytest.mark.usefixtures("cache")


def test_loop_and_threads_give_equal_results_if_onednn_is_the_same() -> None:
    fused = ExecutorChoice("fused", True)

    assert LOOP.gives_same_results(THREADS)
    assert not LOOP.gives_same_results(PLAIN_LOOP)
    assert fused.gives_same_results(fused)
    assert not fused.gives_same_results(LOOP)
    assert not fused.gives_same_results(ExecutorChoice("fused", True, "products"))


def test_a_run_goes_on_with_the_executor_that_it_had() -> None:
    fused = ExecutorChoice("fused", False)

    assert resume_choice(LOOP, LOOP, [LOOP]) == (LOOP, None)
    assert resume_choice(fused, LOOP, [LOOP, fused]) == (
        fused,
        "executor fused without oneDNN, as the run so far, not loop: so it continues as if it had not been stopped",
    )
    assert resume_choice(LOOP, THREADS, [THREADS]) == (THREADS, None), "results are equal"
    assert resume_choice(fused, LOOP, [LOOP]) == (
        LOOP,
        "executor loop, the run so far had fused without oneDNN: it continues within their tolerance, not bit for bit",
    )


def test_a_pool_that_may_choose_goes_on_with_the_saved_executor(make_pool: MakePool, stopwatch: FixedSpeeds) -> None:
    before = make_pool(2)
    for _ in range(2):
        before.step(WaitOnly().act(before))
    after = make_pool(2, executor="auto")
    assert after.executor_choice == PLAIN_THREADS

    note = after.load_state_dict(before.state_dict())

    assert after.executor_choice == LOOP
    assert type(after.executor) is LoopExecutor
    assert note.startswith("executor loop, as the run so far, not threads without oneDNN")
    steps = [pool.step(WaitOnly().act(pool)) for pool in (before, after)]
    assert torch.equal(steps[0].metrics.loss, steps[1].metrics.loss)
    assert differences(before.state_dict(), after.state_dict()) == []


def test_a_pool_whose_executor_is_named_keeps_it(make_pool: MakePool) -> None:
    state = make_pool(2, training=replace(SMALL.training, onednn=False)).state_dict()

    pool = make_pool(2)
    assert pool.load_state_dict(state).startswith("executor loop, the run so far had loop without oneDNN")
    assert pool.executor_choice == LOOP
    threads = make_pool(2, executor="threads", training=replace(SMALL.training, onednn=False))
    assert threads.load_state_dict(state) is None
    assert threads.executor_choice == PLAIN_THREADS


def test_other_pools_of_a_run_are_executed_alike(stopwatch: FixedSpeeds) -> None:
    data = HostPoolData(Digits(), small_host, replace(SMALL, executor="auto"), n_envs=2)
    data.build(CPU)
    stopwatch.calls.clear()

    assert data.make_pool(3).executor_choice == data.pool.executor_choice == PLAIN_THREADS
    assert not stopwatch.calls


@pytest.mark.usefixtures("fused_too")
def test_a_run_goes_on_with_its_method_of_convolution(stopwatch: FixedSpeeds, cache: Path) -> None:
    def build() -> HostPoolData:
        settings = replace(SMALL, executor="auto", training=replace(SMALL.training, onednn=True))
        data = HostPoolData(Digits(), small_host, settings, n_envs=2)
        data.build(CPU)
        return data

    stopwatch.speeds["products"] = 9.0
    before = build()
    products = ExecutorChoice("fused", True, "products")
    assert before.pool.executor_choice == before.make_pool(3).executor_choice == products
    stopwatch.calls.clear()
    assert build().pool.executor_choice == products
    assert not stopwatch.calls, "the choice is remembered"

    cache.unlink()
    stopwatch.speeds["grouped"] = 10.0
    after = build().pool
    assert after.executor_choice == ExecutorChoice("fused", True, "grouped")
    note = after.load_state_dict(before.pool.state_dict())
    assert after.executor_choice == products
    assert after.executor.training.convolutions == "products"
    assert note.startswith("executor fused with products, as the run so far, not fused with grouped convolutions")

    after.load_state_dict(before.pool.state_dict() | {"executor": ["fused", True]})
    assert after.executor_choice == ExecutorChoice("fused", True), "a state that names no method has the default"


AUTO = ("--data.env.executor=auto", "--data.env.training.onednn=null")


@pytest.mark.slow
def test_a_run_measures_at_its_start_and_says_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = fit(tmp_path / "runs", *AUTO, "--model.evaluation.hosts=2")

    printed = capsys.readouterr().out
    choice = built.datamodule.pool.executor_choice
    assert [line.count("│") for line in printed.splitlines() if "│ →" in line] == [4]
    assert f"│ → {choice} " in printed
    assert "remembered in" in printed
    saved = load(only_run(tmp_path / "runs").last)
    assert saved["HostPoolData"]["pool"]["executor"] == list(choice)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_its_executor(
    tmp_path: Path, stopwatch: FixedSpeeds, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=1")
    run = only_run(tmp_path / "runs")
    capsys.readouterr()

    fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=2", f"--ckpt_path={run.last}")
    assert "executor threads without oneDNN: the fastest when it was measured" in capsys.readouterr().out

    cache.unlink()
    stopwatch.speeds["loop"] = 9.0
    built = fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=3", f"--ckpt_path={run.last}")
    printed = capsys.readouterr().out
    assert "│ → loop " in printed
    assert "executor threads without oneDNN, as the run so far, not loop: " in printed
    assert built.datamodule.pool.executor_choice == PLAIN_THREADS

    named = ("--data.env.executor=loop", "--data.env.training.onednn=true", f"--ckpt_path={run.last}")
    built = fit(tmp_path / "runs", *named, "--trainer.max_epochs=4")
    assert "executor loop, the run so far had threads without oneDNN: it continues within" in capsys.readouterr().out
    assert built.datamodule.pool.executor_choice == LOOP
