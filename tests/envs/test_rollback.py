"""A host that diverges continues from its last good state, without effect on other hosts."""

import random
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch

from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.governor.judge import Verdict
from tests.decisions import WAIT, act
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.envs.episodes import HORIZON, Episode, FirstOption, MakePool, restored_by_hand
from tests.runs import differences
from tests.tiers import pairs_of, rest_is_slow


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


@pytest.mark.parametrize("executor", ["loop", "fused"])
def test_a_rolled_back_host_goes_on_with_the_loss_scale_of_its_snapshot(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(
        1, governor=ONLY_NAN_DIVERGES, executor=executor, training=HostTraining(batches=2, precision="fp16")
    )
    pool.step(act(WAIT))
    (env,) = pool.envs
    env.loss_scale.set(torch.tensor(64.0), torch.tensor(5))
    env.take_snapshot()
    env.loss_scale.set(torch.tensor(2.0**15), torch.tensor(9))
    with breaking_epoch(pool, [0]):
        step = pool.step(act(WAIT))

    assert [word.verdict.outcome for word in step.verdicts] == [Verdict.ROLL_BACK]
    assert (env.loss_scale.scale, env.loss_scale.good_steps) == (64.0, 5)


@pytest.mark.parametrize("executor", rest_is_slow(["loop", "threads"], {"loop"}))
def test_the_neighbours_of_a_rolled_back_host_do_not_notice(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(3, governor=ONLY_NAN_DIVERGES, horizon=HORIZON, executor=executor)
    drawn = random.Random(executor)
    for _ in range(2):
        seed, tick, host = drawn.randrange(1000), drawn.randrange(HORIZON), drawn.randrange(3)
        broken = Episode(pool, seed).play(tick).play_broken(host).play(HORIZON - tick - 1)
        states = [env.state_dict() for env in pool.envs]
        whole = Episode(pool, seed).play(HORIZON)

        assert len(broken.verdicts[tick]) == 1 and not any(whole.verdicts)
        for i, env in enumerate(pool.envs):
            if i != host:
                assert differences(broken.rows_of_host(i), whole.rows_of_host(i)) == []
                assert differences(states[i], env.state_dict()) == [], "its snapshot, too"
        assert differences(broken.rows_of_host(host)[:tick], whole.rows_of_host(host)[:tick]) == []
        assert differences(broken.rows_of_host(host)[tick:], whole.rows_of_host(host)[tick:]) != []


def test_in_a_stack_the_neighbours_do_not_notice_while_the_same_seeds_are_stacked(make_pool: MakePool) -> None:
    pool = make_pool(3, governor=ONLY_NAN_DIVERGES, horizon=HORIZON, executor="fused")
    for tick, host in ((0, 1), (4, 0), (7, 2)):
        episodes = []
        for broken in ([host], []):
            episode = Episode(pool, 50 + tick)
            episode.generators[host] = FirstOption()  # so there is no live seed to lose
            episodes.append(episode.play(tick).play_broken(*broken).play(HORIZON - tick - 1))

        assert [len(words) for words in episodes[0].verdicts] == [int(t == tick) for t in range(HORIZON)]
        for i in {0, 1, 2} - {host}:
            assert differences(episodes[0].rows_of_host(i), episodes[1].rows_of_host(i)) == []
