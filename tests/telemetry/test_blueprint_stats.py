"""The scoreboard counts every seed once, with its contribution when it was fossilized or culled."""

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.blueprint_stats import Scoreboard, SeedStats
from tests.runs import tiny_host

EPISODES, HOSTS, HORIZON = 3, 4, 8


@pytest.fixture(scope="module")
def counted_episodes() -> tuple[Scoreboard, dict[tuple[str, str], Counter[str]], dict[tuple[str, str], list[float]]]:
    """Return a scoreboard of three random episodes, and the same statistics counted seed by seed."""
    task = Digits()
    lifecycle = LifecycleConfig(training_ticks=0, min_contribution=None, auto_cull=False, embargo_ticks=0)
    config = EnvConfig(
        horizon=HORIZON,
        training=HostTraining(lr=0.02, batches=3),
        lifecycle=lifecycle,
        actions=ActionConfig(tempos={"FAST": 1}),
    )
    pool = HostPool(task, task.load(), tiny_host, config=config, n_envs=HOSTS, device=torch.device("cpu"))
    board = Scoreboard(pool.space.blueprint, pool.space.slot, HOSTS)
    counts: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    points: dict[tuple[str, str], list[float]] = defaultdict(list)
    controller = RandomValid(0)
    for episode in range(EPISODES):
        pool.reset(range(episode * HOSTS, (episode + 1) * HOSTS))
        last: dict[tuple[int, str], float] = {}
        for _ in range(HORIZON):
            step = pool.step(controller.act(pool))
            board.update(step, pool.envs)
            for host, _, seed in step.events:
                place = (seed.blueprint, seed.slot)
                if seed.after is Stage.GERMINATED:
                    last.pop((host, seed.slot), None)
                if seed.after in (Stage.GERMINATED, Stage.FOSSILIZED, Stage.CULLED) and seed.before is not seed.after:
                    counts[place][seed.after.name] += 1
                    if seed.after is not Stage.GERMINATED and (host, seed.slot) in last:
                        points[place].append(last[host, seed.slot])
            for host, env in enumerate(pool.envs):
                for slot, record in zip(env.slots, env.records, strict=True):
                    if slot.blended and record.contribution is not None:
                        last[host, slot.name] = record.contribution
    return board, counts, points


@pytest.mark.slow
def test_every_seed_is_counted_once(counted_episodes: tuple) -> None:
    board, counts, _ = counted_episodes
    for b, blueprint in enumerate(board.blueprints):
        for k, slot in enumerate(board.slots):
            one = SeedStats(*(part[b, k] for part in board.run_stats))
            expected = counts[blueprint, slot]
            names = ("GERMINATED", "FOSSILIZED", "CULLED")
            assert [one.germinated, one.fossilized, one.culled] == [expected[name] for name in names]
    assert (
        board.run_stats.germinated.sum() > 20
        and board.run_stats.fossilized.sum() > 3
        and board.run_stats.culled.sum() > 3
    )


def test_contributions_are_those_known_when_the_fate_was_decided(counted_episodes: tuple) -> None:
    board, _, points = counted_episodes
    for (blueprint, slot), values in points.items():
        b, k = board.blueprints.index(blueprint), board.slots.index(slot)
        assert board.run_stats.measured[b, k] == len(values)
        assert board.run_stats.mean_contribution[b, k] == pytest.approx(
            np.mean(values) if values else np.nan, nan_ok=True
        )
        assert board.run_stats.deviation[b, k] == pytest.approx(np.std(values) if values else 0.0, abs=1e-6)


def test_the_rollout_s_numbers_are_those_of_the_last_episode(counted_episodes: tuple) -> None:
    board, *_ = counted_episodes

    assert 0 < board.rollout_stats.germinated.sum() < board.run_stats.germinated.sum()
    metrics = board.metrics()
    born = sum(value for tag, value in metrics.items() if tag.endswith("/germinated"))
    assert born * HOSTS == pytest.approx(board.rollout_stats.germinated.sum())
    assert all(np.isfinite(value) for value in metrics.values())


def test_the_table_has_a_row_for_each_place_where_something_grew(counted_episodes: tuple) -> None:
    board, counts, _ = counted_episodes

    rows = board.table().splitlines()[2:]
    assert len(rows) == sum(place["GERMINATED"] > 0 for place in counts.values())


def test_a_saved_scoreboard_goes_on(counted_episodes: tuple, tmp_path: Path) -> None:
    board, *_ = counted_episodes
    torch.save(board.state_dict(), tmp_path / "board.pt")
    again = Scoreboard(board.blueprints, board.slots, HOSTS)

    again.load_state_dict(torch.load(tmp_path / "board.pt", weights_only=True))

    for name in ("sums", "stages", "last_contributions"):
        assert np.array_equal(getattr(again, name), getattr(board, name), equal_nan=True)


def test_with_other_hosts_the_sums_go_on_alone(counted_episodes: tuple) -> None:
    board, *_ = counted_episodes
    again = Scoreboard(board.blueprints, board.slots, HOSTS + 1)

    again.load_state_dict(board.state_dict())

    assert np.array_equal(again.sums, board.sums)
    assert np.isnan(again.last_contributions).all()
    again.forget_rollout()
    assert np.array_equal(again.sums[0], board.sums[0] - board.sums[1]) and not again.sums[1].any()


@pytest.mark.parametrize("damage", [{"sums": [1.0]}, {"sums": None}, {"stages": torch.zeros(16)}])
def test_a_damaged_scoreboard_is_refused(counted_episodes: tuple, damage: dict) -> None:
    board, *_ = counted_episodes

    with pytest.raises(ValueError, match="the scoreboard"):
        board.load_state_dict(board.state_dict() | damage)
