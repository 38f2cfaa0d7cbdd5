"""Anomaly detection: maps the metrics of one PPO update to the anomalies that it raises or clears.

Each rule has a state machine: quiet → raised (a warning, or critical) → cleared. A change of state needs several
updates in a row, so a metric that sits at its bound does not raise the same anomaly again and again.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from esper_lightning.telemetry.anomaly_rules import RULES, AnomalyConfig, Bounds, Limits, Rule

LEVELS = ("quiet", "warning", "critical")
"""Names of the levels of an anomaly, by level 0 … 2."""


class Anomaly(NamedTuple):
    """A change of an anomaly's level."""

    name: str
    level: str
    """New level of the anomaly: `warning`, `critical`, or `cleared`."""
    value: float
    threshold: float
    """Bound that the value crossed, in either direction."""
    update: int
    """Number of the PPO update, counted from 1."""
    cause: str
    settings: tuple[str, ...]

    def __str__(self) -> str:
        """Return `anomaly kl: warning at update 7: 0.13, bound 0.1: updates are too large; look at model.ppo.lr, …`."""
        if self.level == "cleared":
            return f"anomaly {self.name}: cleared at update {self.update}: {self.value:.3g}, bound {self.threshold:.3g}"
        where = f"{self.level} at update {self.update}: {self.value:.3g}, bound {self.threshold:.3g}"
        return f"anomaly {self.name}: {where}: {self.cause}; look at {', '.join(self.settings)}"


class AnomalyState(NamedTuple):
    """State machine of one anomaly: its level, and lengths of the current runs of PPO updates."""

    level: int = 0
    """0: quiet, 1: warning, 2: critical."""
    updates_out_of_bounds: int = 0
    """Updates in a row with the metric out of bounds, critical or not."""
    updates_critical: int = 0
    """Updates in a row with the metric beyond the critical bound."""
    updates_in_bounds: int = 0
    """Updates in a row with the metric within bounds."""
    updates_not_critical: int = 0
    """Updates in a row with the metric not beyond the critical bound."""


def next_state(state: AnomalyState, rule: Rule, value: float, *, limits: Limits, bounds: Bounds) -> AnomalyState:
    """Return the state after one more PPO update. A value that is not finite is beyond every bound."""
    unknown = not math.isfinite(value)
    critical = limits.critical is not None and (unknown or rule.is_out_of_bounds(value, limits.critical))
    warned = unknown or critical or rule.is_out_of_bounds(value, limits.warning)
    runs = AnomalyState(
        level=state.level,
        updates_out_of_bounds=state.updates_out_of_bounds + 1 if warned else 0,
        updates_critical=state.updates_critical + 1 if critical else 0,
        updates_in_bounds=0 if warned else state.updates_in_bounds + 1,
        updates_not_critical=0 if critical else state.updates_not_critical + 1,
    )
    level = state.level
    if runs.updates_critical >= bounds.updates:
        level = 2
    elif runs.updates_out_of_bounds >= bounds.updates and level == 0:
        level = 1
    elif runs.updates_in_bounds >= bounds.clear:
        level = 0
    elif warned and runs.updates_not_critical >= bounds.clear and level == 2:
        level = 1
    return runs._replace(level=level)


def rule_inputs(metrics: Mapping[str, float], config: AnomalyConfig) -> dict[str, float]:
    """Add `ratio_spread` and `waiting`; drop the entropy of heads that rarely had a choice.

    A rule whose metric is left out keeps its state.
    """
    found = dict(metrics)
    for key in metrics:
        kind, _, head = key.partition(".")
        if kind == "entropy" and head and metrics.get(f"choice_share.{head}", 1.0) < config.least_choice_share:
            del found[key]
    changed = metrics.get("weight_change", 0.0) >= config.frozen_policy.warning
    if changed and {"ratio_low", "ratio_high"} <= metrics.keys():
        found["ratio_spread"] = max(metrics["ratio_high"] - 1.0, 1.0 - metrics["ratio_low"])
    if {"op.WAIT", "fossils"} <= metrics.keys():
        found["waiting"] = metrics["op.WAIT"] if metrics["fossils"] <= config.least_fossils else 0.0
    return found


class RunningMean(NamedTuple):
    """Exponential moving average, corrected for the bias of its first values."""

    total: float = 0.0
    weight: float = 0.0

    @property
    def value(self) -> float:
        return self.total / self.weight

    def updated(self, number: float, decay: float) -> "RunningMean":
        return RunningMean(decay * self.total + (1.0 - decay) * number, decay * self.weight + 1.0 - decay)


class AnomalyDetector:
    """Applies the anomaly rules to the metrics of successive PPO updates.

    Args:
        config: Bounds of the rules.
    """

    def __init__(self, config: AnomalyConfig) -> None:
        self.config = config
        self.states: dict[str, AnomalyState] = {}  # by name of the anomaly
        self.grad_norm = RunningMean()

    def observe(self, metrics: Mapping[str, float], update: int, progress: float) -> list[Anomaly]:
        """Process the metrics of one PPO update and return the anomalies that it raises or clears.

        Args:
            metrics: Values by name; see `Rule.metric`.
            update: Number of the update, counted from 1.
            progress: Share of training that is over, 0 … 1.
        """
        numbers = rule_inputs(metrics, self.config) | self._grad_norm_ratio(metrics)
        changes = []
        for rule in RULES:
            bounds = self.config.bounds(rule)
            limits = rule.limits(bounds, self.config, progress)
            for key in rule.matching_metrics(numbers):
                name, value = rule.anomaly_name(key), numbers[key]
                before = self.states.get(name, AnomalyState())
                after = self.states[name] = next_state(before, rule, value, limits=limits, bounds=bounds)
                if after.level != before.level:
                    crossed = max(before.level, after.level)
                    critical = limits.critical if crossed == 2 else None
                    # A resumed run may have dropped the critical bound that an earlier one has crossed.
                    threshold = limits.warning if critical is None else critical
                    level = LEVELS[after.level] if after.level else "cleared"
                    what = key.removeprefix(rule.metric.removesuffix("*"))
                    cause = rule.cause.format(what=what)
                    changes.append(Anomaly(name, level, value, threshold, update, cause, rule.settings))
        return changes

    def _grad_norm_ratio(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the gradient norm divided by its running mean over the previous updates."""
        norm, mean = metrics.get("grad_norm"), self.grad_norm
        if norm is None:
            return {}
        if math.isfinite(norm):
            self.grad_norm = mean.updated(norm, self.config.grad_norm_decay)
        # An update that was stopped before its first optimizer step has no gradient.
        return {"grad_norm_ratio": norm / mean.value} if norm != 0.0 and mean.total > 0.0 else {}

    @property
    def levels(self) -> dict[str, int]:
        """Level (0: quiet, 1: warning, 2: critical) by name, for every anomaly whose metric was ever measured."""
        return {name: state.level for name, state in self.states.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state in types that `torch.load(weights_only=True)` accepts."""
        return {
            "watches": {name: list(state) for name, state in self.states.items()},
            "grad_norm": list(self.grad_norm),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state."""
        self.states = {name: AnomalyState(*counts) for name, counts in state["watches"].items()}
        self.grad_norm = RunningMean(*state["grad_norm"])
