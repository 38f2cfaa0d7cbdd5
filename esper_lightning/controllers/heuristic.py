"""Hand-written growth rule: wait for a plateau, grow one seed, fossilize it if it helps."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import Action, Op
from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.growth.gates import LifecycleConfig


@dataclass(frozen=True, kw_only=True)
class HeuristicConfig:
    """Thresholds for germinating and culling. Ticks are host epochs."""

    stable_loss: float = 0.03
    """Relative fall of the validation loss in a tick below which the host counts as stable."""

    stable_ticks: int = 3
    """Consecutive stable ticks required before the first germination."""

    min_age: int = 5
    """Ticks before the first germination."""

    plateau_points: float = 0.5
    """Accuracy gain in a tick, in points of 100, below which the host is on a plateau."""

    plateau_ticks: int = 3
    """Consecutive ticks on a plateau that lead to a germination."""

    cull_ticks: int = 5
    """Ticks in a stage after which a harmful seed is culled."""

    cull_points: float = -2.0
    """Change of accuracy since germination, in points of 100, below which a seed counts as harmful."""

    cull_penalty: float = 2.0
    """Penalty on a culled blueprint; it halves every tick."""

    max_penalty: float = 3.0
    """Penalty above which a blueprint is skipped in the rotation."""

    ransom_contribution: float = 0.1
    """Contribution, in accuracy points, above which a seed is culled if accuracy has also changed by less than
    `ransom_loss`.
    Such a seed appears useful only because the host has come to depend on it."""

    ransom_loss: float = -0.2
    """Change of accuracy since germination, in points of 100, below which a contribution is not trusted."""

    def __post_init__(self) -> None:
        for name in ("stable_ticks", "plateau_ticks"):
            if getattr(self, name) < 1:
                raise ValueError(f"heuristic.{name} must be at least 1, got {getattr(self, name)}")


@dataclass(kw_only=True)
class _Memory:
    """State of the rule for one environment."""

    next_blueprint: int = 0  # index in the rotation of blueprints
    is_stable: bool = False
    penalties: dict[int, float] = field(default_factory=dict)  # by blueprint index
    accuracy_before: dict[int, float] = field(default_factory=dict)  # by slot index: accuracy points at germination


class Heuristic:
    """Germinates blueprints in rotation when the host is on a stable plateau, and fossilizes what the gate allows."""

    def __init__(self, config: HeuristicConfig = HeuristicConfig()) -> None:
        self.config = config

    def reset(self, pool: Hosts) -> None:
        self.memories = [_Memory() for _ in pool.envs]

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers of each host, for an episode that is continued later."""
        return {"memories": [asdict(memory) for memory in self.memories]}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.memories = [_Memory(**memory) for memory in state["memories"]]

    def act(self, pool: Hosts) -> Action:
        masks = pool.masks_on_cpu.slot.tolist()
        blueprint_masks = pool.masks_on_cpu.blueprint.tolist()
        actions = [
            self._choose_action(env, memory, slot_mask, growable=growable)
            for env, memory, slot_mask, growable in zip(pool.envs, self.memories, masks, blueprint_masks, strict=True)
        ]
        return to_action(actions, pool.device)

    def _choose_action(
        self, env: Subject, memory: _Memory, slot_mask: list[list[bool]], *, growable: list[list[bool]]
    ) -> tuple[int, ...]:
        accuracy = 100.0 * env.history.accuracy[-1]
        memory.penalties = {
            blueprint: penalty / 2.0 for blueprint, penalty in memory.penalties.items() if penalty > 1e-3
        }
        memory.is_stable = memory.is_stable or self._is_stable(env)
        for k in range(len(env.slots)):
            if slot_mask[Op.FOSSILIZE][k] and is_worth_fossilizing(env.records[k].contribution, env.lifecycle):
                return Op.FOSSILIZE, k
            if slot_mask[Op.CULL][k] and self._is_harmful(env, k, accuracy - memory.accuracy_before[k]):
                culled = env.slots[k].blueprint
                assert culled is not None, "only a seed can be culled"
                blueprint = env.space.blueprint.index(culled)
                memory.penalties[blueprint] = memory.penalties.get(blueprint, 0.0) + self.config.cull_penalty
                return Op.CULL, k
        is_growing = any(slot.live for slot in env.slots)
        if memory.is_stable and not is_growing and env.tick >= self.config.min_age and self._is_on_plateau(env):
            for k, is_free in enumerate(slot_mask[Op.GERMINATE]):
                blueprint = self._next_blueprint(memory, growable[k]) if is_free else None
                if blueprint is not None:
                    memory.accuracy_before[k] = accuracy
                    return Op.GERMINATE, k, blueprint
        return (Op.WAIT,)

    def _is_stable(self, env: Subject) -> bool:
        recent = env.history.loss[-self.config.stable_ticks - 1 :]
        threshold = 1.0 - self.config.stable_loss
        return len(recent) == self.config.stable_ticks + 1 and all(
            after > threshold * before for before, after in pairwise(recent)
        )

    def _is_on_plateau(self, env: Subject) -> bool:
        recent = env.history.accuracy[-self.config.plateau_ticks - 1 :]
        rises = [100.0 * (after - before) for before, after in pairwise(recent)]
        return len(rises) == self.config.plateau_ticks and max(rises) < self.config.plateau_points

    def _is_harmful(self, env: Subject, k: int, improvement: float) -> bool:
        contribution = env.records[k].contribution or 0.0
        is_ransom = contribution > self.config.ransom_contribution and improvement < self.config.ransom_loss
        is_old_enough = env.slots[k].ticks_in_stage >= self.config.cull_ticks
        return is_ransom or (is_old_enough and improvement < self.config.cull_points)

    def _next_blueprint(self, memory: _Memory, growable: list[bool]) -> int | None:
        for step in range(len(growable)):
            blueprint = (memory.next_blueprint + step) % len(growable)
            if growable[blueprint] and memory.penalties.get(blueprint, 0.0) <= self.config.max_penalty:
                memory.next_blueprint = blueprint + 1
                return blueprint
        return None


def is_worth_fossilizing(contribution: float | None, lifecycle: LifecycleConfig) -> bool:
    """Return True if the contribution reaches the gate's threshold, or is positive if the gate has none."""
    threshold = lifecycle.min_contribution
    return contribution is not None and (contribution > 0.0 if threshold is None else contribution >= threshold)
