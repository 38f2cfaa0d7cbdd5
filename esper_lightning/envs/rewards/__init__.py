"""Rewards of the policy, as pure functions of one environment step's numbers.

A reward of your own is a function with a name and the names of its terms:

    @register("thrifty", ["gain", "size"])
    def thrifty(step: HostStep, config: RewardConfig) -> dict[str, float]:
        return {"gain": step.objective - step.objective_before, "size": -0.01 * sum(s.growth for s in step.slots)}
"""

from esper_lightning.envs.rewards.reward import (
    REWARDS,
    ROLLBACK_TERM,
    HostStep,
    ObjectiveConfig,
    RewardConfig,
    SlotStatus,
    SlotStep,
    compute_terms,
    objective,
    register,
    rent,
)

from esper_lightning.envs.rewards import modes  # isort: skip  # it registers the rewards of this package

__all__ = [
    "REWARDS",
    "ROLLBACK_TERM",
    "HostStep",
    "ObjectiveConfig",
    "RewardConfig",
    "SlotStatus",
    "SlotStep",
    "compute_terms",
    "modes",
    "objective",
    "register",
    "rent",
]
