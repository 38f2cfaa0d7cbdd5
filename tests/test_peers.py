"""benchmarks/peers.py in miniature; the benchmark itself measures returns and speed."""

import csv
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("gymnasium")

from benchmarks import peers
from esper_lightning.module import TamiyoModule


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    """Reset the number of threads, which the benchmark sets to one."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.slow
def test_what_is_learned_is_measured_on_the_cart_that_hides_its_velocities() -> None:
    pool = peers.cartpoles(3, 4)
    assert pool.observation.features.shape == (3, 2) and pool.space.sizes == {"action": 2}

    learned = peers.train_and_evaluate(seed=1, steps=2 * peers.HORIZON * peers.ENVS + 7)

    assert learned.steps == 4096, "whole rollouts, and no more steps than were allowed"
    assert learned.kept_after == 4096, "of two rollouts only the last is looked at"
    assert learned.mean_return == learned.last_return, "so that it is kept"
    assert 8.0 <= learned.mean_return <= 500.0 and 8.0 <= learned.exploring <= 500.0


@pytest.mark.slow
def test_the_policy_that_did_best_is_kept_and_games_that_judge_it_do_not_choose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The policy is evaluated after rollouts 1, 5 and 9."""
    looks, biases = [], []

    def found(module: TamiyoModule, seed: int) -> float:
        looks.append(seed)
        biases.append(module.policy.value[-1].bias.item())
        return {1: 30.0, 2: 70.0, 3: 50.0}.get(len(looks), 0.0)

    monkeypatch.setattr(peers, "greedy_return", found)
    monkeypatch.setattr(peers, "CARTPOLE", replace(peers.CARTPOLE, epochs=1))
    row = peers.train_and_evaluate(seed=2, steps=9 * peers.HORIZON * peers.ENVS)

    assert looks == [1002, 1002, 1002, 2, 2]
    assert row.kept_after == 5 * peers.HORIZON * peers.ENVS
    assert biases[4] == biases[1] != biases[3] == biases[2], "judged is the one that was kept"


def test_the_benchmark_writes_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "peers.csv"
    monkeypatch.setattr(sys, "argv", ["peers.py", "--seeds", "4", "6", "--rounds", "0", "--csv", str(file)])
    monkeypatch.setattr(peers, "RUN_LENGTHS", (2048, 4096))
    monkeypatch.setattr(
        peers, "train_and_evaluate", lambda seed, steps: peers.Row("ours", steps, seed, mean_return=1.0 / 3.0)
    )

    peers.main()

    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [(row["steps"], row["seed"]) for row in rows] == [(n, s) for n in ("2048", "4096") for s in "46"]
    assert {(row["mean_return"], row["last_return"]) for row in rows} == {("0.33333", "")}


def test_all_are_timed_on_the_same_task(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sb3_contrib")
    monkeypatch.setattr(peers, "SPEED_STEPS", 2048)

    rows = peers.compare_speed(1)

    assert [row.program for row in rows] == ["ours, ten full passes", peers.TWO_LSTMS, peers.ONE_LSTM]
    assert all(row.steps == 2048 and row.steps_per_second > 0.0 for row in rows)
    assert f"\n{peers.ONE_LSTM}: median " in capsys.readouterr().out
