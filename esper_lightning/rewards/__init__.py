"""What the policy is paid for: numbers in, numbers out."""

from esper_lightning.rewards.objective import ObjectiveConfig, objective, rent

__all__ = ["ObjectiveConfig", "objective", "rent"]
