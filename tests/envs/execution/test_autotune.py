"""Executor auto: the fastest choice is found, and measuring leaves no trace in the pool."""

import gc
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

from esper_lightning.envs.config import HostFactory
from esper_lightning.envs.execution import EXECUTORS, LoopExecutor, ThreadsExecutor, autotune
from esper_lightning.envs.execution.autotune import ExecutorChoice, available_choices
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import MLP
from esper_lightning.tasks import Split, Task
from tests.conftest import SMALL, small_host
from tests.envs.execution.choices import (
    CPU,
    LOOP,
    PLAIN_LOOP,
    PLAIN_THREADS,
    THREADS,
    FixedSpeeds,
    MakePool,
    printed_report,
)
from tests.envs.execution.episodes import episode, same
from tests.runs import differences

pytestmark = pytest.mark.usefixtures("cache")


def test_the_fastest_candidate_is_chosen_and_used(make_pool: MakePool, stopwatch: FixedSpeeds) -> None:
    pool = make_pool(2, executor="auto")

    assert stopwatch.calls[:4] == ["loop", "plain_loop", "threads", "plain_threads"]
    assert pool.executor_choice == PLAIN_THREADS
    assert type(pool.executor) is ThreadsExecutor
    assert pool.executor.training == replace(pool.config.training, onednn=False)
    lines = printed_report(pool).splitlines()
    assert [line.split()[1:-1] for line in lines if "│" in line] == [
        ["loop", "│", "2.0", "│", "1.00"],
        ["loop", "without", "oneDNN", "│", "3.0", "│", "1.50"],
        ["threads", "│", "4.0", "│", "2.00"],
        ["→", "threads", "without", "oneDNN", "│", "5.0", "│", "2.50"],
    ]


@pytest.mark.parametrize("onednn", [True, False])
def test_a_switch_that_is_set_is_no_choice(make_pool: MakePool, stopwatch: FixedSpeeds, onednn: bool) -> None:
    pool = make_pool(2, executor="auto", training=replace(SMALL.training, onednn=onednn))

    assert len(set(stopwatch.calls)) == 2
    assert pool.executor_choice == ExecutorChoice("threads", onednn)


def test_without_auto_onednn_is_on_unless_it_is_switched_off(make_pool: MakePool) -> None:
    assert make_pool(1).executor_choice == LOOP
    assert make_pool(1, training=HostTraining(batches=2, onednn=False)).executor_choice == PLAIN_LOOP
    assert make_pool(1).selection is None


def test_what_runs_elsewhere_is_no_candidate() -> None:
    on_cpu = available_choices(CPU, HostTraining())
    on_cuda = available_choices(torch.device("cuda"), HostTraining())

    assert on_cpu == [LOOP, PLAIN_LOOP, THREADS, PLAIN_THREADS]
    assert on_cuda == [LOOP]


@pytest.mark.usefixtures("fused_too")
def test_fused_has_a_candidate_for_each_method_of_convolution_where_none_is_set() -> None:
    def candidates(convolutional: bool = True, **settings: object) -> list[str]:
        training = HostTraining(onednn=True, **settings)
        return [str(choice) for choice in available_choices(CPU, training, convolutional=convolutional)][2:]

    assert candidates() == ["fused", "fused with grouped convolutions", "fused with products"]
    assert candidates(convolutional=False) == ["fused"]
    assert candidates(convolutions="products") == ["fused with products"]
    assert str(ExecutorChoice("fused", False, "products")) == "fused with products, without oneDNN"


@pytest.mark.usefixtures("fused_too")
def test_only_hosts_with_convolutions_are_measured_with_each_method(
    make_pool: MakePool, stopwatch: FixedSpeeds
) -> None:
    def measured(host: HostFactory, blueprint: str) -> set[str]:
        stopwatch.calls.clear()
        training, actions = replace(SMALL.training, onednn=True), replace(SMALL.actions, blueprints=[blueprint])
        make_pool(1, host, executor="auto", training=training, actions=actions)
        return set(stopwatch.calls)

    assert measured(small_host, "norm") == {"loop", "threads", "fused", "grouped", "products"}
    assert measured(partial(MLP, width=8), "lora") == {"loop", "threads", "fused"}


class SlowExecutor(LoopExecutor):
    """Executor that takes 0.5 s per epoch, 0.25 s per minibatch and 1.5 s per validation, by a fake clock."""

    now = 0.0

    def train_epoch(self, envs: list[HostEnv], data: Split) -> torch.Tensor:
        self.now += 0.5 + 0.25 * envs[0].training.batches
        return super().train_epoch(envs, data)

    def validate(self, envs: list[HostEnv], data: Split) -> torch.Tensor:
        self.now += 1.5
        return super().validate(envs, data)


@pytest.mark.parametrize("batches", [1, 3, 20])
def test_what_a_whole_tick_takes_follows_from_a_few_minibatches(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    pool = make_pool(3, training=replace(SMALL.training, batches=batches))
    executor = SlowExecutor(pool.task, pool.config.training)
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: executor.now)

    assert autotune.measure_speed(executor, pool.envs, pool.data) == pytest.approx(3 / (0.5 + 0.25 * batches + 1.5))
    assert executor.now == (0.5 + 0.25) + (0.5 + 0.25 * min(batches, 4)) + 1.5
    assert all(env.training.batches == batches for env in pool.envs)


@pytest.mark.parametrize(("turn", "turns"), [(0.3, 5), (2.0, 2), (6.0, 1)])
def test_candidates_take_turns_until_a_second_is_over(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, turn: float, turns: int
) -> None:
    """The first round does not count towards the limit of 1 s: 5 rounds of 0.3 s first exceed 0.3 s + 1 s."""
    now, asked = 0.0, []

    def slower_and_slower(executor: LoopExecutor, envs: list[HostEnv], *_: object) -> float:
        nonlocal now
        now += turn / 2 * (len(envs) > 4)  # the trial takes no time
        asked.append(executor)
        return 10.0 / len(asked)

    monkeypatch.setattr(autotune, "COMPARISON_SECONDS", 1.0)
    monkeypatch.setattr(autotune, "measure_speed", slower_and_slower)
    monkeypatch.setattr(autotune.time, "perf_counter", lambda: now)
    pool = make_pool(8, executor="auto", training=replace(SMALL.training, onednn=True))

    assert [type(executor) for executor in asked[4:]] == [LoopExecutor, ThreadsExecutor] * turns
    assert [candidate.speed for candidate in pool.selection.measured] == [10.0 / 5, 10.0 / 6], "the best counts"


def test_it_is_measured_on_hosts_with_all_kinds_of_seeds(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[int] = []
    grown: set[tuple[str | None, Stage]] = set()

    def look(executor: LoopExecutor, envs: list[HostEnv], *_: object) -> float:
        met.append(len(envs))
        slots = [slot for env in envs for slot in env.slots]
        assert gc.isenabled() == (len(met) == 1)
        assert any(slot.occupied for slot in slots) == (len(met) > 1), "at first nothing has grown"
        grown.update((slot.blueprint, slot.stage) for slot in slots)
        return 1.0

    monkeypatch.delitem(EXECUTORS, "threads")
    monkeypatch.setattr(autotune, "measure_speed", look)
    pool = make_pool(12, executor="auto", training=replace(SMALL.training, onednn=True))

    assert gc.isenabled()
    assert met == [1, 4, 8], "eight hosts say how fast a loop is"
    assert grown == {(None, Stage.DORMANT), *product(["norm", "conv_small", "conv_light"], autotune.SEED_STAGES)}
    assert {slot.stage for env in pool.envs for slot in env.slots} == {Stage.DORMANT}


def test_a_candidate_that_is_far_behind_at_first_is_not_measured_again(
    make_pool: MakePool, stopwatch: FixedSpeeds
) -> None:
    stopwatch.speeds |= {"plain_loop": 1.0}
    pool = make_pool(2, executor="auto")

    assert stopwatch.calls[8:] == ["loop", "plain_loop", "threads", "plain_threads"]  # both loops in vain
    assert [candidate.speed for candidate in pool.selection.measured] == [2.0, 1.0, 4.0, 5.0]


def test_measuring_leaves_no_trace(make_pool: MakePool) -> None:
    measured = make_pool(3, executor="auto", horizon=9)
    named = make_pool(3, executor=measured.executor_choice.executor, horizon=9, training=measured.executor.training)

    assert len(measured.selection.measured) == 4
    assert all(candidate.speed > 0 for candidate in measured.selection.measured)
    assert differences(measured.state_dict(), named.state_dict()) == []
    assert torch.equal(measured.observation.features, named.observation.features)
    assert same(episode(measured), episode(named))
    assert differences(measured.state_dict(), named.state_dict()) == []


class RefusingExecutor(LoopExecutor):
    """Executor that refuses every host when it is created."""

    def __init__(self, task: Task, training: HostTraining) -> None:
        raise ValueError("a Conv2d cannot be stacked; use env.executor loop")


class LateRefusingExecutor(LoopExecutor):
    """Executor that refuses hosts only when it trains them."""

    def train_epoch(self, envs: list[HostEnv], data: Split) -> torch.Tensor:
        raise ValueError("a seed of kind norm cannot be stacked; use env.executor loop")


def test_a_candidate_that_refuses_the_hosts_is_passed_over(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXECUTORS, "stubborn", RefusingExecutor)
    monkeypatch.setitem(EXECUTORS, "late", LateRefusingExecutor)
    pool = make_pool(2, executor="auto", training=replace(SMALL.training, onednn=False))

    assert pool.executor_choice in (PLAIN_LOOP, PLAIN_THREADS)
    refusals = [candidate.refusal for candidate in pool.selection.measured if not candidate.speed]
    assert refusals == [
        "a Conv2d cannot be stacked; use env.executor loop",
        "a seed of kind norm cannot be stacked; use env.executor loop",
    ]
    assert printed_report(pool).count("refused") == 2
    assert printed_report(pool).splitlines()[-3:-1] == refusals


def test_if_all_refuse_the_reason_is_raised(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loop", "threads"):
        monkeypatch.setitem(EXECUTORS, name, LateRefusingExecutor)

    with pytest.raises(ValueError, match="a seed of kind norm cannot be stacked"):
        make_pool(2, executor="auto")
