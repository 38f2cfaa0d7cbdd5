"""Of executor auto: a memory of choices for the tests alone, and a stopwatch in place of measuring."""

from pathlib import Path

import pytest

from esper_lightning.envs.execution import EXECUTORS, auto
from tests.envs.execution.choices import Stopwatch


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where choices are remembered: not in the folder of whoever runs the tests. And a second is long."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(auto, "SECONDS", 0.0)
    two = {name: EXECUTORS[name] for name in ("loop", "threads")}
    for name in EXECUTORS.keys() - two:
        monkeypatch.delitem(EXECUTORS, name)
    return tmp_path / "cache" / "esper-lightning" / "executors.json"


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> Stopwatch:
    """Threads without oneDNN are fastest."""
    watch = Stopwatch(loop=2.0, plain_loop=3.0, threads=4.0, plain_threads=5.0)
    monkeypatch.setattr(auto, "speed", watch)
    return watch
