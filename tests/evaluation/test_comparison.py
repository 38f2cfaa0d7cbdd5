"""A comparison from Python: controllers of one's own draw the same numbers, and only what has a row is searched."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from esper_lightning import controllers
from esper_lightning.controllers.learned import Hosts
from esper_lightning.controllers.rules import RandomValid
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import Action, EnvConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.evaluation.comparison import BEST_FIXED, REPLAYED, YOKED, Comparison, Entry, EvaluationConfig
from esper_lightning.evaluation.search import SearchConfig
from esper_lightning.tasks import Digits
from tests.runs import tiny_host


class Gambling(RandomValid):
    """Controller that draws from the global generators of Python, numpy and torch."""

    def __init__(self) -> None:
        super().__init__(rng_seed=0)

    def act(self, pool: Hosts) -> Action:
        drawn = random.random() + np.random.rand() + float(torch.rand(()))
        self.generator.manual_seed(int(1e12 * drawn))
        return super().act(pool)


def hosts() -> HostPoolData:
    data = HostPoolData(Digits(), tiny_host, EnvConfig(horizon=5, training=HostTraining(batches=2, lr=0.02)), n_envs=2)
    data.build(torch.device("cpu"))
    return data


def rows(data: HostPoolData, *against: str, **settings: Any) -> list[Entry]:
    """Return the rows of a comparison of controllers on two hosts."""
    comparison = Comparison(EvaluationConfig(hosts=2, controls=False, against=list(against), **settings))
    return comparison.run(data, []).entries


def test_a_controller_draws_the_same_numbers_in_every_comparison() -> None:
    own = f"{__name__}.Gambling"
    (first,) = rows(hosts(), own)
    *_, again = rows(hosts(), "random", own)

    assert again.name == own
    assert again.values("objective").tolist() == first.values("objective").tolist()
    assert again.outcomes[0].schedules == first.outcomes[0].schedules
    assert any(one.entries for one in first.outcomes[0].schedules), "it has acted"


def test_a_search_whose_schedules_are_no_rows_of_the_comparison_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    data = hosts()
    make_pool, made = data.make_pool, list[int]()
    monkeypatch.setattr(data, "make_pool", lambda n_envs, **given: made.append(n_envs) or make_pool(n_envs, **given))

    (row,) = rows(data, "random", search=SearchConfig(steps=999_999))

    assert row.name == "random" and made == [2], "no pool for a search"


@pytest.mark.parametrize(
    "name", [*Comparison(EvaluationConfig()).make_controllers(), REPLAYED, YOKED, BEST_FIXED, "tamiyo"]
)
def test_no_controller_of_ones_own_takes_a_name_of_the_comparison(name: str) -> None:
    with pytest.raises(ValueError, match=f"controller '{name}' is (already registered|a name of this package)"):
        controllers.register(name)(Gambling)
