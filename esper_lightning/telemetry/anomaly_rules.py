"""Rules for anomalies: their settings, and the table of rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Bounds of a metric, and the number of updates after which an anomaly is raised and cleared."""

    warning: float
    """Bound beyond which the metric is worth a warning."""

    critical: float | None = None
    """Bound beyond which the metric is critical. None: it never is."""

    updates: int = 1
    """PPO updates in a row with the metric out of bounds before the anomaly is raised."""

    clear: int = 3
    """PPO updates in a row with the metric within bounds before the anomaly is cleared."""

    def __post_init__(self) -> None:
        for name in ("updates", "clear"):
            if getattr(self, name) < 1:
                raise ValueError(f"anomalies: {name} must be at least 1 PPO update, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """Settings of the anomaly rules. docs/reference/anomalies.md explains each rule."""

    enabled: bool = True
    """Look for anomalies after every PPO update."""

    ratio_high: Bounds = Bounds(warning=5.0, critical=20.0)
    """Largest probability ratio of an update."""

    ratio_low: Bounds = Bounds(warning=0.1, critical=0.02)
    """Smallest probability ratio of an update."""

    kl: Bounds = Bounds(warning=0.1, critical=0.5)
    """KL divergence between the policies before and after an update."""

    explained_variance: Bounds = Bounds(warning=0.0, critical=-0.5, updates=5)
    """Share of the returns' variance that the critic explains, relative to the floor of `explained_variance_floors`."""

    explained_variance_floors: list[tuple[float, float]] | None = None
    """(end, minimum) pairs: `minimum` holds until the share `end` of training is over. None: -0.5 until a tenth, -0.2
    until a quarter, 0 until three quarters, and 0.1 after that."""

    entropy: Bounds = Bounds(warning=0.3, critical=0.1, updates=3)
    """Entropy of a head, averaged over the actions in which it had a choice, relative to that of an even choice. The
    bounds shrink with the share of training that is left, since a trained policy may be nearly deterministic."""

    least_choice_share: float = 0.01
    """Least share of actions in which a head had a choice, for its entropy to be checked."""

    grad_norm_high: Bounds = Bounds(warning=2.0, critical=5.0, updates=3)
    """Norm of the policy's gradient divided by its running mean, upper bounds."""

    grad_norm_low: Bounds = Bounds(warning=0.5, critical=0.1, updates=3)
    """Norm of the policy's gradient divided by its running mean, lower bounds."""

    grad_norm_decay: float = 0.99
    """Decay per update of the running mean of the policy's gradient norm."""

    state_high: Bounds = Bounds(warning=10.0, critical=100.0)
    """Root mean square of the LSTM's state at the end of an episode, upper bounds. NaN is critical, too."""

    state_low: Bounds = Bounds(warning=1e-6, critical=1e-9)
    """Root mean square of the LSTM's state at the end of an episode, lower bounds."""

    stale_state: Bounds = Bounds(warning=1e-4, critical=1e-3)
    """Largest deviation of a probability ratio from 1 before the first optimizer step of an update."""

    frozen_policy: Bounds = Bounds(warning=1e-6, critical=1e-6, updates=2)
    """Relative change of the policy's weights in an update."""

    ratio_one: Bounds = Bounds(warning=1e-5, updates=2)
    """Largest deviation of a probability ratio from 1 in a whole update, checked only if the weights change."""

    waiting: Bounds = Bounds(warning=0.95, critical=0.99, updates=3)
    """Share of WAIT among the actions in which another op was possible, while hardly any seed is fossilized."""

    least_fossils: float = 0.1
    """Fossilized seeds per episode above which `waiting` counts as 0: WAIT may be all that is left to do."""

    dead_seeds: Bounds = Bounds(warning=0.5, critical=0.9)
    """Share of a blueprint's seeds that have had no gradient since they were germinated."""

    least_seeds: int = 5
    """Least number of a blueprint's seeds in a rollout, for `dead_seeds` to be checked."""

    gradient_health: Bounds = Bounds(warning=0.6, critical=0.3)
    """Mean over hosts and ticks of 1 - 0.5·share(norm < 1e-7) - 0.8·share(norm > 5), over the gradients' tensors."""

    rolled_back: Bounds = Bounds(warning=0.25, critical=0.5)
    """Share of hosts that the Governor rolled back or gave up."""

    reliance: Bounds = Bounds(warning=0.25, critical=0.5, updates=2)
    """Share of blended and fossilized seeds on which their host relies too much, as defined by `most_reliance`."""

    most_reliance: float = 5.0
    """Ratio above which a host relies on a seed too much: the seed's contribution over the host's gain in accuracy
    since the seed was germinated."""

    memory: Bounds = Bounds(warning=0.85, critical=0.95)
    """Share of the device's memory that is in use; on a GPU its peak so far."""

    def __post_init__(self) -> None:
        for name in ("least_choice_share", "grad_norm_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"anomalies.{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.least_seeds < 1:
            raise ValueError(f"anomalies.least_seeds must be at least 1, got {self.least_seeds}")
        ends = [end for end, _ in self.floors]
        if not ends or ends != sorted(ends) or ends[-1] < 1.0:
            raise ValueError(
                f"anomalies.explained_variance_floors must go up to the whole of training, 1.0, in order; got {ends}"
            )
        for rule in RULES:
            bounds = self.bounds(rule)
            if bounds.critical is not None and rule.is_out_of_bounds(bounds.warning, bounds.critical):
                raise ValueError(
                    f"anomalies.{rule.name}: critical must not be reached before warning, which is {bounds.warning:g}; "
                    f"got {bounds.critical:g}"
                )

    @property
    def floors(self) -> list[tuple[float, float]]:
        """Floors as (end, minimum) pairs: `minimum` holds until the share `end` of training is over."""
        if self.explained_variance_floors is not None:
            return self.explained_variance_floors
        return [(0.1, -0.5), (0.25, -0.2), (0.75, 0.0), (1.0, 0.1)]

    def bounds(self, rule: "Rule") -> Bounds:
        """Return the bounds of a rule: the field with the rule's name."""
        return getattr(self, rule.name)


class Limits(NamedTuple):
    """Bounds in force at one moment of training."""

    warning: float
    critical: float | None


def constant_limits(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """Return limits that stay the same throughout training."""
    return Limits(bounds.warning, bounds.critical)


def limits_above_floor(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """Return limits relative to the present floor of explained variance."""
    floor = next((minimum for end, minimum in config.floors if progress <= end), config.floors[-1][1])
    return Limits(floor + bounds.warning, None if bounds.critical is None else floor + bounds.critical)


def decaying_limits(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """Return limits that fall linearly to 0 at the end of training."""
    left = 1.0 - min(1.0, progress)
    return Limits(left * bounds.warning, None if bounds.critical is None else left * bounds.critical)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Rule for one anomaly: its metric and likely cause. Its bounds are the field of `AnomalyConfig` with its name."""

    name: str
    metric: str
    """Name of the metric; `.*` at the end stands for all metrics with that prefix, each with a state of its own."""
    side: Literal["above", "below"]
    """Side of the bound on which the metric is out of bounds."""
    cause: str
    """Likely cause of the anomaly; `{what}` stands for the part of the metric's name that matched the `*`."""
    settings: tuple[str, ...]
    """Settings that the user should check."""
    limits: Callable[[Bounds, AnomalyConfig, float], Limits] = constant_limits
    """Function of bounds, config and share of training that returns the limits in force."""

    def is_out_of_bounds(self, value: float, limit: float) -> bool:
        """Return True if the value is out of bounds."""
        return value > limit if self.side == "above" else value < limit

    def matching_metrics(self, metrics: dict[str, float]) -> list[str]:
        """Return the names in `metrics` that the rule applies to."""
        if not self.metric.endswith(".*"):
            return [self.metric] if self.metric in metrics else []
        return [key for key in metrics if key.startswith(self.metric.removesuffix("*"))]

    def anomaly_name(self, key: str) -> str:
        """Return the name of the anomaly for the metric `key`."""
        return self.name + key.removeprefix(self.metric.removesuffix(".*")) if self.metric.endswith(".*") else self.name


STEP_SETTINGS = ("model.ppo.lr", "model.ppo.epochs", "model.ppo.target_kl")

RULES: tuple[Rule, ...] = (
    Rule(name="ratio_high", metric="ratio_high", side="above", cause="updates are too large", settings=STEP_SETTINGS),
    Rule(name="ratio_low", metric="ratio_low", side="below", cause="updates are too large", settings=STEP_SETTINGS),
    Rule(name="kl", metric="kl", side="above", cause="updates are too large", settings=STEP_SETTINGS),
    Rule(
        name="explained_variance", metric="explained_variance", side="below", limits=limits_above_floor,
        cause="the critic does not learn to predict returns",
        settings=("model.ppo.lr", "model.ppo.value_coefficient", "data.n_envs"),
    ),
    Rule(
        name="entropy", metric="entropy.*", side="below", limits=decaying_limits,
        cause="the head {what} always makes the same choice: exploration has stopped",
        settings=("model.ppo.entropy", "model.ppo.lr"),
    ),
    Rule(
        name="grad_norm_high", metric="grad_norm_ratio", side="above",
        cause="the policy's gradient has grown: rewards or values have left their usual range",
        settings=("model.ppo.lr", "model.ppo.max_grad_norm", "Governor.rules.penalty"),
    ),
    Rule(
        name="grad_norm_low", metric="grad_norm_ratio", side="below",
        cause="the policy's gradient has shrunk: there is little left to learn, or nothing to learn from",
        settings=("model.ppo.entropy", "data.env.reward.mode"),
    ),
    Rule(
        name="state_high", metric="state_rms", side="above", cause="the LSTM's state grows without bound",
        settings=("model.ppo.lr", "model.normalize.clip"),
    ),
    Rule(
        name="state_low", metric="state_rms", side="below", cause="the LSTM's state has vanished",
        settings=("model.policy.memory", "model.ppo.lr"),
    ),
    Rule(
        name="stale_state", metric="first_ratio_error", side="above",
        cause="the update sees another recurrent state, observation or mask than the policy that acted: an error in "
        "the program, or numbers too coarse",
        settings=("trainer.precision", "model.ppo.sequence"),
    ),
    Rule(
        name="frozen_policy", metric="weight_change", side="below",
        cause="updates do not change the policy: the learning rate is 0, or updates stop before the first step",
        settings=("model.ppo.lr", "model.ppo.target_kl"),
    ),
    Rule(
        name="ratio_one", metric="ratio_spread", side="below",
        cause="each update is a single step, so that ratios are always 1 and nothing is proximal",
        settings=("model.ppo.epochs", "model.ppo.minibatches"),
    ),
    Rule(
        name="waiting", metric="waiting", side="above",
        cause="the policy has collapsed to WAIT: seeds are not worth their price, or cannot learn",
        settings=("data.env.objective.price", "data.env.actions.blueprints", "model.ppo.entropy"),
    ),
    Rule(
        name="dead_seeds", metric="dead_seeds.*", side="above",
        cause="seeds of blueprint {what} get no gradient: dead at birth",
        settings=("data.env.actions.blueprints", "data.env.lifecycle.birth", "data.env.family"),
    ),
    Rule(
        name="gradient_health", metric="gradient_health", side="below",
        cause="hosts' gradients vanish or explode",
        settings=("data.env.training.lr", "data.env.training.max_grad_norm"),
    ),
    Rule(
        name="rolled_back", metric="rolled_back", side="above", cause="hosts diverge",
        settings=("data.env.training.lr", "data.env.training.max_grad_norm", "Governor.rules"),
    ),
    Rule(
        name="reliance", metric="reliance", side="above",
        cause="hosts rely on seeds that have not made them better",
        settings=("data.env.reward.mode", "data.env.actions.tempos"),
    ),
    Rule(
        name="memory", metric="memory.share", side="above", cause="memory is nearly full",
        settings=("data.n_envs", "data.env.training.micro_batches", "data.env.training.batch_size"),
    ),
)  # fmt: skip
"""Every rule for an anomaly."""
