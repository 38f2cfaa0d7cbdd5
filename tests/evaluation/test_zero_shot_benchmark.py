"""The held-out settings of the benchmark that were fixed before a policy was trained that is to do no harm."""

import math

import pytest

from benchmarks.zero_shot import SETTINGS, Row, make_pool, play, table
from esper_lightning import load_controller
from esper_lightning.envs import EnvConfig
from tests.tiers import rest_is_slow


def test_there_are_twelve_held_out_settings() -> None:
    assert len(SETTINGS) == 12


@pytest.mark.parametrize(
    "name",
    rest_is_slow(
        ["sgd, falling rate", "five ticks", "97 images", "a quantity"], {"five ticks", "97 images", "a quantity"}
    ),
)
def test_the_policy_plays_on_a_further_held_out_setting(name: str) -> None:
    policy = load_controller("tamiyo")
    rules = policy.rules
    assert rules is not None and policy.observation is not None
    env = EnvConfig(observation=policy.observation, lifecycle=rules.lifecycle, actions=rules.actions)
    setting = SETTINGS[name]._replace(hosts=2)
    pool = make_pool(setting, env, ["norm", "mlp_small"] if name == "a quantity" else ["norm", "conv_small"], None)

    rows, schedules = play(pool, name, "tamiyo", "1", policy)

    assert len(rows) == len(schedules) == 2
    scores = [float(f"{score:.6g}") for score in pool.test_scores()[1].tolist()]  # rounded as in a row
    assert all(
        math.isfinite(row.objective) and row.objective <= score <= 1.0 for row, score in zip(rows, scores, strict=True)
    )
    assert all(row.flops > 0.0 for row in rows)
    assert all(math.isfinite(row.validation) and row.validation != row.objective for row in rows)
    rates = [env.training.lr_share(tick / env.horizon) for env in pool.envs for tick in (0, env.horizon - 1)]
    assert rates[0] == 1.0 and (rates[1] < 0.5) == (name in ("sgd, falling rate", "a quantity"))
    assert [env.tick for env in pool.envs] == [setting.horizon] * 2


def test_the_better_of_both_is_chosen_host_by_host_on_validation_data() -> None:
    def rows(controller: str, seed: str, validation: list[float], test: list[float], kept: list[int]) -> list[Row]:
        flops = 10.0 * (1 + (controller == "tamiyo"))
        return [Row("a", controller, seed, i, v, test[i], kept[i], flops) for i, v in enumerate(validation)]

    lines = table(
        [
            *rows("waiting", "", [0.5, 0.5, 0.5, 0.5], [0.5] * 4, [0] * 4),
            *rows("tamiyo", "1", [0.6, 0.7, 0.4, 0.5], [0.7, 0.4, 0.3, 0.9], [1, 2, 1, 0]),
            *rows("tamiyo", "2", [0.0] * 4, [0.0] * 4, [3] * 4),
        ],
        "1",
    )

    assert lines[0] == "| setting | hosts | waiting | tamiyo | keeps nothing | FLOPs |"
    assert lines[2] == "| a | 4 | .500 | .575 | 25% | 2.00 |"
    assert lines[4] == "| ahead of waiting | tamiyo | better of both |"
    alone, better = lines[6].removeprefix("| a | ").split(" | ")
    assert alone.startswith("+.075 [") and better.startswith("+.025 [−.075, ")  # +.2, −.1, and twice 0
