"""Schedules: their JSON files, and controllers that play and record them."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.rules import RandomValid, WaitOnly
from esper_lightning.controllers.schedules import (
    FixedSchedule,
    Schedule,
    ScheduledAction,
    actions_by_tick,
    is_possible,
    read_schedule,
    write_schedule,
    yoke_schedules,
)
from esper_lightning.envs import Action, HostPool
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.evaluation.play import play_episode
from esper_lightning.growth.stages import Stage
from tests.conftest import FREE
from tests.decisions import WAIT, Row, act, cull, episode, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch

MakePool = Callable[..., HostPool]

SLOTS = ("block1.pool", "block2.pool", "block3")

GROW = {"tick": 0, "op": "GERMINATE", "slot": "block3", "blueprint": "norm"}


@pytest.fixture(scope="module")
def pool(make_pool: MakePool) -> HostPool:
    return make_pool(2)


def schedule(*entries: ScheduledAction) -> Schedule:
    return Schedule(SLOTS, entries)


def grow(tick: int, slot: str, blueprint: str = "norm") -> ScheduledAction:
    return ScheduledAction(tick, "GERMINATE", slot, blueprint)


def record(pool: HostPool, controller: Controller, rng_seeds: Sequence[int]) -> list[Schedule]:
    """Return the actions of `controller` in an episode, as one schedule per host."""
    return play_episode(pool, "recorded", controller, rng_seeds=rng_seeds).schedules


def rows_of(pool: HostPool, controller: FixedSchedule, host: int = 0) -> list[Row]:
    """Return the actions on one host at every tick."""
    return list(map(tuple, episode(pool, controller)[..., host].tolist()))


@pytest.mark.parametrize(
    ("entries", "expected"),
    {
        "at their ticks": (
            [grow(0, "block3", "conv_light"), ScheduledAction(2, "CULL", "block3")],
            [germinate(2, 2), WAIT, cull(2), WAIT, WAIT, WAIT],
        ),
        # One tick to train, one more by the lifecycle's settings, one to blend.
        "when they are possible": (
            [grow(0, "block3"), ScheduledAction(1, "FOSSILIZE", "block3")],
            [germinate(2), WAIT, WAIT, fossilize(2), WAIT, WAIT],
        ),
        "the first possible one of several, and what stood before the germination of its seed is given up": (
            [ScheduledAction(0, "FOSSILIZE", "block3"), *(grow(0, slot) for slot in reversed(SLOTS))],
            [germinate(2), germinate(1), germinate(0), WAIT, WAIT, WAIT],
        ),
        # After a cull the slot is closed for a tick; then there is no seed to fossilize, but room for a new one.
        "what is in the way of a later one is given up": (
            [
                *(grow(0, "block3"), ScheduledAction(1, "CULL", "block3"), ScheduledAction(2, "FOSSILIZE", "block3")),
                grow(2, "block3", "conv_small"),
            ],
            [germinate(2), cull(2), WAIT, germinate(2, 1), WAIT, WAIT],
        ),
        "what never becomes possible is never done": (
            [ScheduledAction(0, "FOSSILIZE", "block1.pool"), grow(2, "block2.pool")],
            [WAIT, WAIT, germinate(1), WAIT, WAIT, WAIT],
        ),
    }.values(),
)
def test_entries_are_carried_out(pool: HostPool, entries: list[ScheduledAction], expected: list[Row]) -> None:
    assert rows_of(pool, FixedSchedule(schedule(*entries))) == expected


def test_every_host_may_have_a_schedule_of_its_own(pool: HostPool) -> None:
    both = FixedSchedule([schedule(grow(0, "block3")), schedule(grow(1, "block1.pool"))])

    assert rows_of(pool, both, host=0)[:2] == [germinate(2), WAIT]
    assert rows_of(pool, both, host=1)[:2] == [WAIT, germinate(0)]
    with pytest.raises(ValueError, match="1 schedules for 2 hosts; give one for each"):
        FixedSchedule([schedule()]).reset(pool)


@pytest.mark.parametrize("heads", [{}, pytest.param(FREE, marks=pytest.mark.slow)], ids=["by default", "all"])
def test_what_was_recorded_replays_bit_for_bit_on_the_same_hosts(make_pool: MakePool, heads: dict[str, Any]) -> None:
    pool = make_pool(3, **heads)
    recorded = record(pool, RandomValid(1), [5, 6, 7])
    before = [{name: value.clone() for name, value in env.network.state_dict().items()} for env in pool.envs]

    assert record(pool, FixedSchedule(recorded), [5, 6, 7]) == recorded
    assert sum(len(one.entries) for one in recorded) > 3
    for env, known in zip(pool.envs, before, strict=True):
        now = env.network.state_dict()
        assert now.keys() == known.keys() and all(torch.equal(value, known[name]) for name, value in now.items())


def test_on_hosts_that_are_rolled_back_a_schedule_goes_on(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES)
    plan = schedule(grow(0, "block3"), ScheduledAction(1, "FOSSILIZE", "block3"), grow(3, "block3"))
    controller = FixedSchedule(plan)
    pool.reset([1, 2])
    controller.reset(pool)
    pool.step(controller.act(pool))
    with breaking_epoch(pool, [1]):
        pool.step(controller.act(pool))
    while pool.envs[0].tick < pool.config.horizon:
        pool.step(controller.act(pool))  # raises if the action is masked

    assert [env.slots[2].stage is Stage.FOSSILIZED for env in pool.envs] == [True, False]


class RepeatsGermination(WaitOnly):
    def act(self, pool: HostPool) -> Action:
        return act(*[germinate(2, 2) if pool.masks_on_cpu.allows(i, germinate(2, 2)) else WAIT for i in (0, 1)])


def test_what_the_governor_refuses_is_neither_possible_nor_recorded(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("esper_lightning.envs.host_env.veto_reasons", lambda op, _: ["no"] * (op == "GERMINATE"))
    pool = make_pool(2, governor=GovernorConfig())

    assert record(pool, RepeatsGermination(), [1, 2]) == [schedule(), schedule()]
    assert pool.masks_on_cpu.allows(0, germinate(2, 2)) and not is_possible(pool, 0, germinate(2, 2))
    assert rows_of(pool, FixedSchedule(schedule(grow(0, "block3", "conv_light")))) == [WAIT] * pool.config.horizon


def test_a_schedule_plays_where_not_everything_is_offered(make_pool: MakePool) -> None:
    part = make_pool(2, family=FamilyConfig(train=[{"offer.slots": [1]}]))
    for seeds in ([0, 1], [2, 3], [4, 5]):
        part.reset(seeds)
        controller = FixedSchedule(schedule(*(grow(0, slot) for slot in SLOTS)))
        controller.reset(part)
        part.step(controller.act(part))
        assert [sum(slot.occupied for slot in env.slots) for env in part.envs] == [1, 1]


def test_a_yoked_host_gets_the_actions_of_the_next_one_of_its_kind() -> None:
    a, b, c, d, e = (schedule(grow(tick, "block3")) for tick in range(5))

    assert yoke_schedules([a, b, c, d, e], ["x", "y", "x", "x", "z"], [0.1] * 5) == [c, b, d, a, e]
    assert yoke_schedules([a, b, c], ["x"] * 3, [0.1, 0.3, 0.2]) == [c, a, b], "in the order of prices"


def test_what_is_written_is_read_again_and_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    known = schedule(ScheduledAction(0, "GERMINATE", "block3", "norm", "SLOW"), ScheduledAction(5, "CULL", "block3"))
    write_schedule(known, path)
    with pytest.raises(TypeError):
        write_schedule(schedule(ScheduledAction(0, "CULL", {1})), path)

    assert read_schedule(path) == known
    assert [file.name for file in tmp_path.iterdir()] == ["best.json"], "and no draft is left"


@pytest.mark.parametrize(
    ("unfit", "error"),
    [
        (schedule(ScheduledAction(6, "CULL", "block3")), r"entry 1 .*\(tick 6: CULL block3\): .* 6 ticks, 0 to 5"),
        (schedule(grow(0, "block3", "conv_heavy")), r"entry 1 .*blueprint 'conv_heavy' is not available"),
        (
            schedule(ScheduledAction(0, "GERMINATE", "block3", "norm", tempo="FST")),
            r"tempo 'FST' is not available here; did you mean 'FAST'",
        ),
        (Schedule(("block7",), ()), r"with slots \['block7'\], these have \['block1.pool'"),
    ],
)
def test_a_schedule_for_other_hosts_is_refused(pool: HostPool, unfit: Schedule, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        actions_by_tick(unfit, pool)


def file_with(*entries: Any, **changes: Any) -> str:
    return json.dumps({"format": 1, "slots": list(SLOTS), "entries": entries} | changes)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[]", "must hold format, slots and entries"),
        (file_with(format=2), "format is 2, this version reads 1"),
        (file_with(GROW, {name: GROW[name] for name in ("op", "slot", "blueprint")}), "entry 2: tick is missing"),
        (file_with({name: GROW[name] for name in ("tick", "op", "slot")}), "entry 1: blueprint is missing"),
        (file_with(GROW | {"op": "WAIT"}), "entry 1: op 'WAIT' is none of GERMINATE"),
        (file_with(GROW | {"tick": -1}), "entry 1: tick must be a whole number from 0, got -1"),
        (file_with(GROW | {"slot": "blok3"}), "entry 1: there is no slot 'blok3'; did you mean 'block3'"),
        (file_with(GROW | {"tmepo": "FAST"}), "entry 1: unknown key 'tmepo'; did you mean 'tempo'"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, text: str, error: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))

    with pytest.raises(ValueError, match=error) as caught:
        read_schedule(path)

    assert str(caught.value).startswith(f"schedule {path}") and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"none\.json cannot be read: No such file"):
        read_schedule(tmp_path / "none.json")
