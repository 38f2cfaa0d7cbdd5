"""Configs that come with the package: their names, purposes and copies."""

from pathlib import Path

from esper_lightning.cli.names import nearest_name
from esper_lightning.serialization.replace import replace_file

CONFIGS = Path(__file__).parents[1] / "configs"

PURPOSE = "# Purpose: "
"""Beginning of the first line of a config."""

SUFFIXES = (".yaml", ".yml")


def config_names() -> list[str]:
    """Return the names of all configs that come with the package."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def config_path(name: str) -> Path:
    """Return the path of a config of the package. Raises ValueError if there is none of this name."""
    if name not in config_names():
        raise ValueError(f"no config of the package is called {name!r}; {_meant(None, name)}")
    return CONFIGS / f"{name}.yaml"


def purpose(name: str) -> str:
    """Return the first line of a config of the package, which says what it is for."""
    with config_path(name).open(encoding="utf-8") as file:
        return file.readline().removeprefix(PURPOSE).strip()


def find_config(name: str) -> str:
    """Return the path of a config that is named by its path, or by its name in the package; files come first.

    Raises ValueError if there is none.
    """
    path = Path(name)
    if path.exists() and not path.is_dir():
        return name
    if name in config_names():
        return str(config_path(name))
    if path.is_dir():
        raise ValueError(f"config {name!r} is a folder; name a YAML file in it")
    beside = {one.name: str(one) for one in path.parent.glob("*") if one.suffix in SUFFIXES}
    near = None if name == path.stem else nearest_name(path.name, beside)  # a name alone is that of the package
    raise ValueError(f"config {name!r} does not exist; {_meant(near and beside[near], path.stem)}")


def copy_config(name: str, folder: Path) -> Path:
    """Copy a config of the package, with its comments, into a folder and return the copy's path.

    Raises ValueError if there is no such config, or if the folder has a file of this name already, and OSError if the
    copy cannot be written.
    """
    source = config_path(name)
    target = folder / source.name
    if target.exists():
        raise ValueError(f"{str(target)!r} exists already; rename or remove it first")
    replace_file(target, lambda draft: draft.write_text(source.read_text(encoding="utf-8"), encoding="utf-8"))
    return target


def _meant(near: str | None, name: str) -> str:
    """Return what the user may have meant: `near`, or the config of the package that is most like `name`."""
    near = near or nearest_name(name, config_names())
    return f"did you mean {near!r}?" if near else "`esper-lightning configs` lists those that come with the package"
