"""Modules that a config or the option `--imports` names: they are imported before any other setting is read.

They register blueprints, rewards, controllers and executors, and make classes known by their bare names.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader

from esper_lightning.cli.trust import CONFIG_OPTION
from esper_lightning.cli.yaml_limits import MAX_SIZE
from esper_lightning.plugins import IMPORTS, import_installed, import_modules, module_names

IMPORTS_HELP = """Modules of your own, as a list or with commas between them, that are imported before any other setting
is read: blueprints, rewards, controllers and executors that they register can be named. See
docs/guides/extending.md."""


def import_parts(args: Sequence[str]) -> None:
    """Import the modules that the arguments and their configs name, and those of installed packages.

    Raises ValueError if one cannot be imported.
    """
    import_modules([name for value in _values(args) for name in module_names(value)])
    import_installed()


def _values(args: Sequence[str]) -> Iterator[Any]:
    """Yield every value that the arguments give the setting. YAML that is broken is left to the parser."""
    for given, following in zip(args, [*args[1:], ""], strict=True):
        option, equals, value = given.partition("=")
        value = value if equals else following
        try:
            if option == f"--{IMPORTS}":
                yield get_loader("yaml")(value)
            elif option in (CONFIG_OPTION, "-c"):
                settings = get_loader("yaml")(_text(value))
                if isinstance(settings, dict):
                    yield settings.get(IMPORTS)
        except yaml.YAMLError:
            continue


def _text(value: str) -> str:
    """Return the text of a config, which is a file or stands in the argument itself."""
    file = Path(value)
    try:
        if "\n" in value or not file.is_file():
            return value
        with file.open(encoding="utf-8") as opened:
            return opened.read(MAX_SIZE + 1)
    except (OSError, ValueError):  # the parser reports it
        return ""
