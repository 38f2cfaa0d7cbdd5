"""Threads and streams do what the loop does. Streams are fake; for the order of events see test_stream_races.py."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.executors import StreamsExecutor
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Digits
from tests.conftest import SMALL, small_host
from tests.decisions import CPU
from tests.envs.executors.episodes import episode, same
from tests.envs.executors.fake_cuda import FakeCuda

MakePool = Callable[..., HostPool]

SECOND = torch.device("cpu", 0)
"""The CPU under another name, which a pool treats as another device."""


def on_streams(pool: HostPool) -> HostPool:
    """Return the same pool with its hosts trained on fake streams."""
    pool.executor = StreamsExecutor(pool.task, pool.config.training)
    return pool


def test_streams_do_what_the_loop_does_bit_for_bit(make_pool: MakePool, fake_cuda: FakeCuda) -> None:
    stages: set[Stage] = set()
    streams, loop = on_streams(make_pool(5)), make_pool(5)

    assert same(episode(streams, stages), episode(loop))
    assert {Stage.BLENDING, Stage.FOSSILIZED, Stage.CULLED} <= stages
    assert torch.equal(streams.test_scores()[1], loop.test_scores()[1])


@pytest.mark.parametrize("executor", ["threads", "streams"])
def test_an_error_is_not_swallowed_and_leaves_the_hosts_at_rest(
    make_pool: MakePool, fake_cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    pool = on_streams(make_pool(2)) if executor == "streams" else make_pool(2, executor=executor)
    monkeypatch.setattr(pool.envs[1].network, "head", torch.nn.Linear(3, 10))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pool.step(RandomValid(0).act(pool))

    if executor == "streams":
        events = fake_cuda.default[CPU].log
        assert [event.stream for event in events] == [pool.executor._stream(env) for env in pool.envs]
        assert fake_cuda.entered == []


def two_devices(n_envs: int) -> HostPool:
    task = Digits(validation=100, test=100)
    return HostPool(task, task.load(), small_host, config=SMALL, n_envs=n_envs, device=CPU, host_devices=[CPU, SECOND])


def test_environments_are_dealt_out_to_devices_in_turn() -> None:
    pool = two_devices(5)

    assert [env.device for env in pool.envs] == [CPU, SECOND, CPU, SECOND, CPU]
    assert [env.generator.device for env in pool.envs] == [CPU] * 5  # torch has only one CPU device


def test_each_device_has_one_copy_of_the_data() -> None:
    data = Digits(validation=100, test=100).load().copy_to([CPU, SECOND])
    first, second = (data.train.to(device) for device in (CPU, SECOND))

    assert first.inputs is data.train.inputs
    assert torch.equal(first.inputs, second.inputs) and first.inputs.data_ptr() != second.inputs.data_ptr()
    again = data.copy_to([CPU, SECOND])  # as for a second pool
    assert all(again.test.to(device).inputs is data.test.to(device).inputs for device in (CPU, SECOND))


@pytest.mark.parametrize("streams", [False, True])
def test_every_environment_learns_from_the_copy_on_its_device(fake_cuda: FakeCuda, streams: bool) -> None:
    pool = on_streams(two_devices(4)) if streams else two_devices(4)
    pool.reset([7] * 4)
    pool.data.train.to(SECOND).inputs.zero_()
    pool.data.validation.to(SECOND).targets.zero_()
    trained, validated = pool.executor.train_and_validate(
        pool.envs, pool.data.train, pool.data.validation, clock=pool.clock
    )

    for rows in (trained, validated):
        assert torch.equal(rows[0], rows[2]) and torch.equal(rows[1], rows[3])
        assert not torch.equal(rows[0], rows[1])


def test_streams_of_a_device_wait_for_that_device_and_results_for_all(fake_cuda: FakeCuda) -> None:
    pool = on_streams(two_devices(2))
    fake_cuda.default.clear()
    pool.step(RandomValid(0).act(pool))
    here, there = (pool.executor._stream(env) for env in pool.envs)

    assert (here.device, there.device) == (CPU, SECOND)
    assert [stream.log[0].stream for stream in (here, there)] == [fake_cuda.default[CPU], fake_cuda.default[SECOND]]
    assert [event.stream for event in fake_cuda.default[CPU].log] == [here, there]
    assert [event.stream for event in fake_cuda.default[SECOND].log] == [there]


def test_streams_are_refused_on_the_cpu(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match=r"^executor 'streams' runs on CUDA, not on cpu; use env\.executor loop$"):
        make_pool(1, executor="streams")


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the number of processor cores that the executor finds."""

    def have(number: int) -> None:
        monkeypatch.setattr("esper_lightning.envs.executors.parallel.usable_cores", lambda: number)

    have(4)
    return have


@pytest.mark.slow
def test_workers_do_what_the_loop_does_bit_for_bit(make_pool: MakePool, cores: Callable[[int], None]) -> None:
    """A11: threads share nothing that they write."""
    stages: set[Stage] = set()
    by_loop = episode(make_pool(5, executor="loop", horizon=20), stages)
    assert {Stage.TRAINING, Stage.BLENDING, Stage.FOSSILIZED, Stage.CULLED, Stage.DORMANT} <= stages

    for number in (4, 1):
        cores(number)
        threads = make_pool(5, executor="threads", horizon=20)
        assert same(episode(threads), by_loop)
        assert len(threads.executor.workers._threads) == number


def test_the_largest_hosts_come_first(make_pool: MakePool, cores: Callable[[int], None]) -> None:
    cores(1)
    pool = make_pool(3, executor="threads", horizon=9)
    order: list[int] = []
    for i, env in enumerate(pool.envs):
        env.network.register_forward_hook(lambda *_, i=i: order.append(i))
    pool.envs[1].growing.germinate("block3", "norm")
    pool.executor.train_epoch(pool.envs, pool.data.train)

    assert order == [1, 1, 0, 0, 2, 2]  # two minibatches each


def test_workers_end_with_their_pool(make_pool: MakePool, cores: Callable[[int], None]) -> None:
    for _ in range(2):
        before = set(threading.enumerate())
        pool = make_pool(4, executor="threads")
        pool.step(RandomValid(0).act(pool))
        begun = set(threading.enumerate()) - before
        assert len(begun) > 1

        del pool
        gc.collect()
        for thread in begun:
            thread.join(timeout=10.0)
        assert not begun & set(threading.enumerate())


@pytest.mark.slow
def test_workers_leave_torchs_number_of_threads_as_it_was(make_pool: MakePool, cores: Callable[[int], None]) -> None:
    def threads_per_operator() -> list[int]:
        """Return the threads per operator of this thread and of a new one."""
        found = [torch.get_num_threads()]
        newcomer = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        newcomer.start()
        newcomer.join()
        return found

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = make_pool(4, executor="threads")

        assert threads_per_operator() == [2, 2]
        assert set(pool.executor.workers.map(lambda _: torch.get_num_threads(), range(20))) == {1}
    finally:
        torch.set_num_threads(before)
