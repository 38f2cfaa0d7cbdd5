"""Fixtures for executor auto: a separate cache file, and fixed speeds in place of measured ones."""

from pathlib import Path

import pytest

from esper_lightning.envs.execution import EXECUTORS, FusedExecutor, autotune
from tests.envs.execution.choices import FixedSpeeds


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of a cache file that is not in the user's folder; repeated measurement takes no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(autotune, "COMPARISON_SECONDS", 0.0)
    kept_executors = {name: EXECUTORS[name] for name in ("loop", "threads")}
    for name in EXECUTORS.keys() - kept_executors:
        monkeypatch.delitem(EXECUTORS, name)
    return tmp_path / "cache" / "esper-lightning" / "executors.json"


@pytest.fixture
def fused_too(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offer executor fused beside loop and threads, without the proof that it computes what they do."""
    monkeypatch.setitem(EXECUTORS, "fused", FusedExecutor)
    monkeypatch.setattr("esper_lightning.envs.execution.fused.executor.check_stack", lambda *_: None)


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> FixedSpeeds:
    """Fixed speeds with which threads without oneDNN are fastest."""
    speeds = FixedSpeeds(loop=2.0, plain_loop=3.0, threads=4.0, plain_threads=5.0)
    monkeypatch.setattr(autotune, "measure_speed", speeds)
    return speeds
