"""Adapter from gymnasium vector environments to `VectorEnv`, the interface of PPO. Needs the extra `gym`."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Discrete, MultiDiscrete
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from torch import Tensor

from esper_lightning.envs.spaces.choices import ChoiceAction, ChoiceSpace
from esper_lightning.envs.vector_env import FinalObservation, Observation, VectorStep
from esper_lightning.profiling import PhaseClock

EPISODE_WINDOW = 100
"""Number of recent episodes over which return and length are averaged."""


class GymVector:
    """Vector environment that wraps a gymnasium vector environment and stores its observations in tensors.

    Args:
        envs: Environments with `AutoresetMode.SAME_STEP`. Only in this mode every step belongs to an episode, and the
            final observation is available.
        horizon: Steps of a rollout.
        device: Device of observations, rewards and masks. None: torch's default.
        mask: Key of the action mask in the environments' info: one row of flags per environment with one flag per
            choice, and the heads of a MultiDiscrete action one after the other. A conditional head has one group of
            flags for each choice of its parent, in order.
        privileged: Key in the environments' info of a row of numbers for the critic alone.
        parents: Parent of each conditional head of a MultiDiscrete action (`head0`, `head1` …): the earlier head whose
            choice it depends on. Heads without a parent are independent.
    """

    autoreset = True

    def __init__(
        self,
        envs: VectorEnv,
        horizon: int,
        *,
        device: torch.device | None = None,
        mask: str | None = None,
        privileged: str | None = None,
        parents: Mapping[str, str] | None = None,
    ) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 step, got {horizon}")
        if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"{envs} must be made with autoreset_mode=AutoresetMode.SAME_STEP")
        if not isinstance(envs.single_observation_space, Box):
            raise ValueError(
                f"observations are {envs.single_observation_space}, not a Box; "
                f"wrap the environment in gymnasium.wrappers.FlattenObservation"
            )
        self.envs = envs
        self._observation_shape = envs.single_observation_space.shape
        self.n_envs = envs.num_envs
        self.horizon = horizon
        self.device = device = device or torch.get_default_device()
        self.space = action_space(envs.single_action_space, parents or {}, mask is not None)
        assert isinstance(envs.single_action_space, Discrete | MultiDiscrete), "action_space refuses all others"
        self._action_start = np.asarray(envs.single_action_space.start)  # gymnasium may not number actions from 0
        self._is_discrete = isinstance(envs.single_action_space, Discrete)
        self._mask_key, self._privileged_key = mask, privileged
        self.clock = PhaseClock(device)
        observation, info = envs.reset(seed=0)
        self.observation = Observation(self._flatten(observation).clone())
        self.masks = self.space.full_masks(self.n_envs, device)
        self.privileged = None if privileged is None else self._flatten(info[privileged]).clone()
        self.episode_starts = torch.zeros(self.n_envs, dtype=torch.bool, device=device)
        self._start_episodes(observation, info)

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; `seeds` holds one RNG seed for each."""
        one_per_env: Any = list(rng_seeds)  # gymnasium declares a single number, but its vector environments take these
        self._start_episodes(*self.envs.reset(seed=one_per_env))
        return self.observation

    def _start_episodes(self, observation: np.ndarray, info: dict[str, Any]) -> None:
        self.returns, self.lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, dtype=np.int64)
        self.recent_episodes: deque[tuple[float, int]] = deque(
            maxlen=EPISODE_WINDOW
        )  # return and length of each episode
        self._log = {"episode_return": float("nan"), "episode_length": float("nan")}
        self.episode_starts.zero_()
        self._store(observation, info)

    def step(self, action: ChoiceAction) -> VectorStep:
        """Step every environment and write the new observation into `self.observation`.

        Where an episode ended it is the first one of the next episode.
        """
        chosen = action.indices.cpu().numpy() + self._action_start
        observation, reward, terminated, truncated, info = self.envs.step(chosen[:, 0] if self._is_discrete else chosen)
        final = self._final_observation(info) if truncated.any() else None
        self._update_returns(reward, terminated | truncated)
        self._store(observation, info)
        terminated_flags, truncated_flags = self._to_tensor(terminated), self._to_tensor(truncated & ~terminated)
        torch.logical_or(terminated_flags, truncated_flags, out=self.episode_starts)
        rewards = torch.as_tensor(reward, dtype=torch.float32, device=self.device)
        return VectorStep(action, rewards, terminated_flags, truncated_flags, final, self._log)

    def _to_tensor(self, flags: np.ndarray) -> Tensor:
        return torch.as_tensor(flags, device=self.device)

    def _flatten(self, rows: np.ndarray) -> Tensor:  # [N, …] -> [N, …flat] float
        return torch.as_tensor(rows, dtype=torch.float32, device=self.device).reshape(self.n_envs, -1)

    def _store(self, observation: np.ndarray, info: dict[str, Any]) -> None:
        self.observation.features.copy_(self._flatten(observation))
        if self._privileged_key is not None and self.privileged is not None:
            self.privileged.copy_(self._flatten(info[self._privileged_key]))
        if self._mask_key is not None:
            self.masks.possible.copy_(self._to_tensor(info[self._mask_key]))
            self.masks.forced.copy_(self.space.forced(self.masks.possible))

    def _final_observation(self, info: dict[str, Any]) -> FinalObservation:
        """Return the final observations of the episodes that ended in this step."""
        ended_indices = info["_final_obs"].nonzero()[0]
        final = np.zeros((self.n_envs, *self._observation_shape), dtype=np.float32)
        for i in ended_indices:
            final[i] = info["final_obs"][i]
        if self._privileged_key is None or self.privileged is None:
            return FinalObservation(Observation(self._flatten(final)), None)
        privileged = np.zeros((self.n_envs, self.privileged.shape[1]), dtype=np.float32)
        for i in ended_indices:
            privileged[i] = np.ravel(info["final_info"][self._privileged_key][i])
        return FinalObservation(Observation(self._flatten(final)), self._flatten(privileged))

    def _update_returns(self, reward: np.ndarray, ended: np.ndarray) -> None:
        self.returns += reward
        self.lengths += 1
        if ended.any():
            self.recent_episodes.extend(zip(self.returns[ended].tolist(), self.lengths[ended].tolist(), strict=True))
            self.returns[ended] = self.lengths[ended] = 0
            mean_return, mean_length = np.mean(self.recent_episodes, axis=0).tolist()
            self._log = {"episode_return": mean_return, "episode_length": mean_length}


def action_space(space: gymnasium.Space, parents: Mapping[str, str], masked: bool) -> ChoiceSpace:
    """Convert a gymnasium action space to heads. Raises ValueError if it is not Discrete or a flat MultiDiscrete."""
    if isinstance(space, Discrete):
        return ChoiceSpace({"action": int(space.n)}, parents, masked)
    if isinstance(space, MultiDiscrete) and space.nvec.ndim == 1:
        return ChoiceSpace({f"head{i}": int(n) for i, n in enumerate(space.nvec)}, parents, masked)
    raise ValueError(f"actions are {space}; a policy here decides among choices: Discrete, or MultiDiscrete in a row")


def gym_vector(
    env: str | Callable[..., gymnasium.Env],
    n_envs: int = 8,
    horizon: int = 128,
    *,
    settings: Mapping[str, Any] | None = None,
    time_limit: int | None = None,
    **adapter: Any,
) -> GymVector:
    """Create N equal environments that run in this process.

    Args:
        env: Id of a gymnasium environment (`CartPole-v1`), or a factory: a callable or its `module:name`.
        n_envs: Number of environments N.
        horizon: Steps of a rollout.
        settings: Keyword arguments of each environment.
        time_limit: Steps after which an episode is truncated. None: the limit registered with the id, if any.
        adapter: Further arguments of `GymVector`.
    """
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        make = getattr(import_module(module), name) if module else partial(gymnasium.make, env)
    else:
        make = env

    def make_one() -> gymnasium.Env:
        made = make(**(settings or {}))
        return made if time_limit is None else gymnasium.wrappers.TimeLimit(made, time_limit)

    return GymVector(SyncVectorEnv([make_one] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP), horizon, **adapter)
