"""The objective J = accuracy - rent, and the reward that telescopes to it."""

import math
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Prices(NamedTuple):
    """Prices of growth in one episode, in accuracy (0 to 1) per growth by a factor of e."""

    parameters: float
    compute: float


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """Settings of the objective J: accuracy minus rent for the parameters and the compute of fossilized seeds."""

    price: float = 0.05
    """Accuracy (0 to 1) that a fossilized growth of the parameters by a factor of e must add to be worth it."""

    price_to: float | None = None
    """Upper end of the range from `price` on which each episode's price is drawn uniformly. None: always `price`."""

    compute_price: float = 0.0
    """Accuracy (0 to 1) that a growth of the forward pass's floating-point operations by a factor of e must add to be
    worth it. If it is not 0, the policy observes the compute."""

    compute_price_to: float | None = None
    """Upper end of the range from `compute_price` on which each episode's compute price is drawn uniformly. None:
    always `compute_price`."""

    smallest_host: int = 200
    """Least number of parameters that growth is relative to: relative to a tiny host every seed would look enormous."""

    rent_cap: float = 1.0
    """Largest rent: accuracy cannot be below 0, so a larger rent would mean nothing."""

    def __post_init__(self) -> None:
        if self.smallest_host < 1:
            raise ValueError(f"objective.smallest_host must be at least 1, got {self.smallest_host}")
        for name in ("price", "price_to", "compute_price", "compute_price_to", "rent_cap"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < math.inf:
                raise ValueError(f"objective.{name} must be finite and not negative, got {value}")

    @property
    def prices_vary(self) -> bool:
        """True if prices differ between episodes."""
        return self.price_to is not None or self.compute_price_to is not None

    @property
    def charges_compute(self) -> bool:
        """True if compute has a price."""
        return self.compute_price != 0.0 or self.compute_price_to is not None

    def prices(self, rng_seed: int) -> Prices:
        """Return the prices of the episode with this RNG seed, the same for every controller."""
        if not self.prices_vary:
            return Prices(self.price, self.compute_price)
        rng = random.Random(rng_seed)
        shares = rng.random(), rng.random()
        ranges = (self.price, self.price_to), (self.compute_price, self.compute_price_to)
        drawn = zip(shares, ranges, strict=True)
        return Prices(*(low if high is None else low + share * (high - low) for share, (low, high) in drawn))


def rent(
    parameters: Tensor,
    host_parameters: Tensor | int,
    config: ObjectiveConfig,
    *,
    price: Tensor | None = None,
    compute_cost: Tensor | float = 0.0,
) -> Tensor:
    """Return the rent [N] of grown networks: price·ln(1 + growth), capped.

    Args:
        parameters: Parameters of the grown networks, [N].
        host_parameters: Parameters of the hosts they grew from.
        config: Default price, cap, and least number of parameters that growth is relative to.
        price: Price of each episode, [N]. None: that of the config.
        compute_cost: Rent for compute, [N], from `compute_rent`. The cap applies to the sum.
    """
    growth = (parameters - host_parameters) / torch.as_tensor(host_parameters).clamp(min=config.smallest_host)
    parameter_rent = (config.price if price is None else price) * torch.log1p(growth)
    return (parameter_rent + compute_cost).clamp(max=config.rent_cap)


def compute_rent(flops: Tensor, host_flops: Tensor | int, price: Tensor) -> Tensor:
    """Return price·ln(1 + growth) [N] for forward passes of `flops` [N], grown from hosts of `host_flops`."""
    return price * torch.log1p((flops - host_flops) / host_flops)


def objective(
    accuracy: Tensor,
    parameters: Tensor,
    host_parameters: Tensor | int,
    *,
    config: ObjectiveConfig,
    price: Tensor | None = None,
    compute_cost: Tensor | float = 0.0,
) -> Tensor:
    """Return J [N] of networks with `accuracy` [N] in 0 … 1 and `parameters` [N]; see `rent` for the other arguments.

    The reward of a step is the change of J, so the rewards of an episode sum to J at its end minus J at its start.
    """
    return accuracy - rent(parameters, host_parameters, config, price=price, compute_cost=compute_cost)
