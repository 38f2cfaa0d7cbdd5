"""Anomalies of a training: a table of rules, and their application to the metrics of each PPO update.

A rule is raised after its metric was out of bounds for some updates in a row, and cleared after some within bounds, so
a metric that sits at its bound does not raise the same anomaly again and again.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from esper_lightning.telemetry.events import AnomalyChanged

CLEARING_UPDATES = 3
"""PPO updates in a row with the metric within bounds before an anomaly is cleared."""

LEAST_CHOICE_SHARE = 0.01
"""Least share of actions in which a head had a choice for its entropy to be checked."""

LEAST_FOSSILS = 0.1
"""Fossilized seeds per episode above which waiting is no anomaly: it may be all that is left to do."""

GRAD_NORM_DECAY = 0.99
"""Decay per update of the running mean of the policy's gradient norm."""

CRITIC_FLOORS = ((0.1, -0.5), (0.25, -0.2), (0.75, 0.0), (math.inf, 0.1))
"""(end, floor) pairs: the floor of explained variance until that share of training is over."""


def critic_floor(progress: float) -> float:
    """Return the least explained variance: more is asked of the critic as training goes on."""
    return next(floor for end, floor in CRITIC_FLOORS if progress <= end)


def fading_entropy(progress: float) -> float:
    """Return the least entropy of a head: a policy may make up its mind in the end."""
    return 0.3 * (1.0 - min(1.0, progress))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule for one anomaly: its metric, its bound and the likely cause."""

    name: str
    metric: str  # `.*` at the end stands for all metrics with that prefix, each with a state of its own
    side: Literal[">", "<"]  # on which the metric is out of bounds; one that is not finite always is
    bound: float | Callable[[float], float]  # or a function of the share of training that is over, 0 … 1
    updates: int = 1  # PPO updates in a row with the metric out of bounds before the anomaly is raised
    cause: str  # likely; `{what}` stands for the part of the metric's name that matched the `*`
    settings: tuple[str, ...]  # that the user should check


FROZEN_CHANGE = 1e-6
"""Relative change of the policy's weights in an update below which it does not change."""

LARGE_STEPS = "updates are too large"
STEP_SETTINGS = ("model.ppo.lr", "model.ppo.epochs", "model.ppo.target_kl")

RULES: tuple[Rule, ...] = (
    Rule(name="ratio_high", metric="ratio_high", side=">", bound=5.0, cause=LARGE_STEPS, settings=STEP_SETTINGS),
    Rule(name="ratio_low", metric="ratio_low", side="<", bound=0.1, cause=LARGE_STEPS, settings=STEP_SETTINGS),
    Rule(name="kl", metric="kl", side=">", bound=0.1, cause=LARGE_STEPS, settings=STEP_SETTINGS),
    Rule(
        name="explained_variance", metric="explained_variance", side="<", bound=critic_floor, updates=5,
        cause="the critic does not learn to predict returns",
        settings=("model.ppo.lr", "model.ppo.value_coefficient", "data.n_envs"),
    ),
    Rule(
        name="entropy", metric="entropy.*", side="<", bound=fading_entropy, updates=3,
        cause="the head {what} always makes the same choice: exploration has stopped",
        settings=("model.ppo.entropy", "model.ppo.lr"),
    ),
    Rule(
        name="grad_norm_high", metric="grad_norm_ratio", side=">", bound=2.0, updates=3,
        cause="the policy's gradient has grown: rewards or values have left their usual range",
        settings=("model.ppo.lr", "model.ppo.max_grad_norm", "Governor.rules.penalty"),
    ),
    Rule(
        name="grad_norm_low", metric="grad_norm_ratio", side="<", bound=0.5, updates=3,
        cause="the policy's gradient has shrunk: there is little left to learn, or nothing to learn from",
        settings=("model.ppo.entropy", "data.env.reward.mode"),
    ),
    Rule(
        name="state_high", metric="state_rms", side=">", bound=10.0, cause="the LSTM's state grows without bound",
        settings=("model.ppo.lr",),
    ),
    Rule(
        name="state_low", metric="state_rms", side="<", bound=1e-6, cause="the LSTM's state has vanished",
        settings=("model.policy.memory", "model.ppo.lr"),
    ),
    Rule(
        name="stale_state", metric="first_ratio_error", side=">", bound=1e-4,
        cause="the update sees another recurrent state, observation or mask than the policy that acted: an error in "
        "the program, or numbers too coarse",
        settings=("trainer.precision", "model.ppo.sequence"),
    ),
    Rule(
        name="frozen_policy", metric="weight_change", side="<", bound=FROZEN_CHANGE, updates=2,
        cause="updates do not change the policy: the learning rate is 0, or updates stop before the first step",
        settings=("model.ppo.lr", "model.ppo.target_kl"),
    ),
    Rule(
        name="ratio_one", metric="ratio_spread", side="<", bound=1e-5, updates=2,
        cause="each update is a single step, so that ratios are always 1 and nothing is proximal",
        settings=("model.ppo.epochs", "model.ppo.minibatches"),
    ),
    Rule(
        name="waiting", metric="waiting", side=">", bound=0.95, updates=3,
        cause="the policy has collapsed to WAIT: seeds are not worth their price, or cannot learn",
        settings=("data.env.objective.price", "data.env.actions.blueprints", "model.ppo.entropy"),
    ),
    Rule(
        name="dead_seeds", metric="dead_seeds.*", side=">", bound=0.5,
        cause="seeds of blueprint {what} get no gradient: dead at birth",
        settings=("data.env.actions.blueprints", "data.env.lifecycle.birth", "data.env.family"),
    ),
    Rule(
        name="gradient_health", metric="gradient_health", side="<", bound=0.6,
        cause="hosts' gradients vanish or explode",
        settings=("data.env.training.lr", "data.env.training.max_grad_norm"),
    ),
    Rule(
        name="rolled_back", metric="rolled_back", side=">", bound=0.25, cause="hosts diverge",
        settings=("data.env.training.lr", "data.env.training.max_grad_norm", "Governor.rules"),
    ),
    Rule(
        name="reliance", metric="reliance", side=">", bound=0.25, updates=2,
        cause="hosts rely on seeds that have not made them better",
        settings=("data.env.reward.mode", "data.env.actions.tempos"),
    ),
    Rule(
        name="memory", metric="memory.share", side=">", bound=0.85, cause="memory is nearly full",
        settings=("data.n_envs", "data.env.training.micro_batches", "data.env.training.batch_size"),
    ),
)  # fmt: skip
"""Every rule for an anomaly."""


class AnomalyState(NamedTuple):
    """State of one anomaly."""

    raised: bool = False
    contradictions: int = 0
    """PPO updates in a row that contradict it: out of bounds while it is not raised, within bounds while it is."""
    occurred: bool = False
    """The anomaly was raised before, or is raised."""


def next_state(state: AnomalyState, out_of_bounds: bool, updates: int) -> AnomalyState:
    """Return the state after one more PPO update; an anomaly is raised after `updates` in a row."""
    if out_of_bounds == state.raised:
        return state._replace(contradictions=0)
    contradictions = state.contradictions + 1
    if contradictions < (CLEARING_UPDATES if state.raised else updates):
        return state._replace(contradictions=contradictions)
    return AnomalyState(not state.raised, occurred=True)


class AnomalyDetector:
    """Applies the rules to the metrics of successive PPO updates, but those that are to be ignored, by name."""

    def __init__(self, ignore: Iterable[str] = ()) -> None:
        names = [rule.name for rule in RULES]
        if unknown := [name for name in ignore if name not in names]:
            raise ValueError(f"Telemetry.ignore: no rule is called {unknown[0]!r}; rules are {', '.join(names)}")
        self.rules = [rule for rule in RULES if rule.name not in ignore]
        self.states: dict[str, AnomalyState] = {}  # by name of the anomaly
        # Decaying sums of the gradient norms, and of their weights: the quotient is the running mean.
        self.grad_norm_sum = self.grad_norm_weight = 0.0

    def observe(self, metrics: Mapping[str, float], *, tick: int, update: int, progress: float) -> list[AnomalyChanged]:
        """Return the anomalies that the metrics of a PPO update, counted from 1, raise or clear.

        A rule whose metric is missing keeps its state; `progress` is the share of training that is over, 0 … 1.
        """
        values = self._with_derived(metrics)
        changes = []
        for rule in self.rules:
            bound = rule.bound(progress) if callable(rule.bound) else rule.bound
            stem = rule.metric.removesuffix("*")
            for metric, value in values.items():
                if metric != stem and not (rule.metric.endswith(".*") and metric.startswith(stem)):
                    continue
                what = metric.removeprefix(stem)
                name = f"{rule.name}.{what}" if what else rule.name
                is_out = not math.isfinite(value) or (value > bound if rule.side == ">" else value < bound)
                before = self.states.get(name, AnomalyState())
                after = self.states[name] = next_state(before, is_out, rule.updates)
                if after.raised != before.raised:
                    level, cause = "raised" if after.raised else "cleared", rule.cause.format(what=what)
                    numbers, settings = {"value": value, "threshold": bound}, list(rule.settings)
                    change = AnomalyChanged(tick, update, name, level, **numbers, cause=cause, settings=settings)
                    changes.append(change)
        return changes

    def _with_derived(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics with those derived from several, without the entropy of heads that rarely had a choice."""
        values = dict(metrics)
        for name in metrics:
            kind, _, head = name.partition(".")
            if kind == "entropy" and head and metrics.get(f"choice_share.{head}", 1.0) < LEAST_CHOICE_SHARE:
                del values[name]
        if metrics.get("weight_change", 0.0) >= FROZEN_CHANGE and {"ratio_low", "ratio_high"} <= metrics.keys():
            values["ratio_spread"] = max(metrics["ratio_high"] - 1.0, 1.0 - metrics["ratio_low"])
        if {"op.WAIT", "fossils"} <= metrics.keys():
            values["waiting"] = metrics["op.WAIT"] if metrics["fossils"] <= LEAST_FOSSILS else 0.0
        norm = metrics.get("grad_norm")
        # The norm of an update that was stopped before its first optimizer step is 0.
        if norm and self.grad_norm_sum > 0.0:
            values["grad_norm_ratio"] = norm * self.grad_norm_weight / self.grad_norm_sum
        if norm is not None and math.isfinite(norm):
            rest = 1.0 - GRAD_NORM_DECAY
            self.grad_norm_sum = GRAD_NORM_DECAY * self.grad_norm_sum + rest * norm
            self.grad_norm_weight = GRAD_NORM_DECAY * self.grad_norm_weight + rest
        return values

    def state_dict(self) -> dict[str, Any]:
        states = {name: list(state) for name, state in self.states.items()}
        return {"states": states, "grad_norm": (self.grad_norm_sum, self.grad_norm_weight)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.states = {name: AnomalyState(*fields) for name, fields in state["states"].items()}
        self.grad_norm_sum, self.grad_norm_weight = state["grad_norm"]
