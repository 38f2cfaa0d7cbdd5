"""Running mean and variance, stored as module buffers, so that checkpoints contain them."""

from typing import Literal

import torch
from torch import Tensor, nn

from esper_lightning.envs.observation import RowSizes
from esper_lightning.runtime.ranks import ALONE, Ranks


class RunningMeanStd(nn.Module):
    """Running mean and variance of a stream of vectors of a shape. Normalised values are clipped to ± `clip`.

    Every value has the same weight (Chan et al.'s parallel update of Welford's sums). It is not thread-safe; only the
    thread of the rollout updates it.
    """

    mean: Tensor
    var: Tensor
    count: Tensor

    def __init__(self, shape: tuple[int, ...], clip: float = 10.0) -> None:
        super().__init__()
        self.clip = clip
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("var", torch.ones(shape))
        self.register_buffer("count", torch.zeros(()))

    @torch.no_grad()
    def update(self, batch: Tensor, ranks: Ranks = ALONE) -> None:
        """Update the statistics with values [..., *shape], of this rank and of all others.

        An empty batch changes nothing, nor does one whose mean or variance is not finite.
        """
        if not self.mean.numel():
            return  # no feature of this kind is shown
        new = ranks.moments(batch.reshape(-1, *self.mean.shape))
        if new.number == 0:
            return
        weight = new.number / (self.count + new.number)
        shift = new.mean - self.mean
        new_var = (1.0 - weight) * self.var + weight * new.var + weight * (1.0 - weight) * shift.square()
        new_mean = self.mean + weight * shift
        finite = (new_mean.isfinite() & new_var.isfinite()).all()
        self.var.copy_(torch.where(finite, new_var, self.var))
        self.mean.copy_(torch.where(finite, new_mean, self.mean))
        self.count.add_(new.number * finite)

    def forward(self, x: Tensor) -> Tensor:
        """Return normalised and clipped values; before the first update they are only clipped."""
        return ((x - self.mean) / self.deviation).clamp(-self.clip, self.clip)

    def inverse(self, x: Tensor) -> Tensor:
        return x * self.deviation + self.mean

    @property
    def deviation(self) -> Tensor:
        return deviation(self.var)


LEAST_VARIANCE = 1e-8
"""Variance up to which a stream of numbers counts as constant."""


def deviation(var: Tensor) -> Tensor:
    """Return the standard deviation; 1 for a constant stream, so that it is normalised to 0 and not to noise."""
    return torch.where(var > LEAST_VARIANCE, var, 1.0).sqrt()


class RowNorm(nn.Module):
    """Running mean and variance of observations in rows, shared by all slots and by all blueprints.

    Only rows that are present count. The marks of presence stay as they are, and absent rows stay 0.
    """

    def __init__(self, sizes: RowSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.host, self.slot, self.blueprint = (
            RunningMeanStd((size,)) for size in (sizes.host, sizes.slot - 1, sizes.blueprint - 1)
        )

    @torch.no_grad()
    def update(self, batch: Tensor, ranks: Ranks = ALONE) -> None:
        """Update the statistics with observations [..., K, R]; see `RunningMeanStd.update`."""
        host, slot, blueprint = self.sizes.split(batch)
        self.host.update(host, ranks)
        for norm, rows in ((self.slot, slot), (self.blueprint, blueprint)):
            is_present = rows[..., 0] > 0  # feature 0 is the mark of presence
            norm.update(rows[is_present][..., 1:], ranks)

    def forward(self, x: Tensor) -> Tensor:  # [..., K, R] -> [..., K, R]
        """Return normalised and clipped values."""
        _, slot, blueprint = self.sizes.split(x)
        # All features at once, in one copy: many small operations would take much of the time of a decision.
        blueprints = blueprint.shape[-2]
        mean = self._row_statistic("mean", blueprints, of_mark=0.0)  # 0 and 1 leave the marks as they are
        var = self._row_statistic("var", blueprints, of_mark=1.0)
        values = (x - mean).div_(deviation(var)).clamp_(-self.host.clip, self.host.clip)
        _, slot_values, blueprint_values = self.sizes.split(values)  # views
        slot_values.mul_(slot[..., :1])
        blueprint_values.mul_(blueprint[..., :1])
        return values

    def _row_statistic(self, name: Literal["mean", "var"], blueprints: int, *, of_mark: float) -> Tensor:  # [R]
        """Return mean or variance of each feature of a row with so many blueprints; `of_mark` for marks of presence."""
        mark = self.host.mean.new_full((1,), of_mark)
        host, slot, blueprint = (getattr(norm, name) for norm in (self.host, self.slot, self.blueprint))
        return torch.cat([host, mark, slot, *[mark, blueprint] * blueprints])


ObservationNorm = RunningMeanStd | RowNorm
"""Normaliser of observations."""


def make_norm(features: int | RowSizes) -> ObservationNorm:
    """Return the normaliser of observations with so many features, or of observations in rows."""
    return RowNorm(features) if isinstance(features, RowSizes) else RunningMeanStd((features,))
