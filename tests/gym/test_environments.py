"""Hosts as environments of Gymnasium. Skipped without the extra `gym`."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch

pytest.importorskip("gymnasium")

from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.gymnasium import GymVector
from esper_lightning.envs.spaces.choices import ChoiceAction
from esper_lightning.gym.environments import GrowthEnv, GrowthVectorEnv
from esper_lightning.rewards import RewardConfig
from tests.decisions import WAIT, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch

MakePool = Callable[..., HostPool]

HORIZON = 3


def test_gymnasiums_checker_accepts_a_host(make_pool: MakePool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(GrowthEnv(make_pool(1, horizon=HORIZON), render_mode="rgb_array"))

    assert [str(one.message) for one in caught if "not having a spec" not in str(one.message)] == []


@pytest.mark.slow
def test_the_checker_of_stable_baselines_accepts_a_host(make_pool: MakePool) -> None:
    checker = pytest.importorskip("stable_baselines3.common.env_checker")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checker.check_env(GrowthEnv(make_pool(1), render_mode="rgb_array"), skip_render_check=False)


def test_an_episode_depends_on_its_seed_and_its_actions_alone(make_pool: MakePool) -> None:
    vector, single = GrowthVectorEnv(make_pool(2, horizon=HORIZON)), GrowthEnv(make_pool(1, horizon=HORIZON))
    actions = [germinate(0, 1), WAIT, WAIT, germinate(2), WAIT]

    seen = [vector.reset(seed=7)[0][1]]
    rewards = []
    for action in actions:
        observation, reward, *_ = vector.step(np.array([WAIT, action]))
        seen.append(observation[1])
        rewards.append(reward[1])

    alone = [single.reset(seed=8)[0]]
    for tick, action in enumerate(actions):
        observation, reward, terminated, truncated, _ = single.step(np.array(action))
        assert reward == rewards[tick] and (terminated, truncated) == (tick == HORIZON - 1, False)
        alone.append(single.reset()[0] if terminated else observation)
    np.testing.assert_array_equal(seen, alone)
    assert not np.array_equal(alone[0], alone[HORIZON]), "the next episode has another host"
    assert all(observation in single.observation_space for observation in alone)


def test_rewards_of_an_episode_sum_to_the_change_of_the_objective(make_pool: MakePool) -> None:
    envs = GrowthVectorEnv(make_pool(2, horizon=HORIZON))
    _, begun = envs.reset(seed=[5, 6])
    steps = [envs.step(np.array([germinate(0, 1), WAIT])), envs.step(np.array([WAIT] * 2))]
    last = envs.step(np.array([WAIT] * 2))

    _, _, terminated, truncated, info = last
    assert terminated.all() and not truncated.any()
    assert not any((step[2] | step[3]).any() or "final_obs" in step[4] for step in steps)
    final = info["final_info"]
    returns = sum(step[1] for step in (*steps, last))
    np.testing.assert_allclose(returns, final["objective"] - begun["objective"], atol=1e-6)
    assert info["_final_obs"].all() and info["final_obs"][0][2] == 1.0, "the share of the episode that has passed"
    assert last[0][:, 0].tolist() == [0.0, 0.0], "the observation is that of the next episode"
    assert not (info["rng_seed"] % 2).any(), "those of evaluations are odd"
    assert final["rng_seed"].tolist() == begun["rng_seed"].tolist() != info["rng_seed"].tolist()


def test_a_horizon_that_is_a_time_limit_truncates(make_pool: MakePool) -> None:
    env = GrowthEnv(make_pool(1, horizon=1, reward=RewardConfig(horizon_is_end=False)))
    env.reset(seed=0)

    assert env.step(np.array(WAIT))[2:4] == (False, True)


def test_a_host_that_is_rolled_back_begins_a_new_episode_and_its_neighbour_goes_on(make_pool: MakePool) -> None:
    envs, undisturbed = (GrowthVectorEnv(make_pool(2, governor=ONLY_NAN_DIVERGES, horizon=HORIZON)) for _ in range(2))
    wait = np.array([WAIT] * 2)
    for both in (envs, undisturbed):
        both.reset(seed=1)
        both.step(wait)
    with breaking_epoch(envs.hosts.pool, [0]):
        observation, reward, terminated, truncated, info = envs.step(wait)
    expected = undisturbed.step(wait)

    assert terminated.tolist() == [True, False] and not truncated.any()
    assert info["final_info"]["verdict"][0].startswith("host 0 (RNG seed ") and info["_final_obs"].tolist() == [
        True,
        False,
    ]
    assert reward[0] < -0.1
    assert [env.tick for env in envs.hosts.pool.envs] == [0, 2]
    np.testing.assert_array_equal(observation[1], expected[0][1])
    third, of_neighbour = envs.step(wait), undisturbed.step(wait)
    assert third[2].tolist() == [False, True], "each host has a horizon of its own"
    np.testing.assert_array_equal(third[4]["final_obs"][1], of_neighbour[4]["final_obs"][1])


def test_an_action_that_is_not_possible_is_executed_as_wait(make_pool: MakePool) -> None:
    env = GrowthEnv(make_pool(1))
    _, info = env.reset(seed=0)
    assert info["action_mask"].tolist() == env.action_masks().tolist()
    assert not info["masks"]["slot"][Op.FOSSILIZE].any()

    *_, info = env.step(np.array(fossilize(1)))

    assert not info["action_possible"]
    assert env.hosts.pool.envs[0].last_op is Op.WAIT
    *_, info = env.step(np.array(germinate(1)))
    assert info["action_possible"] and env.hosts.pool.envs[0].slots[1].occupied


@pytest.mark.parametrize("action", [[0] * 7, [9, 0, 0, 0, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0, 0, 0]])
def test_what_is_no_action_is_refused(make_pool: MakePool, action: list[int]) -> None:
    env = GrowthEnv(make_pool(1))
    env.reset(seed=0)

    with pytest.raises(ValueError, match="is no action; an action is one number for each head of MultiDiscrete"):
        env.step(np.array(action))


def test_frames_have_one_size_and_show_what_grows(make_pool: MakePool) -> None:
    env = GrowthEnv(make_pool(1, horizon=HORIZON), render_mode="rgb_array")
    env.reset(seed=0)
    frames = [env.render()]
    env.step(np.array(germinate(1)))
    frames.append(env.render())
    env.reset(seed=0)
    frames.append(env.render())

    assert len({frame.shape for frame in frames}) == 1
    assert not np.array_equal(frames[0], frames[1]) and np.array_equal(frames[0], frames[2])
    assert GrowthVectorEnv(make_pool(1)).render() is None


def test_what_cannot_be_done_is_told_in_one_line(make_pool: MakePool) -> None:
    with pytest.raises(ValueError, match="takes a pool of 1 host, got 2; use GrowthVectorEnv"):
        GrowthEnv(make_pool(2))
    with pytest.raises(ValueError, match="render_mode must be rgb_array or None, got 'human'"):
        GrowthVectorEnv(make_pool(1), "human")
    envs = GrowthVectorEnv(make_pool(2))
    with pytest.raises(ValueError, match="reset takes no options, got reset_mask"):
        envs.reset(options={"reset_mask": np.ones(2, dtype=np.bool_)})
    with pytest.raises(ValueError, match="reset got 3 seeds for 2 environments"):
        envs.reset(seed=[1, 2, 3])
    with pytest.raises(ValueError, match="step got 1 actions for 2 environments"):
        envs.step(np.array([WAIT]))


def test_a_policy_of_this_project_can_act_through_the_interface(make_pool: MakePool) -> None:
    envs = GrowthVectorEnv(make_pool(2, horizon=HORIZON))
    assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    pool = GymVector(envs, HORIZON, mask="action_mask")
    pool.reset([1, 2])

    steps = [pool.step(ChoiceAction(torch.tensor([WAIT] * 2))) for _ in range(HORIZON)]

    assert pool.masks.possible.shape == (2, sum(envs.hosts.pool.space.sizes.values()))
    assert steps[-1].terminated.all() and steps[-1].log["episode_length"] == HORIZON
