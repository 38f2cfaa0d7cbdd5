"""Guard of the PPO update against numbers that are not finite. T environment steps, N environments."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from esper_lightning.errors import DivergedError

MAX_SKIPS = 3
"""Consecutive skipped minibatches that end the run."""

LOWER_LR = "lower model.ppo.lr, or set model.ppo.target_kl"
"""Advice where the policy diverges."""

LARGEST_NUMBER = 1e15
"""Largest absolute reward, return or feature to learn from: the sum of the squares of 10⁸ of them fits in float32."""


def usable_environments(records: Iterable[Tensor]) -> Tensor:  # [N] bool
    """Return the environments whose numbers are all finite and at most `LARGEST_NUMBER`, given records [T, N, …]."""
    return torch.stack([_is_usable(record).all(0) for record in records]).all(0)


class Defect(NamedTuple):
    """Number of one environment from which nothing can be learned."""

    name: str
    step: int
    """Step of the rollout, from 0."""
    value: float


def find_defect(records: Mapping[str, Tensor], env: int) -> Defect | None:
    """Return the first unusable number of one environment, or None; at the same step that of the first record.

    Args:
        records: Numbers of the rollout, [T, N, …] each, by name.
        env: Index of the environment.
    """
    found = []
    for name, record in records.items():
        steps = (~_is_usable(record)[:, env]).nonzero().flatten().tolist()
        if steps:
            values = record[steps[0], env].flatten()
            found.append(Defect(name, steps[0], values[~_in_range(values)][0].item()))
    return min(found, key=lambda defect: defect.step, default=None)


def _in_range(values: Tensor) -> Tensor:  # bool, of the same shape
    return values.abs() <= LARGEST_NUMBER  # False for NaN


def _is_usable(record: Tensor) -> Tensor:  # [T, N, …] -> [T, N] bool
    return _in_range(record).flatten(2).all(2) if record.dim() > 2 else _in_range(record)


def is_finite_step(loss: Tensor, grad_norm: Tensor) -> Tensor:  # [] bool
    """Return whether a minibatch may change the policy.

    The gradient's norm before clipping is squared, as Adam squares gradients. Where several processes share a gradient,
    this is the place to agree: all of them must decide alike.
    """
    return (loss.detach() + grad_norm.detach().square()).isfinite()


def skip_unless(finite: Tensor, optimizer: Optimizer) -> None:
    """Make the optimizer's next step do nothing, unless `finite` [] bool is True.

    A skipped step changes neither parameters nor moments nor step counts. A fused optimizer reads the flag on the
    device, so that the host does not wait for the GPU; any other one steps no parameter that has no gradient.
    """
    if optimizer.defaults.get("fused"):
        fused: Any = optimizer  # torch does not declare these attributes, which its fused optimizers read
        fused.grad_scale, fused.found_inf = None, (~finite).float()
    elif not finite:
        optimizer.zero_grad(set_to_none=True)


def count_skips(finite: Sequence[bool], in_a_row: int) -> int:
    """Return the number of minibatches in a row that are skipped at the end of an update.

    Args:
        finite: False for each skipped minibatch of the update.
        in_a_row: Skipped minibatches in a row before the update.

    Raises DivergedError if `MAX_SKIPS` or more minibatches in a row were skipped.
    """
    for is_finite in finite:
        in_a_row = 0 if is_finite else in_a_row + 1
        if in_a_row == MAX_SKIPS:
            raise DivergedError(f"the loss or gradient of {MAX_SKIPS} minibatches in a row is not finite; {LOWER_LR}")
    return in_a_row


def check_change(weight_change: float) -> None:
    """Raise DivergedError if an update changed the policy's weights by a number that is not finite."""
    if not math.isfinite(weight_change):
        raise DivergedError(f"the policy's weights are not finite after an update; {LOWER_LR}")
