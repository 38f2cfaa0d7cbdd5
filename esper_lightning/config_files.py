"""Configs that come with the package: their paths, their list, and copies of them."""

import shutil
from pathlib import Path

from esper_lightning.registry import suggest_name

CONFIGS = next(
    folder for folder in (Path(__file__).parent / "configs", Path(__file__).parents[1] / "configs") if folder.is_dir()
)
"""Folder of the configs. In a clone without symbolic links it lies beside the package."""


def config_paths() -> list[Path]:
    """Return the paths of all configs of the package."""
    return sorted(CONFIGS.glob("*.yaml"))


def find_config(name: str | Path) -> Path:
    """Return the path of a config that is named by its path, or by its name in the package; files come first.

    Raises ValueError if there is none.
    """
    if Path(name).is_file():
        return Path(name)
    packaged = {path.stem: path for path in config_paths()}
    if str(name) in packaged:
        return packaged[str(name)]
    raise ValueError(f"config {str(name)!r} does not exist; {suggest_name(Path(name).stem, list(packaged))}")


def configs() -> None:
    """List the configs that come with the package, with their purpose."""
    for path in config_paths():
        print(f"{path.stem:18} {path.read_text(encoding='utf-8').partition('# Purpose: ')[2].partition(chr(10))[0]}")


def init(config: str) -> None:
    """Copy a config of the package, with its comments, into the current folder.

    Args:
        config: Name of the config, as `digits`.
    """
    source = find_config(config)
    if Path(source.name).exists():
        raise ValueError(f"{source.name!r} exists already; rename or remove it first")
    shutil.copyfile(source, source.name)
    print(f"written to {source.name}")
