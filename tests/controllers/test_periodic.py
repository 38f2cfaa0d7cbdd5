from collections.abc import Callable
from typing import Any

import pytest

from esper_lightning.controllers.rules import Periodic, PeriodicConfig
from esper_lightning.envs import HostPool, Op
from tests.conftest import FREE
from tests.decisions import Row, fossilize, germinate

MakePool = Callable[..., HostPool]


def rows(pool: HostPool, rule: Periodic) -> list[Row]:
    """Return the actions on the first host at every tick; the pool raises if one is masked."""
    pool.reset(range(pool.n_envs))
    rule.reset(pool)
    done = []
    for _ in range(pool.config.horizon):
        action = rule.act(pool)
        done.append(tuple(int(head[0]) for head in action))
        pool.step(action)
    return done


def test_it_germinates_by_the_clock_and_keeps_what_it_may(make_pool: MakePool) -> None:
    done = rows(make_pool(1, horizon=12), Periodic(PeriodicConfig(every=4)))

    assert {t: row for t, row in enumerate(done) if row[0] != Op.WAIT} == {
        0: germinate(0, 0), 3: fossilize(0), 4: germinate(1, 1), 7: fossilize(1), 8: germinate(2, 2), 11: fossilize(2)
    }  # fmt: skip


def test_a_germination_that_is_due_waits_for_what_is_kept_first(make_pool: MakePool) -> None:
    done = rows(make_pool(1, horizon=6), Periodic(PeriodicConfig(every=3, blueprints=["conv_light"])))

    assert [row for row in done if row[0] != Op.WAIT] == [germinate(0, 2), fossilize(0), germinate(1, 2)]
    assert done[3:5] == [fossilize(0), germinate(1, 2)]


@pytest.mark.parametrize("changes", [{}, FREE])
@pytest.mark.parametrize("every", [1, 2])
def test_no_mask_is_ever_broken(make_pool: MakePool, changes: dict[str, Any], every: int) -> None:
    done = rows(make_pool(2, **changes), Periodic(PeriodicConfig(every=every)))

    assert [row[1] for row in done if row[0] == Op.GERMINATE] == [0, 1, 2]


def test_every_episode_begins_anew(make_pool: MakePool) -> None:
    pool, rule = make_pool(1), Periodic()

    assert rows(pool, rule) == rows(pool, rule)


def test_settings_that_make_no_sense_are_refused(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match=r"periodic\.every must be at least 1, got 0"):
        PeriodicConfig(every=0)
    with pytest.raises(ValueError, match=r"periodic\.blueprints is empty"):
        PeriodicConfig(blueprints=[])
    with pytest.raises(ValueError, match=r"periodic\.blueprints: 'lora' is not available"):
        Periodic(PeriodicConfig(blueprints=["lora"])).reset(make_pool(1))
