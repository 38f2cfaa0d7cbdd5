"""Time and memory per phase, measured with fake timers."""

from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import host_epoch
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.profiling import PHASES, HostTimer, PhaseClock, Timer
from esper_lightning.tasks import Batches, Split, fetch
from tests.envs.executors.fake_cuda import Event, FakeCuda, Stream

MakePool = Callable[..., HostPool]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


class SteppingTimer(HostTimer):
    """Timer that advances by 1 s at every mark; `arrived` is the time that the device has reached."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.now, self.arrived = 0.0, float("inf")

    def mark(self) -> float:
        self.now += 1.0
        return self.now

    def has_passed(self, mark: float) -> bool:
        return mark <= self.arrived

    def seconds(self, begin: float, end: float) -> float:
        assert max(begin, end) <= self.arrived, "the timer must not synchronise"
        return end - begin


def stepping_clock() -> tuple[PhaseClock, SteppingTimer]:
    clock = PhaseClock(CPU)
    clock.timer = SteppingTimer()
    return clock, clock.timer


def nonzero_seconds(clock: PhaseClock) -> dict[str, float]:
    """Return the seconds of all phases that took any time."""
    return {phase: seconds for phase, seconds in clock.take_seconds().items() if seconds}


def test_time_is_of_the_phase_that_is_measured() -> None:
    clock, timer = stepping_clock()
    for seconds, phase in ((2.0, "policy"), (4.0, "update"), (0.0, "policy")):
        with clock.measure(phase):
            timer.now += seconds

    assert nonzero_seconds(clock) == {"policy": 3.0 + 1.0, "update": 5.0}
    assert clock.take_seconds() == dict.fromkeys(PHASES, 0.0)


def test_time_with_several_hosts_is_divided_as_their_intervals_say() -> None:
    """3 hosts record 30 s of work within 10 s of elapsed time; one that says nothing leaves it to the phase."""
    clock, timer = stepping_clock()
    hosts = [SteppingTimer(), SteppingTimer()]
    hosts[0].start()
    hosts[0].record(update=1.0)  # before: not counted
    with clock.measure("train", hosts):
        timer.now += 9.0
        for host_timer, data, train in zip(hosts, (3.0, 5.0), (12.0, 4.0), strict=True):
            host_timer.start()
            host_timer.now += data - 1.0
            host_timer.record(data=1.0)
            host_timer.now += train - 1.0
            host_timer.record(train=0.75, counterfactual=0.25)
    parts = {"data": 10 * 8 / 24, "train": 10 * 12 / 24, "counterfactual": 10 * 4 / 24}
    assert nonzero_seconds(clock) == pytest.approx(parts)

    with clock.measure("train", [SteppingTimer()]):
        pass
    assert nonzero_seconds(clock) == {"train": 1.0}


def test_what_the_device_has_not_reached_is_added_later() -> None:
    clock, timer = stepping_clock()
    timer.arrived = 2.0
    with clock.measure("policy"):  # from 1 to 2
        pass
    with clock.measure("train", [timer]):  # from 3 to 6
        timer.start()
        timer.record(train=1.0)

    assert nonzero_seconds(clock) == {"policy": 1.0}
    assert nonzero_seconds(clock) == {}
    timer.arrived = 6.0
    assert nonzero_seconds(clock) == {"train": 3.0}


def test_the_clock_fits_the_device(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: time is measured by events in the stream at hand on CUDA, and by the processor's clock on the CPU."""
    timer = Timer(GPU)
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: 1500.0, raising=False)
    monkeypatch.setattr(Event, "query", lambda event: event is begin, raising=False)
    begin = timer.mark()
    with torch.cuda.stream(own := Stream(GPU)):
        end = timer.mark()

    assert begin.enable_timing and begin.stream is fake_cuda.default[GPU] and end.stream is own
    assert timer.seconds(begin, end) == 1.5  # an event counts in milliseconds
    assert timer.has_passed(begin) and not timer.has_passed(end)
    assert (timer.name, Timer(CPU).name) == ("cuda_events", "perf_counter")


def test_a_phase_has_a_peak_of_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = 0

    def reset(device: torch.device) -> None:
        nonlocal peak
        peak = 0

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    clock, timer = stepping_clock()
    timer.device, clock.measures_memory = GPU, True
    for phase, most in (("train", 8 * 2**20), ("validate", 2 * 2**20), ("train", 5 * 2**20)):
        with clock.measure(phase):
            peak = max(peak, most)

    assert clock.take_memory() == {"train": 8.0, "validate": 2.0}
    assert clock.take_memory() == {}


def test_lightning_s_profiler_has_a_row_for_each_phase() -> None:
    profiler, (clock, _) = SimpleProfiler(), stepping_clock()
    clock.profile = profiler.profile
    with clock.measure("policy"):
        pass

    assert list(profiler.recorded_durations) == ["policy"]


def seconds_of_intervals(pool: HostPool, work: Callable[[], object]) -> dict[str, float]:
    """Return seconds by phase of the first environment's intervals, with 1 s between marks."""
    pool.envs[0].timer = timer = SteppingTimer()
    work()
    seconds: dict[str, float] = {}
    for begin, end, shares in timer.take_intervals():
        for phase, share in shares.items():
            seconds[phase] = seconds.get(phase, 0.0) + share * (end - begin)
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
        pool.envs[0].timer.now += 10.0
        return fetch(data, batch, config)

    monkeypatch.setattr(host_epoch, "fetch", slowly)
    slow = seconds_of_intervals(pool, lambda: pool.executor.train_epoch(pool.envs, train))

    assert plain["data"] == 1 + 2 * 2  # drawing, and fetching each micro-batch
    assert slow == {"data": plain["data"] + 40.0, "train": plain["train"]}


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_tick_s_phases_add_up_to_the_tick(make_pool: MakePool, executor: str) -> None:
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
