"""Environments from a config. `gymnasium.make` and `gymnasium.make_vec` call these functions."""

from pathlib import Path

from esper_lightning.cli import governor_of, load_config
from esper_lightning.envs import HostPool
from esper_lightning.gym.environments import GrowthEnv, GrowthVectorEnv


def make_env(config: str | Path, render_mode: str | None = None) -> GrowthEnv:
    """Return an environment with one host of a config; see `load_pool`."""
    return GrowthEnv(load_pool(config, 1), render_mode)


def make_vector_env(config: str | Path, num_envs: int = 1, render_mode: str | None = None) -> GrowthVectorEnv:
    """Return `num_envs` environments with hosts of a config; see `load_pool`."""
    return GrowthVectorEnv(load_pool(config, num_envs), render_mode)


def load_pool(config: str | Path, n_envs: int) -> HostPool:
    """Return `n_envs` hosts as `fit` would train them with this config, watched by its Governor.

    The device of the hosts is the one on which a Trainer with the accelerator of the config trains.

    Args:
        config: Path of a YAML file, or the name of a config of the package, as `digits`.
        n_envs: Number of hosts, in place of `data.n_envs`.

    Raises ValueError, naming the file, if a setting is not valid or the hosts are of several tasks.
    """
    made = load_config(config, f"--data.n_envs={n_envs}")
    if len(made.datamodule.task_configs) > 1:
        raise ValueError(f"{config}: data.also names further tasks; an environment has one, leave data.also out")
    made.datamodule.oversee(governor_of(made.trainer))
    made.datamodule.build(made.trainer.strategy.root_device)
    return made.datamodule.pool
