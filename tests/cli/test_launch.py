"""Start of the command line: what needs neither torch nor Lightning answers without them."""

import subprocess
import sys
from pathlib import Path

import pytest

from esper_lightning import __version__
from esper_lightning.__main__ import COMMANDS, SUBCOMMANDS

PROGRAM = """
import atexit, runpy, sys
atexit.register(lambda: print("heavy:", sorted({"torch", "lightning"} & sys.modules.keys())))
runpy.run_module("esper_lightning", run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--version"], 0, f"esper-lightning {__version__}"),
        (["configs"], 0, "digits  "),
        (["init", "smoke"], 0, "written to smoke.yaml"),
        (["init", "smok"], 2, "did you mean 'smoke'?"),
        (["init"], 2, "config"),
        (["configs", "all"], 2, "unrecognized arguments: all"),
        (["fti", "--config", "digits"], 2, f"no command 'fti'; commands are {', '.join([*SUBCOMMANDS, *COMMANDS])}"),
        ([], 2, "name a command; commands are fit, "),
    ],
)
def test_small_commands_and_mistakes_are_answered_without_torch(
    arguments: list[str], code: int, said: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == code and said in (done.stderr if code else done.stdout), done.stderr
    assert code == 0 or done.stderr.count("\n") == 1
    assert done.stdout.endswith("heavy: []\n")
