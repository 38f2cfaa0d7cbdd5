"""Which reward, and its few numbers."""

import math
from dataclasses import dataclass
from typing import Literal

ModeName = Literal[
    "objective", "kept", "sparse", "minimal", "simplified", "shaped", "basic", "basic_plus", "escrow", "loss"
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a controller is paid for. What it is judged by is always the objective."""

    mode: ModeName = "objective"
    """objective: the change of the objective, tick by tick. kept: the change of what the objective would be if the
    episode ended now: the same sum, but a seed pays when it is kept, not when it is blended. sparse: the objective at
    the end alone. minimal: sparse,
    minus 0.1 for culling a seed younger than 5 ticks. simplified: shaping by stages, a little for every op, and at the
    end 3 times the accuracy plus 2 for every seed kept that contributes. shaped: accuracy points that are put down to
    seeds, shaping, rent, warnings, costs of ops. basic: shaping, rent, a bonus for keeping a good seed, and at the end
    5 times the gain in accuracy. basic_plus: basic, with most of that bonus dripped over the rest of the episode.
    escrow: credit for progress that depends on a seed, taken back unless the seed is kept. loss: the fall of the
    validation loss minus rent, and at the end how much of the loss of guessing is gone. See
    docs/concepts/rewards.md."""

    shaping: float = 0.3
    """Weight of the shaping by stages (simplified, shaped, basic, basic_plus)."""

    rent: float = 0.5
    """Cost per tick of a growth by a factor of e (shaped, loss)."""

    rent_cap: float = 1.0
    """Most rent per tick (shaped, basic, basic_plus, loss)."""

    budget: float = 1.0
    """Growth that costs 0.1 per tick: 1 is a doubling of the host (basic, basic_plus)."""

    fossilize_bonus: float = 1.0
    """For keeping a seed that contributes 10 accuracy points (basic, basic_plus)."""

    loss_deviation: float = 0.1
    """Change of the validation loss that counts as 1 (loss)."""

    gamma: float = 1.0
    """Discount of the shaping: set model.ppo.gamma, from which it is taken."""

    horizon_is_end: bool = True
    """Does shaping end at the horizon? Set model.ppo.horizon_is_end, from which it is taken."""

    @property
    def bare(self) -> bool:
        """Is every host also validated without any seed?"""
        return self.mode == "shaped"

    @property
    def looks_at_seeds(self) -> bool:
        """Is anything paid for what happens to seeds?"""
        return self.mode not in ("objective", "kept", "sparse")

    def __post_init__(self) -> None:
        for name in ("shaping", "rent", "rent_cap", "fossilize_bonus"):
            if not 0.0 <= getattr(self, name) < math.inf:
                raise ValueError(f"reward.{name} must be a number from 0 on, got {getattr(self, name)}")
        for name in ("budget", "loss_deviation"):
            if not 0.0 < getattr(self, name) < math.inf:
                raise ValueError(f"reward.{name} must be positive and finite, got {getattr(self, name)}")
