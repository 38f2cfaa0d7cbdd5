"""Schedules that are played in a pool, and recorded from other controllers."""

from collections.abc import Callable, Sequence
from itertools import product

import pytest
import torch

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.controllers.schedules import (
    FixedSchedule,
    RecordingController,
    Schedule,
    ScheduledAction,
    SchedulePerPrice,
    is_possible,
    most_common_schedule,
    yoke_schedules,
)
from esper_lightning.envs import Action, ActionConfig, HostPool
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE
from tests.decisions import WAIT, Row, act, cull, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.tiers import rest_is_slow

SLOTS = ("block1.pool", "block2.pool", "block3")


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    return make_pool(2)


def record_schedules(pool: HostPool, controller: Controller, rng_seeds: Sequence[int]) -> list[Schedule]:
    """Return the actions of `controller` on hosts that depend on `rng_seeds` alone, as one schedule per host.

    The state of the pool is overwritten.
    """
    recording = RecordingController(controller)
    pool.reset(rng_seeds)
    recording.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(recording.act(pool))
    return recording.schedules


def schedule(*entries: ScheduledAction) -> Schedule:
    return Schedule(SLOTS, entries)


def actions_taken(pool: HostPool, controller: FixedSchedule, host: int = 0) -> list[Row]:
    """Return the actions on one host at every tick; the pool raises if one is not possible."""
    pool.reset([1, 2])
    controller.reset(pool)
    done = []
    for _ in range(pool.config.horizon):
        action = controller.act(pool)
        done.append(tuple(int(head[host]) for head in action))
        pool.step(action)
    return done


def grow(tick: int, slot: str, blueprint: str = "norm") -> ScheduledAction:
    return ScheduledAction(tick, "GERMINATE", slot, blueprint)


def test_entries_are_carried_out_at_their_ticks(pool: HostPool) -> None:
    plan = schedule(grow(0, "block3", "conv_light"), ScheduledAction(2, "CULL", "block3"))

    assert actions_taken(pool, FixedSchedule(plan)) == [germinate(2, 2), WAIT, cull(2), WAIT, WAIT, WAIT]


def test_an_entry_waits_until_it_is_possible(pool: HostPool) -> None:
    plan = schedule(grow(0, "block3"), ScheduledAction(1, "FOSSILIZE", "block3"))

    # One tick to train, one more by the lifecycle's settings, one to blend.
    assert actions_taken(pool, FixedSchedule(plan)) == [germinate(2), WAIT, WAIT, fossilize(2), WAIT, WAIT]
    assert pool.envs[0].slots[2].stage is Stage.FOSSILIZED


def test_of_several_that_are_due_the_first_possible_one_comes_first(pool: HostPool) -> None:
    plan = schedule(
        ScheduledAction(0, "FOSSILIZE", "block3"), grow(0, "block3"), grow(0, "block2.pool"), grow(0, "block1.pool")
    )

    done = actions_taken(pool, FixedSchedule(plan))

    assert done[:3] == [germinate(2), germinate(1), germinate(0)]
    assert fossilize(2) not in done, "what stood before its seed's germination was given up with it"


def test_what_is_in_the_way_of_a_later_entry_for_its_slot_is_given_up(pool: HostPool) -> None:
    plan = schedule(
        grow(0, "block3"),
        ScheduledAction(1, "CULL", "block3"),
        ScheduledAction(2, "FOSSILIZE", "block3"),
        grow(2, "block3", "conv_small"),
    )

    # After a cull the slot is closed for a tick; then there is no seed to fossilize, but room for a new one.
    assert actions_taken(pool, FixedSchedule(plan)) == [germinate(2), cull(2), WAIT, germinate(2, 1), WAIT, WAIT]


def test_what_never_becomes_possible_is_never_done(pool: HostPool) -> None:
    plan = schedule(ScheduledAction(0, "FOSSILIZE", "block1.pool"), grow(2, "block2.pool"))

    assert actions_taken(pool, FixedSchedule(plan)) == [WAIT, WAIT, germinate(1), WAIT, WAIT, WAIT]


def test_every_host_may_have_a_schedule_of_its_own(pool: HostPool) -> None:
    both = FixedSchedule([schedule(grow(0, "block3")), schedule(grow(1, "block1.pool"))])

    assert actions_taken(pool, both, host=0)[:2] == [germinate(2), WAIT]
    assert actions_taken(pool, both, host=1)[:2] == [WAIT, germinate(0)]
    with pytest.raises(ValueError, match="1 schedules for 2 hosts; give one for each"):
        FixedSchedule([schedule()]).reset(pool)


@pytest.mark.parametrize(("seed", "heads"), rest_is_slow(product(range(2), ["as by default", "all"]), {(1, "all")}))
def test_what_was_recorded_replays_bit_for_bit_on_the_same_hosts(
    make_pool: Callable[..., HostPool], heads: str, seed: int
) -> None:
    pool = make_pool(3, **(FREE if heads == "all" else {}))
    recorded = record_schedules(pool, RandomValid(seed), [5, 6, 7])
    before = [{name: value.clone() for name, value in env.network.state_dict().items()} for env in pool.envs]
    tested = pool.test_accuracy()

    pool.reset([5, 6, 7])
    replay = FixedSchedule(recorded)
    replay.reset(pool)
    for _ in range(pool.config.horizon):
        pool.step(replay.act(pool))

    assert sum(len(one.entries) for one in recorded) > 3
    assert torch.equal(pool.test_accuracy(), tested)
    for env, known in zip(pool.envs, before, strict=True):
        now = env.network.state_dict()
        assert now.keys() == known.keys()
        assert all(torch.equal(value, known[name]) for name, value in now.items())
    assert record_schedules(pool, FixedSchedule(recorded), [5, 6, 7]) == recorded


def test_recording_changes_nothing(pool: HostPool) -> None:
    pool.reset([1, 2])
    watched = RecordingController(RandomValid(3))
    watched.reset(pool)

    assert all(torch.equal(a, b) for a, b in zip(watched.act(pool), RandomValid(3).act(pool), strict=True))


def test_on_hosts_that_are_rolled_back_a_schedule_goes_on(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES)
    controller = FixedSchedule(
        schedule(grow(0, "block3"), ScheduledAction(1, "FOSSILIZE", "block3"), grow(3, "block3"))
    )
    pool.reset([1, 2])
    controller.reset(pool)
    pool.step(controller.act(pool))
    with breaking_epoch(pool, [1]):
        pool.step(controller.act(pool))
    while pool.envs[0].tick < pool.config.horizon:
        pool.step(controller.act(pool))  # raises if the action is masked

    assert pool.envs[0].slots[2].stage is Stage.FOSSILIZED
    assert pool.envs[1].slots[2].stage is not Stage.FOSSILIZED


class RepeatsGermination:
    """Germinates the same seed whenever it is possible."""

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        rows = [germinate(2, 2) if pool.masks_on_cpu.allows(i, germinate(2, 2)) else WAIT for i in range(pool.n_envs)]
        return act(*rows)


def test_what_the_governor_refuses_is_neither_possible_nor_recorded(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2, governor=GovernorConfig(max_growth=1.5))

    assert record_schedules(pool, RepeatsGermination(), [1, 2]) == [schedule(), schedule()]
    assert pool.masks_on_cpu.allows(0, germinate(2, 2)) and not is_possible(pool, 0, germinate(2, 2))
    assert actions_taken(pool, FixedSchedule(schedule(grow(0, "block3", "conv_light")))) == [WAIT] * pool.config.horizon


def test_of_what_was_done_the_most_common_is_named(pool: HostPool) -> None:
    one, other = schedule(grow(0, "block3")), schedule()

    assert most_common_schedule([other, one, one]) == (one, 2)
    assert most_common_schedule([other, one]) == (other, 1)
    assert most_common_schedule(record_schedules(pool, WaitOnly(), [1, 2])) == (schedule(), 2)


def test_a_schedule_plays_where_only_some_heads_are_offered(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2, actions=ActionConfig(blueprints=["norm"], tempos={"FAST": 1}, max_seeds=1))

    done = actions_taken(pool, FixedSchedule(schedule(grow(0, "block1.pool"), grow(0, "block2.pool"))))

    assert done == [germinate(0)] + [WAIT] * 5, "there is no room for the second"


def test_a_schedule_plays_where_episodes_offer_a_part_of_the_slots(make_pool: Callable[..., HostPool]) -> None:
    family = FamilyConfig(train=[{"offer.slots": [1]}])
    pool = make_pool(2, family=family, sight=ObservationConfig(layout="rows"))
    everywhere = Schedule(tuple(pool.space.slot), tuple(grow(0, slot) for slot in pool.space.slot))
    for seeds in ([0, 1], [2, 3], [4, 5], [6, 7]):
        pool.reset(seeds)
        controller = FixedSchedule(everywhere)
        controller.reset(pool)
        pool.step(controller.act(pool))

        assert [sum(slot.occupied for slot in env.slots) for env in pool.envs] == [1, 1]


def test_a_yoked_host_gets_the_actions_of_the_next_one_of_its_kind() -> None:
    a, b, c, d, e = (schedule(grow(tick, "block3")) for tick in range(5))

    assert yoke_schedules([a, b, c, d, e], ["x", "y", "x", "x", "z"], [0.1] * 5) == [c, b, d, a, e]
    assert yoke_schedules([a, b, c], ["x"] * 3, [0.1, 0.3, 0.2]) == [c, a, b], "in the order of prices"
    assert yoke_schedules([], [], []) == []


def test_every_host_gets_the_schedule_of_the_nearest_price(make_pool: Callable[..., HostPool]) -> None:
    family = FamilyConfig(train=[{"objective.price": [0.0, 0.1, 0.3, 1.0]}])
    varied = make_pool(12, family=family)
    cheap, dear = schedule(grow(0, "block3", "conv_light")), schedule(grow(0, "block1.pool"))
    controller = SchedulePerPrice({0.05: cheap, 0.5: dear})

    varied.reset(range(0, 24, 2))
    controller.reset(varied)
    action = controller.act(varied)

    prices = [env.context.context.price for env in varied.envs]
    assert set(prices) == {0.0, 0.1, 0.3, 1.0}
    blueprints = [varied.space.blueprint[int(chosen)] for chosen in action.blueprint]
    # 0.3 differs by 0.25 from 0.05 and by 0.2 from 0.5.
    assert blueprints == ["conv_light" if price < 0.2 else "norm" for price in prices]
