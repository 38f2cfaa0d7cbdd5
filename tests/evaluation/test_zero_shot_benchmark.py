"""The held-out settings of the benchmark that were fixed before a policy was trained that is to do no harm."""

import math

import pytest

from benchmarks.zero_shot import SETTINGS, make_pool, play
from esper_lightning import load_controller
from esper_lightning.envs import EnvConfig


def test_there_are_twelve_held_out_settings() -> None:
    assert len(SETTINGS) == 12


@pytest.mark.parametrize("name", ["sgd, falling rate", "five ticks", "97 images", "a quantity"])
def test_the_policy_plays_on_a_further_held_out_setting(name: str) -> None:
    policy = load_controller("tamiyo")
    rules = policy.rules
    assert rules is not None and policy.observation is not None
    env = EnvConfig(observation=policy.observation, lifecycle=rules.lifecycle, actions=rules.actions)
    setting = SETTINGS[name]._replace(hosts=2)
    pool = make_pool(setting, env, ["norm", "mlp_small"] if name == "a quantity" else ["norm", "conv_small"], None)

    rows = play(pool, name, "tamiyo", "1", policy)

    assert len(rows) == 2 and all(math.isfinite(row.objective) and row.objective <= row.score <= 1.0 for row in rows)
    rates = [env.training.lr_share(tick / env.horizon) for env in pool.envs for tick in (0, env.horizon - 1)]
    assert rates[0] == 1.0 and (rates[1] < 0.5) == (name in ("sgd, falling rate", "a quantity"))
    assert [env.tick for env in pool.envs] == [setting.horizon] * 2
