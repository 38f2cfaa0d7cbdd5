"""Properties of the code as a whole: its imports and its documentation."""

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.runs import ROOT


@pytest.mark.slow
def test_growing_a_network_loads_neither_lightning_nor_environments() -> None:
    """Run in a subprocess, since this one has already loaded the modules."""
    code = "import sys, esper_lightning.growth.lifecycle, esper_lightning.hosts; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert not {"lightning", "sklearn", "esper_lightning.envs"} & set(loaded.split())


PERSONAL = re.compile(r"/(?:work|root|home|Users|tmp/dev|tmp/pytest)/")
REGISTRY = re.compile(r"pythonhosted|pypi\.org|index-url|find-links|artifactory|download\.pytorch\.org")
OURS = [urlsplit(url).hostname for name, url in os.environ.items() if name.endswith("INDEX_URL")]


def test_no_file_of_the_project_names_a_machine_or_a_registry() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path != Path(__file__) and path.is_file():
            text = path.read_text(errors="ignore")
            found = [
                *PERSONAL.findall(text),
                *REGISTRY.findall(text),
                *(host for host in OURS if host and host in text),
            ]
            assert not found, name
