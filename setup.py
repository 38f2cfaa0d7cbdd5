"""Long description and folders of the package; all other metadata stand in pyproject.toml.

The description is README.md with links that lead somewhere outside of the repository, too. They are relative to
`Repository` in [project.urls]; without it they become plain text, and pictures are left out.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
"""Pattern of a relative link or picture in Markdown."""


def absolute_links(text: str, repository: str | None) -> str:
    """Return a Markdown text in which relative links and pictures lead to files of the repository."""

    def absolute(found: re.Match[str]) -> str:
        picture, words, target = found.groups()
        if repository is None:
            return "" if picture else words
        return f"{picture}[{words}]({repository.rstrip('/')}/{'raw' if picture else 'blob'}/main/{target})"

    return LINK.sub(absolute, text)


if __name__ == "__main__":
    from setuptools import find_packages, setup  # here, so that a test can read the function without it

    urls = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"].get("urls", {})
    # callbacks/ and configs/ lie at the top of the repository. Once installed they are part of the package, since
    # projects of users have a `callbacks` of their own. The links below esper_lightning/ are for tools that read the
    # source; a clone without symbolic links has none.
    moved = {f"esper_lightning.{name}": name for name in ("callbacks", "configs")}
    found = find_packages(str(ROOT), include=["esper_lightning", "esper_lightning.*", "callbacks", "callbacks.*"])
    packages = {f"esper_lightning.{name}" if name.startswith("callbacks") else name for name in found} | set(moved)
    setup(
        packages=sorted(packages),
        package_dir=moved,
        long_description=absolute_links((ROOT / "README.md").read_text(encoding="utf-8"), urls.get("Repository")),
        long_description_content_type="text/markdown",
    )
