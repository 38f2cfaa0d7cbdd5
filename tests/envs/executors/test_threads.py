"""Worker threads train the hosts exactly as the loop does."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.growth.stages import Stage
from tests.envs.executors.episodes import episode, same

MakePool = Callable[..., HostPool]


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


def test_an_error_in_a_worker_is_not_swallowed(
    make_pool: MakePool, cores: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2, executor="threads")
    monkeypatch.setattr(pool.envs[1].network, "head", torch.nn.Linear(3, 10))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pool.step(RandomValid(0).act(pool))


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
