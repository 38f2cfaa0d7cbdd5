"""PPO objective for recurrent policies, evaluated on whole sequences. T environment steps, n environments."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.ranks import Ranks
from esper_lightning.tamiyo.policy import Policy

LARGEST_SETTING = 1e30
"""Largest number of a setting: ten times as much, Adam's first step, must be finite in float32."""


@dataclass(frozen=True, kw_only=True)
class Anneal:
    """Schedule of a number that moves from `start` to `end` over a run."""

    start: float
    """Value at the first rollout."""

    end: float
    """Value at the last rollout and after it."""

    shape: Literal["linear", "geometric"] = "linear"
    """Change by equal differences (linear) or equal ratios (geometric) per rollout.

    Equal ratios leave a large start early and spend more of the run at small values."""

    def at(self, progress: float) -> float:
        """Return the value at `progress` 0 … 1 of the run."""
        done = min(1.0, progress)
        if self.shape == "geometric":
            return float(self.start ** (1.0 - done) * self.end**done)
        return float(self.start + (self.end - self.start) * done)


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """Settings of proximal policy optimisation (https://arxiv.org/abs/1707.06347)."""

    lr: Anneal = Anneal(start=1e-3, end=1e-4)
    """Learning rate of Adam."""

    epochs: int = 6
    """Passes over a rollout per update. With 1 pass and 1 minibatch the ratio is always 1."""

    minibatches: int = 4
    """Minibatches per pass: the environments (or sequences) of a rollout are divided into so many groups."""

    sequence: int | None = None
    """Environment steps of backpropagation through time: a rollout is split into sequences of this length.

    Each sequence begins with the stored recurrent state. Shorter is faster. None: whole rollouts."""

    clip: float = 0.2
    """Clip range of the probability ratio: beyond 1 ± this there is no incentive to move further."""

    log_ratio_clamp: float | None = None
    """Largest absolute log-ratio in the policy loss. A step beyond it has no gradient, so one action that has become
    much more likely cannot dominate a minibatch. None: no limit."""

    value_coefficient: float = 0.5
    """Weight of the value loss."""

    value_warmup: int = 0
    """Rollouts at the start of a run with a smaller weight of the value loss, which rises linearly to value_coefficient
    (n rollouts, from a share of 1 / (n + 1) on), so that an untrained critic moves the shared layers less. 0: none."""

    value_clip: float | None = None
    """Clip range of the change of a normalised value in one update. None: no clipping."""

    entropy: Anneal = Anneal(start=0.03, end=0.003)
    """Weight of the entropy bonus."""

    entropy_weights: dict[str, float] | None = None
    """Weight of each action head's entropy in the bonus, by name (op, slot, blueprint, tempo …). None: 1 for all."""

    entropy_floors: dict[str, float] | None = None
    """Floor of each action head's mean entropy, by name, in (0, 1]. 1 is an even choice, and steps without a choice are
    left out, as in the plots train/entropy. A mean below its floor is penalised. None: no floors."""

    entropy_floor_weight: float = 0.3
    """Weight of the sum of the heads' shortfalls below their entropy floors, constant throughout a run."""

    gamma: float = 1.0
    """Discount per environment step. With 1 the return of an episode is the change of the objective, whenever it
    comes."""

    gae_lambda: float = 0.95
    """GAE's lambda: 0 relies on values, 1 on sampled returns."""

    advantage_floor: float = 1e-3
    """Lower bound of the standard deviation by which advantages are divided."""

    max_grad_norm: float = 0.5
    """Largest norm of the policy's gradient; larger gradients are clipped."""

    target_kl: float | None = 0.02
    """Target of the mean KL divergence between the policies before and after an update. None: no limit."""

    kl_slack: float = 1.5
    """Multiple of the KL target at which an update ends early: above 1, as the target is a mean and not a bound."""

    adam_eps: float = 1e-5
    """Adam's epsilon, larger than usual, so that steps do not grow when PPO's gradients get small."""

    horizon_is_end: bool = True
    """Treat the horizon as a terminal state (the objective is defined there) and not as a time limit.

    Ignored for environments that reset themselves: they report termination and truncation of each episode."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"ppo.{name} must be at least 1, got {getattr(self, name)}")
        if self.sequence is not None and self.sequence < 1:
            raise ValueError(f"ppo.sequence must be at least 1 tick, got {self.sequence}")
        if self.value_warmup < 0:
            raise ValueError(f"ppo.value_warmup must not be negative, got {self.value_warmup}")
        if not (0.0 < self.gamma <= 1.0 and 0.0 <= self.gae_lambda <= 1.0):
            raise ValueError(
                f"ppo: gamma must lie in (0, 1] and gae_lambda in [0, 1], got {self.gamma}, {self.gae_lambda}"
            )
        for name in ("value_coefficient", "lr.start", "lr.end", "entropy.start", "entropy.end"):
            value = attrgetter(name)(self)
            if not 0.0 <= value <= LARGEST_SETTING:
                bound = f"be at most {LARGEST_SETTING:g}" if value > 0.0 else "not be negative"
                raise ValueError(f"ppo.{name} must {bound}, got {value}")
        for name in ("lr", "entropy"):
            anneal = getattr(self, name)
            if anneal.shape == "geometric" and not (anneal.start > 0.0 and anneal.end > 0.0):
                raise ValueError(f"ppo.{name}.shape geometric never comes to 0, nor from there: use linear")
        positive = ("clip", "max_grad_norm", "target_kl", "kl_slack", "value_clip", "advantage_floor", "adam_eps")
        for name in (*positive, "log_ratio_clamp", "entropy_floor_weight"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value <= LARGEST_SETTING:
                bound = f"at most {LARGEST_SETTING:g}" if value > 0.0 else "positive"
                raise ValueError(f"ppo.{name} must be {bound}, got {value}")
        # Log-ratio at which the clip range ends, on the side where it ends later.
        clip_end = max(math.log1p(self.clip), -math.log1p(-self.clip) if self.clip < 1.0 else 0.0)
        if self.log_ratio_clamp is not None and self.log_ratio_clamp <= clip_end:
            raise ValueError(
                f"ppo.log_ratio_clamp must exceed {clip_end:.3g}, where the clip range {self.clip} ends, "
                f"got {self.log_ratio_clamp}"
            )
        for head, floor in (self.entropy_floors or {}).items():
            if not 0.0 < floor <= 1.0:
                raise ValueError(f"ppo.entropy_floors must lie in (0, 1], got {floor} for {head}")

    def check_heads(self, heads: Iterable[str]) -> None:
        """Check the names in `entropy_weights` and `entropy_floors`. Raises ValueError if one is not in `heads`."""
        for setting in ("entropy_weights", "entropy_floors"):
            unknown = set(getattr(self, setting) or ()) - set(heads)
            if unknown:
                raise ValueError(f"ppo.{setting} names unknown heads {sorted(unknown)}; there are {', '.join(heads)}")

    def value_coefficient_at(self, rollout: int) -> float:
        """Return the weight of the value loss in rollout 0, 1, … of a run."""
        return self.value_coefficient * min(1.0, (rollout + 1) / (self.value_warmup + 1))


class PPOTerms(NamedTuple):
    """Loss terms of one minibatch: four scalars and the entropies of the heads with a graph, then metrics without."""

    policy: Tensor  # policy loss
    value: Tensor  # value loss
    entropy: Tensor  # weighted sum over heads, to be maximised
    floor_penalty: Tensor  # weighted shortfall below the entropy floors
    head_entropy: Tensor  # [heads] mean normalised entropy of each head, over steps where it mattered and had a choice
    head_choice_share: Tensor  # [heads] fraction of the actions in which each head mattered and had a choice
    kl: Tensor  # KL divergence by the estimator k3
    kl_k1: Tensor  # KL divergence by the estimator k1, the mean of -ln r: unbiased, but noisier
    clip_fraction: Tensor  # fraction of steps with a ratio outside the clip range
    ratio_error: Tensor  # largest |ratio - 1|
    ratio_low: Tensor  # smallest ratio
    ratio_high: Tensor  # largest ratio
    learned: Tensor  # number of steps whose action was not forced
    active: Tensor  # number of steps of episodes that had not ended
    ratio: Tensor  # [T, n] probability ratios; NaN where the action was forced

    def total(self, value_coefficient: float, entropy_coefficient: float) -> Tensor:
        """Return the loss to minimise."""
        loss = self.policy + value_coefficient * self.value - entropy_coefficient * self.entropy
        return loss + self.floor_penalty


def masked_mean(x: Tensor, where: Tensor) -> Tensor:
    """Return the mean of `x` where `where` is True; 0 if it is nowhere."""
    return (x * where).sum() / where.sum().clamp(min=1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, clip: float) -> Tensor:
    """Return PPO's clipped policy loss per step."""
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - clip, 1.0 + clip) * advantages)


def value_loss(values: Tensor, old: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Return half the squared error per step; with `clip`, the larger of it and that of the clipped value."""
    error = (values - targets).square()
    if clip is not None:
        error = torch.max(error, (old + (values - old).clamp(-clip, clip) - targets).square())
    return 0.5 * error


def entropy_shortfall(head_entropy: Tensor, is_free: Tensor, floors: Tensor) -> Tensor:
    """Return the sum over heads of max(0, floor - entropy), a scalar.

    Args:
        head_entropy: Mean normalised entropy of each head, [heads].
        is_free: Heads that ever had a choice, [heads] bool; the others have no entropy to raise.
        floors: Floors [heads]; 0: none.
    """
    return ((floors - head_entropy).clamp(min=0.0) * is_free).sum()


def floor_penalty(head_entropy: Tensor, free_steps: Tensor, heads: Sequence[str], *, config: PPOConfig) -> Tensor:
    """Return the weighted shortfall of the heads' entropies below their floors, a scalar; 0 without floors.

    Args:
        head_entropy: Mean normalised entropy of each head, [heads].
        free_steps: Number of steps in which each head had a choice, [heads].
        heads: Names of the heads.
        config: Settings with the floors.
    """
    floors = config.entropy_floors or {}
    if not floors:
        return head_entropy.new_zeros(())
    head_floors = torch.tensor([floors.get(head, 0.0) for head in heads], device=head_entropy.device)
    return config.entropy_floor_weight * entropy_shortfall(head_entropy, free_steps > 0.0, head_floors)


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return (r - 1) - ln r, the estimator k3: unbiased, non-negative (http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(log_ratio) - log_ratio


def ppo_terms(policy: Policy, rollout: Rollout, config: PPOConfig) -> PPOTerms:
    """Compute the loss terms of a minibatch of whole sequences, relative to the policy that acted."""
    hidden, _ = policy.encode(rollout.observation, rollout.state, rollout.starts)
    distribution, values = policy.decode(hidden, rollout.masks, rollout.privileged)
    unforced = ~rollout.masks.forced  # a forced action teaches the policy nothing
    log_ratio = distribution.log_prob(rollout.action) - rollout.log_prob
    ratio = log_ratio.exp()
    clamp = config.log_ratio_clamp
    clamped_ratio = ratio if clamp is None else log_ratio.clamp(-clamp, clamp).exp()
    surrogate = clipped_surrogate(clamped_ratio, rollout.advantages, config.clip)
    entropy, relevance = distribution.entropy()  # [T, n, heads] both
    weights = config.entropy_weights or {}
    head_weights = torch.tensor([weights.get(head, 1.0) for head in distribution.heads], device=ratio.device)
    with torch.no_grad():
        kl = masked_mean(kl_estimate(log_ratio), unforced)
        kl_k1 = masked_mean(-log_ratio, unforced)
        clip_fraction = masked_mean((ratio - 1.0).abs() > config.clip, unforced)
        relevant_steps = unforced[..., None] * relevance
        free_steps = (unforced[..., None] * distribution.choice_probability()).sum((0, 1))
        ratio_low, ratio_high = ratio.aminmax()
    # Steps without a choice are excluded, because their entropy is 0 for any policy.
    head_entropy = (entropy * relevant_steps).sum((0, 1)) / free_steps.clamp(min=1e-6)
    return PPOTerms(
        policy=masked_mean(surrogate, unforced),
        value=masked_mean(
            value_loss(values, rollout.values, rollout.targets, clip=config.value_clip), ~rollout.masks.ended
        ),
        entropy=masked_mean((entropy * relevance * head_weights).sum(-1), unforced),
        floor_penalty=floor_penalty(head_entropy, free_steps, distribution.heads, config=config),
        head_entropy=head_entropy,
        head_choice_share=free_steps / unforced.sum().clamp(min=1),
        kl=kl,
        kl_k1=kl_k1,
        clip_fraction=clip_fraction,
        ratio_error=torch.max(ratio_high - 1.0, 1.0 - ratio_low),
        ratio_low=ratio_low,
        ratio_high=ratio_high,
        learned=unforced.sum(),
        active=(~rollout.masks.ended).sum(),
        ratio=torch.where(unforced, ratio.detach(), torch.nan),
    )


MEANS_OF_LEARNED = ("policy", "entropy", "kl", "kl_k1", "clip_fraction")
"""Terms that are means over the steps whose action was not forced."""


def empty_terms(policy: Policy, minibatch: Rollout) -> PPOTerms:
    """Return the terms of a minibatch without environments: they count nothing, and all gradients are 0.

    A rank without environments in a minibatch takes part in the averaging of gradients with them.
    """
    zero = torch.stack([(parameter * 0.0).sum() for parameter in policy.parameters()]).sum()
    names = set(PPOTerms._fields) - {"head_entropy", "head_choice_share", "ratio_low", "ratio_high", "ratio"}
    heads, infinite = zero.expand(len(policy.heads.tables)), torch.full_like(zero, math.inf)
    return PPOTerms(
        **dict.fromkeys(names, zero),
        head_entropy=heads,
        head_choice_share=heads,
        ratio_low=infinite,
        ratio_high=-infinite,
        ratio=minibatch.log_prob,
    )


def terms_over_ranks(terms: PPOTerms, heads: Sequence[str], config: PPOConfig, *, ranks: Ranks) -> PPOTerms:
    """Return the terms of the minibatch of all ranks, alike on all of them, with the gradient of this rank's part.

    Args:
        terms: Terms of this rank's part of the minibatch.
        heads: Names of the heads.
        config: Settings of PPO.
        ranks: See `Ranks.sum_with_gradient`.
    """
    if ranks.world == 1:
        return terms
    learned, active, free = terms.learned, terms.active, terms.head_choice_share * terms.learned
    means = [getattr(terms, name) * learned for name in MEANS_OF_LEARNED]
    dtype = terms.value.dtype
    scalars = torch.stack([learned.to(dtype), active.to(dtype), terms.value * active, *means])
    sums = ranks.sum_with_gradient(torch.cat([scalars, free, terms.head_entropy * free]).double()).to(dtype)
    (learned, active, value, *means), free, entropies = sums.split([len(scalars), len(heads), len(heads)])
    head_entropy = entropies / free.clamp(min=1e-6)
    low, high = ranks.maximum(torch.stack([-terms.ratio_low, terms.ratio_high])) * torch.tensor([-1.0, 1.0]).to(free)
    return PPOTerms(
        **{name: mean / learned.clamp(min=1.0) for name, mean in zip(MEANS_OF_LEARNED, means, strict=True)},
        value=value / active.clamp(min=1.0),
        floor_penalty=floor_penalty(head_entropy, free, heads, config=config),
        head_entropy=head_entropy,
        head_choice_share=free / learned.clamp(min=1.0),
        ratio_error=torch.max(high - 1.0, 1.0 - low),
        ratio_low=low,
        ratio_high=high,
        learned=learned,
        active=active,
        ratio=terms.ratio,
    )


def update_metrics(
    minibatch_terms: Sequence[PPOTerms],
    grad_norms: Sequence[Tensor],
    heads: Mapping[str, int],
    *,
    finite: Sequence[bool],
) -> dict[str, float]:
    """Return the metrics of one update by name.

    Args:
        minibatch_terms: Terms of every minibatch, including the one at which the update ended early.
        grad_norms: Gradient norm of every minibatch that was not the one at which the update ended early.
        heads: Number of choices of each of the policy's heads. A head with one choice has no entropy.
        finite: False for each of these minibatches that was skipped. They are left out, unless all were skipped.
    """
    if any(finite):
        minibatch_terms = [*compress(minibatch_terms, finite), *minibatch_terms[len(finite) :]]
        grad_norms = list(compress(grad_norms, finite))

    def stacked(name: str) -> Tensor:
        return torch.stack([getattr(terms, name) for terms in minibatch_terms])

    first, last = minibatch_terms[0], minibatch_terms[-1]
    metrics = {
        "loss.policy": stacked("policy").mean(),
        "loss.value": stacked("value").mean(),
        "entropy": stacked("entropy").mean(),
        "kl": last.kl,
        "kl_k1": last.kl_k1,
        "clip_fraction": stacked("clip_fraction").mean(),
        "first_ratio_error": first.ratio_error,
        "ratio_low": stacked("ratio_low").min(),
        "ratio_high": stacked("ratio_high").max(),
        "grad_norm": torch.stack(list(grad_norms)).mean() if grad_norms else torch.zeros_like(last.kl),
    }
    numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
    for name, values in (("entropy", first.head_entropy), ("choice_share", first.head_choice_share)):
        by_head = zip(heads.items(), values.tolist(), strict=True)
        numbers |= {f"{name}.{head}": number for (head, choices), number in by_head if choices > 1}
    return numbers | {"minibatches": float(sum(finite))}
