"""Gymnasium environments: the training of hosts for other people's algorithms. Needs the extra `gym`.

Importing this package registers one id for each shipped config of one task, as `esper_lightning/Digits-v0`, and
`esper_lightning/Growth-v0`, which takes a config. Torch, Lightning and the config are loaded when an environment is
made.
"""

from esper_lightning.config_files import config_paths

try:
    import gymnasium
except ModuleNotFoundError as error:
    if error.name != "gymnasium":
        raise
    raise ImportError("esper_lightning.gym needs gymnasium; pip install 'esper-lightning[gym]'") from None

NAMESPACE = "esper_lightning"

CONFIGS_OF_SEVERAL_TASKS = frozenset({"general", "mixed"})
"""Shipped configs without an id, because an environment has hosts of one task."""


def register_configs() -> None:
    """Register an id for each shipped config, `DigitsFamily-v0` for `digits_family.yaml`, and one for any config."""
    kwargs_by_name: dict[str, dict[str, str]] = {"Growth": {}}
    for config in (path.stem for path in config_paths()):
        if config not in CONFIGS_OF_SEVERAL_TASKS:
            kwargs_by_name["".join(word.capitalize() for word in config.split("_"))] = {"config": config}
    for name, kwargs in kwargs_by_name.items():
        gymnasium.register(
            f"{NAMESPACE}/{name}-v0",
            entry_point=f"{__name__}.make:make_env",
            vector_entry_point=f"{__name__}.make:make_vector_env",
            kwargs=kwargs,
        )


register_configs()
