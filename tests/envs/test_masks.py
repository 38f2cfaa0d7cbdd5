"""Masks allow exactly the possible actions."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from itertools import product

import pytest
from torch import Tensor, nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, HostPool, Op
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.growth.blueprints import registry
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from tests.decisions import WAIT, act, decide, fossilize, germinate

OUTCOME = {Op.GERMINATE: Stage.GERMINATED, Op.CULL: Stage.CULLED, Op.FOSSILIZE: Stage.FOSSILIZED}


def possible_slots(pool: HostPool) -> dict[str, list[int]]:
    """Return the slot mask of the first environment by op."""
    return {op: row.nonzero().flatten().tolist() for op, row in zip(pool.space.op, pool.masks.slot[0], strict=True)}


def test_every_possible_action_is_carried_out_and_every_other_raises(make_pool: Callable[..., HostPool]) -> None:
    pool, wanderer = make_pool(1), RandomValid(rng_seed=1)
    offered = [Op[name] for name in pool.space.op]
    carried_out, refused = set(), set()
    for episode in range(2):
        pool.reset([episode])
        for _ in range(pool.config.horizon):
            before = deepcopy(pool.state_dict())
            for op, slot in product(offered, range(3)):
                action = act(decide(op, slot=slot, blueprint=slot, tempo=slot % 2))
                if pool.masks.slot[0, op, slot]:
                    events = pool.step(action).events
                    pool.load_state_dict(deepcopy(before))
                    # The event of the action comes first; automatic changes follow.
                    assert op is Op.WAIT or (events[0].slot, events[0].after) == (
                        pool.space.slot[slot],
                        OUTCOME[op],
                    )
                    carried_out.add(op)
                else:
                    with pytest.raises(ValueError, match=f"{op.name} .*is masked"):
                        pool.step(action)
                    refused.add(op)
            assert pool.masks.op[0, Op.WAIT], "waiting is always possible"
            pool.step(wanderer.act(pool))

    assert carried_out == set(offered)  # the random walk was long enough
    assert refused == set(offered) - {Op.WAIT}


def test_what_can_be_done_follows_the_life_of_a_seed(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, horizon=20)
    every = [0, 1, 2]
    assert possible_slots(pool) == {"WAIT": every, "GERMINATE": every, "CULL": [], "FOSSILIZE": []}

    pool.step(act(germinate(1)))
    for stage in (Stage.TRAINING, Stage.BLENDING):
        assert pool.envs[0].slots[1].stage is stage
        assert possible_slots(pool) == {"WAIT": every, "GERMINATE": [0, 2], "CULL": [1], "FOSSILIZE": []}
        pool.step(act(WAIT))

    assert pool.envs[0].slots[1].stage is Stage.PROBATIONARY
    assert possible_slots(pool) == {"WAIT": every, "GERMINATE": [0, 2], "CULL": [1], "FOSSILIZE": [1]}
    pool.step(act(fossilize(1)))
    assert possible_slots(pool) == {"WAIT": every, "GERMINATE": [0, 2], "CULL": [], "FOSSILIZE": []}


def test_a_step_is_forced_where_waiting_is_all_there_is(make_pool: Callable[..., HostPool]) -> None:
    young = LifecycleConfig(training_ticks=9, min_contribution=None, auto_cull=False, min_cull_age=4)
    pool = make_pool(2, lifecycle=young, horizon=9)
    for slot in range(3):
        assert pool.masks.forced.tolist() == [False, False]
        pool.step(act(germinate(slot), WAIT))
    assert pool.masks.forced.tolist() == [True, False]  # no slot is free, and all seeds are too young to be culled
    pool.step(act(WAIT, WAIT))
    assert pool.masks.forced.tolist() == [False, False]


class Dead(nn.Module):
    """Seed that is the identity and has no gradient."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 1)

    def start_as_identity(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return x + 0.0 * self.conv(x)


def test_a_blueprint_that_is_masked_for_a_slot_cannot_be_germinated_there(
    make_pool: Callable[..., HostPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = registry.get_blueprint("conv_small", "image").build
    picky = registry.get_blueprint("conv_small", "image")._replace(
        name="picky", build=lambda c: alive(c) if c == 4 else Dead(c)
    )
    monkeypatch.setitem(registry._BLUEPRINTS, ("image", "picky"), picky)
    pool = make_pool(1, actions=ActionConfig(blueprints=["norm", "picky"], tempos={"FAST": 1}))
    assert pool.masks.blueprint[0].tolist() == [[True, True], [True, False], [True, False]]

    with pytest.raises(ValueError, match="picky"):
        pool.step(act(germinate(1, 1)))
    pool.step(act(germinate(0, 1)))
    assert pool.envs[0].slots[0].blueprint == "picky"
    hosts = FamilyConfig(train=[{"host.widths": [[4, 8], [8, 4]]}])
    mixed = make_pool(1, partial(CNN, isolate=False), family=hosts, actions=pool.config.actions)
    assert mixed.space.slot == ["place1", "place2"], "it can grow in other slots of other hosts"
