"""Value of information, compared with brute force and on context distributions whose answer is known."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from esper_lightning.envs import HostPool
from esper_lightning.envs.family import FamilyConfig, Member
from esper_lightning.evaluation.information import (
    EVERYTHING,
    Best,
    Grid,
    Information,
    InformationConfig,
    best_few,
    chosen_and_judged,
    facts,
    value_of_information,
)
from esper_lightning.evaluation.information_report import print_information, write_information
from esper_lightning.evaluation.intervals import Interval
from esper_lightning.evaluation.plans import Generator
from esper_lightning.evaluation.race import draw_hosts
from esper_lightning.hosts import CNN
from esper_lightning.tamiyo.replay import FixedSchedule
from esper_lightning.tamiyo.schedule import Entry, Schedule, read_schedule

MakePool = Callable[..., HostPool]

cnn = partial(CNN, base=4, kernel=1, pools=2, isolate=False, channels_last=False)

PRICES = FamilyConfig(train=[{"objective.price": [0.0, 5.0], "host.kernel": [1, 3]}])


def test_who_judges_has_not_chosen() -> None:
    random = np.random.default_rng(0)
    found, groups = random.normal(size=(5, 6, 4)), np.array([0, 1, 0, 2, 1, 0])
    judged = chosen_and_judged(found, groups)
    for m in range(6):
        for r in range(4):
            others = [(o, h) for o in range(6) if groups[o] == groups[m] for h in range(4) if h % 2 != r % 2]
            means = [np.mean([found[p, o, h] for o, h in others]) for p in range(5)]
            assert judged[m, r] == found[int(np.argmax(means)), m, r]


def test_luck_alone_is_worth_nothing_and_a_real_difference_its_full_worth() -> None:
    random = np.random.default_rng(1)
    noise = random.normal(size=(8, 40, 6))
    alone, common = (chosen_and_judged(noise, of) for of in (np.arange(40), np.zeros(40, int)))
    assert abs((alone - common).mean()) < 0.15, "chosen by luck, judged without"
    assert (noise.max(0) - noise[noise.mean((1, 2)).argmax()]).mean() > 1.0, "with hindsight luck counts"
    wanted = 3.0 * (np.arange(8)[:, None] == np.arange(40) % 8)[..., None] + 0.01 * noise
    gain = chosen_and_judged(wanted, np.arange(40) % 8) - chosen_and_judged(wanted, np.zeros(40, int))
    assert gain.mean() == pytest.approx(3.0 * 7 / 8, abs=0.02)


def test_a_fact_that_a_member_does_not_have_sets_it_apart() -> None:
    members = [Member((("a", 1),)), Member((("b", 2),)), Member(())]
    groups = dict(facts(members))
    assert groups["a"].tolist() in ([0, 1, 1], [1, 0, 0]) and len(set(groups["b"].tolist())) == 2


def test_members_are_grouped_by_every_fact_that_differs() -> None:
    members = [Member((("a", 1), ("b", b), ("c", c))) for b in ("x", "y") for c in (0.1, 0.2)]
    groups = dict(facts(members))
    assert {name: of.tolist() for name, of in groups.items()} == {
        "b": [0, 0, 1, 1],
        "c": [0, 1, 0, 1],
        EVERYTHING: [0, 1, 2, 3],
    }


def test_the_few_are_good_for_all_or_the_best_for_one() -> None:
    seen = np.array([[5.0, 5.0, 5.0], [9.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 7.0], [1.0, 1.0, 1.0]])[..., None]
    assert best_few(seen, 4)[0] == 0
    assert set(best_few(seen, 4)) == {0, 1, 2, 3}, "the best for all, and for each"
    assert len(best_few(seen, 2)) == 2 and len(best_few(seen, 9)) == 5


def test_hosts_are_drawn_for_every_member_and_plans_are_played_on_each(make_pool: MakePool) -> None:
    pool = make_pool(5, host=cnn, family=PRICES)
    hosts = draw_hosts(pool, 3, Random(0))
    assert hosts.shape == (4, 3) and (hosts % 2 == 0).all()
    for member, row in zip(pool.bench.family.members, hosts.tolist(), strict=True):
        assert [pool.bench.family.draw(seed) for seed in row] == [member] * 3
    generator = Generator(pool, 0)
    plans = generator.distinct(2, set())
    grid = Grid(pool, generator)
    found = grid.play(plans, hosts)
    assert found.shape == (2, 4, 3) and grid.steps == 5 * 5 * pool.horizon  # 24 pairs of plan and host, five at a time
    alone = make_pool(1, host=cnn, family=PRICES)
    for p, m, r in ((0, 0, 0), (1, 2, 1), (1, 3, 2)):
        alone.reset([int(hosts[m, r])])
        controller = FixedSchedule(generator.schedule(plans[p]))
        controller.reset(alone)
        for _ in range(alone.horizon):
            step = alone.step(controller.act(alone))
        assert found[p, m, r] == pytest.approx(step.metrics.objective.item(), abs=1e-6)


@pytest.mark.slow
def test_where_growth_is_ruinous_or_free_the_price_is_worth_knowing(make_pool: MakePool, tmp_path: Path) -> None:
    config = FamilyConfig(train=[{"objective.price": [0.0, 5.0]}])
    pool = make_pool(16, host=cnn, family=config, horizon=8)
    with pytest.raises(ValueError, match=r"look.finalists is 2: .* need 3"):
        value_of_information(pool, InformationConfig(finalists=2))
    found = value_of_information(pool, InformationConfig(plans=8, finalists=5, hosts=4))
    assert set(found.facts) == {"objective.price", EVERYTHING}
    free, ruinous = found.members
    assert "0.0" in free.member and "5.0" in ruinous.member
    assert not ruinous.schedule.entries, "nothing is grown where it is ruinous"
    assert found.per_host >= found.facts[EVERYTHING].mean - 1e-9
    write_information(found, tmp_path, {"run": "test"})
    summary = json.loads((tmp_path / "information.json").read_text())
    assert summary["steps"] == found.steps and summary["run"] == "test"
    assert read_schedule(tmp_path / "best_schedule.json") == found.schedule


def test_members_with_long_names_leave_room_for_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    member = ", ".join(f"fail.blueprint{i} 0.0" for i in range(9))
    entries = (
        Entry(0, "GERMINATE", "block1.pool", "norm"),
        Entry(2, "CULL", "block1.pool"),
        Entry(2, "GERMINATE", "block1.pool", "conv_light"),
        Entry(5, "FOSSILIZE", "block1.pool"),
    )
    grown = Schedule(("block1.pool",), entries)
    gain = Interval(0.07, 0.05, 0.09)
    print_information(Information({EVERYTHING: gain}, 0.2, [Best(member, grown, 0.612, 0.534)], grown, steps=1234))
    said = capsys.readouterr().out
    assert all(number in said for number in ("0.612", "0.534", "0.070 ± 0.020", "0.200", "1234"))
    assert "block1.pool norm at 0, culled at 2" in said and "fail.blueprint8" in said
    assert "block1.pool conv_light at 2" in said and "conv_light at 2," not in said


def test_one_kind_of_host_has_nothing_to_know(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match="one kind of host only"):
        value_of_information(make_pool(1))


@pytest.mark.parametrize("setting", [{"plans": 0}, {"finalists": 1}, {"hosts": 1}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"information.{next(iter(setting))} must be at least"):
        InformationConfig(**setting)
