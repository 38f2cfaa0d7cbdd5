"""Episodes and rollbacks reuse the memory of the first episode."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.runtime import compiled
from tests.conftest import SMALL
from tests.decisions import WAIT, act
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch

MakePool = Callable[..., HostPool]


def storage(tensors: Iterable[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> bool:
    """Return True if the tensors are identical objects in the same memory."""
    return all(a is b and a.data_ptr() == b.data_ptr() for a, b in zip(ours, theirs, strict=True))


def play(pool: HostPool, seed: int) -> None:
    """Play an episode with random actions."""
    controller = RandomValid(seed)
    pool.reset([seed + i for i in range(pool.n_envs)])
    for _ in range(pool.config.horizon):
        pool.step(controller.act(pool))


def test_environments_are_reset_in_place(make_pool: MakePool) -> None:
    """S1: every episode uses the same hosts, weights and optimizer states, in the same memory."""
    pool = make_pool(2)

    def tensors() -> Iterator[Tensor]:
        for env in pool.envs:
            host = env.optimizer.param_groups[0]["params"]
            yield from host
            yield from (buffer for name, buffer in env.network.named_buffers() if ".seed." not in name)
            yield from (value for p in host for value in env.optimizer.state[p].values())

    play(pool, 0)
    before = list(tensors())
    pointers = storage(before)
    for seed in (1, 2):
        play(pool, seed)
        assert same(tensors(), before)
        assert storage(before) == pointers
    assert len(before) > 2 * 20


@pytest.mark.parametrize(
    ("executor", "compile"), [("loop", False), ("threads", False), ("fused", False), ("loop", True)]
)
def test_a_rollback_is_in_place(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, executor: str, compile: bool
) -> None:
    """S1: a rollback keeps a host, its weights and its snapshot in the same memory."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    governor, training = replace(ONLY_NAN_DIVERGES, max_rollbacks=9), replace(SMALL.training, compile=compile)
    pool = make_pool(2, governor=governor, horizon=9, executor=executor, training=training)
    pool.reset([1, 2])  # from the second episode on, optimizers have a state for every weight

    def places() -> Iterator[tuple[Any, int]]:
        for env in pool.envs:
            for tensor in [*env.network.parameters(), *env.network.buffers()]:
                yield id(tensor), tensor.data_ptr()
            yield env, env.monitor.snapshot.nbytes
            held: list[Tensor] = list(env.monitor.snapshot.view()["growing"]["network"].values())
            yield held[0].shape, held[0].data_ptr()

    for _ in range(2):
        pool.step(act(WAIT, WAIT))
    before = list(places())
    for tick in range(6):
        with breaking_epoch(pool, [tick % 2]):
            step = pool.step(act(WAIT, WAIT))
        assert step.terminated.tolist() == [tick % 2 == 0, tick % 2 == 1]
    assert list(places()) == before
    assert pool.executor.compiled.enabled == compile
