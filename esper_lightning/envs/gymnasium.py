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

from esper_lightning.envs.vector_env import ChoiceAction, ChoiceSpace, Observation, VectorStep
from esper_lightning.runtime.machine import PhaseClock

EPISODE_WINDOW = 100  # recent episodes over which return and length are averaged


class GymVector:
    """Vector environment that wraps a gymnasium vector environment and stores its observations in tensors.

    Args:
        envs: Environments with `AutoresetMode.SAME_STEP`, in which every step belongs to an episode.
        horizon: Steps of a rollout.
        device: Device of observations, rewards and masks. None: torch's default.
        mask: Key of the action mask in the environments' info: a flag for each choice of each head.
    """

    autoreset = True
    privileged = None

    def __init__(
        self, envs: VectorEnv, horizon: int, *, device: torch.device | None = None, mask: str | None = None
    ) -> None:
        if horizon < 1:
            raise ValueError(f"horizon must be at least 1 step, got {horizon}")
        if envs.metadata.get("autoreset_mode") != AutoresetMode.SAME_STEP:
            raise ValueError(f"{envs} must be made with autoreset_mode=AutoresetMode.SAME_STEP")
        observations, actions = envs.single_observation_space, envs.single_action_space
        if not isinstance(observations, Box):
            raise ValueError(
                f"observations are {observations}, not a Box; wrap the environment in "
                f"gymnasium.wrappers.FlattenObservation"
            )
        if isinstance(actions, Discrete):
            sizes = {"action": int(actions.n)}
        elif isinstance(actions, MultiDiscrete) and actions.nvec.ndim == 1:
            sizes = {f"head{i}": int(n) for i, n in enumerate(actions.nvec)}
        else:
            raise ValueError(
                f"actions are {actions}; a policy here decides among choices: Discrete, or MultiDiscrete in a row"
            )
        self.envs, self.n_envs, self.horizon = envs, envs.num_envs, horizon
        self.device = device or torch.get_default_device()
        self.space = ChoiceSpace(sizes, masked=mask is not None)
        self._action_start = np.asarray(actions.start)  # gymnasium may not number actions from 0
        self._is_discrete = isinstance(actions, Discrete)
        self._mask_key = mask
        self.clock = PhaseClock(self.device)
        self.observation = Observation(torch.zeros(self.n_envs, int(np.prod(observations.shape)), device=self.device))
        self.masks = self.space.full_masks(self.n_envs, self.device)
        self.episode_starts = torch.zeros(self.n_envs, dtype=torch.bool, device=self.device)
        self._start_episodes(*envs.reset(seed=0))

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        one_per_env: Any = list(rng_seeds)  # gymnasium declares a single number, but its vector environments take these
        self._start_episodes(*self.envs.reset(seed=one_per_env))
        return self.observation

    def _start_episodes(self, observation: np.ndarray, info: dict[str, Any]) -> None:
        self.returns, self.lengths = np.zeros(self.n_envs), np.zeros(self.n_envs, dtype=np.int64)
        self.recent_episodes: deque[tuple[float, int]] = deque(maxlen=EPISODE_WINDOW)  # return and length of each
        self._log = {"episode_return": float("nan"), "episode_length": float("nan")}
        self.episode_starts.zero_()
        self._store(observation, info)

    def step(self, action: ChoiceAction) -> VectorStep:
        """Step every environment. Where an episode ended, `self.observation` is the first one of the next episode."""
        chosen = action.indices.cpu().numpy() + self._action_start
        observation, reward, terminated, truncated, info = self.envs.step(chosen[:, 0] if self._is_discrete else chosen)
        final, ended = None, terminated | truncated
        if truncated.any():
            last = np.zeros_like(observation, dtype=np.float32)  # observation of each episode that ended; else not read
            for i in info["_final_obs"].nonzero()[0]:
                last[i] = info["final_obs"][i]
            final = Observation(self._flatten(last)), None
        self.returns += reward
        self.lengths += 1
        if ended.any():
            self.recent_episodes.extend(zip(self.returns[ended].tolist(), self.lengths[ended].tolist(), strict=True))
            self.returns[ended] = self.lengths[ended] = 0
            mean_return, mean_length = np.mean(self.recent_episodes, axis=0).tolist()
            self._log = {"episode_return": mean_return, "episode_length": mean_length}
        self._store(observation, info)
        self.episode_starts.copy_(torch.as_tensor(ended))
        rewards = torch.as_tensor(reward, dtype=torch.float32, device=self.device)
        is_terminal = torch.as_tensor(terminated, device=self.device)
        is_cut = torch.as_tensor(truncated & ~terminated, device=self.device)
        return VectorStep(action, rewards, is_terminal, is_cut, final=final, log=self._log)

    def _flatten(self, rows: np.ndarray) -> Tensor:  # [N, …] -> [N, …flat] float
        return torch.as_tensor(rows, dtype=torch.float32, device=self.device).reshape(self.n_envs, -1)

    def _store(self, observation: np.ndarray, info: dict[str, Any]) -> None:
        self.observation.features.copy_(self._flatten(observation))
        if self._mask_key is not None:
            self.masks.possible.copy_(torch.as_tensor(info[self._mask_key]))
            self.masks.forced.copy_(self.space.forced(self.masks.possible))


def gym_vector(
    env: str | Callable[..., gymnasium.Env],
    n_envs: int = 8,
    horizon: int = 128,
    *,
    settings: Mapping[str, Any] | None = None,
    time_limit: int | None = None,
    device: torch.device | None = None,
    mask: str | None = None,
) -> GymVector:
    """Create N equal environments that run in this process.

    Args:
        env: Id of a gymnasium environment (`CartPole-v1`), or a factory: a callable or its `module:name`.
        n_envs, horizon: Number of environments N, and steps of a rollout.
        settings: Keyword arguments of each environment.
        time_limit: Steps after which an episode is truncated. None: the limit registered with the id, if any.
        device, mask: See `GymVector`.
    """
    if isinstance(env, str):
        module, _, name = env.rpartition(":")
        make = getattr(import_module(module), name) if module else partial(gymnasium.make, env)
    else:
        make = env

    def make_one() -> gymnasium.Env:
        made = make(**(settings or {}))
        return made if time_limit is None else gymnasium.wrappers.TimeLimit(made, time_limit)

    envs = SyncVectorEnv([make_one] * n_envs, autoreset_mode=AutoresetMode.SAME_STEP)
    return GymVector(envs, horizon, device=device, mask=mask)
