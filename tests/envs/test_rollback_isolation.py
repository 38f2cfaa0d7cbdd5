"""A rollback affects a single host: neither other hosts nor their training data for the policy change."""

import io
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import RunningMeanStd
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.runs import differences

MakePool = Callable[..., HostPool]
MakeLoop = Callable[..., RolloutCollector]


@pytest.fixture(scope="module")
def make_watched(make_pool: MakePool, make_policy: Callable[..., Policy]) -> MakeLoop:
    """Make a collector over three hosts, which diverge only if a test breaks them."""

    def make(governor: GovernorConfig = ONLY_NAN_DIVERGES, **ppo: Any) -> RolloutCollector:
        pool = make_pool(3, governor=governor)
        norms = RunningMeanStd((pool.observation.features.shape[-1],)), RunningMeanStd((), clip=math.inf)
        return RolloutCollector(
            pool,
            make_policy(pool),
            observation_norm=norms[0],
            value_norm=norms[1],
            config=PPOConfig(**ppo),
            run_rng_seed=7,
        )

    return make


def play(loop: RolloutCollector, broken: dict[int, list[int]]) -> None:
    """Play a rollout in which the hosts `broken[tick]` diverge at each tick."""
    loop.reset()
    for tick in range(loop.pool.config.horizon):
        with breaking_epoch(loop.pool, broken.get(tick, [])):
            loop.step()


def test_a_rollout_with_rollbacks_and_an_end_resumes_at_every_tick(make_watched: MakeLoop) -> None:
    """F6: a rollout in which hosts diverge resumes bit for bit from every tick, in a collector with another state: the
    Governor's state and the snapshots are saved."""
    governor = replace(ONLY_NAN_DIVERGES, max_rollbacks=1)
    loop, resumed = make_watched(governor), make_watched(governor)
    resumed.run_rng_seed = 8  # other hosts
    loop.reset()
    for tick in range(6):
        resumed.reset()
        for broken in ([0], [1, 2]):
            with breaking_epoch(resumed.pool, broken):
                resumed.step()
        assert loop.state.hidden.any() == loop.state.cell.any() == (tick > 0), "there is a recurrent state to lose"
        torch.save([loop.state_dict(), loop.pool.state_dict()], file := io.BytesIO())
        file.seek(0)
        for part, state in zip((resumed, resumed.pool), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        for each in (loop, resumed):
            with breaking_epoch(each.pool, {1: [0, 2], 3: [0], 4: [2]}.get(tick, [])):
                each.step()

        assert differences(loop.state_dict(), resumed.state_dict()) == []
        assert differences(loop.pool.state_dict(), resumed.pool.state_dict()) == []
        assert list(map(str, loop.last_step.verdicts)) == list(map(str, resumed.last_step.verdicts))
    assert [env.ended for env in loop.pool.envs] == [True, False, True]


def test_normalisers_take_in_nothing_of_an_episode_that_is_over(make_watched: MakeLoop) -> None:
    """F7: both normalisers count the steps before the end of an episode only."""
    loop = make_watched(replace(ONLY_NAN_DIVERGES, max_rollbacks=0))
    play(loop, {1: [0], 3: [2]})
    loop.finish()

    assert loop.value_norm.count == 6 + 2 + 4
    assert loop.observation_norm.count == 12 * len(loop.pool.space.slot), "a row for each slot"


def test_a_rollback_neither_discards_nor_poisons_transitions(make_watched: MakeLoop) -> None:
    """F10: a host that becomes NaN only cuts its own trajectory. All other transitions are bit for bit those of a
    rollout without divergence, and the policy learns from all."""
    whole, cut = (make_watched(gamma=1.0, gae_lambda=1.0) for _ in range(2))
    returns = []
    for loop, broken in ((whole, {}), (cut, {2: [1]})):
        play(loop, broken)
        rollout, summary = loop.finish()
        assert torch.equal(summary.advantages.isfinite(), ~loop.buffer.steps.masks.forced), (
            "every decision has an advantage"
        )
        returns.append(loop.value_norm.inverse(rollout.targets))
        terms = ppo_terms(loop.policy, rollout, PPOConfig())
        assert all(term.isfinite().all() for term in terms) and terms.ratio_error < 1e-5

    for theirs, ours in zip(whole.buffer.state_dict()["ticks"], cut.buffer.state_dict()["ticks"], strict=True):
        assert torch.equal(theirs[:, [0, 2]], ours[:, [0, 2]])
        assert torch.equal(theirs[:2, 1], ours[:2, 1])
    torch.testing.assert_close(returns[0][:, [0, 2]], returns[1][:, [0, 2]], rtol=1e-4, atol=1e-5)
    # The earlier transitions stay, and bear the penalty of the rollback.
    earned = cut.buffer.steps.rewards[:, 1]
    for t in range(3):
        torch.testing.assert_close(returns[1][t, 1], earned[t:3].sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[1][3, 1], earned[3:].sum(), rtol=1e-4, atol=1e-5)
    assert earned[2] == -ONLY_NAN_DIVERGES.penalty


def test_the_value_behind_a_rollback_is_not_that_of_what_comes_next(make_watched: MakeLoop) -> None:
    """F11: the last return before a rollback is the penalty alone, independent of the value of the restored state."""
    loop = make_watched(gamma=1.0, gae_lambda=0.0, horizon_is_end=False)
    with torch.no_grad():
        loop.policy.value[-1].bias.fill_(5.0)
    play(loop, {2: [1], 5: [0]})
    buffer = loop.buffer
    assert buffer.steps.values.min() > 2.0
    rollout, _ = loop.finish()
    returns = loop.value_norm.inverse(rollout.targets)

    for tick, host in ((2, 1), (5, 0)):
        torch.testing.assert_close(returns[tick, host], torch.tensor(-ONLY_NAN_DIVERGES.penalty), rtol=1e-3, atol=1e-3)
    assert returns[5, 1] > 2.0, "at the horizon there is one"


def test_what_the_governor_refuses_is_stored_as_the_wait_that_was_done(make_watched: MakeLoop) -> None:
    """F22: a vetoed action is stored as WAIT, the executed action, with the probability of WAIT."""
    loop = make_watched()
    with torch.no_grad():
        loop.policy.heads.tables["op"].layers[-1].bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    loop.reset()
    for env in loop.pool.envs[:2]:
        env.monitor.governor_state = env.monitor.governor_state._replace(
            consecutive_anomalies=1
        )  # as after a loss out of range
    step = loop.step()

    assert [veto.host for veto in step.vetoes] == [0, 1]
    assert loop.buffer.steps.action.op[0].tolist() == step.action.op.tolist() == [Op.WAIT, Op.WAIT, Op.GERMINATE]
    assert (loop.buffer.steps.log_prob[0, :2] < -8.0).all(), "one in e^9"
    assert [env.slots[0].occupied or env.slots[1].occupied or env.slots[2].occupied for env in loop.pool.envs] == [
        False,
        False,
        True,
    ]


def test_an_episode_ends_early_for_a_host_that_diverges_again_and_again(
    make_watched: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S16: an ended host is not trained any more, and the policy learns nothing from it from then on."""
    loop = make_watched(replace(ONLY_NAN_DIVERGES, max_rollbacks=1))
    trained: list[int] = []
    train = loop.pool.executor._train
    monkeypatch.setattr(
        loop.pool.executor, "_train", lambda env, data: (trained.append(loop.pool.envs.index(env)), train(env, data))[1]
    )
    play(loop, {0: [2], 2: [2]})

    assert [trained.count(host) for host in range(3)] == [6, 6, 3]
    assert loop.buffer.steps.masks.ended.sum(0).tolist() == [0, 0, 3]
    assert loop.last_step.truncated.all() and loop.pool.test_scores()[1].isfinite().all()
