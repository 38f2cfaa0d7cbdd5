"""The benchmark of families finds schedules by what is known of a host, and its controllers play them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import family
from benchmarks.family import KNOWLEDGE, Classified, Knowledge, Oracle, find_knowledge, read_knowledge
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.schedules import Schedule, ScheduledAction
from esper_lightning.envs import HostPool
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.vector_env import EVALUATION, episode_rng_seeds

HOSTS = episode_rng_seeds(0, EVALUATION, 0, n_envs=8)

SLOTS = ("block1.pool", "block2.pool", "block3")

KINDS = ("norm", "conv_small")
"""Blueprints that the schedules of the two kinds of hosts grow."""


def grow(blueprint: str) -> Schedule:
    """Return the schedule that germinates one seed before the second host epoch."""
    return Schedule(SLOTS, (ScheduledAction(1, "GERMINATE", SLOTS[0], blueprint, "FAST"),))


@pytest.fixture(scope="module")
def pool(make_pool: Callable[..., HostPool]) -> HostPool:
    """Eight hosts of two kinds, which a first observation tells apart, in each of which conv_light may be dead."""
    train = [{"objective.price": [0.0, 0.4], "fail.conv_light": [0.0, 1.0]}]
    return make_pool(8, family=FamilyConfig(train=train), training=HostTraining(batches=1), executor="fused")


@pytest.fixture(scope="module")
def found(pool: HostPool) -> Knowledge:
    return find_knowledge(pool, 100, 0)


@pytest.fixture
def knowledge(found: Knowledge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Knowledge:
    """The result of a search, with schedules that can be told apart, as controllers read it."""
    kinds = [known._replace(schedule=grow(name)) for known, name in zip(found.kinds, KINDS, strict=True)]
    contexts = [
        known._replace(schedule=grow("norm" if known.variables["fail.conv_light"] else "conv_light"))
        for known in found.contexts
    ]
    monkeypatch.chdir(tmp_path)
    found._replace(kinds=kinds, contexts=contexts).write(KNOWLEDGE)
    return read_knowledge()


def grown_by(controller: Controller, pool: HostPool) -> list[str | None]:
    """Return the blueprint of the seed in the first slot of each host, after two host epochs with decisions."""
    pool.reset(HOSTS)
    controller.reset(pool)
    for _ in range(2):
        pool.step(controller.act(pool))
    return [env.slots[0].blueprint for env in pool.envs]


def test_a_search_knows_each_kind_and_each_context_of_the_family(knowledge: Knowledge) -> None:
    assert [known.variables for known in knowledge.kinds] == [{"objective.price": 0.0}, {"objective.price": 0.4}]
    assert [known.variables for known in knowledge.contexts] == [
        {"objective.price": price, "fail.conv_light": dead} for price in (0.0, 0.4) for dead in (0.0, 1.0)
    ]
    assert knowledge.single.slots == SLOTS


def test_the_oracle_plays_the_schedule_of_the_context_of_each_host(pool: HostPool, knowledge: Knowledge) -> None:
    grown = grown_by(Oracle(), pool)
    dead = [dict(env.context.context.variables)["fail.conv_light"] for env in pool.envs]
    assert set(dead) == {0.0, 1.0}
    assert grown == ["norm" if of_host else "conv_light" for of_host in dead]


def test_the_classifier_finds_the_kind_of_hosts_that_it_has_not_met(pool: HostPool, knowledge: Knowledge) -> None:
    grown = grown_by(Classified(), pool)
    prices = [dict(env.context.context.variables)["objective.price"] for env in pool.envs]
    assert set(prices) == {0.0, 0.4}
    assert grown == [KINDS[price > 0] for price in prices]


def test_the_table_of_values_has_a_row_for_each_context_and_no_gain_where_nothing_is_known_better(
    pool: HostPool, knowledge: Knowledge
) -> None:
    same = knowledge._replace(
        single=grow("norm"),
        kinds=[known._replace(schedule=grow("norm")) for known in knowledge.kinds],
        contexts=[known._replace(schedule=grow("norm")) for known in knowledge.contexts],
    )
    _, _, *rows, _, gains = [line.strip("| ").split(" | ") for line in family.value_of_knowledge(pool, same, 2)]
    assert len(rows) == 4
    assert all(single == of_kind == of_context for *_, single, of_kind, of_context in rows)
    assert gains[-3:] == ["+.000 [.000, .000]"] * 3


def test_the_table_of_values_has_the_schedule_of_each_context(pool: HostPool, knowledge: Knowledge) -> None:
    """A schedule that grows nothing costs nothing; one that keeps a seed pays for it where growth has a price."""
    keep = Schedule(SLOTS, (*grow("norm").entries, ScheduledAction(4, "FOSSILIZE", SLOTS[0])))
    never = Schedule(SLOTS, ())
    by_price = {0.0: never, 0.4: keep}
    told = knowledge._replace(
        single=never,
        kinds=[known._replace(schedule=by_price[known.variables["objective.price"]]) for known in knowledge.kinds],
        contexts=[known._replace(schedule=keep) for known in knowledge.contexts],
    )
    _, _, *rows, _, _ = [line.strip("| ").split(" | ") for line in family.value_of_knowledge(pool, told, 2)]
    for context, never_grown, single, of_kind, of_context in rows:
        assert never_grown == single
        if "price 0.4" in context:
            assert float(of_kind) == float(of_context) < float(never_grown)
        else:
            assert of_kind == never_grown
