"""Adapter for gymnasium environments. Skipped without the extra `gym`."""

from typing import Any

import numpy as np
import pytest
import torch

gymnasium = pytest.importorskip("gymnasium")

from gymnasium.spaces import Box, Dict, Discrete, MultiDiscrete  # noqa: E402
from gymnasium.vector import AutoresetMode, SyncVectorEnv  # noqa: E402

from esper_lightning.envs.gymnasium import GymVector, gym_vector  # noqa: E402
from esper_lightning.envs.vector_env import ChoiceAction  # noqa: E402
from esper_lightning.ppo.collector import RolloutCollector  # noqa: E402
from esper_lightning.ppo.losses import PPOConfig, ppo_terms  # noqa: E402
from esper_lightning.ppo.policy import Policy, PolicyConfig, policy_shape  # noqa: E402
from esper_lightning.ppo.running_norm import RunningMeanStd  # noqa: E402


class Counter(gymnasium.Env):
    """Environment that counts its steps and ends at `end`; only the present count is a possible first choice."""

    observation_space = Box(0.0, 100.0, (2, 1))

    def __init__(self, end: int = 3) -> None:
        self.end = end
        self.action_space = MultiDiscrete([4, 2], start=[10, 0])
        self.did: list[np.ndarray] = []

    def _seen(self) -> tuple[np.ndarray, dict[str, Any]]:
        first = np.arange(4) == self.count % 4
        info = {"possible": np.concatenate([first, [True, True]])}
        return np.array([[self.count], [self.begin]], dtype=np.float32), info

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.count, self.begin = 0, self.np_random.integers(1000) / 1000
        return self._seen()

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.did.append(np.asarray(action))
        self.count += 1
        seen, info = self._seen()
        return seen, float(self.count), self.count == self.end, False, info


def counters(n_envs: int = 2, horizon: int = 5, time_limit: int | None = None, **adapter: Any) -> GymVector:
    adapter = {"mask": "possible"} | adapter
    return gym_vector(Counter, n_envs, horizon, time_limit=time_limit, **adapter)


def play(pool: GymVector, steps: int) -> list[Any]:
    return [pool.step(ChoiceAction(torch.tensor([[0, 1]] * pool.n_envs))) for _ in range(steps)]


def test_steps_rewards_and_ends_are_the_environments_own() -> None:
    pool = counters(settings={"end": 3})
    pool.reset([1, 2])

    steps = play(pool, 4)

    assert [step.reward.tolist() for step in steps] == [[1.0] * 2, [2.0] * 2, [3.0] * 2, [1.0] * 2]
    assert [step.terminated.tolist() for step in steps] == [[False] * 2] * 2 + [[True] * 2, [False] * 2]
    assert not any(step.truncated.any() for step in steps)
    assert pool.observation.features[:, 0].tolist() == [1.0, 1.0], "a step into the second episode"
    assert steps[-1].log == {"episode_return": 6.0, "episode_length": 3.0}
    assert [one.unwrapped.did[0].tolist() for one in pool.envs.envs] == [[10, 1]] * 2, "gymnasium counts from 10 here"


def test_a_time_limit_shows_the_last_state_although_the_next_episode_has_begun() -> None:
    pool = counters(settings={"end": 9}, time_limit=2)
    pool.reset([1, 2])
    begun = pool.observation.features[:, 1].clone()

    first, second = play(pool, 2)

    assert first.final is None and not first.truncated.any()
    assert second.truncated.all() and not second.terminated.any() and pool.episode_starts.all()
    assert second.final[0].features.tolist() == [[2.0, begun[0].item()], [2.0, begun[1].item()]]
    assert pool.observation.features[:, 0].tolist() == [0.0, 0.0]
    assert not torch.equal(pool.observation.features[:, 1], begun)


def test_masks_follow_the_environment() -> None:
    pool = counters(settings={"end": 3})
    pool.reset([1, 2])
    assert pool.space.sizes == {"head0": 4, "head1": 2}
    assert pool.masks.possible.tolist() == [[True, False, False, False, True, True]] * 2

    play(pool, 1)

    assert pool.masks.possible.tolist() == [[False, True, False, False, True, True]] * 2
    assert not pool.masks.forced.any(), "there is still the second head"


def test_a_policy_acts_there_and_its_ratio_is_one() -> None:
    pool = counters(n_envs=3, horizon=7, settings={"end": 4}, time_limit=3, mask=None)
    torch.manual_seed(0)
    policy = Policy(policy_shape(pool), PolicyConfig(width=8))
    norms = RunningMeanStd((2,)), RunningMeanStd((), clip=float("inf"))
    loop = RolloutCollector(
        pool,
        policy,
        observation_norm=norms[0],
        value_norm=norms[1],
        config=PPOConfig(),
        run_rng_seed=0,
    )
    for _ in range(3):
        loop.reset()
        for _ in range(7):
            loop.step()
        rollout, _ = loop.finish()
        assert ppo_terms(policy, rollout, PPOConfig()).ratio_error < 1e-5

    assert len({int(one) for one in rollout.steps.action.indices[..., 0].flatten()}) > 1
    assert loop.ticks == 21 and rollout.steps.starts.any() and not rollout.steps.starts.all()


def test_what_a_policy_cannot_see_or_do_is_refused() -> None:
    class Nested(Counter):
        observation_space = Dict({"count": Box(0.0, 1.0, (1,))})

    class Continuous(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = Box(0.0, 1.0, (1,))

    for kind, message in ((Nested, "FlattenObservation"), (Continuous, "decides among choices")):
        with pytest.raises(ValueError, match=message):
            GymVector(SyncVectorEnv([kind], autoreset_mode=AutoresetMode.SAME_STEP), 4)
    with pytest.raises(ValueError, match=r"autoreset_mode=AutoresetMode\.SAME_STEP"):
        GymVector(SyncVectorEnv([Counter] * 2), 4)
    with pytest.raises(ValueError, match="horizon must be at least 1"):
        counters(horizon=0)


def test_an_environment_is_named_by_its_id_or_by_where_it_is_made() -> None:
    by_id, by_path = (
        gym_vector(name, n_envs=2) for name in ("CartPole-v1", "gymnasium.envs.classic_control:CartPoleEnv")
    )

    assert by_id.space.sizes == by_path.space.sizes == {"action": 2}
    assert isinstance(by_id.envs.single_action_space, Discrete)
    assert torch.equal(by_id.reset([1, 2]).features, by_path.reset([1, 2]).features)
