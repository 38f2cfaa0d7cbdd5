"""Hosts for Stable-Baselines3: N hosts that are trained together as a VecEnv, and a MaskablePPO policy as a controller.

Needs stable-baselines3 and sb3-contrib, which the project does not need otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from sb3_contrib import MaskablePPO
from stable_baselines3.common.vec_env import VecEnv

from esper_lightning.envs import Action, HostPool
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.gym.environments import GrowthVectorEnv
from esper_lightning.gym.spaces import flatten_masks, flatten_observation


class HostVecEnv(VecEnv):
    """A `GrowthVectorEnv` in the form that stable-baselines3 expects.

    Attributes:
        impossible: Number of actions so far that were not possible, and therefore executed as WAIT.
    """

    def __init__(self, envs: GrowthVectorEnv) -> None:
        self.envs = envs
        self.impossible = 0
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> np.ndarray:
        observation, _ = self.envs.reset(seed=self._seeds)
        self._reset_seeds()
        return observation

    def step_async(self, actions: np.ndarray) -> None:
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observation, reward, terminated, truncated, info = self.envs.step(self.actions)
        infos: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        possible = info.get("action_possible", np.ones(self.num_envs, dtype=np.bool_))  # none if all episodes end
        for i in np.flatnonzero(terminated | truncated):
            infos[i] = {"terminal_observation": info["final_obs"][i], "TimeLimit.truncated": bool(truncated[i])}
            possible[i] = info["final_info"]["action_possible"][i]
        self.impossible += int((~possible).sum())
        return observation, reward.astype(np.float32), terminated | truncated, infos

    def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> list[Any]:
        assert method_name == "action_masks", "MaskablePPO calls no other one"
        return list(self.envs.action_masks())

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * self.num_envs

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise NotImplementedError("environments have no attributes to set")

    def env_is_wrapped(self, wrapper_class: type, indices: Any = None) -> list[bool]:
        return [False] * self.num_envs

    def close(self) -> None:
        self.envs.close()


class GreedyMaskable:
    """Controller that takes the most likely actions of a MaskablePPO policy; impossible ones become WAIT.

    Args:
        model: The trained policy.
        normalise: Function from observations to those that the policy was trained on.
    """

    def __init__(self, model: MaskablePPO, normalise: Callable[[np.ndarray], np.ndarray]) -> None:
        self.model, self.normalise = model, normalise

    def reset(self, pool: HostPool) -> None:
        pass

    def act(self, pool: HostPool) -> Action:
        observation = self.normalise(flatten_observation(pool.observation, pool.space))
        masks = flatten_masks(pool.masks_on_cpu, pool.space)
        chosen, _ = self.model.predict(observation, action_masks=masks, deterministic=True)
        rows = chosen.tolist()
        executed = [row if pool.masks_on_cpu.allows(i, row) else WAIT_ACTION for i, row in enumerate(rows)]
        return to_action(executed, pool.device)
