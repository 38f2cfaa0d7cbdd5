"""Value of information, compared with brute force and on context distributions whose answer is known."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest

from esper_lightning.controllers.fixed_schedule import FixedSchedule
from esper_lightning.controllers.schedule import Schedule, ScheduledAction, read_schedule
from esper_lightning.envs import HostPool
from esper_lightning.envs.context.distribution import Context, FamilyConfig
from esper_lightning.evaluation.search.plans import PlanSampler
from esper_lightning.evaluation.search.report import print_information, write_information
from esper_lightning.evaluation.search.successive_halving import sample_host_seeds
from esper_lightning.evaluation.search.value_of_information import (
    ALL_VARIABLES,
    BestPlan,
    InformationConfig,
    InformationValue,
    PlanEvaluator,
    context_groups,
    cross_validated_objective,
    select_finalists,
    value_of_information,
)
from esper_lightning.evaluation.statistics import Interval
from esper_lightning.hosts import CNN

MakePool = Callable[..., HostPool]

cnn = partial(CNN, base=4, kernel=1, pools=2, isolate=False, channels_last=False)

PRICES = FamilyConfig(train=[{"objective.price": [0.0, 5.0], "host.kernel": [1, 3]}])


def test_who_judges_has_not_chosen() -> None:
    random = np.random.default_rng(0)
    found, groups = random.normal(size=(5, 6, 4)), np.array([0, 1, 0, 2, 1, 0])
    judged = cross_validated_objective(found, groups)
    for m in range(6):
        for r in range(4):
            others = [(o, h) for o in range(6) if groups[o] == groups[m] for h in range(4) if h % 2 != r % 2]
            means = [np.mean([found[p, o, h] for o, h in others]) for p in range(5)]
            assert judged[m, r] == found[int(np.argmax(means)), m, r]


def test_luck_alone_is_worth_nothing_and_a_real_difference_its_full_worth() -> None:
    random = np.random.default_rng(1)
    noise = random.normal(size=(8, 40, 6))
    alone, common = (cross_validated_objective(noise, of) for of in (np.arange(40), np.zeros(40, int)))
    assert abs((alone - common).mean()) < 0.15, "chosen by luck, judged without"
    assert (noise.max(0) - noise[noise.mean((1, 2)).argmax()]).mean() > 1.0, "with hindsight luck counts"
    wanted = 3.0 * (np.arange(8)[:, None] == np.arange(40) % 8)[..., None] + 0.01 * noise
    gain = cross_validated_objective(wanted, np.arange(40) % 8) - cross_validated_objective(wanted, np.zeros(40, int))
    assert gain.mean() == pytest.approx(3.0 * 7 / 8, abs=0.02)


def test_a_variable_that_a_context_lacks_distinguishes_it() -> None:
    members = [Context((("a", 1),)), Context((("b", 2),)), Context(())]
    groups = dict(context_groups(members))
    assert groups["a"].tolist() in ([0, 1, 1], [1, 0, 0]) and len(set(groups["b"].tolist())) == 2


def test_contexts_are_grouped_by_every_variable_that_differs() -> None:
    members = [Context((("a", 1), ("b", b), ("c", c))) for b in ("x", "y") for c in (0.1, 0.2)]
    groups = dict(context_groups(members))
    assert {name: of.tolist() for name, of in groups.items()} == {
        "b": [0, 0, 1, 1],
        "c": [0, 1, 0, 1],
        ALL_VARIABLES: [0, 1, 2, 3],
    }


def test_the_few_are_good_for_all_or_the_best_for_one() -> None:
    seen = np.array([[5.0, 5.0, 5.0], [9.0, 0.0, 0.0], [0.0, 8.0, 0.0], [0.0, 0.0, 7.0], [1.0, 1.0, 1.0]])[..., None]
    assert select_finalists(seen, 4)[0] == 0
    assert set(select_finalists(seen, 4)) == {0, 1, 2, 3}, "the best for all, and for each"
    assert len(select_finalists(seen, 2)) == 2 and len(select_finalists(seen, 9)) == 5


@pytest.mark.slow
def test_hosts_are_drawn_for_every_context_and_plans_are_played_on_each(make_pool: MakePool) -> None:
    pool = make_pool(5, host=cnn, family=PRICES)
    hosts = sample_host_seeds(pool, 3, Random(0))
    assert hosts.shape == (4, 3) and (hosts % 2 == 0).all()
    for member, row in zip(pool.env_factory.context_distribution.contexts, hosts.tolist(), strict=True):
        assert [pool.env_factory.context_distribution.draw(seed) for seed in row] == [member] * 3
    generator = PlanSampler(pool, 0)
    plans = generator.sample_distinct(2, set())
    grid = PlanEvaluator(pool, generator)
    found = grid.evaluate(plans, hosts)
    assert found.shape == (2, 4, 3) and grid.steps == 5 * 5 * pool.horizon  # 24 pairs of plan and host, five at a time
    alone = make_pool(1, host=cnn, family=PRICES)
    for p, m, r in ((0, 0, 0), (1, 2, 1), (1, 3, 2)):
        alone.reset([int(hosts[m, r])])
        controller = FixedSchedule(generator.to_schedule(plans[p]))
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
    assert set(found.gains) == {"objective.price", ALL_VARIABLES}
    free, ruinous = found.contexts
    assert "0.0" in free.context and "5.0" in ruinous.context
    assert not ruinous.schedule.entries, "nothing is grown where it is ruinous"
    assert found.hindsight_gain >= found.gains[ALL_VARIABLES].mean - 1e-9
    write_information(found, tmp_path, {"run": "test"})
    summary = json.loads((tmp_path / "information.json").read_text())
    assert summary["steps"] == found.steps and summary["run"] == "test"
    assert read_schedule(tmp_path / "best_schedule.json") == found.common_schedule


def test_long_names_of_contexts_leave_room_for_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    member = ", ".join(f"fail.blueprint{i} 0.0" for i in range(9))
    entries = (
        ScheduledAction(0, "GERMINATE", "block1.pool", "norm"),
        ScheduledAction(2, "CULL", "block1.pool"),
        ScheduledAction(2, "GERMINATE", "block1.pool", "conv_light"),
        ScheduledAction(5, "FOSSILIZE", "block1.pool"),
    )
    grown = Schedule(("block1.pool",), entries)
    gain = Interval(0.07, 0.05, 0.09)
    print_information(
        InformationValue({ALL_VARIABLES: gain}, 0.2, [BestPlan(member, grown, 0.612, 0.534)], grown, steps=1234)
    )
    said = capsys.readouterr().out
    assert all(number in said for number in ("0.612", "0.534", "0.070 ± 0.020", "0.200", "1234"))
    assert "block1.pool norm at 0, culled at 2" in said and "fail.blueprint8" in said
    assert "block1.pool conv_light at 2" in said and "conv_light at 2," not in said


def test_one_kind_of_host_has_nothing_to_know(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match="one kind of host only"):
        value_of_information(make_pool(1))


@pytest.mark.parametrize("setting", [{"plans": 0}, {"finalists": 1}, {"hosts": 1}, {"plans": 10**9}, {"seed": -1}])
def test_settings_that_make_no_sense_are_refused(setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"information.{next(iter(setting))} must"):
        InformationConfig(**setting)
