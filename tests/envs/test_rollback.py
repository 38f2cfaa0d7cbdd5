"""A host that diverges continues from its last good state, without effect on other hosts."""

import io
import random
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.governor import Verdict
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.rewards import objective
from esper_lightning.growth.param_groups import group_names
from esper_lightning.growth.slot import EXTRA_STATE
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import Split
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.envs.episodes import (
    HORIZON,
    Episode,
    MakePool,
    fossilize_in_broken_epoch,
    random_actions,
    restored_by_hand,
    score_by_forward_pass,
)
from tests.runs import differences
from tests.tiers import pairs_of


@pytest.fixture
def snapshots(monkeypatch: pytest.MonkeyPatch) -> dict[HostEnv, dict[str, Any]]:
    """Record the state of each host at its last snapshot."""
    states: dict[HostEnv, dict[str, Any]] = {}
    keep = HostEnv.take_snapshot

    def watched(env: HostEnv) -> None:
        keep(env)
        states[env] = deepcopy(env.state_dict())

    monkeypatch.setattr(HostEnv, "take_snapshot", watched)
    return states


@pytest.fixture
def rarely_snapshotting_pool(make_pool: MakePool) -> HostPool:
    """Return a pool that takes snapshots at the start and after fossilizations only."""
    return make_pool(2, governor=replace(ONLY_NAN_DIVERGES, snapshot_every=1000), horizon=12)


def hosts_of(pool: HostPool) -> Iterator[dict[str, Any]]:
    """Return the states of hosts without those of the Governor."""
    for env in pool.envs:
        state = env.state_dict()
        del state["monitor"]
        yield state


@pytest.mark.parametrize(
    ("executor", "optimizer", "precision"), pairs_of(["loop", "threads", "fused"], ["sgd", "adamw"], ["fp32", "bf16"])
)
def test_a_rolled_back_host_goes_on_as_one_that_was_restored_by_hand(
    make_pool: MakePool, snapshots: dict[HostEnv, dict[str, Any]], executor: str, optimizer: str, precision: str
) -> None:
    training = HostTraining(batches=2, optimizer=optimizer, precision=precision, weight_decay=0.01)
    settings = {"horizon": HORIZON, "executor": executor, "training": training}
    pool = make_pool(3, governor=ONLY_NAN_DIVERGES, **settings)
    by_hand = make_pool(3, governor=None, **settings)
    drawn = random.Random(f"{executor} {optimizer} {precision}")
    for _ in range(2 if precision == "fp32" else 1):
        seed, tick, host = drawn.randrange(1000), drawn.randrange(2, HORIZON - 2), drawn.randrange(3)
        episode = Episode(pool, seed).play(tick).play_broken(host)
        assert episode.verdicts == [[]] * tick + [[(host, Verdict.ROLL_BACK)]]

        restored_by_hand(by_hand, deepcopy(pool.state_dict()), host, snapshots[pool.envs[host]])
        for ours, theirs in zip((*pool.observation, *pool.masks), (*by_hand.observation, *by_hand.masks), strict=True):
            assert torch.equal(ours, theirs)
        assert differences(list(hosts_of(pool)), list(hosts_of(by_hand))) == []

        other = episode.continue_in(by_hand).play(HORIZON - tick - 1)
        episode.play(HORIZON - tick - 1)
        assert differences(episode.rows[tick + 1 :], other.rows) == []
        assert differences(list(hosts_of(pool)), list(hosts_of(by_hand))) == []


def test_the_neighbours_of_a_rolled_back_host_do_not_notice(make_pool: MakePool) -> None:
    pool = make_pool(3, governor=ONLY_NAN_DIVERGES, horizon=HORIZON)
    broken = Episode(pool, 5).play(3).play_broken(1).play(HORIZON - 4)
    states = [env.state_dict() for env in pool.envs]
    whole = Episode(pool, 5).play(HORIZON)

    changed = [bool(differences(state, env.state_dict())) for state, env in zip(states, pool.envs, strict=True)]
    assert changed == [False, True, False], "their snapshots, too"
    for i in range(3):
        assert bool(differences(broken.rows_of_host(i)[3:], whole.rows_of_host(i)[3:])) is (i == 1)
        assert differences(broken.rows_of_host(i)[:3], whole.rows_of_host(i)[:3]) == []


STRICT = replace(ONLY_NAN_DIVERGES, max_rollbacks=1)


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_a_host_that_diverges_once_too_often_is_restored_and_left_alone(
    make_pool: MakePool, snapshots: dict[HostEnv, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    """S16: the episode of a host that diverges again and again ends early: it is not trained any more."""
    pool = make_pool(3, governor=STRICT, horizon=HORIZON, executor=executor)
    # Host 1 is rolled back in the third tick and ended in the fifth.
    episode = Episode(pool, 5).play(2).play_broken(1).play(1).play_broken(1)
    env = pool.envs[1]
    assert episode.verdicts == [[], [], [(1, Verdict.ROLL_BACK)], [], [(1, Verdict.END)]]
    assert env.ended and pool.masks.ended.tolist() == [False, True, False]
    assert pool.masks.slot[1].any(-1).nonzero().tolist() == [[Op.WAIT]]
    assert pool.episode_starts.tolist() == [False, True, False]
    good = snapshots[env]["growing"]["network"]
    left = {name: value for name, value in env.network.state_dict().items() if name in good and "extra" not in name}
    assert differences({name: good[name] for name in left}, left) == [], "it is the host of the last snapshot"

    trained: list[HostEnv] = []
    train = pool.executor.train_epoch

    def watched(envs: Sequence[HostEnv], data: Split) -> Tensor:
        trained.extend(envs)
        return train(envs, data)

    monkeypatch.setattr(pool.executor, "train_epoch", watched)
    before, weights = deepcopy(env.state_dict()), env.monitor.snapshot.copy()
    score = score_by_forward_pass(env.network, pool.data.validation)
    for tick in range(6, HORIZON + 1):
        step = pool.step(random_actions(pool, episode.generators))
        assert (step.reward[1], step.terminated[1], step.truncated[1]) == (0.0, False, tick == HORIZON)
        assert step.metrics.score[1].item() == pytest.approx(score)
        assert not [word for word in step.verdicts if word.host == 1]
        assert not [event for event in step.events if event.host == 1]
    assert env not in trained and len(trained) == 2 * (HORIZON - 5)
    assert differences(before | {"tick": HORIZON, "monitor": None}, env.state_dict() | {"monitor": None}) == []
    assert differences(weights, env.monitor.snapshot.copy()) == [], "not kept again"
    torch.testing.assert_close(
        pool.test_scores()[1],
        torch.tensor([score_by_forward_pass(e.network, pool.data.test, live(e)) for e in pool.envs]),
    )
    pool.reset([1, 2, 3])
    assert not pool.masks.ended.any() and pool.masks.slot[1, Op.GERMINATE].all()


def live(env: HostEnv) -> list[str]:
    return [slot.name for slot in env.slots if slot.live]


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_an_episode_without_active_hosts_goes_on_to_the_horizon(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    pool = make_pool(2, governor=replace(ONLY_NAN_DIVERGES, max_rollbacks=0), horizon=5, executor=executor)
    first = Episode(pool, 1).play(5)
    episode = Episode(pool, 1).play(1).play_broken(0).play_broken(1)
    with monkeypatch.context() as patch:
        patch.setattr(pool.executor, "train_and_validate", None)  # any call fails
        for tick in (4, 5):
            step = pool.step(act(WAIT, WAIT))
            assert step.reward.tolist() == [0.0, 0.0] and step.truncated.tolist() == [tick == 5] * 2
    assert pool.test_scores()[1].isfinite().all()
    assert [words for words in episode.verdicts if words] == [[(0, Verdict.END)], [(1, Verdict.END)]]

    assert differences(Episode(pool, 1).play(5).rows, first.rows) == [], "the next episode is as any other"


def weights_of(network: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in network.state_dict().items() if not name.endswith(EXTRA_STATE)}


def test_what_is_kept_for_good_survives_a_rollback_in_the_very_same_tick(rarely_snapshotting_pool: HostPool) -> None:
    rarely_snapshotting_pool.reset([3, 4])
    rarely_snapshotting_pool.step(act(germinate(0, 1), WAIT))
    for _ in range(2):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    before = deepcopy(weights_of(rarely_snapshotting_pool.envs[0].network))
    assert rarely_snapshotting_pool.envs[0].slots[0].stage is Stage.PROBATIONARY
    step = fossilize_in_broken_epoch(rarely_snapshotting_pool)

    env = rarely_snapshotting_pool.envs[0]
    assert [word.decision for word in step.verdicts] == [Verdict.ROLL_BACK]
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(before, weights_of(env.network)) == []
    assert step.metrics.parameters[0] == 390 + sum(p.numel() for p in env.slots[0].seed.parameters())
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    for _ in range(5):
        step = rarely_snapshotting_pool.step(act(WAIT, WAIT))
    with breaking_epoch(rarely_snapshotting_pool, [0]):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert env.slots[0].stage is Stage.FOSSILIZED
    assert differences(before, weights_of(env.network)) == [], "the same snapshot serves again"


def test_what_was_alive_is_culled_and_its_slot_opens_again(rarely_snapshotting_pool: HostPool) -> None:
    fossilize_in_broken_epoch(rarely_snapshotting_pool)
    env = rarely_snapshotting_pool.envs[0]
    rarely_snapshotting_pool.step(act(germinate(1, 1), germinate(1, 1)))
    rarely_snapshotting_pool.step(act(germinate(2), WAIT))
    env.take_snapshot()  # a snapshot with live seeds
    with breaking_epoch(rarely_snapshotting_pool, [0]):
        step = rarely_snapshotting_pool.step(act(WAIT, WAIT))

    assert [
        (event.host, event.tick, event.slot, event.after, event.cause) for event in step.events if event.host == 0
    ] == [
        (0, 7, "block2.pool", Stage.CULLED, "rolled back"),
        (0, 7, "block3", Stage.CULLED, "rolled back"),
    ]
    assert [slot.stage for slot in env.slots] == [Stage.FOSSILIZED, Stage.CULLED, Stage.CULLED]
    assert group_names(env.optimizer) == ["host", "seed.block1.pool"]
    assert set(env.optimizer.state) == set(env.network.parameters()), "nothing is known of what is gone"
    assert not rarely_snapshotting_pool.masks.slot[0, Op.GERMINATE].any()
    assert rarely_snapshotting_pool.envs[1].slots[1].live, "a neighbour's is left alone"
    for _ in range(2):
        rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert rarely_snapshotting_pool.masks.slot[0, Op.GERMINATE].tolist() == [False, True, True]


def measure_objective(pool: HostPool, host: int, committed: bool = False) -> float:
    """Compute J of one host from its weights, with all seeds or with the fossilized ones."""
    env = pool.envs[host]
    kept = [slot for slot in env.slots if slot.stage is Stage.FOSSILIZED]
    gone = [slot.name for slot in env.slots if slot not in kept] if committed else []
    score = score_by_forward_pass(env.network, pool.data.validation, gone)
    parameters = 390 + sum(p.numel() for slot in kept for p in slot.seed.parameters())
    return objective(torch.tensor([score]), torch.tensor([parameters]), 390, pool.config.objective.price).item()


def test_a_rollback_costs_the_penalty_and_ends_the_trajectory_there(rarely_snapshotting_pool: HostPool) -> None:
    step = fossilize_in_broken_epoch(rarely_snapshotting_pool)

    assert step.reward.tolist()[0] == step.metrics.reward.tolist()[0] == -0.75
    assert step.terminated.tolist() == rarely_snapshotting_pool.episode_starts.tolist() == [True, False]
    assert step.truncated.tolist() == [False, False]
    assert step.metrics.objective[0].item() == pytest.approx(measure_objective(rarely_snapshotting_pool, 0))
    (word,) = step.verdicts
    assert str(word) == "host 0 (RNG seed 3) rolled back at tick 4, to tick 3: loss is nan"
    assert step.observation.features.isfinite().all()

    before = measure_objective(rarely_snapshotting_pool, 0)
    step = rarely_snapshotting_pool.step(act(WAIT, WAIT))
    assert step.terminated.tolist() == [False, False]
    assert step.reward[0].item() == pytest.approx(measure_objective(rarely_snapshotting_pool, 0) - before, abs=1e-6)


def test_a_rollback_at_the_horizon_ends_the_episode_as_ever(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=ONLY_NAN_DIVERGES, horizon=4)
    for fault in (False, True):
        pool.reset([1, 2])
        pool.step(act(germinate(0, 2), germinate(0, 2)))
        for _ in range(2):
            pool.step(act(WAIT, WAIT))
        with breaking_epoch(pool, [0] if fault else []):
            step = pool.step(act(fossilize(0), WAIT))
    assert step.terminated.tolist() == [True, False]
    assert step.truncated.tolist() == [True, True]
    assert step.reward[0] == -0.75
    for i in range(2):
        assert step.metrics.objective[i].item() == pytest.approx(measure_objective(pool, i, committed=True))
    with pytest.raises(ValueError, match="the episode is over after 4 ticks"):
        pool.step(act(WAIT, WAIT))
    pool.reset([1, 2])
    assert not pool.episode_starts.any()


def test_a_snapshot_is_taken_of_healthy_hosts_alone(make_pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool(1, governor=replace(ONLY_NAN_DIVERGES, snapshot_every=3, max_rollbacks=9), horizon=16)
    (env,), rules, kept = pool.envs, pool.governor, list[int]()
    keep = HostEnv.take_snapshot
    monkeypatch.setattr(HostEnv, "take_snapshot", lambda env: (kept.append(env.tick), keep(env)))
    pool.reset([1])
    for tick in range(1, 17):  # a spike, and a divergence
        env.monitor.config = replace(rules, max_loss=1e-6) if tick in (4, 8, 9) else rules
        pool.step(act(WAIT))
    # When it is new; healthy epochs are 1, 2, 3; 5, 6, 7 (spikes do not count); after the rollback, every third one.
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
    pool = make_pool(2, governor=replace(ONLY_NAN_DIVERGES, patience=9), horizon=12)
    pool.reset([1, 2])
    pool.step(act(germinate(0, 2), germinate(0, 2)))
    # Its loss counts as out of range although it is healthy, so that no gate holds its seed.
    pool.envs[0].monitor.config = replace(ONLY_NAN_DIVERGES, patience=9, max_loss=1e-6)
    stages = []
    for _ in range(2):
        pool.step(act(WAIT, WAIT))
        stages.append([env.slots[0].stage for env in pool.envs])

    assert stages == [[Stage.TRAINING, Stage.BLENDING], [Stage.TRAINING, Stage.PROBATIONARY]]
    assert [env.slots[0].age for env in pool.envs] == [3, 3], "time passes all the same"


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_an_episode_with_rollbacks_and_an_end_resumes_at_every_tick(make_pool: MakePool, executor: str) -> None:
    """F6: an episode in which hosts diverge resumes bit for bit from every tick, in a pool with another state: the
    Governor's state and the snapshots are saved."""
    pool, other = (make_pool(3, governor=STRICT, horizon=6, executor=executor) for _ in range(2))
    episode = Episode(pool, 7)
    for tick in range(6):
        torch.save(pool.state_dict(), file := io.BytesIO())
        file.seek(0)
        Episode(other, 8).play_broken(0).play_broken(1, 2)
        other.load_state_dict(torch.load(file, weights_only=True))
        resumed = episode.continue_in(other)
        for each in (episode, resumed):
            each.play_broken(*{1: [0, 2], 3: [0], 4: [2]}.get(tick, []))

        assert differences(episode.rows[-1:], resumed.rows) == [] and episode.verdicts[-1:] == resumed.verdicts
        assert differences(pool.state_dict(), other.state_dict()) == []
    assert [env.ended for env in pool.envs] == [True, False, True]
