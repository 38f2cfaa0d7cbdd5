"""Data module for vector environments of any kind, for example from Gymnasium."""

from collections.abc import Callable
from typing import Any

from lightning import LightningDataModule

from esper_lightning.datamodules.hosts import TickLoader
from esper_lightning.envs.vector_env import VectorEnv, check_rng_seed
from esper_lightning.runtime.ranks import Ranks


class VectorData(LightningDataModule):
    """Data module for any VectorEnv. A Lightning batch is a whole rollout, because a step may take microseconds.

    Checkpoints do not contain the state of the environments: a resumed run begins new episodes.

    Args:
        env: Function that returns a VectorEnv, as `esper_lightning.envs.gymnasium.gym_vector`.
        settings: Keyword arguments of this function.
        seed: RNG seed of episodes and exploration.
    """

    def __init__(self, env: Callable[..., Any], settings: dict[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__()
        check_rng_seed("data.seed", seed)
        self.pool: VectorEnv = env(**(settings or {}))
        self.seed = seed
        self.n_envs, self.horizon = self.pool.n_envs, self.pool.horizon
        self.ranks = Ranks([self.n_envs])

    def setup(self, stage: str) -> None:
        assert self.trainer is not None, "the trainer calls this"
        if self.trainer.world_size > 1:
            raise ValueError("environments that are no hosts train in one process; set trainer.devices to 1")
        env_device, policy_device = self.pool.device, self.trainer.strategy.root_device
        if env_device.type != policy_device.type:
            raise ValueError(
                f"the policy would be on {policy_device.type}, its environments on {env_device.type}; "
                f"set trainer.accelerator, or the environments' device"
            )

    def resume_identity(self) -> dict[str, Any]:
        """Return the sizes of observations, actions and rollouts, which a resumed run must share."""
        pool = self.pool
        return {
            "choices": dict(pool.space.sizes),
            "features": pool.observation.features.shape[-1],
            "privileged": 0 if pool.privileged is None else pool.privileged.shape[-1],
            "steps of a rollout": pool.horizon,
            "environments": pool.n_envs,
        }

    def growth_rules(self) -> None:
        """Return None: nothing grows."""

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Do nothing: checkpoints contain no state of the environments."""

    def train_dataloader(self) -> TickLoader:
        return TickLoader(1)
