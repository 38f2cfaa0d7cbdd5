"""Inputs of the anomaly rules beside the metrics of a PPO update: statistics of hosts, seeds and recurrent state."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from esper_lightning.growth.stages import Stage

if TYPE_CHECKING:
    from esper_lightning.envs.host_env import HostEnv

MIN_RELIED_CONTRIBUTION_POINTS = 5.0
"""Contribution in accuracy points below which a host is never said to rely on the seed."""

MIN_HOST_GRADIENT_HEALTH = 0.7
"""Least gradient health of a host for a new seed to be counted: below it, the host may be why the seed has none."""

MIN_IMPROVEMENT_POINTS = 1.0
"""Least improvement in accuracy points used as a divisor: a smaller one is noise."""


class RolloutGradients:
    """Statistics of the gradients of hosts and seeds in one rollout; all inputs are on the CPU already."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start a rollout: forget everything."""
        self.born: Counter[str] = Counter()  # seeds germinated in the rollout, by blueprint
        self.silent: dict[tuple[int, int], str] = {}  # host, slot -> blueprint of a seed that never had a gradient
        self.gone: Counter[str] = Counter()  # such seeds that another seed has replaced, by blueprint
        self.health = 0.0
        self.host_ticks = 0

    def update(self, envs: Sequence["HostEnv"]) -> None:
        """Process one environment step."""
        if envs[0].tick == 1:
            self.clear()
        for i, env in enumerate(envs):
            if env.ended or env.host_gradient is None:
                continue
            self.health += env.host_gradient.health
            self.host_ticks += 1
            for k, (slot, record) in enumerate(zip(env.slots, env.records, strict=True)):
                if not slot.live or record.gradient is None:
                    continue
                if slot.age == 1:
                    self._replace_silent(i, k)
                    assert slot.blueprint is not None, "that of the live seed"
                    if env.host_gradient.health >= MIN_HOST_GRADIENT_HEALTH:
                        self.born[slot.blueprint] += 1
                        self.silent[i, k] = slot.blueprint
                if record.gradient.norm != 0.0:  # NaN is not the absence of a gradient
                    self.silent.pop((i, k), None)

    def _replace_silent(self, host: int, slot: int) -> None:
        if (blueprint := self.silent.pop((host, slot), None)) is not None:
            self.gone[blueprint] += 1

    def metrics(self, least_seeds: int) -> dict[str, float]:
        """Return the rollout's mean health of the hosts' gradients, and by blueprint the share of seeds without any.

        Blueprints of which fewer than `least_seeds` seeds were germinated are left out.
        """
        dead = self.gone + Counter(self.silent.values())
        found = {f"dead_seeds.{name}": dead[name] / n for name, n in self.born.items() if n >= least_seeds}
        return found | ({"gradient_health": self.health / self.host_ticks} if self.host_ticks else {})

    def state_dict(self) -> dict[str, Any]:
        return {
            "born": dict(self.born),
            "gone": dict(self.gone),
            "silent": [[host, slot, blueprint] for (host, slot), blueprint in self.silent.items()],
            "health": self.health,
            "host_ticks": self.host_ticks,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state within a rollout."""
        self.clear()
        self.born.update(state["born"])
        self.gone.update(state["gone"])
        self.silent.update({(host, slot): blueprint for host, slot, blueprint in state["silent"]})
        self.health, self.host_ticks = state["health"], state["host_ticks"]


def host_anomaly_metrics(envs: Sequence["HostEnv"], most_reliance: float) -> dict[str, float]:
    """Return fossilized seeds per host, and the shares of hosts rolled back and of seeds relied on too much.

    Args:
        envs: All hosts, at the end of their episodes.
        most_reliance: Ratio of contribution to improvement above which a host relies on a seed too much.
    """
    fossilized = sum(slot.stage is Stage.FOSSILIZED for env in envs for slot in env.slots)
    rolled_back = sum(
        env.stopped or (env.monitor is not None and env.monitor.governor_state.rollbacks > 0) for env in envs
    )
    ratios = [ratio for env in envs for ratio in reliance_ratios(env)]
    relied_on = sum(ratio > most_reliance for ratio in ratios) / len(ratios) if ratios else 0.0
    return {"fossils": fossilized / len(envs), "rolled_back": rolled_back / len(envs), "reliance": relied_on}


def reliance_ratios(env: "HostEnv") -> Iterable[float]:
    """Yield each blended seed's contribution over the host's improvement since the seed was germinated."""
    for slot, record, before in zip(env.slots, env.records, env.accuracy_at_germination, strict=True):
        if slot.blended and record.contribution is not None and math.isfinite(record.contribution):
            improvement = 100.0 * (env.history.accuracy[-1] - before)
            large = record.contribution >= MIN_RELIED_CONTRIBUTION_POINTS
            yield record.contribution / max(improvement, MIN_IMPROVEMENT_POINTS) if large else 0.0


def state_rms(state: Iterable[Tensor]) -> dict[str, float]:
    """Return the root mean square of a recurrent state, parts of [N, width]; nothing for a policy without memory.

    It takes one transfer from the device.
    """
    parts = [part for part in state if part.numel()]
    if not parts:
        return {}
    return {"state_rms": torch.stack([part.float().square().mean() for part in parts]).mean().sqrt().item()}
