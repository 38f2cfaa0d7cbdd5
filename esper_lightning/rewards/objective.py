"""The objective J = accuracy - rent, and the reward that telescopes to it."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a grown network is worth: accuracy minus rent for the parameters that were kept."""

    price: float = 0.05
    """Accuracy (0 to 1) that a kept growth by a factor of e must bring to be worth it."""

    smallest_host: int = 200
    """Growth is relative to at least this many parameters: beside a tiny host every seed would look enormous."""

    rent_cap: float = 1.0
    """Most rent that is ever charged: accuracy cannot be below 0, so more would mean nothing."""

    def __post_init__(self) -> None:
        if self.smallest_host < 1:
            raise ValueError(f"objective.smallest_host must be at least 1, got {self.smallest_host}")
        if self.price < 0.0 or self.rent_cap < 0.0:
            raise ValueError(f"objective: price and rent_cap must not be negative, got {self.price}, {self.rent_cap}")


def rent(parameters: Tensor, host_parameters: int, config: ObjectiveConfig) -> Tensor:
    """Price of a network with `parameters` [N] grown from a host of `host_parameters`: price·ln(1 + growth), capped."""
    growth = (parameters - host_parameters) / max(host_parameters, config.smallest_host)
    return (config.price * torch.log1p(growth)).clamp(max=config.rent_cap)


def objective(accuracy: Tensor, parameters: Tensor, host_parameters: int, config: ObjectiveConfig) -> Tensor:
    """J [N] of networks with `accuracy` [N] in 0 … 1 and `parameters` [N] kept.

    The reward of a tick is the change of J, so that an episode's rewards sum to J at its end minus J at its start.
    """
    return accuracy - rent(parameters, host_parameters, config)
