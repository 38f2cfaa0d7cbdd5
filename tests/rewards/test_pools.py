"""Every reward on real hosts and in runs: it is that of the measured step in any case."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import REWARDS, HostStep, ObjectiveConfig, RewardConfig, register
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits, Split, TaskData
from tests.conftest import FREE
from tests.decisions import WAIT, act, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.runs import EPOCHS, HORIZON, fit, only_run
from tests.tiers import rest_is_slow

ALL = ("objective", "kept", "sparse")

LEARNS = HostTraining(lr=0.02, batches=8)


@register("sizes", ["size", "contribution"])
def sizes(step: HostStep, config: RewardConfig) -> dict[str, float]:
    """Reward that reads the slots."""
    growth, points = (sum(getattr(slot, name) for slot in step.slots) for name in ("growth", "contribution"))
    return {"size": -growth, "contribution": points / 100.0}


@pytest.fixture(scope="module")
def pool_of(make_pool: Callable[..., HostPool]) -> Callable[..., HostPool]:
    """Return `pool_of(mode, n_envs, …)`, which makes a small pool rewarded by `mode`."""

    def make(mode: str, n_envs: int = 3, **changes: Any) -> HostPool:
        return make_pool(n_envs, reward=RewardConfig(mode=mode), **changes)

    return make


@pytest.mark.parametrize("mode", [*ALL, "sizes"])
def test_terms_sum_to_the_reward(mode: str, pool_of: Callable[..., HostPool]) -> None:
    pool, wanderer = pool_of(mode, **FREE), RandomValid(5)
    for episode in range(2):
        pool.reset([3 * episode, 3 * episode + 1, 3 * episode + 2])
        for _ in range(pool.config.horizon):
            step = pool.step(wanderer.act(pool))
            assert list(step.terms) == [*REWARDS[mode].terms, "rollback"]
            torch.testing.assert_close(sum(step.terms.values()).float(), step.reward, rtol=0.0, atol=1e-6)
            assert torch.equal(step.reward, step.metrics.reward)


@torch.no_grad()
def right_answers(network: nn.Module, data: Split) -> float:
    return (network(data.inputs).argmax(1) == data.targets).double().mean().item()


def test_a_reward_reads_the_contributions_and_sizes_of_seeds(pool_of: Callable[..., HostPool]) -> None:
    pool = pool_of("sizes", 1, training=LEARNS, horizon=20)
    pool.reset([1])
    for row in (germinate(0, 2), germinate(1, 2), *[WAIT] * 5):  # until no ramp moves any more
        pool.step(act(row))
    (env,) = pool.envs

    def points(without: str | None = None) -> float:
        network = deepcopy(env.network).eval()
        if without is not None:
            slots_of(network)[without].empty()
        return 100.0 * right_answers(network, pool.data.validation)

    then = [points() - points(without=slot.name) for slot in env.slots]
    pool.step(act(WAIT))
    now = [points() - points(without=slot.name) for slot in env.slots]
    ticks = env.reward_step(diverged=False).slots
    assert [tick.contribution for tick in ticks] == pytest.approx(now, abs=1e-3)
    assert then != now and all(now[:2]) and now[2] == 0.0
    seeds = [sum(part.numel() for part in slot.seed.parameters()) for slot in env.slots]
    assert [tick.parameters for tick in ticks] == seeds and all(seeds[:2]) and seeds[2] == 0
    assert [tick.growth * env.host_parameters for tick in ticks] == pytest.approx(seeds)
    assert [tick.stage for tick in ticks] == [Stage.PROBATIONARY, Stage.PROBATIONARY, Stage.DORMANT]


@pytest.mark.parametrize("mode", [*ALL, "sizes"])
def test_a_rollback_is_paid_by_its_penalty_alone_and_an_episode_that_is_over_by_nothing(
    mode: str, pool_of: Callable[..., HostPool]
) -> None:
    pool = pool_of(mode, 2, training=LEARNS, horizon=10, governor=ONLY_NAN_DIVERGES)
    pool.reset([1, 2])
    for rows in ([germinate(0, 2)] * 2, *[[WAIT] * 2] * 4):
        pool.step(act(*rows))
    for _ in range(ONLY_NAN_DIVERGES.max_rollbacks + 1):
        with breaking_epoch(pool, [0]):
            step = pool.step(act(WAIT, WAIT))
        assert step.terminated.tolist() == [True, False]
        paid = {name: values[0].item() for name, values in step.terms.items()}
        assert paid == dict.fromkeys(paid, 0.0) | {"rollback": -0.75}
        assert step.reward[0].item() == -0.75
    assert pool.envs[0].ended
    for _ in range(pool.config.horizon - pool.envs[0].tick):
        assert pool.step(act(WAIT, WAIT)).reward[0].item() == 0.0


CONFIG = EnvConfig(
    horizon=5,
    training=LEARNS,
    lifecycle=LifecycleConfig(
        training_ticks=0, embargo_ticks=0, min_contribution=None, auto_cull=False, min_gradient_health=0.0
    ),
    actions=ActionConfig(blueprints=["conv_light"], tempos={"FAST": 1}),
    objective=ObjectiveConfig(price=0.5),
)

RENT = 0.2769426
"""Rent of one conv_light on 4 channels: 148 parameters on a host of 150, counted as 200, so 0.5·ln 1.74."""

WAITS, GROWS, STAYS, GOES = (Op.WAIT, 0), (Op.GERMINATE, 0), (Op.FOSSILIZE, 0), (Op.CULL, 0)

EPISODE = [  # of three hosts: only WAIT; one seed fossilized and one too late; one seed culled
    [WAITS, GROWS, GROWS],
    [WAITS, (Op.GERMINATE, 1), WAITS],
    [WAITS, STAYS, WAITS],
    [WAITS, WAITS, GOES],
    [WAITS, WAITS, GROWS],
]


def score_by_hand(env: HostEnv, data: Split) -> float:
    """Return the score of the host with its fossilized seeds only."""
    network = deepcopy(env.network).eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return right_answers(network, data)


@pytest.mark.parametrize("mode", ["objective", "kept"])
def test_rewards_of_an_episode_sum_to_what_the_host_has_become_worth(mode: str) -> None:
    """J at its end minus J at its start; the rent falls due when the seed is fossilized, and `kept` pays only then."""
    digits = Digits().load()
    few = Split(digits.train.inputs[:64], digits.train.targets[:64])
    data = TaskData(few, digits.validation, digits.test, digits.outputs)
    host = partial(CNN, base=4, blocks=2, kernel=1, slots=["block1", "block2"])
    config = replace(CONFIG, reward=RewardConfig(mode=mode))
    pool = HostPool(Digits(), data, host, config=config, n_envs=3, device=torch.device("cpu"))
    pool.reset([1, 2, 3])
    rewards, scores = [], [[score_by_hand(env, data.validation) for env in pool.envs]]
    for choices in EPISODE:
        rewards.append(pool.step(act(*choices)).reward.clone())
        scores.append([score_by_hand(env, data.validation) for env in pool.envs])
    expected = torch.tensor(scores).diff(dim=0)
    expected[2, 1] -= RENT  # rent is charged for fossilized seeds only
    torch.testing.assert_close(sum(rewards), expected.sum(0), rtol=0.0, atol=1e-5)
    stages = [[slot.stage.name for slot in env.slots] for env in pool.envs]
    assert stages == [["DORMANT", "DORMANT"], ["FOSSILIZED", "PROBATIONARY"], ["BLENDING", "DORMANT"]]
    # In the third tick the second host pays rent; its score moved by the rest, a whole number of images.
    images = (rewards[2][1].item() + RENT) * data.validation.samples
    assert images == pytest.approx(round(images), abs=1e-3)
    if mode == "kept":
        torch.testing.assert_close(torch.stack(rewards), expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("mode", rest_is_slow(["objective", "kept", "sparse"], {"kept"}))
def test_a_run_in_every_mode_is_plotted_term_by_term(mode: str, tmp_path: Path) -> None:
    fit(tmp_path, "--data.env.reward.mode", mode)
    points = only_run(tmp_path).scalars()
    shown = {tag.removeprefix("reward/") for tag in points if tag.startswith("reward/")}
    assert shown == {*REWARDS[mode].terms, "rollback"}
    for i, (_, reward) in enumerate(points["hosts/reward"]):
        assert sum(points[f"reward/{name}"][i][1] for name in shown) == pytest.approx(reward, abs=1e-5)
    assert len(points["hosts/reward"]) == EPOCHS * HORIZON
    for i, (_, expected) in enumerate(points["rollout/return"]):
        assert sum(points[f"rollout/reward.{name}"][i][1] for name in shown) == pytest.approx(expected, abs=1e-5)
        episode = slice(i * HORIZON, (i + 1) * HORIZON)
        for name in shown:
            paid = sum(value for _, value in points[f"reward/{name}"][episode])
            assert points[f"rollout/reward.{name}"][i][1] == pytest.approx(paid, abs=1e-5)


def test_it_cannot_be_set_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        fit(tmp_path, "--data.env.reward.gamma", "0.5")
    assert "data.env.reward.gamma" in capsys.readouterr().err
