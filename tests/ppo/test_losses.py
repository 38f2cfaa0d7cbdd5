"""Settings of PPO, advantage estimation and losses, against definitions and numbers computed by hand."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import (
    Anneal,
    PPOConfig,
    PPOTerms,
    clipped_surrogate,
    discounted_sums,
    gae,
    kl_estimate,
    normalise,
    ppo_terms,
    update_metrics,
    value_loss,
)
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.rollout_buffer import Rollout
from tests.ppo import reference
from tests.ppo.loops import play


@pytest.mark.parametrize(
    ("shape", "expected"), [("linear", [1.0, 0.8125, 0.625, 0.25, 0.25]), ("geometric", [1.0, 0.7071, 0.5, 0.25, 0.25])]
)
def test_a_schedule_moves_by_equal_differences_or_ratios_and_stops(shape: Any, expected: list[float]) -> None:
    anneal = Anneal(start=1.0, end=0.25, shape=shape)

    assert [anneal.at(progress) for progress in (0.0, 0.25, 0.5, 1.0, 3.0)] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 0}, "ppo.epochs must be at least 1, got 0"),
        ({"sequence": 0}, "ppo.sequence must be at least 1"),
        ({"gamma": 0.0}, "ppo.gamma must lie between 0 and 1"),
        ({"gae_lambda": 1.1}, "ppo.gae_lambda must lie between 0 and 1"),
        ({"max_grad_norm": math.nan}, "ppo.max_grad_norm must be positive, got nan"),
        ({"value_coefficient": -0.5}, "value_coefficient must not be negative"),
        ({"start": 1e-3, "end": -0.1}, r"must not be negative, got 0\.001, -0\.1"),
        ({"start": 1e-3, "end": 0.0, "shape": "geometric"}, "a geometric schedule never comes to 0"),
    ],
)
def test_impossible_settings_are_refused_with_their_reason(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        (Anneal if "start" in settings else PPOConfig)(**settings)


class Sample(NamedTuple):
    rewards: Tensor
    values: Tensor
    next_values: Tensor
    terminated: Tensor
    truncated: Tensor


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Draw a rollout of up to 9 steps and 4 environments with terminations and truncations."""
    shape = draw(st.integers(1, 9)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    ends = draw(st.sampled_from([0.0, 0.2, 0.5]))

    def numbers() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def flags() -> Tensor:
        return torch.rand(shape, generator=generator) < ends

    return Sample(numbers(), numbers(), numbers(), flags(), flags())


@given(sample=samples(), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_matches_its_definition(sample: Sample, gamma: float, lam: float) -> None:
    advantages, returns = gae(**sample._asdict(), gamma=gamma, lam=lam)

    beyond = torch.where(sample.terminated, 0.0, sample.next_values)
    for n in range(sample.rewards.shape[1]):
        rewards, values, after, *ends = (part[:, n].numpy() for part in (*sample[:2], beyond, *sample[3:]))
        expected = torch.from_numpy(
            reference.advantages(rewards, values, after, ends[0] | ends[1], gamma=gamma, lam=lam)
        )
        torch.testing.assert_close(advantages[:, n], expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, advantages + sample.values)


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers)[:, None]


def test_gae_matches_a_hand_computed_rollout() -> None:
    advantages, returns = gae(
        rewards=column(1.0, 2.0),
        values=column(0.5, 1.0),
        next_values=column(1.0, 3.0),
        terminated=column(False, False),
        truncated=column(False, False),
        gamma=0.5,
        lam=0.5,
    )
    # delta = [1 + 0.5*1 - 0.5, 2 + 0.5*3 - 1] = [1.0, 2.5];  A_0 = 1.0 + 0.25 * 2.5
    torch.testing.assert_close(advantages, column(1.625, 2.5))
    torch.testing.assert_close(returns, column(2.125, 3.5))


def test_discounted_sums_go_on_from_the_rollout_before_and_begin_anew_with_an_episode() -> None:
    sums = discounted_sums(
        torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]),
        torch.tensor([8.0, 8.0]),
        starts=torch.tensor([[False, True], [False, False], [True, False]]),
        gamma=0.5,
    )
    torch.testing.assert_close(sums, torch.tensor([[5.0, 1.0], [4.5, 2.5], [3.0, 4.25]]))


def test_normalised_advantages_have_mean_0_and_deviation_1_over_the_counted_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    advantages = 3.0 + 5.0 * torch.randn(40, 6, generator=generator)
    counted = torch.rand(40, 6, generator=generator) < 0.5

    scaled = normalise(advantages, counted)[0]

    assert scaled[counted].mean().item() == pytest.approx(0.0, abs=1e-5)
    assert scaled[counted].std(correction=0).item() == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(scaled.flatten().argsort(), advantages.flatten().argsort()), "the order stays"


def test_advantages_that_are_alike_stay_small() -> None:
    # The deviation is 1e-5, and ADVANTAGE_FLOOR is used instead.
    scaled = normalise(torch.tensor([0.5, 0.50002]), torch.ones(2, dtype=torch.bool))[0]

    torch.testing.assert_close(scaled, torch.tensor([-1e-2, 1e-2]), rtol=1e-2, atol=0)


@pytest.mark.parametrize("counted", [0, 1])
def test_too_few_counted_steps_give_no_advantage(counted: int) -> None:
    where = torch.arange(4) < counted

    assert normalise(torch.tensor([1.0, 2.0, 3.0, 4.0]), where)[0].tolist() == [0.0] * 4


class CountedCalls(TorchFunctionMode):
    """Counts calls of torch functions."""

    calls = 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return function(*args, **(kwargs or {}))


def test_advantages_of_all_environments_come_from_the_same_calls() -> None:
    """S14: advantages of more environments take no more calls; each environment's are as they would be alone."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, after = (torch.randn(5, 64, generator=generator) for _ in range(3))
    ends, cuts = (torch.rand(5, 64, generator=generator) < 0.2 for _ in range(2))

    def run(columns: slice) -> tuple[Tensor, int]:
        with CountedCalls() as counted:
            parts = Sample(*(part[:, columns] for part in (rewards, values, after, ends, cuts)))
            advantages, _ = gae(**parts._asdict(), gamma=0.9, lam=0.8)
        return advantages, counted.calls

    together, calls = run(slice(None))
    alone, calls_alone = run(slice(7, 8))
    assert calls == calls_alone > 0
    assert torch.equal(alone, together[:, 7:8])


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "learns"),
    [
        (1.0, 2.0, -2.0, True),
        (1.1, 2.0, -2.2, True),
        (1.5, 2.0, -2.4, False),  # already much likelier: no reward for more
        (0.5, 2.0, -1.0, True),  # a good action that became unlikely: come back
        (0.5, -2.0, 1.6, False),  # already much less likely: no reward for more
        (1.5, -2.0, 3.0, True),  # a bad action that became likely: come back
    ],
)
def test_the_surrogate_is_pessimistic(ratio: float, advantage: float, loss: float, learns: bool) -> None:
    r = torch.tensor(ratio, requires_grad=True)

    value = clipped_surrogate(r, torch.tensor(advantage))
    value.backward()

    assert value.item() == pytest.approx(loss)
    assert r.grad.item() == pytest.approx(-advantage if learns else 0.0)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (3.0, 0.0, 1.0, None, 2.0),
        (3.0, 0.0, 1.0, 10.0, 2.0),  # within the clip: as without
        (1.0, 0.0, 1.0, 0.5, 0.125),  # right, but moved too far: judged where the clip ends, at 0.5
        (-1.0, 0.0, 1.0, 0.5, 2.0),  # wrong way: the worse of the two errors
    ],
)
def test_the_value_loss_is_half_the_squared_error_and_clipped_on_request(
    value: float, old: float, target: float, clip: float | None, loss: float
) -> None:
    assert value_loss(*torch.tensor([value, old, target]), clip=clip).item() == pytest.approx(loss)


def test_the_kl_estimate_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(6, generator=generator, dtype=torch.float64).softmax(0)
    new = torch.randn(6, generator=generator, dtype=torch.float64).softmax(0)

    average = (old * kl_estimate((new / old).log())).sum()

    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(old), torch.distributions.Categorical(new)
    )
    torch.testing.assert_close(average, expected)


@pytest.fixture(scope="module")
def loop(make_loop: Callable[..., RolloutCollector]) -> RolloutCollector:
    made = make_loop(n_envs=3)
    play(made)
    return made


@pytest.fixture(scope="module")
def rollout(loop: RolloutCollector) -> Rollout:
    generator = torch.Generator().manual_seed(3)
    advantages = torch.randn(loop.buffer.ticks, 3, generator=generator)
    return loop.finish()[0]._replace(advantages=advantages)


def with_steps(rollout: Rollout, **changes: Any) -> Rollout:
    return rollout._replace(steps=rollout.steps._replace(**changes))


def forced_everywhere(rollout: Rollout, env: int) -> Rollout:
    """Return the same rollout with all actions of environment `env` forced."""
    slot = rollout.steps.masks.slot.clone()
    slot[:, env, 1:] = False
    action = type(rollout.steps.action)(*(head.clone() for head in rollout.steps.action))
    for head in action:
        head[:, env] = 0
    log_prob = rollout.steps.log_prob.clone()
    log_prob[:, env] = 0.0
    masks = rollout.steps.masks._replace(slot=slot)
    return with_steps(rollout, masks=masks, action=action, log_prob=log_prob)


def policy_gradient(policy: Policy, loss: Tensor) -> list[Tensor]:
    parameters = list(policy.parameters())
    return list(torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True))


def test_forced_steps_carry_no_policy_gradient_and_no_entropy(loop: RolloutCollector, rollout: Rollout) -> None:
    config, policy = PPOConfig(), loop.policy
    forced = forced_everywhere(rollout, env=1)
    others = rollout.select_envs(torch.tensor([0, 2]))

    ours, theirs = ppo_terms(policy, forced, config), ppo_terms(policy, others, config)

    for name in ("policy", "entropy"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name))
        a, b = (policy_gradient(policy, getattr(terms, name)) for terms in (ours, theirs))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-7)
        assert any(g.any() for g in a)
    torch.testing.assert_close(ours.head_entropy, theirs.head_entropy)


def test_ppo_terms_measure_how_far_the_policy_has_moved(loop: RolloutCollector, rollout: Rollout) -> None:
    still = ppo_terms(loop.policy, rollout, PPOConfig())
    assert still.ratio_error < 1e-5 and still.kl < 1e-9 and still.clip_fraction == 0

    likelier = with_steps(rollout, log_prob=rollout.steps.log_prob - math.log(1.5))
    moved = ppo_terms(loop.policy, likelier, PPOConfig())
    assert moved.ratio_error.item() == pytest.approx(0.5, rel=1e-4)
    assert moved.ratio_low.item() == pytest.approx(1.5, rel=1e-4) == moved.ratio_high.item()
    assert moved.kl.item() == pytest.approx(0.5 - math.log(1.5), rel=1e-4)
    assert moved.kl_k1.item() == pytest.approx(-math.log(1.5), rel=1e-4)
    assert moved.clip_fraction == 1

    forced = forced_everywhere(rollout, env=1)
    forced.steps.log_prob[:, 1] -= math.log(1.5)  # what an action that was forced does, says nothing of the policy
    moved = ppo_terms(loop.policy, forced, PPOConfig())
    assert moved.clip_fraction == 0 and abs(moved.kl_k1) < 1e-6 and moved.kl < 1e-9


def test_the_metrics_of_an_update_leave_out_skipped_minibatches_and_heads_without_a_choice() -> None:
    def terms(number: float) -> PPOTerms:
        made = PPOTerms(*[torch.tensor(number)] * len(PPOTerms._fields))
        shares = {"head_entropy": torch.tensor([0.5, 0.0]), "head_choice_share": torch.tensor([0.9, 0.0])}
        return made._replace(**shares)

    every, norms = [terms(1.0), terms(math.nan), terms(3.0)], [torch.tensor(2.0), torch.tensor(math.nan)]

    metrics = update_metrics(every, norms, {"op": 4, "tempo": 1}, finite=[True, False])

    assert (metrics["loss.policy"], metrics["kl"], metrics["ratio_high"], metrics["grad_norm"]) == (2.0, 3.0, 3.0, 2.0)
    assert (metrics["minibatches"], metrics["skipped"]) == (1.0, 1.0)
    assert metrics["entropy.op"] == 0.5 and metrics["choice_share.op"] == pytest.approx(0.9)
    assert not any(name.endswith(".tempo") for name in metrics)
