"""Observer of all hosts: collects per environment step the data from which metrics, events and figures are made."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure

from esper_lightning.growth.restoring import check_parts
from esper_lightning.telemetry.chronicle import GateWatch, contributions, rollbacks, seed_changes, vetoes
from esper_lightning.telemetry.events import Event
from esper_lightning.telemetry.figures import (
    accuracy_against_parameters,
    blueprint_scoreboard,
    growth_timeline,
    op_map,
)
from esper_lightning.telemetry.readings import GradientWatch
from esper_lightning.telemetry.scoreboard import Scoreboard
from esper_lightning.telemetry.trace import EpisodeTrace

if TYPE_CHECKING:
    from esper_lightning.envs import HostPool, StepResult
    from esper_lightning.envs.host_env import HostEnv

PARTS = ("gradients", "scoreboard", "trace", "gates")


class Observer:
    """Collects statistics of the hosts, their seeds, and the actions applied to them.

    Args:
        pool: The hosts; only numbers and names (hosts, slots, blueprints, horizon) are read from it.
    """

    def __init__(self, pool: "HostPool") -> None:
        space = pool.space
        self.slots, self.blueprints = space.slot, space.blueprint
        self.gradients = GradientWatch()
        self.scoreboard = Scoreboard(space.blueprint, space.slot, pool.n_envs)
        self.trace = EpisodeTrace(pool.horizon, pool.n_envs, len(space.slot))
        self.gates = GateWatch()

    def tick(self, step: "StepResult", envs: Sequence["HostEnv"], tick: int, everything: bool) -> list[Event]:
        """Process one environment step and return its events.

        Args:
            step: Result of the step.
            envs: The hosts, after the step.
            tick: Number of the step, counted from the start of the run.
            all_events: Also return the events of seeds and gates, not only rollbacks and vetoes.
        """
        self.gradients.tick(envs)
        self.scoreboard.tick(step, envs)
        self.trace.tick(step, envs)
        told = [*rollbacks(step, tick), *vetoes(step, tick)]
        if everything:
            told = [*seed_changes(step, tick), *self.gates.tick(step, envs, tick), *contributions(envs, tick), *told]
        return told

    def figures(self, step: "StepResult") -> dict[str, Figure]:
        """Return the figures of the finished episode by tag; if a part was not observed, only those without history."""
        final = (part.numpy() for part in (step.metrics.accuracy, step.metrics.parameters, step.metrics.objective))
        found = {
            "figures/hosts": accuracy_against_parameters(*final),
            "figures/blueprints": blueprint_scoreboard(self.scoreboard.run, self.blueprints, self.slots),
        }
        if self.trace.whole:
            found |= {"figures/growth": growth_timeline(self.trace, self.slots), "figures/ops": op_map(self.trace)}
        return found

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name).state_dict() for name in PARTS}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Raises ValueError if it is damaged."""
        check_parts("what is known of the hosts", state, PARTS)
        for name in PARTS:
            getattr(self, name).load_state_dict(state[name])
        saved = check_parts("the trace of the rollout", state["trace"], ("length",))["length"]
        if saved not in (0, len(self.trace.op)) and self.trace.length == 0:  # saved with another number of hosts
            self.scoreboard.forget_rollout()
