"""Small collectors on memory games, which begin and end anywhere in a rollout, for tests of PPO."""

from typing import Any

import torch

from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, PPOTerms
from esper_lightning.ppo.policy import Policy, PolicyConfig, policy_shape
from esper_lightning.ppo.running_norm import RunningMeanStd
from esper_lightning.runtime.ranks import Ranks
from tests.cue import CUE, CueMemory


def cue_loop(
    env: CueMemory, config: PPOConfig = PPOConfig(), *, noise: float = 0.0, ranks: Ranks | None = None, **policy: Any
) -> RolloutCollector:
    """Return a collector with a small policy whose initial weights have `noise` added."""
    torch.manual_seed(0)
    made = Policy(policy_shape(env), PolicyConfig(width=8, **policy))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return RolloutCollector(
        env,
        made,
        observation_norm=RunningMeanStd((CUE + 1,)),
        value_norm=RunningMeanStd((), clip=float("inf")),
        config=config,
        run_rng_seed=3,
        privileged_norm=RunningMeanStd((CUE,)),
        ranks=ranks,
    )


def play(loop: RolloutCollector, ticks: int | None = None) -> None:
    loop.reset()
    for _ in range(ticks or loop.buffer.ticks):
        loop.step()


def total(terms: PPOTerms) -> torch.Tensor:
    return terms.policy + 0.5 * terms.value - 0.1 * terms.entropy
