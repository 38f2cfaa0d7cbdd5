"""Rewards of the policy, as pure functions of one environment step's numbers."""

from esper_lightning.rewards.config import ModeName, RewardConfig
from esper_lightning.rewards.modes import MODES, bound, pay, settled
from esper_lightning.rewards.objective import ObjectiveConfig, Prices, compute_rent, objective, rent
from esper_lightning.rewards.tick import Account, Seed, SlotTick, Tick

__all__ = [
    "MODES",
    "Account",
    "ModeName",
    "ObjectiveConfig",
    "Prices",
    "RewardConfig",
    "Seed",
    "SlotTick",
    "Tick",
    "bound",
    "compute_rent",
    "objective",
    "pay",
    "rent",
    "settled",
]
