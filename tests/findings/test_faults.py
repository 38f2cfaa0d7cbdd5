"""Rows of the findings that are about hosts that diverge: what the Governor does, and to whom."""

import io
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.execution import StreamsExecutor
from esper_lightning.envs.training import HostTraining
from esper_lightning.governor import Decision, GovernorConfig
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.normalize import RunningMeanStd
from esper_lightning.rollout import RolloutLoop
from esper_lightning.tamiyo.policy import Policy
from esper_lightning.telemetry.metrics import skipped_metrics
from tests.decisions import WAIT, act, germinate
from tests.envs.breaking import CALM, breaking
from tests.envs.execution.fake_cuda import FakeCuda
from tests.runs import differences

MakePool = Callable[..., HostPool]
MakeLoop = Callable[..., RolloutLoop]


@pytest.fixture(scope="module")
def make_watched(make_pool: MakePool, make_policy: Callable[..., Policy]) -> MakeLoop:
    """Acts on three hosts; nobody diverges but who is made to."""

    def make(governor: GovernorConfig = CALM, **ppo: Any) -> RolloutLoop:
        pool = make_pool(3, governor=governor)
        norms = RunningMeanStd((len(pool.feature_names),)), RunningMeanStd((), clip=math.inf)
        return RolloutLoop(pool, make_policy(pool), *norms, PPOConfig(**ppo), run_seed=7)

    return make


def play(loop: RolloutLoop, broken: dict[int, list[int]]) -> None:
    loop.begin_rollout()
    for tick in range(loop.pool.config.horizon):
        with breaking(loop.pool, broken.get(tick, [])):
            loop.tick()


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_f4_a_host_that_can_take_no_step_is_rolled_back_and_the_others_step_on(
    make_pool: MakePool, executor: str
) -> None:
    """F4: a host whose one decision is to skip every step is counted, logged and rolled back; nobody else skips."""
    training = HostTraining(batches=4, precision="fp16")
    pool = make_pool(2, governor=CALM, training=training, executor=executor)
    pool.reset([1, 2])
    pool.step(act(germinate(0, 0), germinate(0, 0)))
    counted = [env.skipped_steps for env in pool.envs]
    good = deepcopy(pool.envs[0].scaler.state_dict())
    with torch.no_grad():
        for parameter in pool.envs[0].slots[0].seed.parameters():
            parameter.fill_(math.nan)  # behind straight-through: the host itself is sound
    pool.envs[0].keep()
    before = [p.clone() for p in pool.envs[0].network.parameters()]
    step = pool.step(act(WAIT, WAIT))

    assert [word.verdict.decision for word in step.verdicts] == [Decision.SUSPICIOUS]
    stood = [
        torch.equal(a, b) for a, b in zip(pool.envs[0].network.parameters(), before, strict=True) if a.isfinite().all()
    ]
    assert stood and all(stood), "host and seed made the same decision"
    assert pool.envs[0].skipped_steps == counted[0] + 4
    assert skipped_metrics(pool.envs)["skipped_steps/host0"] == counted[0] + 4
    assert pool.envs[1].skipped_steps < counted[1] + 4
    scale = pool.envs[1].scaler.get_scale()
    step = pool.step(act(WAIT, WAIT))
    assert [(word.host, word.verdict.decision) for word in step.verdicts] == [(0, Decision.ROLL_BACK)]
    assert pool.envs[0].scaler.state_dict() == good, "its loss scale is that of the snapshot"
    assert pool.envs[1].scaler.get_scale() <= scale or pool.envs[1].skipped_steps == counted[1]


def test_f5_a_rollback_touches_one_hosts_scaler_between_the_streams_work(
    make_pool: MakePool, fake_cuda: FakeCuda
) -> None:
    """F5: a host that is rolled back on its stream gets its own loss scale back; the others' are as in a loop."""
    training = HostTraining(batches=2, precision="fp16")
    pools = [make_pool(3, governor=CALM, training=training) for _ in range(2)]
    pools[0].executor = StreamsExecutor(pools[0].task, training)
    for pool in pools:
        pool.reset([1, 2, 3])
        for tick in range(6):
            with breaking(pool, [1] if tick == 3 else []):
                step = pool.step(act(*[germinate(0, 1) if tick == 0 else WAIT] * 3))
            assert [word.host for word in step.verdicts if word.verdict.diverged] == [1] * (tick == 3)

    assert len({id(env.scaler) for env in pools[0].envs}) == 3
    ours, theirs = ([env.state_dict() for env in pool.envs] for pool in pools)
    assert differences(ours, theirs) == []


def test_f6_a_rollout_with_rollbacks_and_an_end_resumes_at_every_tick(make_watched: MakeLoop) -> None:
    """F6: what is known of diverging hosts, and their last good state, is saved: what follows is bit-identical."""
    governor = replace(CALM, max_rollbacks=1)
    loop, resumed = make_watched(governor), make_watched(governor)
    play(resumed, {0: [0], 1: [1, 2], 2: [0]})  # it was somewhere else
    loop.begin_rollout()
    for tick in range(6):
        torch.save([loop.state_dict(), loop.pool.state_dict()], file := io.BytesIO())
        file.seek(0)
        for part, state in zip((resumed, resumed.pool), torch.load(file, weights_only=True), strict=True):
            part.load_state_dict(state)
        for each in (loop, resumed):
            with breaking(each.pool, {1: [0, 2], 3: [0], 4: [2]}.get(tick, [])):
                each.tick()

        assert differences(loop.state_dict(), resumed.state_dict()) == []
        assert differences(loop.pool.state_dict(), resumed.pool.state_dict()) == []
        assert list(map(str, loop.last.verdicts)) == list(map(str, resumed.last.verdicts))
    assert [env.ended for env in loop.pool.envs] == [True, False, True]


def test_f7_normalisers_take_in_nothing_of_an_episode_that_is_over(make_watched: MakeLoop) -> None:
    """F7: the count of both normalisers is that of steps which were really taken."""
    loop = make_watched(replace(CALM, max_rollbacks=0))
    play(loop, {1: [0], 3: [2]})
    loop.finish_rollout()

    assert loop.observation_norm.count == loop.value_norm.count == 6 + 2 + 4


def test_f8_a_host_and_its_seeds_are_clipped_each_for_itself_after_a_rollback_too(make_pool: MakePool) -> None:
    """F8: every group of a restored host's optimizer stays within the limit, and norms are known before clipping."""
    pool = make_pool(1, governor=CALM, training=HostTraining(batches=3, max_grad_norm=1e-2))
    optimizer, norms = pool.envs[0].optimizer, []
    with breaking(pool, [0]):
        pool.step(act(WAIT))

    def watch(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in group["params"]]).item())

    optimizer.register_step_pre_hook(watch)
    pool.step(act(germinate(1, 1)))
    assert len(norms) == 2 * 3
    assert max(norms) <= 1e-2 * (1 + 1e-4)
    assert pool.envs[0].host_gradient.norm > 1e-1


def test_f10_a_rollback_neither_discards_nor_poisons_anybodys_transitions(make_watched: MakeLoop) -> None:
    """F10: a host that is nothing but NaN costs its own trajectory its end; all other transitions are bit for bit those
    of a rollout in which nothing happened, and all are learned from."""
    whole, cut = (make_watched(gamma=1.0, gae_lambda=1.0) for _ in range(2))
    returns = []
    for loop, broken in ((whole, {}), (cut, {2: [1]})):
        play(loop, broken)
        rollout, _ = loop.finish_rollout()
        returns.append(loop.value_norm.inverse(rollout.targets))
        terms = ppo_terms(loop.policy, rollout, PPOConfig())
        assert all(term.isfinite().all() for term in terms) and terms.ratio_error < 1e-5

    for theirs, ours in zip(whole.buffer.state_dict()["ticks"], cut.buffer.state_dict()["ticks"], strict=True):
        assert torch.equal(theirs[:, [0, 2]], ours[:, [0, 2]])
        assert torch.equal(theirs[:2, 1], ours[:2, 1])
    torch.testing.assert_close(returns[0][:, [0, 2]], returns[1][:, [0, 2]], rtol=1e-4, atol=1e-5)
    # The earlier transitions stay, and answer for the rollback.
    earned = cut.buffer.rewards[:, 1]
    for t in range(3):
        torch.testing.assert_close(returns[1][t, 1], earned[t:3].sum(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[1][3, 1], earned[3:].sum(), rtol=1e-4, atol=1e-5)
    assert earned[2] == -CALM.penalty


def test_f11_the_value_behind_a_rollback_is_not_that_of_what_comes_next(make_watched: MakeLoop) -> None:
    """F11: no bootstrap across a rollback: the last return before it is the penalty alone, whatever V says then."""
    loop = make_watched(gamma=1.0, gae_lambda=0.0, horizon_is_end=False)
    with torch.no_grad():
        loop.policy.value[-1].bias.fill_(5.0)
    play(loop, {2: [1], 5: [0]})
    buffer = loop.buffer
    assert buffer.values.min() > 2.0
    rollout, _ = loop.finish_rollout()
    returns = loop.value_norm.inverse(rollout.targets)

    for tick, host in ((2, 1), (5, 0)):
        torch.testing.assert_close(returns[tick, host], torch.tensor(-CALM.penalty), rtol=1e-3, atol=1e-3)
    assert returns[5, 1] > 2.0, "at the horizon there is one"


def test_f22_what_the_governor_refuses_is_stored_as_the_wait_that_was_done(make_watched: MakeLoop) -> None:
    """F22: a vetoed action is stored as WAIT, which is what the host did, with the probability of WAIT."""
    loop = make_watched()
    with torch.no_grad():
        loop.policy.heads.tables["op"].output.bias.copy_(torch.tensor([0.0, 9.0, 0.0, 0.0]))
    loop.begin_rollout()
    for env in loop.pool.envs[:2]:
        env.guard.watch = env.guard.watch._replace(panic=1)  # as if its last loss had been out of range
    step = loop.tick()

    assert [veto.host for veto in step.vetoes] == [0, 1]
    assert loop.buffer.action.op[0].tolist() == step.action.op.tolist() == [Op.WAIT, Op.WAIT, Op.GERMINATE]
    assert (loop.buffer.log_prob[0, :2] < -8.0).all(), "one in e^9"
    assert [env.slots[0].occupied or env.slots[1].occupied or env.slots[2].occupied for env in loop.pool.envs] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("executor", ["loop", "threads", "fused"])
def test_s1_a_rollback_is_in_place(make_pool: MakePool, executor: str) -> None:
    """S1: over rollbacks the same host, weights and snapshot, in the same memory."""
    pool = make_pool(2, governor=replace(CALM, max_rollbacks=9), horizon=9, executor=executor)
    pool.reset([1, 2])  # from the second episode on the optimizers know all weights from the start

    def places() -> Iterator[tuple[Any, int]]:
        for env in pool.envs:
            for tensor in [*env.network.parameters(), *env.network.buffers()]:
                yield id(tensor), tensor.data_ptr()
            yield env, env.guard.snapshot.nbytes
            held: list[Tensor] = list(env.guard.snapshot.view()["growing"]["network"].values())
            yield held[0].shape, held[0].data_ptr()

    for _ in range(2):
        pool.step(act(WAIT, WAIT))
    before = list(places())
    for tick in range(6):
        with breaking(pool, [tick % 2]):
            step = pool.step(act(WAIT, WAIT))
        assert step.terminated.tolist() == [tick % 2 == 0, tick % 2 == 1]
    assert list(places()) == before


def test_s16_an_episode_ends_early_for_a_host_that_diverges_again_and_again(
    make_watched: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S16: no more is computed for it, and nothing is learned from what did not happen."""
    loop = make_watched(replace(CALM, max_rollbacks=1))
    trained: list[int] = []
    train = loop.pool.executor._train
    monkeypatch.setattr(
        loop.pool.executor, "_train", lambda env, data: (trained.append(loop.pool.envs.index(env)), train(env, data))[1]
    )
    play(loop, {0: [2], 2: [2]})

    assert [trained.count(host) for host in range(3)] == [6, 6, 3]
    assert loop.buffer.masks.ended.sum(0).tolist() == [0, 0, 3]
    assert loop.last.truncated.all() and loop.pool.test().isfinite().all()
