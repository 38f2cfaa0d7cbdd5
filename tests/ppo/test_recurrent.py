"""PPO on collected rollouts: ratio, bootstrap value, and episodes that end within a rollout."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.envs import Action, Observation, StepResult
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.tamiyo.policy import Policy, RecurrentState
from tests.tiers import rest_is_slow

MakeLoop = Callable[..., RolloutCollector]
Play = Callable[[RolloutCollector], None]


def cut(loop: RolloutCollector, monkeypatch: pytest.MonkeyPatch, where: Tensor) -> None:
    """Terminate episodes early, like a rollback, at the steps and environments in `where` [T, N] bool."""
    real = loop.pool.step

    def step(action: Action) -> StepResult:
        return real(action)._replace(terminated=where[loop.buffer.length])

    monkeypatch.setattr(loop.pool, "step", step)


def constant_critic(loop: RolloutCollector, value: float) -> None:
    last = loop.policy.value[-1]
    nn.init.zeros_(last.weight)
    nn.init.constant_(last.bias, value)


def perturb(policy: Policy) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def returns_of(loop: RolloutCollector) -> Tensor:  # [T, N]
    """Return the critic's targets on the scale of the returns."""
    return loop.value_norm.inverse(loop.finish()[0].targets)


@pytest.mark.parametrize(
    ("perturbed", "ends"),
    rest_is_slow(product([False, True], [0.0, 0.3, 1.0]), {(False, 0.0), (True, 0.3), (True, 1.0)}),
)
def test_before_any_update_the_ratio_is_1_whatever_was_reset(
    make_loop: MakeLoop, play_rollout: Play, monkeypatch: pytest.MonkeyPatch, ends: float, perturbed: bool
) -> None:
    loop = make_loop(3)
    if perturbed:
        perturb(loop.policy)
    cut(loop, monkeypatch, torch.rand(6, 3, generator=torch.Generator().manual_seed(1)) < ends)
    for _ in range(2):
        play_rollout(loop)
        rollout, _ = loop.finish()

    for minibatch in rollout.minibatches(1, 2, loop.generator):
        assert ppo_terms(loop.policy, minibatch, PPOConfig()).ratio_error < 1e-5
    assert (rollout.log_prob < -0.1).any(), "there was something to choose"


@pytest.mark.parametrize(("horizon_is_end", "bootstrap"), [(True, 0.0), (False, 4.0)])
def test_the_last_state_counts_only_if_the_horizon_is_no_end(
    make_loop: MakeLoop, play_rollout: Play, horizon_is_end: bool, bootstrap: float
) -> None:
    loop = make_loop(2, horizon_is_end=horizon_is_end, gamma=0.5, gae_lambda=1.0)
    constant_critic(loop, 4.0)
    play_rollout(loop)

    rewards = loop.buffer.rewards.clone()
    returns = returns_of(loop)

    torch.testing.assert_close(returns[5], rewards[5] + 0.5 * bootstrap, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(returns[4], rewards[4] + 0.5 * rewards[5] + 0.25 * bootstrap, rtol=1e-4, atol=1e-5)
    expected = sum(0.5**t * rewards[t] for t in range(6)) + 0.5**6 * bootstrap
    torch.testing.assert_close(returns[0], expected, rtol=1e-4, atol=1e-5)


def test_the_bootstrap_is_the_value_of_the_state_after_the_last_action(make_loop: MakeLoop, play_rollout: Play) -> None:
    loop = make_loop(2, horizon_is_end=False, gamma=1.0, gae_lambda=0.0)
    perturb(loop.policy)
    play_rollout(loop)
    none_start = torch.zeros(2, dtype=torch.bool)
    seen = Observation(loop.observation_norm(loop.pool.observation.features), loop.pool.observation.blueprints)
    with torch.no_grad():
        _, after, _ = loop.policy.step(seen, loop.state, loop.pool.masks, starts=none_start)
    rewards, values = loop.buffer.rewards.clone(), loop.buffer.values.clone()

    returns = returns_of(loop)

    torch.testing.assert_close(returns[:5], rewards[:5] + values[1:], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(returns[5], rewards[5] + after, rtol=1e-3, atol=1e-4)


def test_an_end_in_mid_rollout_cuts_credit_there_and_nowhere_else(
    make_loop: MakeLoop, play_rollout: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(3, gamma=1.0, gae_lambda=1.0)
    constant_critic(loop, 2.0)
    where = torch.zeros(6, 3, dtype=torch.bool)
    where[2, 1] = True
    cut(loop, monkeypatch, where)
    play_rollout(loop)
    loop.buffer.rewards.copy_(torch.arange(18.0).view(6, 3))

    returns = returns_of(loop)

    whole = [[0 + 3 + 6 + 9 + 12 + 15], [1 + 4 + 7], [2 + 5 + 8 + 11 + 14 + 17]]
    torch.testing.assert_close(returns[0], torch.tensor(whole).flatten().float())
    torch.testing.assert_close(returns[3], torch.tensor([9.0 + 12 + 15, 10 + 13 + 16, 11 + 14 + 17]))


def test_an_end_in_mid_rollout_resets_the_recurrent_state_of_that_environment_alone(
    make_loop: MakeLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(3)
    where = torch.zeros(6, 3, dtype=torch.bool)
    where[1, 2] = True
    cut(loop, monkeypatch, where)
    loop.reset()
    loop.step()
    loop.step()
    seen = Observation(loop.observation_norm(loop.pool.observation.features), loop.pool.observation.blueprints)
    masks, before = type(loop.pool.masks)(*(m.clone() for m in loop.pool.masks)), loop.state
    forgotten = RecurrentState(*(part.clone() for part in before))
    for part in forgotten:
        part[2] = 0.0
    none_start = torch.zeros(3, dtype=torch.bool)
    with torch.no_grad():
        expected = loop.policy.step(seen, forgotten, masks, starts=none_start)[2]

    loop.step()

    assert loop.buffer.starts[:3].tolist() == [[True] * 3, [False] * 3, [False, False, True]]
    torch.testing.assert_close(tuple(loop.state), tuple(expected))
