"""Rewards of the policy, as pure functions of one environment step's numbers."""

from esper_lightning.rewards.config import ModeName, RewardConfig
from esper_lightning.rewards.modes import MODES, account_after, compute_terms
from esper_lightning.rewards.objective import ObjectiveConfig, Prices, compute_rent, objective, rent
from esper_lightning.rewards.tick import HostStep, SeedAccount, SlotStatus, SlotStep

__all__ = [
    "MODES",
    "HostStep",
    "ModeName",
    "ObjectiveConfig",
    "Prices",
    "RewardConfig",
    "SeedAccount",
    "SlotStatus",
    "SlotStep",
    "account_after",
    "compute_rent",
    "compute_terms",
    "objective",
    "rent",
]
