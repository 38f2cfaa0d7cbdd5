"""Several workers train the hosts exactly as the loop does."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.tamiyo.baselines import RandomValid


@pytest.fixture(autouse=True)
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever machine the test runs on."""
    monkeypatch.setattr("esper_lightning.envs.execution.threads.usable_cores", lambda: 4)


def episode(pool: HostPool) -> list[Tensor]:
    """All that can be known of it."""
    wanderer = RandomValid(3)
    seen = [pool.reset(range(pool.n_envs)).features.clone()]
    for _ in range(pool.config.horizon):
        step = pool.step(wanderer.act(pool))
        seen += [part.clone() for part in (*step.observation, step.reward, *step.metrics)]
    return seen + [weights for env in pool.envs for weights in env.network.state_dict().values()]


def test_workers_do_what_the_loop_does_bit_for_bit(make_pool: Callable[..., HostPool]) -> None:
    threads = make_pool(5, executor="threads")
    by_workers = episode(threads)
    by_loop = episode(make_pool(5, executor="loop"))

    assert all(torch.equal(a, b) for a, b in zip(by_workers, by_loop, strict=True))
    assert len(threads.executor.workers._threads) == 4, "there were several"


def test_an_error_in_a_worker_is_not_swallowed(
    make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2, executor="threads")
    monkeypatch.setattr(pool.envs[1].network, "head", torch.nn.Linear(3, 10))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pool.step(RandomValid(0).act(pool))
