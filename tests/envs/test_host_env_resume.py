"""An environment that is saved within an episode continues bit for bit."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.nested import iter_tensors
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.tiers import rest_is_slow

SCRIPT = [  # actions of two environments, tick by tick
    [germinate(0, 2), WAIT],
    [WAIT, germinate(1, tempo=1)],
    [germinate(1, 1, tempo=1), germinate(0, 1, tempo=1)],
    [fossilize(0), cull(1)],
    [germinate(2), WAIT],
    [WAIT, germinate(1, 2)],
    [cull(2), fossilize(0)],
]

EVERY = range(len(SCRIPT))

SAVE_TICKS = (0, 3, len(SCRIPT) - 1)
"""Ticks to save at: the first, one in the middle, and the last."""


def saved(pool: HostPool) -> bytes:
    file = io.BytesIO()
    torch.save(pool.state_dict(), file)
    return file.getvalue()


def loaded(file: bytes) -> dict[str, Any]:
    return torch.load(io.BytesIO(file), weights_only=True)


def play(pool: HostPool, begin: int) -> list[Tensor]:
    """Play the script from tick `begin` on and return everything observable."""
    seen = []
    for rows in SCRIPT[begin:]:
        step = pool.step(act(*rows))
        seen += [*step.observation, *step.masks, step.reward, *step.metrics]
    networks = [value for env in pool.envs for value in env.network.state_dict().values()]
    generators = [env.generator.get_state() for env in pool.envs]
    return [tensor.clone() for tensor in seen + networks + generators]


def used_pool(make: Callable[[], HostPool]) -> HostPool:
    """Return a pool in the middle of another episode."""
    pool, wanderer = make(), RandomValid(8)
    pool.reset([11, 12])
    for _ in range(4):
        pool.step(wanderer.act(pool))
    return pool


def test_a_resumed_host_holds_no_memory_besides_its_own(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2)
    pool.reset([1, 2])
    for rows in SCRIPT[:4]:
        pool.step(act(*rows))
    state = loaded(saved(pool))
    pool.load_state_dict(state)

    assert len({tensor.untyped_storage().data_ptr() for tensor in iter_tensors(state["envs"][0])}) < 6
    for env in pool.envs:
        moments = [value for state in env.optimizer.state.values() for value in state.values()]
        own = [*moments, *env.network.parameters(), *env.network.buffers()]
        assert moments and all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in own)


@pytest.mark.parametrize(
    ("optimizer", "ticks"),
    rest_is_slow([("adam", SAVE_TICKS), ("adam", EVERY), ("sgd", EVERY)], lambda case: case[1] != EVERY),
)
def test_an_episode_that_is_saved_at_any_tick_continues_bit_for_bit(
    make_pool: Callable[..., HostPool], optimizer: str, ticks: Sequence[int]
) -> None:
    def make() -> HostPool:
        return make_pool(2, horizon=len(SCRIPT), training=HostTraining(optimizer=optimizer, batches=2))

    pool, other = make(), used_pool(make)
    pool.reset([1, 2])
    stages = set()
    for tick, rows in enumerate(SCRIPT):
        stages |= {slot.stage for env in pool.envs for slot in env.slots}
        if tick not in ticks:
            pool.step(act(*rows))
            continue
        file = saved(pool)
        expected = play(pool, tick)

        other.load_state_dict(loaded(file))
        resumed = play(other, tick)

        assert all(torch.equal(a, b) for a, b in zip(expected, resumed, strict=True)), f"saved at tick {tick}"
        pool.load_state_dict(loaded(file))
        pool.step(act(*rows))
    # The script passes through every state that a seed can have between two ticks.
    assert stages == set(Stage) - {Stage.GERMINATED, Stage.CULLED}


def test_a_state_can_be_loaded_twice(make_pool: Callable[..., HostPool]) -> None:
    pool = used_pool(make_pool)
    state = loaded(saved(pool))

    def rewards() -> list[Tensor]:
        pool.load_state_dict(state)
        wanderer = RandomValid(2)
        return [pool.step(wanderer.act(pool)).reward for _ in range(2)]

    first, second = rewards(), rewards()  # training in between must not change the saved state

    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
