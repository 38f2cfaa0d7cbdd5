"""Settings of PPO, advantage estimation and losses, against definitions and numbers computed by hand."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
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


def test_advantages_of_all_environments_match_their_definition_and_come_from_the_same_calls() -> None:
    """S14: advantages of more environments take no more calls; each environment's are as they would be alone."""
    generator = torch.Generator().manual_seed(0)
    rewards, values, after = (torch.randn(5, 64, generator=generator) for _ in range(3))
    ends, cuts = (torch.rand(5, 64, generator=generator) < 0.2 for _ in range(2))

    def run(columns: slice) -> tuple[Tensor, Tensor, int]:
        with CountedCalls() as counted:
            *parts, over, cut = (part[:, columns] for part in (rewards, values, after, ends, cuts))
            advantages, returns = gae(*parts, terminated=over, truncated=cut, gamma=0.9, lam=0.8)
        return advantages, returns, counted.calls

    together, returns, calls = run(slice(None))
    alone, _, calls_alone = run(slice(7, 8))
    assert calls == calls_alone > 0
    assert torch.equal(alone, together[:, 7:8])
    torch.testing.assert_close(returns, together + values)
    parts = (rewards, values, torch.where(ends, 0.0, after), ends | cuts)
    for n, column in enumerate(zip(*(part.T.numpy() for part in parts), strict=True)):
        expected = torch.from_numpy(reference.advantages(*column, gamma=0.9, lam=0.8))
        torch.testing.assert_close(together[:, n].double(), expected, rtol=1e-4, atol=1e-5)


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
