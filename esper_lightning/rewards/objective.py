"""The objective J, the score of a host minus its rent, and the reward that telescopes to it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_HOST = 200
"""Least number of parameters that growth is relative to: relative to a tiny host every seed would look enormous."""

RENT_CAP = 1.0
"""Largest rent: no score is above 1, so a larger rent would mean nothing."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of the objective J: score minus rent for the parameters of fossilized seeds."""

    price: float = 0.05
    """Rise of the score that a fossilized growth of the parameters by a factor of e must add to be worth it."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.price < math.inf:
            raise ValueError(f"objective.price must be finite and not negative, got {self.price}")


def rent(parameters: Tensor, host_parameters: Tensor | int, price: Tensor | float) -> Tensor:
    """Return the rent [N] of networks with `parameters` [N], grown from hosts: price·ln(1 + growth), capped."""
    growth = (parameters - host_parameters) / torch.as_tensor(host_parameters).clamp(min=SMALLEST_HOST)
    return (price * torch.log1p(growth)).clamp(max=RENT_CAP)


def objective(score: Tensor, parameters: Tensor, host_parameters: Tensor | int, price: Tensor | float) -> Tensor:  # [N]
    """Return J [N] of networks with `score` [N] and `parameters` [N]; see `rent` for the other arguments.

    The reward of a step is the change of J, so the rewards of an episode sum to J at its end minus J at its start.
    """
    return score - rent(parameters, host_parameters, price)
