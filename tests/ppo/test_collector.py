from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from esper_lightning.envs import Observation, Op
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.vector_env import EVALUATION, TRAINING, episode_rng_seeds
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, PPOTerms, ppo_terms
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.runtime.nested import iter_tensors
from tests.envs.breaking import ONLY_NAN_DIVERGES, breaking_epoch
from tests.ppo import reference
from tests.ppo.loops import play, total
from tests.runs import differences

MakeLoop = Callable[..., RolloutCollector]


def test_seeds_differ_by_run_episode_host_and_purpose_and_are_reproducible() -> None:
    drawn = {
        (run, purpose, episode): episode_rng_seeds(run, purpose, episode, n_envs=50)
        for run in (0, 1)
        for purpose in (TRAINING, EVALUATION)
        for episode in range(20)
    }

    assert len({seed for seeds in drawn.values() for seed in seeds}) == 50 * len(drawn), "no host is met twice"
    for (run, purpose, episode), seeds in drawn.items():
        assert {seed % 2 for seed in seeds} == {0 if purpose is TRAINING else 1}
        assert episode_rng_seeds(run, purpose, episode, n_envs=3) == seeds[:3], "whatever the number of hosts"


def test_normalisers_change_at_the_end_of_a_rollout_and_never_within(make_loop: MakeLoop) -> None:
    loop = make_loop(2)
    play(loop)
    loop.finish()

    def statistics() -> list[Tensor]:
        norms = (*loop.observation_norm.state_dict().values(), *loop.value_norm.state_dict().values())
        return [value.clone() for value in norms]

    before, raw, of_hosts = statistics(), [], loop.observation_norm.host.mean.clone()
    loop.reset()
    for _ in range(6):
        raw.append(loop.pool.rows.split(loop.pool.observation.features)[0].clone())
        loop.step()
        assert all(torch.equal(a, b) for a, b in zip(before, statistics(), strict=True))

    stored = loop.buffer.steps.observation.features.clone()
    rollout, _ = loop.finish()
    assert loop.observation_norm.host.count == loop.value_norm.count == 2 * 12
    assert torch.equal(rollout.steps.observation.features, stored), "what was seen stays as it was seen"
    # The statistics are those of raw features, including the rollout before.
    now = loop.observation_norm.host.mean
    assert not torch.equal(now, of_hosts)
    torch.testing.assert_close(now, (of_hosts + torch.stack(raw).mean((0, 1))) / 2, rtol=1e-4, atol=1e-5)


CUTS = {0: [2], 2: [1], 3: [2]}
"""Hosts whose training fails, by tick: host 1 is rolled back once, host 2 twice, host 0 never."""


@pytest.fixture(scope="module")
def make_watched(make_loop: MakeLoop) -> MakeLoop:
    """Return three hosts without history that diverge on demand, with values that differ from tick to tick."""

    def make(governor: GovernorConfig = ONLY_NAN_DIVERGES, **ppo: Any) -> RolloutCollector:
        loop = make_loop(3, governor, **ppo)
        with torch.no_grad():
            loop.policy.value[-1].weight.mul_(20.0)
        return loop

    return make


def play_broken(loop: RolloutCollector, cuts: dict[int, list[int]]) -> None:
    loop.reset()
    for tick in range(loop.pool.config.horizon):
        with breaking_epoch(loop.pool, cuts.get(tick, [])):
            loop.step()


def test_a_rollback_cuts_the_environment_concerned_alone(make_watched: MakeLoop) -> None:
    """F10: the end of one environment leaves the others, and its own earlier transitions, bit for bit as they were."""
    whole, cut = make_watched(), make_watched()
    play_broken(whole, {})
    play_broken(cut, CUTS)
    b = cut.buffer.steps

    assert b.terminated.nonzero().tolist() == [[0, 2], [2, 1], [3, 2]]
    assert b.starts.T.tolist() == [
        [True, False, False, False, False, False],
        [True, False, False, True, False, False],
        [True, True, False, False, True, False],
    ]
    assert (b.rewards[b.terminated] == -0.75).all() and (b.rewards[~b.terminated] > -0.75).all()
    for theirs, ours in zip(whole.buffer.state_dict()["ticks"], cut.buffer.state_dict()["ticks"], strict=True):
        assert torch.equal(theirs[:, 0], ours[:, 0])
        assert torch.equal(theirs[:2, 1], ours[:2, 1]), "what came before stays as it was"
    assert ppo_terms(cut.policy, cut.finish()[0], PPOConfig()).ratio_error < 1e-5, (
        "it learns from the states it acted in"
    )


@pytest.mark.parametrize("horizon_is_end", [True, False])
def test_credit_never_crosses_a_rollback(make_watched: MakeLoop, horizon_is_end: bool) -> None:
    gamma, lam = 0.9, 0.8
    loop = make_watched(gamma=gamma, gae_lambda=lam, horizon_is_end=horizon_is_end)
    play_broken(loop, CUTS)
    seen = Observation(loop.observation_norm(loop.pool.observation.features))
    with torch.no_grad():
        last = loop.policy.estimate_value(loop.policy.encode_step(seen, loop.state, loop.starts)[0])
    rewards, values = loop.buffer.steps.rewards.double(), loop.buffer.steps.values.double()
    rollout, _ = loop.finish()

    terminated = rollout.steps.terminated.clone()
    terminated[-1] |= horizon_is_end
    beyond = torch.where(terminated, 0.0, torch.cat([values[1:], last[None]]))  # 0 after a rollback
    columns = zip(*(part.T.numpy() for part in (rewards, values, beyond, terminated)), strict=True)
    rows = [reference.advantages(*column, gamma=gamma, lam=lam) for column in columns]
    advantages = torch.from_numpy(np.stack(rows, 1))
    returns = loop.value_norm.inverse(rollout.targets).double()
    torch.testing.assert_close(returns, advantages + values, rtol=1e-4, atol=1e-5)
    counted = advantages[~rollout.steps.masks.forced]
    normalised = (advantages - counted.mean()) / counted.std(correction=0)
    torch.testing.assert_close(rollout.advantages.double(), normalised, rtol=1e-4, atol=1e-4)


ENDING = replace(ONLY_NAN_DIVERGES, max_rollbacks=0)


def test_the_summary_judges_the_critic_on_the_scale_of_the_returns(make_watched: MakeLoop) -> None:
    loop = make_watched(ENDING, gae_lambda=0.5)
    play_broken(loop, {2: [1]})
    loop.finish()  # values have another scale from now on
    play_broken(loop, {2: [1]})
    scale = deepcopy(loop.value_norm)
    rollout, summary = loop.finish()

    assert abs(scale.deviation - 1.0) > 0.1
    real, forced = ~rollout.steps.masks.ended, rollout.steps.masks.forced
    values, returns = scale.inverse(rollout.steps.values), loop.value_norm.inverse(rollout.targets)
    errors = (returns - values)[real]
    torch.testing.assert_close(summary.values, values[real], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(summary.value_targets - summary.values, errors, rtol=1e-4, atol=1e-5)
    advantages = (returns - values)[~forced]
    assert summary.metrics["advantage_spread"] == pytest.approx(advantages.std(correction=0).item(), rel=1e-4)
    assert forced.any() and torch.equal(summary.advantages.isnan(), forced)


def spoil_what_is_over(loop: RolloutCollector) -> None:
    """Overwrite the stored steps of host 1 after its end."""
    buffer, over = loop.buffer, loop.buffer.steps.masks.ended
    assert over.nonzero().tolist() == [[3, 1], [4, 1], [5, 1]]
    for stored in (buffer.steps.observation.features, loop.raw_features, buffer.steps.rewards, buffer.steps.values):
        stored[over] = 3.0 + 2.0 * torch.rand(stored[over].shape, generator=torch.Generator().manual_seed(0))


def learned_from(loop: RolloutCollector) -> tuple[list[Tensor], PPOTerms, list[Tensor], Rollout]:
    rollout, summary = loop.finish()
    terms = ppo_terms(loop.policy, rollout, PPOConfig(value_clip=0.3))
    total(terms).backward()
    parts = (loop.observation_norm, loop.value_norm, loop.reward_norm)
    norms = [statistic for norm in parts if norm is not None for statistic in norm.state_dict().values()]
    gradients = [p.grad for p in loop.policy.parameters()]
    return [*norms, summary.values, summary.value_targets], terms, gradients, rollout


def test_what_comes_after_an_end_counts_for_nothing(make_watched: MakeLoop) -> None:
    loops = [make_watched(ENDING), make_watched(ENDING)]
    for loop in loops:
        loop.reward_norm = RunningMeanStd(())
        play_broken(loop, {2: [1]})
        assert loop.buffer.steps.masks.forced[3:, 1].all() and not loop.buffer.steps.rewards[3:, 1].any()
    spoil_what_is_over(loops[1])
    (norms, terms, gradients, rollout), (norms2, terms2, gradients2, rollout2) = map(learned_from, loops)

    assert norms[2] == loops[0].observation_norm.host.count == 3 * 6 - 3
    assert differences(norms, norms2) == []
    counted = ~rollout.steps.masks.ended
    for name in ("advantages", "targets"):
        assert torch.equal(getattr(rollout, name)[counted], getattr(rollout2, name)[counted])
    for name, ours, theirs in zip(terms._fields, terms, terms2, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6, equal_nan=True, msg=name)
    for ours, theirs in zip(gradients, gradients2, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_a_vetoed_action_is_stored_as_the_wait_that_was_done(make_watched: MakeLoop) -> None:
    """F22: the effective op is stored, with its own log-probability."""
    loop = make_watched()
    with torch.no_grad():
        loop.policy.heads.tables["op"].layers[-1].bias.copy_(torch.tensor([0.0, 3.0, 0.0, 0.0]))  # prefer GERMINATE
    loop.reset()
    vetoes = []
    for _ in range(6):
        monitor = loop.pool.envs[0].monitor
        monitor.governor_state = monitor.governor_state._replace(
            consecutive_anomalies=1
        )  # as if its last loss had been out of range
        vetoes += [(veto.host, veto.tick) for veto in loop.step().vetoes]
    rollout, _ = loop.finish()

    assert len(vetoes) > 3 and {host for host, _ in vetoes} == {0}
    assert not any(s.occupied for s in loop.pool.envs[0].slots) and any(s.occupied for s in loop.pool.envs[1].slots)
    assert (torch.stack(rollout.steps.action)[:, :, 0] == 0).all(), "WAIT, in every head"
    # The policy prefers GERMINATE: its odds are e^3 against one WAIT, so it waits with probability ≤ 1 / (1 + e^3).
    for _, tick in vetoes:
        assert rollout.steps.log_prob[tick - 1, 0].item() < -2.0
    assert (rollout.steps.action.op[:, 1:] == Op.GERMINATE).any()
    assert ppo_terms(loop.policy, rollout, PPOConfig()).ratio_error < 1e-5


def test_what_is_filled_every_tick_is_allocated_once(make_loop: MakeLoop) -> None:
    """S4: observation, masks and the rollout's storage are the same memory, rollout after rollout."""
    loop = make_loop(2)

    def tensors() -> Iterator[Tensor]:
        yield from (*loop.pool.observation, *loop.pool.masks, loop.raw_features, loop.starts)
        buffer = loop.buffer
        yield from (*iter_tensors(buffer.steps), *buffer.state)

    before = list(tensors())
    pointers = [tensor.data_ptr() for tensor in before]
    for _ in range(2):
        play(loop)
        loop.finish()
        assert all(ours is theirs for ours, theirs in zip(tensors(), before, strict=True))
        assert [tensor.data_ptr() for tensor in before] == pointers
    assert len(set(pointers)) == len(pointers)


def test_a_rollout_whose_random_numbers_are_a_gpus_is_refused_on_the_cpu(make_loop: MakeLoop) -> None:
    loop = make_loop(2)
    of_gpu = loop.state_dict() | {"generator": torch.zeros(16, dtype=torch.uint8)}

    with pytest.raises(ValueError, match="the generator's state is of a generator on cuda, not on cpu"):
        loop.load_state_dict(of_gpu)
