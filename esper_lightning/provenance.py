"""Record of a process: its command, its machine and the versions of its software."""

import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import torch

from esper_lightning import __version__

PACKAGE_NAME = "esper-lightning"


def provenance(rng_seed: int, device: torch.device, executor: str, *, precision: str) -> dict[str, Any]:
    """Return the command, device, software versions and git revision of this process; no environment variables."""
    return {
        "command": sys.argv,
        "seed": rng_seed,
        "device": str(device),
        "executor": executor,
        "precision": precision,
        "threads": torch.get_num_threads(),
        "python": sys.version,
        "platform": platform.platform(),
        "processor": processor(),
        "versions": versions(),
        "git": git_revision(Path(__file__)),
    }


def processor() -> str:
    """Return the names of the processor and the GPUs."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return ", ".join([platform.processor() or platform.machine(), *names])


def versions() -> dict[str, str | None]:
    """Return the versions of this package and its dependencies; None for one that is not installed as a package."""
    try:
        requirements = [re.split(r"[^\w.-]", one)[0] for one in requires(PACKAGE_NAME) or () if "extra ==" not in one]
    except PackageNotFoundError:  # run from a checkout without installation
        requirements = ["torch", "lightning", "jsonargparse"]
    return {PACKAGE_NAME: __version__} | {name: _version(name) for name in sorted({"numpy", *requirements})}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def git_revision(file: Path) -> dict[str, Any] | None:
    """Return the git commit of `file` and whether tracked files differ from it, or None outside of a repository."""
    git_commands = (
        ("ls-files", "--error-unmatch", file.name),
        ("rev-parse", "HEAD"),
        ("status", "--porcelain", "-uno"),
    )
    try:
        _, commit, changes = (
            subprocess.run(
                # A killed `git status` would leave a locked index behind, with which the user cannot commit.
                ["git", "--no-optional-locks", *ask],
                cwd=file.parent,
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            ).stdout
            for ask in git_commands
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return {"commit": commit.strip(), "changed": bool(changes.strip())}
