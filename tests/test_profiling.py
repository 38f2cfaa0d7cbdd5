"""Time per phase, measured with a fake clock."""

import time
from collections.abc import Callable

import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.runtime.profiling import PHASES, PhaseClock
from tests.envs.executors.fake_cuda import Event, FakeCuda, Stream

MakePool = Callable[..., HostPool]

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def nonzero_seconds(clock: PhaseClock) -> dict[str, float]:
    """Return the seconds of all phases that took any time."""
    return {phase: seconds for phase, seconds in clock.take_seconds().items() if seconds}


def test_time_is_of_the_phase_that_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    clock, profiler = PhaseClock(CPU), SimpleProfiler()
    clock.profile = profiler.profile
    for seconds, phase in ((2.0, "policy"), (4.0, "update"), (1.0, "policy")):
        with clock.measure(phase):
            now += seconds

    assert nonzero_seconds(clock) == {"policy": 3.0, "update": 4.0}
    assert clock.take_seconds() == dict.fromkeys(PHASES, 0.0)
    assert list(profiler.recorded_durations) == ["policy", "update"], "Lightning's profiler has a row for each phase"


def test_on_a_gpu_events_in_the_stream_at_hand_count(fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """S13: time is measured by events on CUDA, without waiting, and by the processor's clock on the CPU."""
    events: list[Event] = []
    arrived = 2  # events that the GPU has reached

    def note(event: Event, stream: Stream) -> None:
        event.stream = stream
        events.append(event)

    monkeypatch.setattr(Event, "record", note)
    monkeypatch.setattr(Event, "elapsed_time", lambda begin, end: 1500.0)  # milliseconds
    monkeypatch.setattr(Event, "query", lambda event: events.index(event) < arrived)
    clock = PhaseClock(GPU)
    with clock.measure("policy"):
        pass
    with torch.cuda.stream(own := Stream(GPU)), clock.measure("train"):
        pass

    assert [event.stream for event in events] == [fake_cuda.default[GPU]] * 2 + [own] * 2
    assert all(event.enable_timing for event in events)
    assert nonzero_seconds(clock) == {"policy": 1.5}
    assert nonzero_seconds(clock) == {}
    arrived = 4
    assert nonzero_seconds(clock) == {"train": 1.5}
    assert (clock.name, PhaseClock(CPU).name) == ("cuda_events", "perf_counter")


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_tick_s_phases_add_up_to_the_tick(make_pool: MakePool, executor: str) -> None:
    pool, wanderer = make_pool(4, executor=executor), RandomValid(0)
    for _ in range(pool.config.horizon):
        pool.clock.take_seconds()
        action = wanderer.act(pool)
        begin = time.perf_counter()
        pool.step(action)
        whole = time.perf_counter() - begin
        seconds = pool.clock.take_seconds()

        assert 0.5 * whole < sum(seconds.values()) <= whole
        assert all(seconds[phase] > 0.0 for phase in ("train", "validate", "bookkeeping"))
