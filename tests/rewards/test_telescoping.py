"""The rewards of an episode sum to J at its end minus J at its start, whatever happens in between."""

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import ActionConfig, EnvConfig, HostPool, Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import ObjectiveConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN
from esper_lightning.tasks import Digits, Split, TaskData
from tests.decisions import act

CONFIG = EnvConfig(
    horizon=5,
    training=HostTraining(batches=2),
    lifecycle=LifecycleConfig(training_ticks=0, embargo_ticks=0, min_contribution=None, auto_cull=False),
    actions=ActionConfig(blueprints=["conv_light"], tempos={"FAST": 1}),
    objective=ObjectiveConfig(price=0.5),
)

RENT = 0.2769426
"""Rent of one conv_light on 4 channels: 148 parameters on a host of 150, counted as 200, so 0.5·ln 1.74."""

WAIT = (Op.WAIT, 0)

EPISODE = [  # (op, slot) of three hosts: only WAIT; one seed fossilized and one too late; one seed culled
    [WAIT, (Op.GERMINATE, 0), (Op.GERMINATE, 0)],
    [WAIT, (Op.GERMINATE, 1), WAIT],
    [WAIT, (Op.FOSSILIZE, 0), WAIT],
    [WAIT, WAIT, (Op.CULL, 0)],
    [WAIT, WAIT, (Op.GERMINATE, 0)],
]


@pytest.fixture(scope="module")
def pool() -> HostPool:
    digits = Digits().load()
    few = Split(digits.train.inputs[:64], digits.train.targets[:64])
    data = TaskData(few, digits.validation, digits.test, digits.outputs)
    host = partial(CNN, base=4, blocks=2, kernel=1, slots=["block1", "block2"])
    return HostPool(Digits(), data, host, config=CONFIG, n_envs=3, device=torch.device("cpu"))


@torch.no_grad()
def score_by_hand(env: HostEnv, data: Split) -> float:
    """Return the score of the host with its fossilized seeds only."""
    network = deepcopy(env.network).eval()
    for slot in slots_of(network).values():
        if slot.stage is not Stage.FOSSILIZED:
            slot.empty()
    return (network(data.inputs).argmax(1) == data.targets).double().mean().item()


def run_episode(pool: HostPool) -> tuple[Tensor, Tensor, Tensor]:
    """Run one episode; return its rewards [T, N], and scores [N] at its start and at its end."""
    pool.reset([1, 2, 3])
    start = [score_by_hand(env, pool.data.validation) for env in pool.envs]
    rewards = torch.stack([pool.step(act(*choices)).reward.clone() for choices in EPISODE])
    end = [score_by_hand(env, pool.data.validation) for env in pool.envs]
    return rewards, torch.tensor(start), torch.tensor(end)


def test_rewards_sum_to_what_the_host_has_become_worth(pool: HostPool) -> None:
    rewards, start, end = run_episode(pool)
    rents = torch.tensor([0.0, RENT, 0.0])  # rent is charged for fossilized seeds only
    torch.testing.assert_close(rewards.sum(0), end - rents - start, rtol=0.0, atol=1e-5)
    stages = [[slot.stage.name for slot in env.slots] for env in pool.envs]
    assert stages == [["DORMANT", "DORMANT"], ["FOSSILIZED", "PROBATIONARY"], ["BLENDING", "DORMANT"]]


def test_the_rent_falls_due_in_the_tick_that_keeps_the_seed(pool: HostPool) -> None:
    rewards, _, _ = run_episode(pool)
    # In the third tick the second host pays rent; its score moved by the rest, a whole number of images.
    images = (rewards[2, 1].item() + RENT) * pool.data.validation.samples
    assert images == pytest.approx(round(images), abs=1e-3)
    others = rewards[:-1, [0, 2]] * pool.data.validation.samples
    torch.testing.assert_close(others, others.round(), rtol=0.0, atol=1e-3)
