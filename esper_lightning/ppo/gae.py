"""Advantage estimation. T environment steps in a rollout, N environments."""

import torch
from torch import Tensor

from esper_lightning.runtime.ranks import ALONE, Ranks

ADVANTAGE_FLOOR = 1e-3
"""Lower bound of the standard deviation by which advantages are divided: where all returns are alike, it is noise."""


def gae(
    rewards: Tensor,  # [T, N]
    values: Tensor,  # [T, N]  V(s_t)
    next_values: Tensor,  # [T, N]  V(s_{t+1}), taken before any reset
    *,
    terminated: Tensor,  # [T, N]  bool: s_{t+1} is terminal and has value 0
    truncated: Tensor,  # [T, N]  bool: time limit; s_{t+1} keeps its value
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (https://arxiv.org/abs/1506.02438) of all environments.

    Returns advantages and returns, both [T, N]. Credit never crosses the end of an episode.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    ended = terminated | truncated
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0])  # [N]
    for t in reversed(range(len(rewards))):
        running = delta[t] + gamma * lam * running * ~ended[t]
        advantages[t] = running
    return advantages, advantages + values


def discounted_sums(
    rewards: Tensor,  # [T, N]
    before: Tensor,  # [N]  sum before the first step
    *,
    starts: Tensor,  # [T, N]  bool: an episode begins with this step
    gamma: float,
) -> Tensor:
    """Compute R_t = r_t + gamma·R_{t-1}, the discounted sum of the rewards of an episode so far, [T, N]."""
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        before = rewards[t] + gamma * before * ~starts[t]
        sums[t] = before
    return sums


def normalise(advantages: Tensor, included: Tensor, *, ranks: Ranks = ALONE) -> tuple[Tensor, float]:
    """Normalise advantages to mean 0 and standard deviation 1 over the steps in `included` (bool, same shape).

    Returns the normalised advantages and the standard deviation, which is that of the steps of all ranks.
    """
    sample = advantages[included]
    if ranks.world > 1:
        count, mean, variance = ranks.moments(sample)
        spread = variance.sqrt()
    else:
        count, mean, spread = len(sample), sample.mean(), sample.std(correction=0) if len(sample) else sample.sum()
    if count < 2:
        return torch.zeros_like(advantages), 0.0
    return (advantages - mean) / spread.clamp(min=ADVANTAGE_FLOOR), spread.item()
