"""Environments from a config. `gymnasium.make` and `gymnasium.make_vec` call these functions."""

from pathlib import Path

from jsonargparse import ArgumentError, Namespace
from lightning.fabric import Fabric

from esper_lightning.callbacks import Governor
from esper_lightning.cli.configs import find_config
from esper_lightning.cli.parser import Parser, link_reward
from esper_lightning.cli.unique_keys import load_with_unique_keys
from esper_lightning.datamodules.hosts import HostPoolData
from esper_lightning.envs import HostPool
from esper_lightning.gym.environments import GrowthEnv, GrowthVectorEnv
from esper_lightning.module import TamiyoModule
from esper_lightning.plugins import IMPORTS, import_installed, import_modules, module_names

GROUPS = ("model", "data", "governor")
"""Groups of settings that describe hosts and policy."""


def make_env(config: str | Path, render_mode: str | None = None) -> GrowthEnv:
    """Return an environment with one host of a config; see `load_pool`."""
    return GrowthEnv(load_pool(config, 1), render_mode)


def make_vector_env(config: str | Path, num_envs: int = 1, render_mode: str | None = None) -> GrowthVectorEnv:
    """Return `num_envs` environments with hosts of a config; see `load_pool`."""
    return GrowthVectorEnv(load_pool(config, num_envs), render_mode)


def load_pool(config: str | Path, n_envs: int) -> HostPool:
    """Return `n_envs` hosts as `fit` would train them with this config, watched by its Governor.

    Raises ValueError, naming the file, if a setting is not valid or the hosts are of several tasks.
    """
    pool = load_config(config, n_envs).data.pool
    assert isinstance(pool, HostPool), "hosts of several tasks are refused"
    return pool


def load_config(config: str | Path, n_envs: int) -> Namespace:
    """Return the module (`model`) and the data module (`data`) of a config, with hosts that are built.

    The device of the hosts is the one on which a Trainer with the accelerator of the config trains. Settings of the
    rest of a run are not read.

    Args:
        config: Path of a YAML file, or the name of a config of the package, as `digits`.
        n_envs: Number of hosts, in place of `data.n_envs`.

    Raises ValueError, naming the file, if a setting is not valid or the hosts are of several tasks.
    """
    settings = load_with_unique_keys(Path(find_config(str(config))).read_text(encoding="utf-8"))
    if not isinstance(settings, dict) or not isinstance(settings.get("data"), dict):
        raise ValueError(f"{config} is no config of hosts: it has no group `data`")
    if settings["data"].get("also"):
        raise ValueError(f"{config}: data.also names further tasks; an environment has one, leave data.also out")
    import_modules(module_names(settings.get(IMPORTS)))
    import_installed()
    parser = Parser(exit_on_error=False)
    parser.add_lightning_class_args(TamiyoModule, "model")
    parser.add_lightning_class_args(HostPoolData, "data")
    parser.add_lightning_class_args(Governor, "governor")
    link_reward(parser)
    taken = {name: settings[name] for name in GROUPS if name in settings}
    taken["data"] = settings["data"] | {"n_envs": n_envs}
    try:
        built = parser.instantiate(parser.parse_object(taken))
        if built.governor.enabled:
            built.data.oversee(built.governor)
        accelerator = (settings.get("trainer") or {}).get("accelerator", "auto")
        built.data.build(Fabric(accelerator=accelerator, devices=1).device)
    except (ArgumentError, ValueError) as error:
        raise ValueError(f"{config}: {error}") from error
    return built
