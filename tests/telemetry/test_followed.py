"""Events and statistics: they suffice to follow each seed's stage, divergences, and automatic culls."""

import re
from collections.abc import Iterator

import pytest
import torch

from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import ActionConfig, EnvConfig, HostPool, Op
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.governor.judge import GovernorConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import LIVE, Stage
from esper_lightning.tasks import Digits
from esper_lightning.telemetry.observer import Observer, seed_changes
from tests.runs import tiny_host
from tests.tiers import rest_is_slow

HOSTS, HORIZON = 6, 16


def make_pool(lr: float = 0.05, **lifecycle: object) -> HostPool:
    """Return hosts in which seeds are germinated and culled at random; with a large `lr` they diverge."""
    task = Digits()
    config = EnvConfig(
        horizon=HORIZON,
        training=HostTraining(lr=lr, batches=2, max_grad_norm=None, optimizer="sgd"),
        lifecycle=LifecycleConfig(**{"training_ticks": 1, "min_contribution": None, "embargo_ticks": 1, **lifecycle}),
        actions=ActionConfig(tempos={"FAST": 2}, slow_cull=True, set_alpha=True, speeds=[0, 2]),
    )
    device, governor = torch.device("cpu"), GovernorConfig()
    return HostPool(task, task.load(), tiny_host, config=config, n_envs=HOSTS, device=device, governor=governor)


def observe_steps(pool: HostPool, episodes: int = 2) -> Iterator[tuple[Observer, object]]:
    """Yield tick by tick, after the observer has processed the step."""
    observer, controller = Observer(pool), RandomValid(3)
    for episode in range(episodes):
        pool.reset(range(episode * HOSTS, (episode + 1) * HOSTS))
        for tick in range(HORIZON):
            step = pool.step(controller.act(pool))
            observer.update(step, pool.envs, episode * HORIZON + tick + 1, all_events=True)
            yield observer, step


@pytest.mark.parametrize("lr", rest_is_slow([0.05, 30.0], {30.0}))
@pytest.mark.slow
def test_the_told_changes_lead_to_where_every_seed_is(lr: float) -> None:
    pool, rolled_back = make_pool(lr), 0
    known: dict[tuple[int, str], str] = {}
    for _, step in observe_steps(pool):
        rolled_back += sum(word.verdict.diverged for word in step.verdicts)
        if pool.envs[0].tick == 1:
            known = {(host, slot): "DORMANT" for host in range(HOSTS) for slot in pool.space.slot}
        for change in seed_changes(step.events, 0):
            assert known[change.host, change.slot] == change.before, change
            known[change.host, change.slot] = change.after
        assert known == {(i, s.name): s.stage.name for i, env in enumerate(pool.envs) for s in env.slots}
    assert (rolled_back > 5) == (lr > 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.05, 30.0])
def test_every_seed_that_is_born_is_alive_kept_or_gone(lr: float) -> None:
    pool, left = make_pool(lr), 0
    for observer, _ in observe_steps(pool):
        alive = sum(slot.stage in LIVE for env in pool.envs for slot in env.slots)
        if pool.envs[0].tick == HORIZON:
            left += alive  # dropped at the end of the episode, without a contribution being judged
            alive = 0
        run = observer.scoreboard.run_stats
        assert run.germinated.sum() == run.fossilized.sum() + run.culled.sum() + alive + left
    assert run.germinated.sum() > 15


@pytest.mark.slow
def test_a_seed_is_judged_by_what_it_was_culled_for() -> None:
    pool, judged = make_pool(), 0
    for _, step in observe_steps(pool, episodes=3):
        for _, _, seed in step.events:
            if (said := re.match(r"contribution ([+-]\d+\.\d+) points is not positive", seed.cause)) is not None:
                judged += 1
                assert seed.contribution == pytest.approx(float(said[1]), abs=0.006)
    assert judged > 3


def test_stages_last_as_long_as_they_did() -> None:
    """Only time and the lifecycle apply: one host epoch GERMINATED, one in TRAINING, two of the ramp."""
    pool = make_pool(training_ticks=1)
    observer = Observer(pool)
    pool.reset(range(HOSTS))
    action = pool.space.zeros(HOSTS, pool.device)
    action.op[:] = Op.GERMINATE
    for tick in range(6):
        step = pool.step(action if tick == 0 else pool.space.zeros(HOSTS, pool.device))
        observer.update(step, pool.envs, tick + 1, all_events=True)

    durations = observer.scoreboard.durations
    assert [durations[stage] for stage in (Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING)] == [1.0, 1.0, 2.0]


def test_the_trace_shows_what_was_carried_out_also_on_hosts_that_were_rolled_back() -> None:
    pool = make_pool(30.0)
    rolled_back = 0
    for observer, step in observe_steps(pool):
        trace = observer.trace
        assert trace.op[trace.length - 1].tolist() == step.action.op.tolist()
        rolled_back += int(trace.rolled_back[trace.length - 1].sum())
    assert rolled_back > 5 and trace.is_complete
