"""Hosts in training as a vector environment of Gymnasium, for other people's algorithms. Needs the extra `gym`.

Importing this module registers one id for each shipped config of one task, as `esper_lightning/Digits-v0`, and
`esper_lightning/Growth-v0`, which takes a config. `gymnasium.make_vec` makes them. N environments, K slots.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from esper_lightning.cli.commands import governor_of, load_config
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.envs.measurements import download
from esper_lightning.envs.vector_env import TRAINING, draw_rng_seed
from esper_lightning.runtime.registry import config_paths

try:
    import gymnasium
    from gymnasium.spaces import Box, MultiDiscrete
    from gymnasium.utils import seeding
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise ImportError("esper_lightning.gym needs gymnasium; pip install 'esper-lightning[gym]'") from None

LARGEST_FEATURE = 3.0
"""Bound of all features in an observation."""

CONFIGS_OF_SEVERAL_TASKS = frozenset({"general", "mixed"})
"""Shipped configs without an id, because an environment has hosts of one task."""


class GrowthVectorEnv(VectorEnv[np.ndarray, np.ndarray, np.ndarray]):
    """N hosts that are trained together. A step is one host epoch; the reward is that of the config.

    An action that is not possible is executed as WAIT. An environment whose episode ends is reset in the same step.
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # as in Gymnasium

    def __init__(self, pool: HostPool) -> None:
        self.pool = pool
        self.num_envs = pool.n_envs
        self.observation_names = observation_names(pool)
        self.single_action_space = MultiDiscrete(list(pool.space.sizes.values()))
        shape = (len(self.observation_names),)
        self.single_observation_space = Box(-LARGEST_FEATURE, LARGEST_FEATURE, shape, np.float32)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self._generators = [seeding.np_random(None)[0] for _ in range(self.num_envs)]

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode in every environment. A single seed s stands for s, s + 1 …; None continues a generator."""
        if isinstance(seed, int | np.integer):
            seed = [int(seed) + i for i in range(self.num_envs)]
        for i, env_seed in enumerate([None] * self.num_envs if seed is None else seed):
            if env_seed is not None:
                self._generators[i] = seeding.np_random(int(env_seed))[0]
        self._begin(range(self.num_envs))
        return self._observe(), self._info()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        """Train every host for one epoch, and reset those whose episode ends.

        Where an episode ends, observation and info are those of the next one; the last ones are in the info under
        `final_obs` and `final_info`.
        """
        if actions not in self.action_space:
            raise ValueError(f"{actions!r} is no row of {self.single_action_space} for each environment")
        rows = np.asarray(actions).tolist()
        possible = [self.pool.masks_on_cpu.allows(i, row) for i, row in enumerate(rows)]
        executed = [row if allowed else WAIT_ACTION for row, allowed in zip(rows, possible, strict=True)]
        step = self.pool.step(to_action(executed, self.pool.device))
        rolled_back, at_horizon = (flags.cpu().numpy().copy() for flags in (step.terminated, step.truncated))
        terminated = rolled_back | at_horizon if self.pool.config.reward.horizon_is_end else rolled_back
        ended = terminated | at_horizon
        verdicts = {verdict.host: str(verdict) for verdict in step.verdicts}
        info_of_step = {
            "action_possible": np.array(possible),
            "verdict": np.array([verdicts.get(i, "") for i in range(self.num_envs)], dtype=object),
        }
        observation, info = self._observe(), self._info(**info_of_step)
        if ended.any():
            final = {"final_obs": observation, "_final_obs": ended, "final_info": info, "_final_info": ended}
            self._begin(ended.nonzero()[0].tolist())
            observation, info = self._observe(), self._info(**info_of_step) | final
        return observation, step.metrics.reward.double().numpy(), terminated, at_horizon & ~terminated, info

    def action_masks(self) -> np.ndarray:  # [N, sum of choices] bool
        """Return for each head which choices some possible action uses, heads in the order of the action space.

        This is the method that MaskablePPO (sb3-contrib) calls. Where no possible action uses a head, its choice 0
        alone is marked, because every head must have one. Heads are masked independently, so some combinations are
        still impossible, and are executed as WAIT; `slot_mask` and `blueprint_mask` of the info tell exactly.
        """
        masks = self.pool.masks_on_cpu
        acting = masks.slot.clone()  # [N, ops, K]
        acting[:, Op.WAIT] = False
        germinating = acting[:, Op.GERMINATE]  # [N, K]
        blueprints = (masks.blueprint & germinating[..., None]).any(1)
        tempos = germinating.any(1, keepdim=True).expand(-1, len(self.pool.space.tempo))
        heads = [head.numpy().copy() for head in (masks.op, acting.any(1), blueprints, tempos)]
        for head in heads:
            head[:, 0] |= ~head.any(1)
        return np.concatenate(heads, 1)

    def _begin(self, hosts: Sequence[int]) -> None:
        self.pool.reset_hosts(hosts, [draw_rng_seed(self._generators[i], TRAINING) for i in hosts])

    def _observe(self) -> np.ndarray:  # [N, features]
        """Return the features of each host, then those of its slots, then those of the blueprints in each slot."""
        parts = self.pool.rows.split(download(self.pool.observation.features))
        return torch.cat([part.flatten(1) for part in parts], 1).to(torch.float32).numpy()

    def _info(self, **more: np.ndarray) -> dict[str, Any]:
        """Return one array per key, and under `_key` which environments have it: all."""
        envs, masks = self.pool.envs, self.pool.masks_on_cpu
        info = {
            "action_mask": self.action_masks(),
            "slot_mask": masks.slot.numpy().copy(),  # [N, ops, K]
            "blueprint_mask": masks.blueprint.numpy().copy(),  # [N, K, blueprints]
            "score": np.array([env.measured.score for env in envs]),
            "objective": np.array([env.objective for env in envs]),
            "parameters": np.array([env.fossilized_parameters for env in envs]),
            "rng_seed": np.array([env.rng_seed for env in envs]),
            **more,
        }
        return info | {f"_{key}": np.ones(self.num_envs, dtype=np.bool_) for key in info}


def observation_names(pool: HostPool) -> list[str]:
    """Return the name of each number of an observation, in their order; see `GrowthVectorEnv._observe`."""
    names, space, end_of_host = pool.feature_names, pool.space, pool.rows.host
    end_of_slot = end_of_host + pool.rows.slot
    of_slot = [name.removeprefix("slot.") for name in names[end_of_host:end_of_slot]]
    of_blueprint = [name.removeprefix("blueprint.") for name in names[end_of_slot:]]
    return [
        *names[:end_of_host],
        *(f"{slot}.{name}" for slot, name in product(space.slot, of_slot)),
        *(".".join(parts) for parts in product(space.slot, space.blueprint, of_blueprint)),
    ]


def make_vector_env(config: str | Path, num_envs: int = 1) -> GrowthVectorEnv:
    """Return `num_envs` hosts as `fit` would train them with a config, by path or name, watched by its Governor."""
    made = load_config(config, f"--data.n_envs={num_envs}")
    data = made.datamodule
    if len(data.task_configs) > 1:
        raise ValueError(f"{config}: data.also names further tasks; an environment has one, leave data.also out")
    data.set_governor(governor_of(made.trainer))
    data.build_for(made.trainer)
    return GrowthVectorEnv(data.pool)


def register_configs() -> None:
    """Register `DigitsBudget-v0` for `digits_budget.yaml`, so each shipped config of one task, and `Growth-v0`."""
    kwargs_by_name: dict[str, dict[str, str]] = {"Growth": {}}
    for config in (path.stem for path in config_paths()):
        if config not in CONFIGS_OF_SEVERAL_TASKS:
            kwargs_by_name["".join(word.capitalize() for word in config.split("_"))] = {"config": config}
    for name, kwargs in kwargs_by_name.items():
        entry = f"{__name__}:{make_vector_env.__name__}"
        gymnasium.register(f"esper_lightning/{name}-v0", vector_entry_point=entry, kwargs=kwargs)


register_configs()
