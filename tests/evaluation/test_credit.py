"""Credit of fossilized seeds: ablation, Shapley value and matched fork."""

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from esper_lightning.envs import HostPool
from esper_lightning.evaluation.comparison import Comparison, EvaluationConfig
from esper_lightning.evaluation.credit import CreditConfig, SeedCredit, measure_credit
from esper_lightning.evaluation.report import credit_table, write_credits
from esper_lightning.evaluation.statistics import Interval
from esper_lightning.growth.counterfactual import fossilized_only
from esper_lightning.growth.shapley import Credit
from tests.decisions import WAIT, act, fossilize, germinate
from tests.runs import fit, only_run


def with_two_fossils(pool: HostPool) -> HostPool:
    """Return the pool after every host has fossilized a conv_light in the first slot and a conv_small in the third."""
    pool.reset(range(pool.n_envs))
    for decision in (germinate(0, 2), germinate(2, 1), WAIT, fossilize(0), fossilize(2), WAIT):
        pool.step(act(*[decision] * pool.n_envs))
    return pool


def test_every_fossil_of_the_first_hosts_is_looked_at(make_pool: Callable[..., HostPool]) -> None:
    pool = with_two_fossils(make_pool(3, horizon=6))
    config = CreditConfig(hosts=2, fork_ticks=1, repetitions=2)

    seeds = measure_credit(pool, make_pool(4), config)

    found = [(seed.host, seed.slot, seed.blueprint) for seed in seeds]
    assert found == [(i, *kept) for i in (0, 1) for kept in (("block1.pool", "conv_light"), ("block3", "conv_small"))]
    assert all(seed.effect.low <= seed.effect.mean <= seed.effect.high for seed in seeds)


def test_fair_shares_add_up_to_what_the_seeds_add_together(make_pool: Callable[..., HostPool]) -> None:
    pool = with_two_fossils(make_pool(1, horizon=6))

    seeds = measure_credit(pool, make_pool(4), CreditConfig(hosts=1, fork_ticks=0, repetitions=2))

    kept = fossilized_only(pool.envs[0].network)
    whole, bare = (100.0 * pool.variant_accuracies(0, [kept, frozenset()], pool.data.test)).tolist()
    assert sum(seed.shapley.value for seed in seeds) == pytest.approx(whole - bare)
    # With two seeds, leave-one-out and Shapley value differ by half the interaction.
    apart = [seed.contribution - seed.shapley.value for seed in seeds]
    assert [seed.interaction / 2.0 for seed in seeds] == pytest.approx(apart)
    # A fork without time to recover equals the ablation.
    assert [seed.effect.mean for seed in seeds] == pytest.approx([seed.contribution for seed in seeds])


def test_hosts_without_fossils_have_no_rows(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(2)

    assert measure_credit(pool, make_pool(4), CreditConfig(hosts=2, repetitions=2)) == []


def made(host: int, blueprint: str, effect: float) -> SeedCredit:
    return SeedCredit(
        host, "block1", blueprint, 3.0, Credit(2.0, 0.25), -0.5, Interval(effect, effect - 1.0, effect + 1.0)
    )


def test_the_table_has_a_row_per_blueprint_and_the_file_one_per_seed(tmp_path: Path) -> None:
    seeds = [made(0, "norm", 1.0), made(1, "norm", 3.0), made(1, "conv_small", -1.0)]

    table = credit_table(seeds, CreditConfig(hosts=2, fork_ticks=7))
    write_credits(seeds, tmp_path)

    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["blueprint"] == ["conv_small", "norm"]
    assert columns["seeds"] == ["1", "2"]
    assert columns["caused"] == ["-1.00 ± 0.00", "2.00 ± 1.00"]  # the resampled means of two values are 1, 2 and 3
    assert "7 more host epochs" in table.caption
    with (tmp_path / "seeds.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["effect_mean"] for row in rows] == ["1", "3", "-1"]
    assert (
        rows[0] | {"host": "0", "interaction": "-0.5", "shapley": "2", "shapley_error": "0.25", "effect_low": "0"}
        == rows[0]
    )


@pytest.mark.slow
def test_a_run_looks_at_seeds_when_it_is_asked_to(tmp_path: Path) -> None:
    fit(
        tmp_path,
        "--trainer.max_epochs=1",
        "--data.env.training.batches=1",
        "--model.evaluation.hosts=2",
        "--model.evaluation.credit.hosts=2",
        "--model.evaluation.credit.repetitions=2",
    )

    assert (
        (only_run(tmp_path).folder / "evaluation" / "seeds.csv")
        .read_text()
        .startswith("host,slot,blueprint,contribution,shapley")
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hosts": -1}, "hosts and fork_ticks must not be negative"),
        ({"fork_ticks": -1}, "hosts and fork_ticks must not be negative"),
        ({"repetitions": 1}, "at least 2"),
        ({"pairs": 1}, "at least 2"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CreditConfig(**settings)


def test_no_more_hosts_can_be_looked_at_than_are_evaluated() -> None:
    with pytest.raises(ValueError, match=r"evaluation\.credit\.hosts is 5, more than the 4"):
        Comparison(EvaluationConfig(hosts=4, credit=CreditConfig(hosts=5)))
