"""What counts as an anomaly: settings, and the table of rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """From where on a number is out of bounds, and for how long it must be."""

    warning: float
    """From here on it is worth a warning."""

    critical: float | None = None
    """From here on it is critical. None: never."""

    updates: int = 1
    """PPO updates in a row that it must be out of bounds before the anomaly is raised."""

    clear: int = 3
    """PPO updates in a row that it must be back within bounds before the anomaly is cleared."""

    def __post_init__(self) -> None:
        for name in ("updates", "clear"):
            if getattr(self, name) < 1:
                raise ValueError(f"anomalies: {name} must be at least 1 PPO update, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig:
    """When the course of a run counts as abnormal. What each rule means: docs/reference/anomalies.md."""

    enabled: bool = True
    """Look for anomalies after every PPO update."""

    ratio_high: Bounds = Bounds(warning=5.0, critical=20.0)
    """Largest probability ratio of an update."""

    ratio_low: Bounds = Bounds(warning=0.1, critical=0.02)
    """Least probability ratio of an update."""

    kl: Bounds = Bounds(warning=0.1, critical=0.5)
    """KL divergence by which an update moved the policy."""

    explained_variance: Bounds = Bounds(warning=0.0, critical=-0.5, updates=5)
    """Variance of returns that the critic explains, beyond the floor of `explained_variance_floors`."""

    explained_variance_floors: list[tuple[float, float]] | None = None
    """Share of training and the least explained variance until then. None: -0.5 until a tenth, -0.2 until a quarter,
    0 until three quarters, and 0.1 after that."""

    entropy: Bounds = Bounds(warning=0.3, critical=0.1, updates=3)
    """Entropy of a head over the decisions in which it had a choice, relative to that of an even choice. Times the
    share of training that is left, for in the end a policy may have made up its mind."""

    least_freedom: float = 0.01
    """A head that had a choice in a smaller share of decisions than this is not looked at."""

    grad_norm_high: Bounds = Bounds(warning=2.0, critical=5.0, updates=3)
    """Norm of the policy's gradient over its running mean."""

    grad_norm_low: Bounds = Bounds(warning=0.5, critical=0.1, updates=3)
    """Norm of the policy's gradient over its running mean."""

    grad_norm_decay: float = 0.99
    """Share of the past that one update keeps in that running mean."""

    state_high: Bounds = Bounds(warning=10.0, critical=100.0)
    """Root mean square of the LSTM's state at the end of an episode; not a number is critical, too."""

    state_low: Bounds = Bounds(warning=1e-6, critical=1e-9)
    """Root mean square of the LSTM's state at the end of an episode."""

    stale_state: Bounds = Bounds(warning=1e-4, critical=1e-3)
    """Largest deviation of a probability ratio from 1 before the first step of an update."""

    frozen_policy: Bounds = Bounds(warning=1e-6, critical=1e-6, updates=2)
    """Change of the policy's weights in an update, relative to them."""

    ratio_one: Bounds = Bounds(warning=1e-5, updates=2)
    """Largest deviation of a probability ratio from 1 in a whole update, of a policy that does change."""

    waiting: Bounds = Bounds(warning=0.95, critical=0.99, updates=3)
    """Share of WAIT among the decisions in which something else was possible, while next to nothing is fossilized."""

    least_fossils: float = 0.1
    """Seeds fossilized in an episode from which on WAIT may be all that is left to do."""

    dead_seeds: Bounds = Bounds(warning=0.5, critical=0.9)
    """Share of a blueprint's seeds that have had no gradient since they were germinated."""

    least_seeds: int = 5
    """A blueprint with fewer seeds in a rollout than this is not looked at."""

    gradient_health: Bounds = Bounds(warning=0.6, critical=0.3)
    """Mean over hosts and ticks of 1 - 0.5·share(norm < 1e-7) - 0.8·share(norm > 5) of their gradients."""

    rolled_back: Bounds = Bounds(warning=0.25, critical=0.5)
    """Share of hosts that the Governor rolled back or gave up."""

    reliance: Bounds = Bounds(warning=0.25, critical=0.5, updates=2)
    """Share of blended and kept seeds on which their host hangs, as `most_reliance` says."""

    most_reliance: float = 5.0
    """A host hangs on a seed if that contributes more than so many times what the host has gained since it was
    germinated."""

    memory: Bounds = Bounds(warning=0.85, critical=0.95)
    """Share of the device's memory that is in use; on a GPU the most that has been."""

    def __post_init__(self) -> None:
        for name in ("least_freedom", "grad_norm_decay"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"anomalies.{name} must lie in [0, 1), got {getattr(self, name)}")
        if self.least_seeds < 1:
            raise ValueError(f"anomalies.least_seeds must be at least 1, got {self.least_seeds}")
        ends = [until for until, _ in self.floors]
        if not ends or ends != sorted(ends) or ends[-1] < 1.0:
            raise ValueError(
                f"anomalies.explained_variance_floors must go up to the whole of training, 1.0, in order; got {ends}"
            )
        for rule in RULES:
            bounds = self.bounds(rule)
            if bounds.critical is not None and rule.beyond(bounds.warning, bounds.critical):
                raise ValueError(
                    f"anomalies.{rule.name}: critical must not be reached before warning, which is {bounds.warning:g}; "
                    f"got {bounds.critical:g}"
                )

    @property
    def floors(self) -> list[tuple[float, float]]:
        """Those of explained variance."""
        if self.explained_variance_floors is not None:
            return self.explained_variance_floors
        return [(0.1, -0.5), (0.25, -0.2), (0.75, 0.0), (1.0, 0.1)]

    def bounds(self, rule: "Rule") -> Bounds:
        """Those of a rule: the field of its name."""
        return getattr(self, rule.name)


class Limits(NamedTuple):
    """Bounds as they are at one moment of training."""

    warning: float
    critical: float | None


def constant(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """The same in all of training."""
    return Limits(bounds.warning, bounds.critical)


def above_floor(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """Bounds beyond the floor of explained variance."""
    floor = next((floor for until, floor in config.floors if progress <= until), config.floors[-1][1])
    return Limits(floor + bounds.warning, None if bounds.critical is None else floor + bounds.critical)


def while_it_matters(bounds: Bounds, config: AnomalyConfig, progress: float) -> Limits:
    """Bounds that go to 0 as training comes to its end."""
    left = 1.0 - min(1.0, progress)
    return Limits(left * bounds.warning, None if bounds.critical is None else left * bounds.critical)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """An anomaly: what is looked at, and what it means. Its bounds are the field of AnomalyConfig with its name."""

    name: str
    metric: str
    """Key of what is measured; with `.*` at the end: of everything below it, each with a state of its own."""
    side: Literal["above", "below"]
    """Where it is out of bounds."""
    cause: str
    """What is likely the matter; `{what}` stands for what was found in place of the `*`."""
    settings: tuple[str, ...]
    """To look at."""
    limits: Callable[[Bounds, AnomalyConfig, float], Limits] = constant

    def beyond(self, value: float, limit: float) -> bool:
        return value > limit if self.side == "above" else value < limit

    def keys(self, metrics: dict[str, float]) -> list[str]:
        """Those of `metrics` that the rule looks at."""
        if not self.metric.endswith(".*"):
            return [self.metric] if self.metric in metrics else []
        return [key for key in metrics if key.startswith(self.metric.removesuffix("*"))]

    def called(self, key: str) -> str:
        """Name of the anomaly that `key` shows."""
        return self.name + key.removeprefix(self.metric.removesuffix(".*")) if self.metric.endswith(".*") else self.name


STEP = ("model.ppo.lr", "model.ppo.epochs", "model.ppo.target_kl")

RULES: tuple[Rule, ...] = (
    Rule(name="ratio_high", metric="ratio_high", side="above", cause="updates are too large", settings=STEP),
    Rule(name="ratio_low", metric="ratio_low", side="below", cause="updates are too large", settings=STEP),
    Rule(name="kl", metric="kl", side="above", cause="updates are too large", settings=STEP),
    Rule(
        name="explained_variance", metric="explained_variance", side="below", limits=above_floor,
        cause="the critic does not learn what episodes are worth",
        settings=("model.ppo.lr", "model.ppo.value_coefficient", "data.n_envs"),
    ),
    Rule(
        name="entropy", metric="entropy.*", side="below", limits=while_it_matters,
        cause="the head {what} always chooses the same: nothing else is tried any more",
        settings=("model.ppo.entropy", "model.ppo.entropy_weights", "model.ppo.lr"),
    ),
    Rule(
        name="grad_norm_high", metric="grad_norm_ratio", side="above",
        cause="the policy's gradient has grown: rewards or values have left their usual range",
        settings=("model.ppo.lr", "model.ppo.max_grad_norm", "data.env.governor.penalty"),
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
        name="state_low", metric="state_rms", side="below", cause="the LSTM remembers nothing",
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
        cause="updates do not change the policy: no learning rate, or they end before the first step",
        settings=("model.ppo.lr", "model.ppo.target_kl"),
    ),
    Rule(
        name="ratio_one", metric="ratio_spread", side="below",
        cause="each update is a single step, so that ratios are always 1 and nothing is proximal",
        settings=("model.ppo.epochs", "model.ppo.minibatches"),
    ),
    Rule(
        name="waiting", metric="waiting", side="above",
        cause="the policy has collapsed to WAIT: what it grows is not worth its price, or cannot learn",
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
        settings=("data.env.training.lr", "data.env.training.max_grad_norm", "data.env.governor"),
    ),
    Rule(
        name="reliance", metric="reliance", side="above",
        cause="hosts hang on seeds that have not made them better",
        settings=("data.env.reward.mode", "data.env.actions.tempos"),
    ),
    Rule(
        name="memory", metric="memory.share", side="above", cause="memory is nearly full",
        settings=("data.n_envs", "data.env.training.micro_batches", "data.env.training.batch_size"),
    ),
)  # fmt: skip
"""Every anomaly that there is."""
