"""A host that exceeds the limit of rollbacks is ended."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Op
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.governor.judge import Verdict
from esper_lightning.tasks import Split
from tests.decisions import WAIT, act
from tests.envs.breaking import ONLY_NAN_DIVERGES
from tests.envs.episodes import HORIZON, Episode, MakePool, accuracy_by_forward_pass, play_until_ended, random_actions
from tests.runs import differences

STRICT = replace(ONLY_NAN_DIVERGES, max_rollbacks=1)


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_a_host_that_diverges_once_too_often_is_restored_and_left_alone(
    make_pool: MakePool, snapshots: dict[HostEnv, dict[str, Any]], monkeypatch: pytest.MonkeyPatch, executor: str
) -> None:
    pool = make_pool(3, governor=STRICT, horizon=HORIZON, executor=executor)
    episode = play_until_ended(pool)
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
    accuracy = accuracy_by_forward_pass(env.network, pool.data.validation)
    for tick in range(6, HORIZON + 1):
        step = pool.step(random_actions(pool, episode.generators))
        assert (step.reward[1], step.terminated[1], step.truncated[1]) == (0.0, False, tick == HORIZON)
        assert step.metrics.accuracy[1].item() == pytest.approx(accuracy)
        assert not [word for word in step.verdicts if word.host == 1]
        assert not [event for event in step.events if event.host == 1]
    assert env not in trained and len(trained) == 2 * (HORIZON - 5)
    assert differences(before | {"tick": HORIZON, "monitor": None}, env.state_dict() | {"monitor": None}) == []
    assert differences(weights, env.monitor.snapshot.copy()) == [], "not kept again"
    torch.testing.assert_close(
        pool.test_accuracy(),
        torch.tensor([accuracy_by_forward_pass(e.network, pool.data.test, live(e)) for e in pool.envs]),
    )
    pool.reset([1, 2, 3])
    assert not pool.masks.ended.any() and pool.masks.slot[1, Op.GERMINATE].all()


def live(env: HostEnv) -> list[str]:
    return [slot.name for slot in env.slots if slot.live]


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_the_others_do_not_notice_that_a_host_has_ended(make_pool: MakePool, executor: str) -> None:
    pool = make_pool(3, governor=STRICT, horizon=HORIZON, executor=executor)
    cut = play_until_ended(pool).play(HORIZON - 5)
    whole = Episode(pool, 5).play(HORIZON)

    for i in (0, 2):
        assert differences(cut.rows_of_host(i), whole.rows_of_host(i)) == []


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
    assert pool.test_accuracy().isfinite().all()
    assert [words for words in episode.verdicts if words] == [[(0, Verdict.END)], [(1, Verdict.END)]]

    assert differences(Episode(pool, 1).play(5).rows, first.rows) == [], "the next episode is as any other"
