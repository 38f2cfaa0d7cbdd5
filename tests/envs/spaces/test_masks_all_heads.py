"""Masks with every op and every head on offer: exact, and never empty."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE
from tests.decisions import WAIT, Row, act, advance, cull, fossilize, germinate, set_alpha

MakePool = Callable[..., HostPool]
HALF, WHOLE = 0, 1  # targets
AT_ONCE, IN_TWO, IN_THREE = 0, 1, 2  # speeds


def is_possible(pool: HostPool, row: Row) -> bool:
    """Return True if the first environment may take the action, and assert that pool and masks agree."""
    allowed = pool.masks.allows(0, row)
    if not allowed:
        with pytest.raises(ValueError, match=f"{pool.space.op[row[0]]} .*is masked"):
            pool.step(act(row))
    return allowed


def ops(pool: HostPool, slot: int = 0, env: int = 0) -> set[str]:
    """Return the ops that are possible on a slot."""
    rows = pool.masks.slot[env, 1:].tolist()
    return {op for op, row in zip(pool.space.op[1:], rows, strict=True) if row[slot]}


def in_stage(pool: HostPool, stage: Stage) -> SeedSlot:
    """Grow a seed in the first slot to `stage`, with an alpha ramp of one tick."""
    pool.reset([1])
    life = [germinate(0, 1), WAIT, advance(0), advance(0)]
    for row in life[: 2 + [Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY].index(stage)]:
        pool.step(act(row))
    slot = pool.envs[0].slots[0]
    assert slot.stage is stage
    return slot


@pytest.fixture(scope="module")
def free(make_pool: MakePool) -> HostPool:
    return make_pool(1, **FREE | {"horizon": 30})


def test_what_can_be_done_follows_the_life_of_a_seed(free: HostPool) -> None:
    free.reset([1])
    assert ops(free) == {"GERMINATE"}
    in_stage(free, Stage.TRAINING)
    assert ops(free) == {"CULL", "ADVANCE"}
    in_stage(free, Stage.BLENDING)
    assert ops(free) == {"CULL", "ADVANCE", "SET_ALPHA"}
    in_stage(free, Stage.PROBATIONARY)
    assert ops(free) == {"CULL", "FOSSILIZE", "SET_ALPHA"}
    free.step(act(fossilize(0)))
    assert ops(free) == set(), "it is fossilized"


def test_a_seed_cannot_be_advanced_before_the_gate_opens(make_pool: MakePool) -> None:
    patient = replace(FREE["lifecycle"], training_ticks=3)
    pool = make_pool(1, **FREE | {"lifecycle": patient})
    pool.step(act(germinate(0, 1, tempo=1)))
    for _ in range(3):
        assert not is_possible(pool, advance(0))
        pool.step(act(WAIT))
    assert is_possible(pool, advance(0))

    pool.step(act(advance(0)))
    assert pool.envs[0].slots[0].stage is Stage.BLENDING
    assert not is_possible(pool, advance(0)), "alpha was half of what it shall be"
    pool.step(act(WAIT))
    assert is_possible(pool, advance(0))


def test_alpha_is_never_sent_where_it_goes_already(free: HostPool) -> None:
    for stage in (Stage.BLENDING, Stage.PROBATIONARY):
        slot = in_stage(free, stage)
        for target, other in ((HALF, WHOLE), (WHOLE, HALF)):
            assert not is_possible(free, set_alpha(0, other))
            assert is_possible(free, set_alpha(0, target, IN_THREE))
            free.step(act(set_alpha(0, target, IN_THREE)))
            assert slot.ramp.target == free.space.target[target]
            assert slot.alpha_now != slot.ramp.target, "not even while it is on its way"


def test_where_all_targets_are_taken_alpha_cannot_be_set(make_pool: MakePool) -> None:
    pool = make_pool(1, **FREE | {"actions": replace(FREE["actions"], targets=[1.0])})
    in_stage(pool, Stage.BLENDING)
    assert ops(pool) == {"CULL", "ADVANCE"}

    half = replace(FREE["lifecycle"], alpha_target=0.5)
    pool = make_pool(1, **FREE | {"actions": replace(FREE["actions"], targets=[1.0]), "lifecycle": half})
    in_stage(pool, Stage.BLENDING)
    assert ops(pool) == {"CULL", "ADVANCE", "SET_ALPHA"}


@pytest.mark.parametrize("stage", [Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY])
def test_only_a_blended_seed_can_be_culled_slowly(free: HostPool, stage: Stage) -> None:
    in_stage(free, stage)

    assert is_possible(free, cull(0, AT_ONCE))
    assert is_possible(free, cull(0, IN_TWO)) is is_possible(free, cull(0, IN_THREE)) is (stage is not Stage.TRAINING)


def test_without_slow_culls_every_cull_is_at_once(make_pool: MakePool) -> None:
    pool = make_pool(1, **FREE | {"actions": replace(FREE["actions"], slow_cull=False)})
    in_stage(pool, Stage.PROBATIONARY)

    assert is_possible(pool, cull(0, AT_ONCE)) and not is_possible(pool, cull(0, IN_TWO))
    assert is_possible(pool, set_alpha(0, HALF, IN_TWO)), "the speeds are there for changes of alpha"


def test_what_happens_at_once_has_the_first_curve_and_no_other(free: HostPool) -> None:
    in_stage(free, Stage.PROBATIONARY)
    bent = {"curve": 1}

    assert is_possible(free, set_alpha(0, HALF, AT_ONCE)) and not is_possible(free, set_alpha(0, HALF, AT_ONCE, **bent))
    assert is_possible(free, cull(0, AT_ONCE)) and not is_possible(free, cull(0, AT_ONCE, **bent))
    assert is_possible(free, set_alpha(0, HALF, IN_TWO, **bent)) and is_possible(free, cull(0, IN_TWO, **bent))


@pytest.mark.parametrize("row", [advance(0), set_alpha(0, 0)], ids=["ADVANCE", "SET_ALPHA"])
def test_an_op_that_is_not_on_offer_is_no_action(make_pool: MakePool, row: Row) -> None:
    pool = make_pool(1)
    pool.step(act(germinate(0)))

    with pytest.raises(ValueError, match="is no action; the heads"):
        pool.step(act(row))


def test_advance_stays_masked_where_seeds_advance_by_themselves(make_pool: MakePool) -> None:
    pool = make_pool(1, actions=replace(FREE["actions"], advance=False))
    assert "ADVANCE" in pool.space.op, "its number is between others that are on offer"
    pool.step(act(germinate(0, 1)))
    for _ in range(3):
        assert not is_possible(pool, advance(0))
        pool.step(act(WAIT))
    assert pool.envs[0].slots[0].stage is Stage.PROBATIONARY


def expected_ops(env: HostEnv, slot: SeedSlot, alpha_before: float) -> set[str]:
    """Recompute the masks from the lifecycle rules; decisions of the gates are taken from the gates."""
    ramping = slot.stage in (Stage.BLENDING, Stage.PROBATIONARY)
    target = slot.ramp.target
    there = target > 0 and math.isclose(min(alpha_before, target) / max(alpha_before, target), 1.0, abs_tol=0.05)
    return {
        op
        for op, possible in {
            "GERMINATE": slot.stage is Stage.DORMANT,
            "CULL": slot.stage in (Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY),
            "FOSSILIZE": slot.stage is Stage.PROBATIONARY and not env.growing.reasons_against_fossilizing(slot.name),
            "ADVANCE": (slot.stage is Stage.BLENDING and there)
            or (slot.stage is Stage.TRAINING and not env.growing.reasons_against_advancing(slot.name)),
            "SET_ALPHA": ramping,
        }.items()
        if possible
    }


@pytest.mark.slow
def test_in_every_random_life_whatever_can_be_chosen_can_be_done(make_pool: MakePool) -> None:
    pool, done = make_pool(4, **FREE), set()
    for seed in range(3):
        wanderer = RandomValid(seed)
        pool.reset([10 * seed + i for i in range(4)])
        for _ in range(pool.config.horizon):
            action = wanderer.act(pool)
            rows = list(zip(*(head.tolist() for head in action), strict=True))
            for i, row in enumerate(rows):
                assert pool.masks.allows(i, row), "no masked action is ever drawn"
                assert_every_choice_leads_on(pool, i)
            before = [[slot.alpha_now for slot in env.slots] for env in pool.envs]
            pool.step(action)  # raises if the lifecycle refuses
            for i, env in enumerate(pool.envs):
                for k, slot in enumerate(env.slots):
                    # The alpha with which the host has just trained: after the action, before the epoch ended.
                    trained = slot.ramp.value(slot.ramp_ticks) if slot.ramp_ticks else before[i][k]
                    assert ops(pool, k, i) == expected_ops(env, slot, trained), (slot.stage, slot.ramp)
            done |= {Op(row[0]) for row in rows}
    assert done == set(Op), "the lives were long enough to show something"


def assert_every_choice_leads_on(pool: HostPool, env: int) -> None:
    """Every possible op leaves each relevant head a possible choice, given the choices of earlier heads."""
    slots, grows, targets, speeds, curves = (mask[env].tolist() for mask in pool.masks[:5])
    assert all(slots[Op.WAIT])
    assert all(any(row) for row in curves)
    for k in range(len(pool.space.slot)):
        assert any(grows[k]) or not slots[Op.GERMINATE][k]
        assert any(targets[k]) or not slots[Op.SET_ALPHA][k]
        assert all(any(speeds[op][k]) for op in (Op.CULL, Op.SET_ALPHA) if slots[op][k])
