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

from esper_lightning.ppo.losses import Anneal, PPOConfig, PPOTerms, gae, normalise, update_metrics
from esper_lightning.ppo.policy import PolicyConfig
from tests.ppo import reference


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
        ({"width": 1}, "width must be at least 2, got 1"),
    ],
)
def test_impossible_settings_are_refused_with_their_reason(settings: dict[str, Any], message: str) -> None:
    kind = {"start": Anneal, "width": PolicyConfig}.get(next(iter(settings)), PPOConfig)
    with pytest.raises(ValueError, match=message):
        kind(**settings)


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


@pytest.mark.parametrize(
    ("counted", "expected"),
    [
        (0, [0.0, 0.0, 0.0]),
        (1, [0.0, 0.0, 0.0]),
        (2, [-1e-2, 1e-2, 9999.95]),  # their deviation is 1e-5, and ADVANTAGE_FLOOR is used instead
        (3, [-0.707, -0.707, 1.414]),
    ],
)
def test_few_counted_steps_give_no_advantage_and_those_that_are_alike_a_small_one(
    counted: int, expected: list[float]
) -> None:
    scaled = normalise(torch.tensor([0.5, 0.50002, 10.5]), torch.arange(3) < counted)[0]
    torch.testing.assert_close(scaled, torch.tensor(expected), rtol=1e-2, atol=0)


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
