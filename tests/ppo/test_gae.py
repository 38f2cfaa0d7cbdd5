from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from esper_lightning.ppo.gae import discounted_sums, gae, normalise


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


def by_definition(s: Sample, gamma: float, lam: float) -> Tensor:
    """Return A_t = sum over l of (gamma·lam)^l · delta_{t+l}, up to the end of the episode."""
    steps, envs = s.rewards.shape
    advantages = torch.zeros(steps, envs, dtype=torch.float64)
    for n in range(envs):
        for t in range(steps):
            for k in range(t, steps):
                bootstrap = 0.0 if s.terminated[k, n] else gamma * s.next_values[k, n]
                advantages[t, n] += (gamma * lam) ** (k - t) * (s.rewards[k, n] + bootstrap - s.values[k, n])
                if s.terminated[k, n] or s.truncated[k, n]:
                    break
    return advantages


@given(sample=samples(), gamma=st.floats(0.0, 1.0), lam=st.floats(0.0, 1.0))
def test_gae_matches_its_definition(sample: Sample, gamma: float, lam: float) -> None:
    advantages, returns = gae(**sample._asdict(), gamma=gamma, lam=lam)

    expected = by_definition(sample, gamma, lam)
    torch.testing.assert_close(advantages, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(returns, expected + sample.values, rtol=1e-9, atol=1e-9)


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
