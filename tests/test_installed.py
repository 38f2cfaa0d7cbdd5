"""The wheel: what it holds, and a run from an empty folder with nothing of the repository beside it."""

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from esper_lightning import __version__
from tests.runs import CONFIGS, ROOT, TINY

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["symbolic links", "no symbolic links"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package as it is installed from its wheel; its dependencies are those of this Python.

    A clone without symbolic links has a text file in place of each.
    """
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    project = source / "project"
    project.mkdir()
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        copy = project / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink() and request.param == "no symbolic links":
            copy.write_text(str((ROOT / name).readlink()))
        elif (ROOT / name).is_symlink() or (ROOT / name).is_file():
            shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", wheels, project], check=True)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", target, wheel], check=True)
    return target


def test_the_package_claims_one_name_and_brings_its_configs(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}

    assert names == {"esper_lightning", "bin"}
    configs = {path.name: path.read_text() for path in (installed / "esper_lightning" / "configs").iterdir()}
    assert configs == {path.name: path.read_text() for path in CONFIGS.glob("*.yaml")}


def test_its_metadata_name_the_version_and_no_file_of_the_repository(installed: Path) -> None:
    (folder,) = installed.glob("*.dist-info")
    metadata = Distribution.at(folder).metadata

    assert metadata["Version"] == __version__
    text = str(metadata.get_payload())
    assert "# Esper Lightning" in text
    assert re.findall(r"\]\((?!https?:|#)([^)]+)\)", text) == []


def test_a_run_begins_in_an_empty_folder_beside_callbacks_of_the_user(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "__init__.py").write_text("raise ImportError('these are the user\\'s')\n")
    settings = [flag for flag in TINY if flag not in ("--config", str(CONFIGS / "smoke.yaml"))]
    done = subprocess.run(
        [sys.executable, "-m", "esper_lightning", "fit", "--config", "smoke", *settings],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (run,) = tmp_path.glob("runs/*/version_0")
    record = json.loads((run / "run.json").read_text())
    assert record["versions"]["esper-lightning"] == __version__
    assert record["command"][0].startswith(str(installed))
    assert len(list((run / "checkpoints").glob("*.ckpt"))) == 2
