"""Flat masks and observations. Skipped without the extra `gym`."""

from collections.abc import Callable, Container
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("gymnasium")

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HEADS, HostPool, Op
from esper_lightning.envs.spaces.actions import RELEVANT_OPS
from esper_lightning.envs.spaces.observation import slot_features
from esper_lightning.gym.spaces import choice_masks, flatten_masks, flatten_observation, observation_names
from tests.conftest import FREE


def choices_in_possible_actions(pool: HostPool, host: int) -> dict[str, list[bool]]:
    """Try every action, and return the choices of each head that have an effect in one that is possible."""
    found = {head: [False] * size for head, size in pool.space.sizes.items()}
    for action in product(*map(range, pool.space.sizes.values())):
        if pool.masks_on_cpu.allows(host, action):
            for head, choice in zip(HEADS, action, strict=True):
                found[head][choice] |= Op(action[0]) in RELEVANT_OPS[head]
    return {head: choices if any(choices) else [True, *choices[1:]] for head, choices in found.items()}


@pytest.mark.parametrize(
    ("changes", "ticks"),
    [({}, range(6)), (FREE, (4, 8))],
    ids=["one style", "three styles"],
)
def test_a_choice_is_masked_unless_a_possible_action_needs_it(
    make_pool: Callable[..., HostPool], changes: dict[str, Any], ticks: Container[int]
) -> None:
    pool, wanderer = make_pool(2, **changes), RandomValid(rng_seed=3)
    pool.reset([1, 2])
    seen = set()
    for tick in range(max(ticks) + 1):
        if tick in ticks:
            masks = choice_masks(pool.masks_on_cpu, pool.space)
            for host in range(2):
                expected = choices_in_possible_actions(pool, host)
                assert {head: mask[host].tolist() for head, mask in masks.items()} == expected
                seen |= {pool.space.op[op] for op, possible in enumerate(expected["op"]) if possible}
        pool.step(wanderer.act(pool))
    assert seen >= {"WAIT", "GERMINATE", "CULL", "FOSSILIZE"}, "a long enough walk"


def test_masks_of_the_heads_stand_one_after_the_other(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2)
    flat = torch.from_numpy(flatten_masks(pool.masks_on_cpu, pool.space))

    parts = dict(zip(HEADS, flat.split(list(pool.space.sizes.values()), 1), strict=True))

    assert torch.equal(parts["op"], pool.masks_on_cpu.op)
    assert parts["slot"].all() and parts["tempo"].all(), "a seed can germinate in every slot"


def test_an_observation_is_the_rows_one_after_the_other(make_pool: Callable[..., HostPool]) -> None:
    pool, wanderer = make_pool(2), RandomValid(rng_seed=0)
    for _ in range(4):
        pool.step(wanderer.act(pool))

    flat = flatten_observation(pool)
    row = dict(zip(observation_names(pool), flat[0].tolist(), strict=True))

    assert flat.dtype.name == "float32"
    for k, slot in enumerate(pool.envs[0].slots):
        expected = slot_features(pool.envs[0], k)
        assert {name: row[f"{slot.name}.{name}"] for name in expected} == pytest.approx(expected)
        here = [name for name in pool.space.blueprint if row[f"{slot.name}.{name}.here"]]
        assert here == [slot.blueprint] * slot.occupied
    assert any(slot.occupied for slot in pool.envs[0].slots), "something has grown"
