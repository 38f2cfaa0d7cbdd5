"""Time per phase, measured with fake timers."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import host_epoch
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.profiling import PHASES, EventTimer, HostTimer, PhaseClock, ProcessorTimer, make_timer
from esper_lightning.tasks import Batches, Split, fetch
from esper_lightning.telemetry.memory import make_memory_probe
from tests.envs.executors.fake_cuda import Event, FakeCuda, Stream
from tests.runs import fit, only_run

MakePool = Callable[..., HostPool]


class SteppingTimer:
    """Timer that advances by 1 s at every mark; `arrived` is the time that the device has reached."""

    name = "counting"

    def __init__(self) -> None:
        self.now, self.arrived = 0.0, float("inf")

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark <= self.arrived

    def seconds(self, begin: float, end: float) -> float:
        assert max(begin, end) <= self.arrived, "the timer must not synchronise"
        return end - begin


def nonzero_seconds(clock: PhaseClock) -> dict[str, float]:
    """Return the seconds of all phases that took any time."""
    return {phase: seconds for phase, seconds in clock.take_seconds().items() if seconds}


def test_time_is_of_the_phase_that_is_measured() -> None:
    timer = SteppingTimer()
    clock = PhaseClock(timer)
    for seconds, phase in ((2.0, "policy"), (4.0, "update"), (0.0, "policy")):
        with clock.measure(phase):
            timer.now += seconds

    assert nonzero_seconds(clock) == {"policy": 3.0 + 1.0, "update": 5.0}
    assert clock.take_seconds() == dict.fromkeys(PHASES, 0.0)


def test_a_phase_remembers_the_most_memory_that_it_took() -> None:
    held = iter([3.0, 7.0, 5.0])

    class Gauge:
        def begin(self) -> None:
            pass

        def end(self) -> float:
            return next(held)

    clock = PhaseClock(SteppingTimer())
    clock.memory_probe = Gauge()
    for phase in ("train", "update", "train"):
        with clock.measure(phase):
            pass

    assert clock.take_memory() == {"train": 5.0, "update": 7.0}
    assert clock.take_memory() == {}


def test_on_a_gpu_each_phase_has_a_peak_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 0

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = 0

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    clock = PhaseClock(SteppingTimer())
    clock.memory_probe = make_memory_probe(torch.device("cuda", 0))
    for phase, most in (("train", 8 * 2**20), ("validate", 2 * 2**20)):
        with clock.measure(phase):
            peak = max(peak, most)

    assert clock.take_memory() == {"train": 8.0, "validate": 2.0}


def test_time_with_several_hosts_is_divided_as_their_laps_say() -> None:
    """3 hosts record 30 s of work within 10 s of elapsed time."""
    timer, own = SteppingTimer(), [SteppingTimer() for _ in range(2)]
    clock, hosts = PhaseClock(timer), [HostTimer(each) for each in own]
    hosts[0].start()
    hosts[0].record(update=1.0)  # before: not counted
    with clock.measure("train", hosts):
        timer.now += 9.0
        for host_timer, data, train in zip(hosts, (3.0, 5.0), (12.0, 4.0), strict=True):
            host_timer.start()
            host_timer.timer.now += data - 1.0
            host_timer.record(data=1.0)
            host_timer.timer.now += train - 1.0
            host_timer.record(train=0.75, counterfactual=0.25)

    assert nonzero_seconds(clock) == pytest.approx(
        {"data": 10 * 8 / 24, "train": 10 * 12 / 24, "counterfactual": 10 * 4 / 24}
    )


def test_hosts_that_say_nothing_leave_the_time_to_the_phase() -> None:
    clock = PhaseClock(SteppingTimer())
    with clock.measure("train", [HostTimer(SteppingTimer())]):
        pass

    assert nonzero_seconds(clock) == {"train": 1.0}


def test_what_the_device_has_not_reached_is_added_later() -> None:
    timer = SteppingTimer()
    clock, host_timer = PhaseClock(timer), HostTimer(timer)
    timer.arrived = 2.0
    with clock.measure("policy"):  # from 1 to 2
        pass
    with clock.measure("train", [host_timer]):  # from 3 to 6
        host_timer.start()
        host_timer.record(train=1.0)

    assert nonzero_seconds(clock) == {"policy": 1.0}
    assert nonzero_seconds(clock) == {}
    timer.arrived = 6.0
    assert nonzero_seconds(clock) == {"train": 3.0}


def test_events_are_recorded_on_the_current_stream_and_measured_in_seconds(
    fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = torch.device("cuda", 1)
    timer = make_timer(gpu)
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: 1500.0, raising=False)
    monkeypatch.setattr(Event, "query", lambda event: event is begin, raising=False)
    begin = timer.mark()
    with torch.cuda.stream(Stream(gpu)) as _:
        end = timer.mark()

    assert isinstance(timer, EventTimer) and begin.enable_timing
    assert begin.stream is fake_cuda.default[gpu] and end.stream is not begin.stream
    assert timer.seconds(begin, end) == 1.5  # an event counts in milliseconds
    assert timer.has_passed(begin) and not timer.has_passed(end)


def test_the_clock_is_named_after_what_it_reads(make_pool: MakePool) -> None:
    assert make_pool(1).clock.timer.name == ProcessorTimer.name == "perf_counter"
    assert make_timer(torch.device("cuda")).name == "cuda_events"


def seconds_of_intervals(pool: HostPool, work: Callable[[], object]) -> dict[str, float]:
    """Return seconds by phase of the first environment's intervals, with 1 s between marks."""
    host_timer = pool.envs[0].timer
    host_timer.take_intervals()
    host_timer.timer = SteppingTimer()
    work()
    seconds: dict[str, float] = {}
    for interval in host_timer.take_intervals():
        for phase, share in interval.shares.items():
            seconds[phase] = seconds.get(phase, 0.0) + share * (interval.end - interval.begin)
    return seconds


def test_what_is_beyond_the_host_as_it_is_counts_as_counterfactual(make_pool: MakePool) -> None:
    pool = make_pool(1)
    env, wait = pool.envs[0], WaitOnly()
    alone = seconds_of_intervals(pool, lambda: pool.executor.validate(pool.envs, pool.data.validation))
    for slot in env.slots:
        env.growing.germinate(slot.name, "conv_small")
    for _ in range(2):
        pool.step(wait.act(pool))
    assert all(slot.blended for slot in env.slots)
    grown = seconds_of_intervals(pool, lambda: pool.executor.validate(pool.envs, pool.data.validation))

    assert alone == {"validate": 2.0, "counterfactual": 0.0}  # from the beginning to the end, nothing in between
    # 5 combinations: all seeds, without each in turn, and none. Behind the first slot there are 2, then 4.
    lengths = [1, 1, 2, 4, 5]
    assert grown["validate"] == pytest.approx(sum(1 / length for length in lengths))
    assert grown["counterfactual"] == pytest.approx(sum(1 - 1 / length for length in lengths))


def test_fetching_a_minibatch_is_no_training(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1, training=HostTraining(batches=2, micro_batches=2))
    train = pool.data.train
    plain = seconds_of_intervals(pool, lambda: pool.executor.train_epoch(pool.envs, train))

    def slowly(data: Split, batch: Batches, config: object) -> Split:
        pool.envs[0].timer.timer.now += 10.0
        return fetch(data, batch, config)

    monkeypatch.setattr(host_epoch, "fetch", slowly)
    slow = seconds_of_intervals(pool, lambda: pool.executor.train_epoch(pool.envs, train))

    assert plain["data"] == 1 + 2 * 2  # drawing, and fetching each micro-batch
    assert slow == {"data": plain["data"] + 40.0, "train": plain["train"]}


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_ticks_phases_add_up_to_the_tick(make_pool: MakePool, executor: str) -> None:
    pool, wanderer = make_pool(4, executor=executor), RandomValid(0)
    stages = set()
    for _ in range(pool.config.horizon):
        timer = pool.clock.timer
        pool.clock.take_seconds()
        action = wanderer.act(pool)
        begin = timer.mark()
        pool.step(action)
        whole = timer.seconds(begin, timer.mark())
        seconds = pool.clock.take_seconds()
        stages |= {slot.stage for env in pool.envs for slot in env.slots}

        assert 0.5 * whole < sum(seconds.values()) <= whole
        assert all(seconds[phase] > 0.0 for phase in ("data", "train", "validate", "bookkeeping"))
    assert Stage.PROBATIONARY in stages and seconds["counterfactual"] > 0.0
    assert seconds["data"] < seconds["train"]


def test_the_clock_fits_the_device_and_telemetry_says_which_it_was(tmp_path: Path, fake_cuda: FakeCuda) -> None:
    """S13: time is measured by events in the stream at hand on CUDA and by the processor's clock on the CPU; a run's
    telemetry names the clock."""
    fit(tmp_path, "--trainer.max_epochs", "1")
    names = re.findall(r"\btime/(\w+)\.train\b", " ".join(only_run(tmp_path).scalars()))
    gpu = torch.device("cuda", 0)
    with torch.cuda.stream(own := Stream(gpu)):
        mark = make_timer(gpu).mark()

    assert sorted(names) == ["perf_counter", "samples_per_second", "share"]
    assert make_timer(gpu).name == "cuda_events"
    assert mark.enable_timing and mark.stream is own
