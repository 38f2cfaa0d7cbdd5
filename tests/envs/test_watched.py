"""Hosts under the Governor: snapshots, vetoes and resuming."""

import io
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper_lightning.envs import HostPool, Op, StepResult
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.stages import Stage
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES
from tests.envs.episodes import (
    FirstOption,
    MakePool,
    fossilize_in_broken_epoch,
    play_until_ended,
    random_actions,
)
from tests.runs import differences
from tests.tiers import rest_is_slow

LARGE = replace(ONLY_NAN_DIVERGES, max_loss=50.0, patience=2, max_rollbacks=1)


FAULTS = {2: 0, 3: 0, 5: 1, 7: 0, 8: 0}
"""Tick -> host whose loss becomes large: host 0 is rolled back after the fourth and ended after the ninth tick, host 1
recovers by itself."""


def blow_up(env: HostEnv) -> None:
    """Scale the weights of the head, so that the loss becomes large."""
    with torch.no_grad():
        for parameter in env.network.head.parameters():
            parameter.mul_(1e4)


def faulty_tick(pool: HostPool, choices: list[random.Random], tick: int) -> StepResult:
    """Step the pool with the fault of FAULTS: the host has scaled weights for this tick only."""
    real, host = pool.executor.train_and_validate, FAULTS.get(tick)

    def faulty(*args: Any, **more: Any) -> Any:
        head = list(pool.envs[host].network.head.parameters())
        sound = [parameter.detach().clone() for parameter in head]
        blow_up(pool.envs[host])
        measured = real(*args, **more)
        with torch.no_grad():
            for parameter, value in zip(head, sound, strict=True):
                parameter.copy_(value)
        return measured

    if host is not None:
        pool.executor.train_and_validate = faulty
    step = pool.step(random_actions(pool, choices))
    pool.executor.train_and_validate = real
    return step


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "fused"], {"fused"}))
def test_a_traced_episode_that_is_saved_at_any_tick_continues_bit_for_bit(make_pool: MakePool, executor: str) -> None:
    settings = {"governor": LARGE, "horizon": 11, "executor": executor}
    pool, other = make_pool(2, **settings), make_pool(2, **settings)
    pool.reset([1, 2])
    choices = [random.Random(i) for i in range(2)]
    words = []
    for tick in range(11):
        torch.save(pool.state_dict(), file := io.BytesIO())
        file.seek(0)
        if tick % 3 == 1:
            play_until_ended(other)  # an unrelated state, which loading must replace
        other.load_state_dict(torch.load(file, weights_only=True))
        ours, theirs = (faulty_tick(each, deepcopy(choices), tick) for each in (pool, other))
        for choice in choices:
            choice.random()

        assert differences(list(map(str, ours.verdicts)), list(map(str, theirs.verdicts))) == []
        for name in ("action", "reward", "terminated", "observation", "masks", "metrics"):
            assert differences(getattr(ours, name), getattr(theirs, name)) == [], name
        assert differences(pool.state_dict(), other.state_dict()) == []
        words += [(word.host, word.tick, word.decision.name) for word in ours.verdicts]
    assert words == [
        (0, 3, "SUSPICIOUS"),
        (0, 4, "ROLL_BACK"),
        (1, 6, "SUSPICIOUS"),
        (0, 8, "SUSPICIOUS"),
        (0, 9, "END"),
    ]


def test_a_snapshot_is_taken_of_healthy_hosts_alone(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1, governor=replace(LARGE, snapshot_every=3, max_rollbacks=9), horizon=16)
    kept: list[int] = []
    keep = HostEnv.take_snapshot
    monkeypatch.setattr(HostEnv, "take_snapshot", lambda env: (kept.append(env.tick), keep(env)))
    faults = {4, 8, 9}  # a spike, and a divergence
    pool.reset([1])
    assert kept == [0], "when it is new"
    for tick in range(1, 17):
        monkeypatch.setitem(FAULTS, tick, 0) if tick in faults else monkeypatch.delitem(FAULTS, tick, raising=False)
        faulty_tick(pool, [FirstOption()], tick)
    # Healthy epochs are 1, 2, 3; 5, 6, 7 (spikes do not count); after the rollback, every third one.
    assert kept == [0, 3, 7, 12, 15]


def test_to_train_on_after_a_rollback_does_not_touch_the_snapshot(rarely_snapshotting_pool: HostPool) -> None:
    fossilize_in_broken_epoch(rarely_snapshotting_pool)
    env = rarely_snapshotting_pool.envs[0]
    before = env.monitor.snapshot.copy()
    for decision in (germinate(1, 1), WAIT, WAIT, WAIT):
        rarely_snapshotting_pool.step(act(decision, WAIT))

    assert differences(before, env.monitor.snapshot.view()) == []
    assert differences(before["growing"]["network"], env.network.state_dict()) != []
    # The restored host holds no memory besides its own.
    values = [value for state in env.optimizer.state.values() for value in state.values()]
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in [*values, *env.network.parameters()])


def test_what_builds_on_a_suspicious_host_is_refused_and_it_waits_instead(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES, horizon=12)
    for decision in (germinate(0, 1), WAIT, WAIT):
        pool.step(act(decision, decision))
    for decision, forbidden in ((germinate(1, 2), "GERMINATE conv_light"), (fossilize(0), "FOSSILIZE")):
        guard = pool.envs[0].monitor
        guard.governor_state = guard.governor_state._replace(consecutive_anomalies=1)  # as after a loss out of range
        step = pool.step(act(decision, decision))

        (veto,) = step.vetoes
        assert str(veto).startswith(f"host 0: {forbidden}")
        reason = "the loss has been out of range or near guessing for 1 host epochs"
        assert str(veto).endswith(f"vetoed at tick {veto.tick}: {reason}")
        assert torch.stack(step.action).T.tolist() == [list(WAIT), list(decision)]
        assert [event.host for event in step.events if event.cause in ("germinate", "fossilize")] == [1]
        assert pool.envs[0].last_op is Op.WAIT
    assert [slot.stage for env in pool.envs for slot in env.slots[:2]] == [
        Stage.PROBATIONARY, Stage.DORMANT, Stage.FOSSILIZED, Stage.BLENDING,
    ]  # fmt: skip
    guard.governor_state = guard.governor_state._replace(consecutive_anomalies=1)
    step = pool.step(act(cull(0), WAIT))
    assert step.vetoes == [] and not pool.envs[0].slots[0].occupied


def test_seeds_of_a_suspicious_host_do_not_advance(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=replace(LARGE, patience=9), horizon=12)
    pool.reset([1, 2])
    pool.step(act(germinate(0, 2), germinate(0, 2)))
    # Its loss counts as out of range although it is healthy, so that no gate holds its seed.
    pool.envs[0].monitor.config = replace(LARGE, patience=9, max_loss=1e-6)
    stages = []
    for _ in range(2):
        pool.step(act(WAIT, WAIT))
        stages.append([env.slots[0].stage for env in pool.envs])

    assert stages == [[Stage.TRAINING, Stage.BLENDING], [Stage.TRAINING, Stage.PROBATIONARY]]
    assert [env.slots[0].age for env in pool.envs] == [3, 3], "time passes all the same"
