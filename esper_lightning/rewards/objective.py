"""The objective J = accuracy - rent, and the reward that telescopes to it."""

import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Prices(NamedTuple):
    """What growth costs in one episode."""

    parameters: float
    compute: float


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """What a grown network is worth: accuracy minus rent for the parameters that were kept, and for their compute."""

    price: float = 0.05
    """Accuracy (0 to 1) that a kept growth of the parameters by a factor of e must bring to be worth it."""

    price_to: float | None = None
    """With it every episode has a price of its own, evenly drawn between `price` and this. None: `price` always."""

    compute_price: float = 0.0
    """The same for a growth of the forward pass's floating-point operations. Where it is not 0 it is observed."""

    compute_price_to: float | None = None
    """With it every episode has a compute price of its own, evenly drawn between `compute_price` and this."""

    smallest_host: int = 200
    """Growth is relative to at least this many parameters: beside a tiny host every seed would look enormous."""

    rent_cap: float = 1.0
    """Most rent that is ever charged: accuracy cannot be below 0, so more would mean nothing."""

    def __post_init__(self) -> None:
        if self.smallest_host < 1:
            raise ValueError(f"objective.smallest_host must be at least 1, got {self.smallest_host}")
        if self.price < 0.0 or self.rent_cap < 0.0:
            raise ValueError(f"objective: price and rent_cap must not be negative, got {self.price}, {self.rent_cap}")
        for name in ("price_to", "compute_price", "compute_price_to"):
            value = getattr(self, name)
            if value is not None and value < 0.0:
                raise ValueError(f"objective.{name} must not be negative, got {value}")

    @property
    def varies(self) -> bool:
        """Do prices differ between episodes?"""
        return self.price_to is not None or self.compute_price_to is not None

    @property
    def prices_compute(self) -> bool:
        """Does compute cost anything?"""
        return self.compute_price != 0.0 or self.compute_price_to is not None

    def prices(self, seed: int) -> Prices:
        """Of the episode that begins with `seed`: of that alone, so every controller pays the same on the same host."""
        if not self.varies:
            return Prices(self.price, self.compute_price)
        drawn = random.Random(seed)
        shares = drawn.random(), drawn.random()
        ranges = (self.price, self.price_to), (self.compute_price, self.compute_price_to)
        return Prices(
            *(
                low if high is None else low + share * (high - low)
                for share, (low, high) in zip(shares, ranges, strict=True)
            )
        )


def rent(
    parameters: Tensor,
    host_parameters: Tensor | int,
    config: ObjectiveConfig,
    price: Tensor | None = None,
    compute: Tensor | float = 0.0,
) -> Tensor:
    """What networks with `parameters` [N], grown from hosts of `host_parameters`, cost: price·ln(1 + growth), capped.

    Args:
        price: Of each episode, [N]. None: the config's.
        compute: What compute costs beside that, [N]: see `compute_rent`. The cap is on the sum.
    """
    growth = (parameters - host_parameters) / torch.as_tensor(host_parameters).clamp(min=config.smallest_host)
    charged = (config.price if price is None else price) * torch.log1p(growth)
    return (charged + compute).clamp(max=config.rent_cap)


def compute_rent(flops: Tensor, host_flops: Tensor | int, price: Tensor) -> Tensor:
    """Price·ln(1 + growth) [N] of networks whose forward pass takes `flops` [N], grown from one of `host_flops`."""
    return price * torch.log1p((flops - host_flops) / host_flops)


def objective(
    accuracy: Tensor,
    parameters: Tensor,
    host_parameters: Tensor | int,
    config: ObjectiveConfig,
    price: Tensor | None = None,
    compute: Tensor | float = 0.0,
) -> Tensor:
    """J [N] of networks with `accuracy` [N] in 0 … 1 and `parameters` [N] kept; see `rent` for the rest.

    The reward of a tick is the change of J, so that an episode's rewards sum to J at its end minus J at its start.
    """
    return accuracy - rent(parameters, host_parameters, config, price, compute)
