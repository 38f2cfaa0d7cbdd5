"""executor auto: the fastest choice, measured without a trace, remembered, and kept by a run that goes on."""

import gc
import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console

from esper_lightning.data import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.envs.execution import EXECUTORS, LoopExecutor, ThreadsExecutor, auto
from esper_lightning.envs.execution.choice import Choice, candidates, go_on
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tamiyo.baselines import WaitOnly
from esper_lightning.tasks import Digits, Split, Task
from tests.conftest import SMALL, small_host
from tests.envs.execution.episodes import episode, same
from tests.runs import differences, fit, load, only_run

MakePool = Callable[..., HostPool]
CPU = torch.device("cpu")
LOOP, PLAIN_LOOP, THREADS, PLAIN_THREADS = (Choice(name, on) for name in ("loop", "threads") for on in (True, False))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are remembered: not in the folder of whoever runs the tests. And a second is long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "SECONDS", 0.0)
    two = {name: EXECUTORS[name] for name in ("loop", "threads")}
    for name in EXECUTORS.keys() - two:
        monkeypatch.delitem(EXECUTORS, name)
    return tmp_path / "cache" / "esper-lightning" / "executors.json"


class Stopwatch:
    """Takes the place of measuring: says what it is told, and counts how often it is asked."""

    def __init__(self, **speeds: float) -> None:
        self.speeds = speeds
        self.asked: list[str] = []

    def __call__(self, executor: LoopExecutor, *_: object) -> float:
        name = {LoopExecutor: "loop", ThreadsExecutor: "threads"}[type(executor)]
        self.asked.append(name if executor.training.onednn else f"plain_{name}")
        return self.speeds.get(self.asked[-1], 1.0)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Threads without oneDNN are fastest."""
    watch = Stopwatch(loop=2.0, plain_loop=3.0, threads=4.0, plain_threads=5.0)
    monkeypatch.setattr(auto, "speed", watch)
    return watch


def said(pool: HostPool) -> str:
    """What is printed of a selection."""
    console = Console(width=200)
    with console.capture() as captured:
        for part in pool.selection.report():
            console.print(part)
    return captured.get()


def test_the_fastest_candidate_is_chosen_and_used(make_pool: MakePool, stopwatch: Stopwatch) -> None:
    pool = make_pool(2, executor="auto")

    assert stopwatch.asked[:4] == ["loop", "plain_loop", "threads", "plain_threads"]
    assert pool.choice == PLAIN_THREADS
    assert type(pool.executor) is ThreadsExecutor
    assert pool.executor.training == replace(pool.config.training, onednn=False)
    lines = said(pool).splitlines()
    assert [line.split()[1:-1] for line in lines if "│" in line] == [
        ["loop", "│", "2.0", "│", "1.00"],
        ["loop", "without", "oneDNN", "│", "3.0", "│", "1.50"],
        ["threads", "│", "4.0", "│", "2.00"],
        ["→", "threads", "without", "oneDNN", "│", "5.0", "│", "2.50"],
    ]


@pytest.mark.parametrize("onednn", [True, False])
def test_a_switch_that_is_set_is_no_choice(make_pool: MakePool, stopwatch: Stopwatch, onednn: bool) -> None:
    pool = make_pool(2, executor="auto", training=replace(SMALL.training, onednn=onednn))

    assert len(set(stopwatch.asked)) == 2
    assert pool.choice == Choice("threads", onednn)


def test_without_auto_onednn_is_on_unless_it_is_switched_off(make_pool: MakePool) -> None:
    assert make_pool(1).choice == LOOP
    assert make_pool(1, training=HostTraining(batches=2, onednn=False)).choice == PLAIN_LOOP
    assert make_pool(1).selection is None


def test_what_runs_elsewhere_is_no_candidate() -> None:
    on_cpu = candidates(CPU, HostTraining())
    on_cuda = candidates(torch.device("cuda"), HostTraining())

    assert on_cpu == [LOOP, PLAIN_LOOP, THREADS, PLAIN_THREADS]
    assert on_cuda == [LOOP]


class Sleepy(LoopExecutor):
    """Takes 0.5 s once an epoch, 0.25 s for every minibatch and 1.5 s for a validation, by a clock of its own."""

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
    executor = Sleepy(pool.task, pool.config.training)
    monkeypatch.setattr(auto.time, "perf_counter", lambda: executor.now)

    assert auto.speed(executor, pool.envs, pool.data) == pytest.approx(3 / (0.5 + 0.25 * batches + 1.5))
    assert executor.now == (0.5 + 0.25) + (0.5 + 0.25 * min(batches, 4)) + 1.5
    assert all(env.training.batches == batches for env in pool.envs)


@pytest.mark.parametrize(("turn", "turns"), [(0.3, 5), (2.0, 2), (6.0, 1)])
def test_candidates_take_turns_until_a_second_is_over(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, turn: float, turns: int
) -> None:
    """The first turn of all does not count: five times 0.3 s are the first to pass 0.3 s + 1 s."""
    now, asked = 0.0, []

    def slower_and_slower(executor: LoopExecutor, envs: list[HostEnv], *_: object) -> float:
        nonlocal now
        now += turn / 2 * (len(envs) > 4)  # a trial takes no time
        asked.append(executor)
        return 10.0 / len(asked)

    monkeypatch.setattr(auto, "SECONDS", 1.0)
    monkeypatch.setattr(auto, "speed", slower_and_slower)
    monkeypatch.setattr(auto.time, "perf_counter", lambda: now)
    pool = make_pool(8, executor="auto", training=replace(SMALL.training, onednn=True))

    assert [type(executor) for executor in asked[4:]] == [LoopExecutor, ThreadsExecutor] * turns
    assert [candidate.speed for candidate in pool.selection.tried] == [10.0 / 5, 10.0 / 6], "the best counts"


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
    monkeypatch.setattr(auto, "speed", look)
    pool = make_pool(12, executor="auto", training=replace(SMALL.training, onednn=True))

    assert gc.isenabled()
    assert met == [1, 4, 8], "eight hosts say how fast a loop is"
    assert grown == {(None, Stage.DORMANT), *product(["norm", "conv_small", "conv_light"], auto.GROWN)}
    assert {slot.stage for env in pool.envs for slot in env.slots} == {Stage.DORMANT}


def test_a_candidate_that_is_far_behind_at_first_is_not_measured_again(
    make_pool: MakePool, stopwatch: Stopwatch
) -> None:
    stopwatch.speeds |= {"plain_loop": 1.0}
    pool = make_pool(2, executor="auto")

    assert stopwatch.asked[8:] == ["loop", "plain_loop", "threads", "plain_threads"]  # the first two once more in vain
    assert [candidate.speed for candidate in pool.selection.tried] == [2.0, 1.0, 4.0, 5.0]


def test_measuring_leaves_no_trace(make_pool: MakePool) -> None:
    measured = make_pool(3, executor="auto", horizon=9)
    named = make_pool(3, executor=measured.choice.executor, horizon=9, training=measured.executor.training)

    assert len(measured.selection.tried) == 4
    assert all(candidate.speed > 0 for candidate in measured.selection.tried)
    assert differences(measured.state_dict(), named.state_dict()) == []
    assert torch.equal(measured.observation.features, named.observation.features)
    assert same(episode(measured), episode(named))
    assert differences(measured.state_dict(), named.state_dict()) == []


def test_a_choice_is_remembered_for_hosts_of_the_same_kind_and_number(
    make_pool: MakePool, stopwatch: Stopwatch, cache: Path
) -> None:
    assert f"remembered in {cache}" in said(make_pool(2, executor="auto")).replace("\n", "")
    (speeds,) = json.loads(cache.read_text())["measured"].values()
    assert speeds["environment steps per second"]["loop without oneDNN"] == 3.0
    stopwatch.asked.clear()

    for changes in ({}, {"training": replace(SMALL.training, lr=0.5, weight_decay=0.1)}, {"horizon": 9}):
        pool = make_pool(2, executor="auto", **changes)
        assert pool.choice == PLAIN_THREADS
        (line,) = said(pool).splitlines()
        assert line == "executor threads without oneDNN: the fastest when it was measured for hosts like these"
    assert not stopwatch.asked


def wider(input_shape: tuple[int, ...], outputs: int) -> CNN:
    return CNN(input_shape, outputs, base=8, kernel=1, pools=2, channels_last=False)


def other_layout(input_shape: tuple[int, ...], outputs: int) -> CNN:
    """The same weights in the same places, computed in another memory format."""
    slots = ["block1.pool", "block2.pool", "block3"]
    return CNN(input_shape, outputs, base=4, kernel=1, pools=2, slots=slots, isolate=False)


@pytest.mark.parametrize(
    "changes",
    [
        {"n_envs": 3},
        {"host": wider},
        {"host": other_layout},
        {"training": replace(SMALL.training, batch_size=16)},
        {"training": replace(SMALL.training, batches=3)},
        {"training": replace(SMALL.training, precision="bf16")},
        {"training": replace(SMALL.training, onednn=False)},
        {"actions": replace(SMALL.actions, blueprints=["norm"])},
    ],
)
def test_what_differs_is_measured_anew(make_pool: MakePool, stopwatch: Stopwatch, changes: dict) -> None:
    make_pool(2, executor="auto")
    stopwatch.asked.clear()

    make_pool(**{"n_envs": 2, "executor": "auto", **changes})

    assert stopwatch.asked


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "could not be read (JSONDecodeError) and is replaced"),
        ("\udcff", "could not be read (UnicodeDecodeError) and is replaced"),
        ("[]", "was not of format 1 and is replaced"),
        ('{"format": 2, "measured": {}}', "was not of format 1 and is replaced"),
        ('{"format": 1, "measured": {"here": 3}}', "was not of format 1 and is replaced"),
    ],
)
def test_a_foreign_file_is_replaced_and_said_so(
    make_pool: MakePool, stopwatch: Stopwatch, cache: Path, content: str, complaint: str
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_bytes(content.encode(errors="surrogateescape"))

    pool = make_pool(2, executor="auto")

    assert pool.selection.note == f"{cache} {complaint}; remembered in {cache}"
    assert not make_pool(2, executor="auto").selection.tried
    assert [path.name for path in cache.parent.iterdir()] == [cache.name], "no draft is left"


def test_an_entry_that_names_no_candidate_is_mended(make_pool: MakePool, stopwatch: Stopwatch, cache: Path) -> None:
    make_pool(2, executor="auto")
    make_pool(3, executor="auto")
    content = json.loads(cache.read_text())
    first, _ = content["measured"].values()
    first["fastest"] = "abacus"
    cache.write_text(json.dumps(content))

    assert make_pool(2, executor="auto").selection.note.startswith(f"{cache} was damaged and is mended; remembered")
    assert not make_pool(2, executor="auto").selection.tried
    assert not make_pool(3, executor="auto").selection.tried, "the others are kept"


def test_where_nothing_can_be_written_the_choice_is_measured_every_time(
    make_pool: MakePool, stopwatch: Stopwatch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))

    for _ in range(2):
        pool = make_pool(2, executor="auto")
        assert pool.choice == PLAIN_THREADS
        assert pool.selection.note.startswith("not remembered: ")
        assert pool.selection.note.endswith("cannot be written (Not a directory)")


class Stubborn(LoopExecutor):
    """Takes no host at all."""

    def __init__(self, task: Task, training: HostTraining) -> None:
        raise ValueError("a Conv2d cannot be stacked; use env.executor loop")


class Late(LoopExecutor):
    """Notices only when it sees them."""

    def train_epoch(self, envs: list[HostEnv], data: Split) -> torch.Tensor:
        raise ValueError("a seed of kind norm cannot be stacked; use env.executor loop")


def test_a_candidate_that_refuses_the_hosts_is_passed_over(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(EXECUTORS, "stubborn", Stubborn)
    monkeypatch.setitem(EXECUTORS, "late", Late)
    pool = make_pool(2, executor="auto", training=replace(SMALL.training, onednn=False))

    assert pool.choice in (PLAIN_LOOP, PLAIN_THREADS)
    refusals = [candidate.refused for candidate in pool.selection.tried if not candidate.speed]
    assert refusals == [
        "a Conv2d cannot be stacked; use env.executor loop",
        "a seed of kind norm cannot be stacked; use env.executor loop",
    ]
    assert said(pool).count("refused") == 2
    assert said(pool).splitlines()[-3:-1] == refusals


def test_if_all_refuse_the_reason_is_raised(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("loop", "threads"):
        monkeypatch.setitem(EXECUTORS, name, Late)

    with pytest.raises(ValueError, match="a seed of kind norm cannot be stacked"):
        make_pool(2, executor="auto")


def test_loop_and_threads_give_equal_results_if_onednn_is_the_same() -> None:
    fused = Choice("fused", True)

    assert LOOP.equals(THREADS)
    assert not LOOP.equals(PLAIN_LOOP)
    assert fused.equals(fused)
    assert not fused.equals(LOOP)


def test_a_run_goes_on_with_the_executor_that_it_had() -> None:
    fused = Choice("fused", False)

    assert go_on(LOOP, LOOP, [LOOP]) == (LOOP, None)
    assert go_on(fused, LOOP, [LOOP, fused]) == (
        fused,
        "executor fused without oneDNN, as the run so far, not loop: so it goes on as if it had not been stopped",
    )
    assert go_on(LOOP, THREADS, [THREADS]) == (THREADS, None), "results are equal"
    assert go_on(fused, LOOP, [LOOP]) == (
        LOOP,
        "executor loop, the run so far had fused without oneDNN: it goes on within their tolerance, not bit for bit",
    )


def test_a_pool_that_may_choose_goes_on_with_the_saved_executor(make_pool: MakePool, stopwatch: Stopwatch) -> None:
    before = make_pool(2)
    for _ in range(2):
        before.step(WaitOnly().act(before))
    after = make_pool(2, executor="auto")
    assert after.choice == PLAIN_THREADS

    note = after.load_state_dict(before.state_dict())

    assert after.choice == LOOP
    assert type(after.executor) is LoopExecutor
    assert note.startswith("executor loop, as the run so far, not threads without oneDNN")
    steps = [pool.step(WaitOnly().act(pool)) for pool in (before, after)]
    assert torch.equal(steps[0].metrics.loss, steps[1].metrics.loss)
    assert differences(before.state_dict(), after.state_dict()) == []


def test_a_pool_whose_executor_is_named_keeps_it(make_pool: MakePool) -> None:
    state = make_pool(2, training=replace(SMALL.training, onednn=False)).state_dict()

    pool = make_pool(2)
    assert pool.load_state_dict(state).startswith("executor loop, the run so far had loop without oneDNN")
    assert pool.choice == LOOP
    threads = make_pool(2, executor="threads", training=replace(SMALL.training, onednn=False))
    assert threads.load_state_dict(state) is None
    assert threads.choice == PLAIN_THREADS


def test_other_pools_of_a_run_are_executed_alike(stopwatch: Stopwatch) -> None:
    data = HostPoolData(Digits(), small_host, replace(SMALL, executor="auto"), n_envs=2)
    data.build(CPU)
    stopwatch.asked.clear()

    assert data.make_pool(3).choice == data.pool.choice == PLAIN_THREADS
    assert not stopwatch.asked


AUTO = ("--data.env.executor=auto", "--data.env.training.onednn=null")


def test_a_run_measures_at_its_start_and_says_what_it_chose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = fit(tmp_path / "runs", *AUTO, "--evaluation.hosts=2")

    printed = capsys.readouterr().out
    choice = built.datamodule.pool.choice
    assert [line.count("│") for line in printed.splitlines() if "│ →" in line] == [4]
    assert f"│ → {choice} " in printed
    assert "remembered in" in printed
    saved = load(only_run(tmp_path / "runs").latest)
    assert saved["HostPoolData"]["pool"]["executor"] == list(choice)


def test_a_resumed_run_goes_on_with_its_executor(
    tmp_path: Path, stopwatch: Stopwatch, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=1")
    run = only_run(tmp_path / "runs")
    capsys.readouterr()

    fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=2", f"--ckpt_path={run.latest}")
    assert "executor threads without oneDNN: the fastest when it was measured" in capsys.readouterr().out

    cache.unlink()
    stopwatch.speeds["loop"] = 9.0
    built = fit(tmp_path / "runs", *AUTO, "--trainer.max_epochs=3", f"--ckpt_path={run.latest}")
    printed = capsys.readouterr().out
    assert "│ → loop " in printed
    assert "executor threads without oneDNN, as the run so far, not loop: " in printed
    assert built.datamodule.pool.choice == PLAIN_THREADS

    named = ("--data.env.executor=loop", "--data.env.training.onednn=true", f"--ckpt_path={run.latest}")
    built = fit(tmp_path / "runs", *named, "--trainer.max_epochs=4")
    assert "executor loop, the run so far had threads without oneDNN: it goes on within" in capsys.readouterr().out
    assert built.datamodule.pool.choice == LOOP
