"""Rewards of the policy, as pure functions of one environment step's numbers.

A reward of your own is a function with a name and the names of its terms:

    @register("thrifty", ["gain", "size"])
    def thrifty(step: HostStep, config: RewardConfig) -> dict[str, float]:
        return {"gain": step.objective - step.objective_before, "size": -0.01 * sum(s.growth for s in step.slots)}
"""

from esper_lightning.rewards.config import REWARDS, ROLLBACK_TERM, ModeName, Reward, RewardConfig, register
from esper_lightning.rewards.modes import MODES, account_after, compute_terms
from esper_lightning.rewards.objective import ObjectiveConfig, Prices, compute_rent, objective, rent
from esper_lightning.rewards.tick import HostStep, SeedAccount, SlotStatus, SlotStep

__all__ = [
    "MODES",
    "REWARDS",
    "ROLLBACK_TERM",
    "HostStep",
    "ModeName",
    "ObjectiveConfig",
    "Prices",
    "Reward",
    "RewardConfig",
    "SeedAccount",
    "SlotStatus",
    "SlotStep",
    "account_after",
    "compute_rent",
    "compute_terms",
    "objective",
    "register",
    "rent",
]
