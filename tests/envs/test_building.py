"""Building of many hosts: they are in order, and what takes long is announced with its time and memory."""

import pytest

from esper_lightning.envs import building
from esper_lightning.envs.building import LEAST_SECONDS, SAMPLE, build_envs


class SlowBuilder:
    """Builds hosts that take a number of seconds and of MiB each, on a clock and in books of its own."""

    def __init__(self, seconds: float, memory: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.memory, self.built = seconds, memory, 0
        monkeypatch.setattr(building, "perf_counter", lambda: self.built * self.seconds)
        monkeypatch.setattr(
            building, "resident_memory", lambda: None if self.memory is None else 100 + self.built * self.memory
        )

    def make(self, index: int) -> int:
        self.built += 1
        return index


@pytest.mark.parametrize(
    ("memory", "said"),
    [
        (0.5, "building 10000 hosts: about 100 s and 4.9 GiB of memory; lower the number of hosts if that is too much"),
        (None, "building 10000 hosts: about 100 s; lower the number of hosts if that is too much"),
    ],
)
def test_hosts_that_take_long_are_announced(
    memory: float | None, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = SlowBuilder(0.01, memory, monkeypatch)
    said_before: list[str] = []

    def make(index: int) -> int:
        if index == SAMPLE + 1:
            said_before.append(capsys.readouterr().out)
        return builder.make(index)

    assert build_envs(make, 10000) == list(range(10000))
    assert said_before == [f"{said}\n"], "before most of them are built"


@pytest.mark.parametrize("n_envs", [1, 2, SAMPLE, SAMPLE + 1, SAMPLE + 2, 400])
def test_few_hosts_are_built_in_silence(
    n_envs: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    builder = SlowBuilder(0.99 * LEAST_SECONDS / 400, 1.0, monkeypatch)

    assert build_envs(builder.make, n_envs) == list(range(n_envs))
    assert capsys.readouterr().out == ""


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    builder = SlowBuilder(0.1, None, monkeypatch)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    build_envs(builder.make, 200)

    assert "100%" in capsys.readouterr().out
