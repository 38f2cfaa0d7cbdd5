"""Fixtures for executor auto: a separate cache file, and fixed speeds in place of measured ones."""

from pathlib import Path

import pytest

from esper_lightning.envs.execution import EXECUTORS, auto
from tests.envs.execution.choices import Stopwatch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a cache file that is not in the user's folder; repeated measurement takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "SECONDS", 0.0)
    two = {name: EXECUTORS[name] for name in ("loop", "threads")}
    for name in EXECUTORS.keys() - two:
        monkeypatch.delitem(EXECUTORS, name)
    return tmp_path / "cache" / "esper-lightning" / "executors.json"


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Fixed speeds with which threads without oneDNN are fastest."""
    watch = Stopwatch(loop=2.0, plain_loop=3.0, threads=4.0, plain_threads=5.0)
    monkeypatch.setattr(auto, "speed", watch)
    return watch
