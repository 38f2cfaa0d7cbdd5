"""The PPO objective, recurrent: whole sequences go through the policy again. T steps, n environments."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper_lightning.ppo.buffer import Rollout
from esper_lightning.tamiyo.policy import Policy


@dataclass(frozen=True, kw_only=True)
class Anneal:
    """A number that moves from `start` to `end` over a run."""

    start: float
    """Value at the first rollout."""

    end: float
    """Value at the last rollout, and after it."""

    shape: Literal["linear", "geometric"] = "linear"
    """On its way it changes by equal differences, or by equal ratios: those soon leave a large start, and take their
    time with what is small."""

    def at(self, progress: float) -> float:
        """Value at `progress` 0 … 1 of the run."""
        done = min(1.0, progress)
        if self.shape == "geometric":
            return float(self.start ** (1.0 - done) * self.end**done)
        return float(self.start + (self.end - self.start) * done)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Proximal policy optimisation (https://arxiv.org/abs/1707.06347)."""

    lr: Anneal = Anneal(start=1e-3, end=1e-4)
    """Learning rate of Adam."""

    epochs: int = 6
    """Passes over a rollout. With one, the ratio is always 1 and nothing is proximal."""

    minibatches: int = 4
    """Parts of a rollout, by environment (or sequence), that one pass is made of."""

    sequence: int | None = None
    """Ticks that the gradient of an LSTM goes back: each such part of a rollout is a sequence of its own, which begins
    with the state that was remembered there. Shorter is faster. None: whole rollouts."""

    clip: float = 0.2
    """Most that the probability ratio may usefully move from 1."""

    value_coefficient: float = 0.5
    """Weight of the value loss."""

    value_clip: float | None = None
    """Most that a normalised value may usefully move in one update. None: no limit."""

    entropy: Anneal = Anneal(start=0.03, end=0.003)
    """Weight of the entropy bonus."""

    entropy_weights: dict[str, float] | None = None
    """Weight of each head's entropy in the bonus, by name (op, slot, blueprint, tempo …). None: 1 for all."""

    gamma: float = 1.0
    """Discount per tick. 1: the reward of an episode is the change of the objective, whenever it comes."""

    gae_lambda: float = 0.95
    """Trust in values (0) against sampled returns (1)."""

    advantage_floor: float = 1e-3
    """Least deviation of advantages that normalisation assumes."""

    max_grad_norm: float = 0.5
    """The policy's gradient is clipped to this norm."""

    target_kl: float | None = 0.02
    """KL divergence by which an update should move the policy, on average. None: no limit."""

    kl_slack: float = 1.5
    """An update ends early at this multiple of the KL target: it is a mean to be met, not a bound."""

    adam_eps: float = 1e-5
    """Adam's epsilon: larger than usual, because PPO's gradients get small and its steps must not grow for it."""

    horizon_is_end: bool = True
    """Whether the objective is defined at the horizon (a terminal state) or goes on beyond it (a time limit).
    Environments whose episodes do not end with the rollout say themselves which it is."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"ppo.{name} must be at least 1, got {getattr(self, name)}")
        if self.sequence is not None and self.sequence < 1:
            raise ValueError(f"ppo.sequence must be at least 1 tick, got {self.sequence}")
        if not (0.0 < self.gamma <= 1.0 and 0.0 <= self.gae_lambda <= 1.0):
            raise ValueError(
                f"ppo: gamma must lie in (0, 1] and gae_lambda in [0, 1], got {self.gamma}, {self.gae_lambda}"
            )
        for name in ("value_coefficient", "lr.start", "lr.end", "entropy.start", "entropy.end"):
            value = attrgetter(name)(self)
            if not 0.0 <= value < math.inf:
                raise ValueError(f"ppo.{name} must {'be finite' if value > 0.0 else 'not be negative'}, got {value}")
        for name in ("lr", "entropy"):
            anneal = getattr(self, name)
            if anneal.shape == "geometric" and not (anneal.start > 0.0 and anneal.end > 0.0):
                raise ValueError(f"ppo.{name}.shape geometric never comes to 0, nor from there: use linear")
        for name in ("clip", "max_grad_norm", "target_kl", "kl_slack", "value_clip", "advantage_floor", "adam_eps"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < math.inf:
                raise ValueError(f"ppo.{name} must be {'finite' if value > 0.0 else 'positive'}, got {value}")

    def check_heads(self, heads: Iterable[str]) -> None:
        """Raises ValueError if a weight is meant for a head that is none of these."""
        unknown = set(self.entropy_weights or ()) - set(heads)
        if unknown:
            raise ValueError(f"ppo.entropy_weights names unknown heads {sorted(unknown)}; there are {', '.join(heads)}")


class PPOTerms(NamedTuple):
    """Of one minibatch; scalars with a graph first, then what is only watched."""

    policy: Tensor
    value: Tensor
    entropy: Tensor  # weighted sum over heads, to be maximised
    head_entropy: Tensor  # [heads of the policy] mean of each, normalised, where it mattered and had a choice
    head_freedom: Tensor  # [heads of the policy] share of the decisions where it mattered and had a choice
    kl: Tensor  # by the estimator k3
    kl_k1: Tensor  # by the mean of -ln r: unbiased, and noisier
    clip_fraction: Tensor
    ratio_error: Tensor  # largest |ratio - 1|
    ratio_low: Tensor  # least ratio
    ratio_high: Tensor  # largest ratio
    ratio: Tensor  # [T, n] all of them; not a number where a step was forced

    def total(self, value_coefficient: float, entropy_coefficient: float) -> Tensor:
        """The loss to minimise."""
        return self.policy + value_coefficient * self.value - entropy_coefficient * self.entropy


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    """Mean of `x` over the True places of `where`; 0 if there are none."""
    return (x * where).sum() / where.sum().clamp(min=1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """PPO's pessimistic policy loss, per step."""
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


def value_loss(values: Tensor, old: Tensor, targets: Tensor, clip: float | None) -> Tensor:
    """Half the squared error, per step; with `clip`, the worse of it and that of the value moved by at most `clip`."""
    error = (values - targets).square()
    if clip is not None:
        error = torch.max(error, (old + (values - old).clamp(-clip, clip) - targets).square())
    return 0.5 * error


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """(r - 1) - ln r: unbiased, never negative, low variance (http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(log_ratio) - log_ratio


def ppo_terms(policy: Policy, rollout: Rollout, config: PPOConfig) -> PPOTerms:
    """Runs the policy over a minibatch of whole sequences again and compares it with the one that acted."""
    seen = (rollout.observation, rollout.state, rollout.masks, rollout.starts, rollout.privileged)
    distribution, values, _ = policy(*seen)
    learned = ~rollout.masks.forced  # a forced step was no decision
    log_ratio = distribution.log_prob(rollout.action) - rollout.log_prob
    ratio = log_ratio.exp()
    surrogate = clipped_surrogate(ratio, rollout.advantages, config.clip)
    entropy, share = distribution.entropy()  # [T, n, heads] both
    weights = config.entropy_weights or {}
    per_head = torch.tensor([weights.get(head, 1.0) for head in distribution.heads], device=ratio.device)
    with torch.no_grad():
        kl = masked_mean(kl_estimate(log_ratio), learned)
        kl_k1 = masked_mean(-log_ratio, learned)
        clipped = masked_mean((ratio - 1.0).abs() > config.clip, learned)
        steps = learned[..., None] * share
        free = (learned[..., None] * distribution.freedom()).sum((0, 1))
        # Where there is no choice the entropy is 0, whatever the policy: such steps say nothing of it.
        head_entropy = (entropy * steps).sum((0, 1)) / free.clamp(min=1e-6)
        ratio_low, ratio_high = ratio.aminmax()
    return PPOTerms(
        policy=masked_mean(surrogate, learned),
        value=masked_mean(value_loss(values, rollout.values, rollout.targets, config.value_clip), ~rollout.masks.ended),
        entropy=masked_mean((entropy * share * per_head).sum(-1), learned),
        head_entropy=head_entropy,
        head_freedom=free / learned.sum().clamp(min=1),
        kl=kl,
        kl_k1=kl_k1,
        clip_fraction=clipped,
        ratio_error=torch.max(ratio_high - 1.0, 1.0 - ratio_low),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        ratio=torch.where(learned, ratio.detach(), torch.nan),
    )


def update_metrics(watched: Sequence[PPOTerms], grad_norms: Sequence[Tensor], heads: Sequence[str]) -> dict[str, float]:
    """What an update did, in numbers.

    Args:
        watched: Terms of every minibatch, also of one that was not learned from any more.
        grad_norms: Of those that were.
        heads: Names of the policy's heads.
    """

    def over(name: str) -> Tensor:
        return torch.stack([getattr(terms, name) for terms in watched])

    first, last = watched[0], watched[-1]
    found = {
        "loss.policy": over("policy").mean(),
        "loss.value": over("value").mean(),
        "entropy": over("entropy").mean(),
        "kl": last.kl,
        "kl_k1": last.kl_k1,
        "clip_fraction": over("clip_fraction").mean(),
        "first_ratio_error": first.ratio_error,
        "ratio_low": over("ratio_low").min(),
        "ratio_high": over("ratio_high").max(),
        "grad_norm": torch.stack(list(grad_norms)).mean() if grad_norms else torch.zeros_like(last.kl),
    }
    numbers = dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))
    for name, values in (("entropy", first.head_entropy), ("freedom", first.head_freedom)):
        numbers |= {f"{name}.{head}": number for head, number in zip(heads, values.tolist(), strict=True)}
    return numbers | {"minibatches": float(len(grad_norms))}
