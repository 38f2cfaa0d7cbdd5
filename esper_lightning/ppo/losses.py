"""Settings of PPO, advantage estimation and losses. T environment steps in a rollout, N environments."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.rollout_buffer import Rollout
from esper_lightning.runtime.ranks import ALONE, Ranks

CLIP = 0.2
"""Clip range of the probability ratio, as in the paper: beyond 1 ± this there is no incentive to move further."""

ADVANTAGE_FLOOR = 1e-3
"""Lower bound of the standard deviation by which advantages are divided: where all returns are alike, it is noise."""


@dataclass(frozen=True, kw_only=True)
class Anneal:
    """Schedule of a number that moves from `start` to `end` over a run."""

    start: float
    """Value at the first rollout."""

    end: float
    """Value at the last rollout and after it."""

    shape: Literal["linear", "geometric"] = "linear"
    """How the value changes from rollout to rollout: by equal differences (linear) or by equal factors (geometric)."""

    def __post_init__(self) -> None:
        if not min(self.start, self.end) >= 0.0:
            raise ValueError(f"ppo: start and end of a schedule must not be negative, got {self.start}, {self.end}")
        if self.shape == "geometric" and 0.0 in (self.start, self.end):
            raise ValueError("ppo: a geometric schedule never comes to 0, nor from there; use shape linear")

    def at(self, progress: float) -> float:
        """Return the value at `progress` 0 … 1 of the run."""
        progress = min(1.0, progress)
        if self.shape == "geometric":
            return float(self.start ** (1.0 - progress) * self.end**progress)
        return float(self.start + (self.end - self.start) * progress)


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
    """Environment steps of backpropagation through time; shorter is faster. None: whole rollouts."""

    value_coefficient: float = 0.5
    """Weight of the value loss."""

    value_clip: float | None = None
    """Clip range of the change of a normalised value in one update. None: no clipping."""

    entropy: Anneal = Anneal(start=0.03, end=0.003)
    """Weight of the entropy bonus."""

    gamma: float = 1.0
    """Discount per environment step. With 1 the return of an episode is the change of the objective."""

    gae_lambda: float = 0.95
    """GAE's lambda: 0 relies on values, 1 on sampled returns."""

    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the discounted sum of rewards."""

    max_grad_norm: float = 0.5
    """Largest norm of the policy's gradient; larger gradients are clipped."""

    target_kl: float | None = 0.02
    """Target of the mean KL divergence of an update, which ends early at 1.5 times this. None: no limit."""

    compile: bool = False
    """Run the layers of the policy ahead of its LSTM, and its action heads, through torch.compile in training."""

    horizon_is_end: bool = True
    """Treat the horizon as a terminal state, and not as a time limit, unless environments reset themselves."""

    def __post_init__(self) -> None:
        for name in ("epochs", "minibatches", "sequence"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"ppo.{name} must be at least 1, got {value}")
        for name in ("value_clip", "max_grad_norm", "target_kl"):
            if (value := getattr(self, name)) is not None and not value > 0.0:
                raise ValueError(f"ppo.{name} must be positive, got {value}")
        for name, least in (("gamma", 1e-9), ("gae_lambda", 0.0)):
            if not least <= getattr(self, name) <= 1.0:
                raise ValueError(f"ppo.{name} must lie between 0 and 1, got {getattr(self, name)}")
        if not self.value_coefficient >= 0.0:
            raise ValueError(f"ppo.value_coefficient must not be negative, got {self.value_coefficient}")


def gae(
    rewards: Tensor,  # [T, N]
    values: Tensor,  # [T, N]  V(s_t)
    next_values: Tensor,  # [T, N]  V(s_{t+1}), taken before any reset
    *,
    terminated: Tensor,  # [T, N]  bool: s_{t+1} is terminal and has value 0
    truncated: Tensor,  # [T, N]  bool: time limit; s_{t+1} keeps its value
    gamma: float,
    lam: float,
) -> tuple[Tensor, Tensor]:
    """Compute generalised advantage estimates (https://arxiv.org/abs/1506.02438) of all environments.

    Returns advantages and returns, both [T, N]. Credit never crosses the end of an episode.
    """
    delta = rewards + gamma * next_values * ~terminated - values
    ended = terminated | truncated
    advantages = torch.empty_like(rewards)
    running = torch.zeros_like(rewards[0])  # [N]
    for t in reversed(range(len(rewards))):
        running = delta[t] + gamma * lam * running * ~ended[t]
        advantages[t] = running
    return advantages, advantages + values


def discounted_sums(
    rewards: Tensor,  # [T, N]
    before: Tensor,  # [N]  sum before the first step
    *,
    starts: Tensor,  # [T, N]  bool: an episode begins with this step
    gamma: float,
) -> Tensor:
    """Compute R_t = r_t + gamma·R_{t-1}, the discounted sum of the rewards of an episode so far, [T, N]."""
    sums = torch.empty_like(rewards)
    for t in range(len(rewards)):
        before = rewards[t] + gamma * before * ~starts[t]
        sums[t] = before
    return sums


def normalise(advantages: Tensor, included: Tensor, *, ranks: Ranks = ALONE) -> tuple[Tensor, float]:
    """Normalise advantages to mean 0 and standard deviation 1 over the steps in `included` (bool, same shape).

    Mean and standard deviation are those of the included steps of all ranks. Returns the normalised advantages, 0 if
    fewer than two steps are included, and the standard deviation before the normalisation.
    """
    sample = advantages[included]
    if ranks.world > 1:
        count, mean, variance = ranks.moments(sample)
        deviation = variance.sqrt()
    else:
        count, mean = len(sample), sample.mean()
        deviation = sample.std(correction=0) if count else mean  # of no numbers torch warns
    if count < 2:
        return torch.zeros_like(advantages), 0.0
    return (advantages - mean) / deviation.clamp(min=ADVANTAGE_FLOOR), deviation.item()


def clipped_surrogate(ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return PPO's clipped policy loss per step."""
    return -torch.min(ratio * advantages, ratio.clamp(1.0 - CLIP, 1.0 + CLIP) * advantages)


def value_loss(values: Tensor, old: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Return half the squared error per step; with `clip`, at least the one of the value limited to `old` ± `clip`."""
    error = (values - targets).square()
    if clip is not None:
        error = torch.max(error, (old + (values - old).clamp(-clip, clip) - targets).square())
    return 0.5 * error


def kl_estimate(log_ratio: Tensor) -> Tensor:
    """Return (r - 1) - ln r, the estimator k3: unbiased, non-negative (http://joschu.net/blog/kl-approx.html)."""
    return torch.expm1(log_ratio) - log_ratio


class PPOTerms(NamedTuple):
    """Terms of one minibatch of all ranks: three scalars with a graph, then metrics without."""

    policy: Tensor  # mean policy loss
    value: Tensor  # mean value loss
    entropy: Tensor  # mean entropy, a sum over heads, to be maximised
    kl: Tensor  # KL divergence by the estimator k3
    kl_k1: Tensor  # KL divergence by the estimator k1, the mean of -ln r: unbiased, but noisier
    clip_fraction: Tensor  # fraction of steps with a ratio outside the clip range
    ratio_low: Tensor  # smallest ratio
    ratio_high: Tensor  # largest ratio
    head_entropy: Tensor  # [heads] mean normalised entropy of each head, over steps where it mattered and had a choice
    head_choice_share: Tensor  # [heads] fraction of the actions in which each head mattered and had a choice
    ratio: Tensor  # [T, n] probability ratios of this rank; NaN where the action was forced

    @property
    def ratio_error(self) -> Tensor:
        """Largest |ratio - 1|."""
        return torch.max(self.ratio_high - 1.0, 1.0 - self.ratio_low)


class TermSums(NamedTuple):
    """Terms of a minibatch with sums over steps in place of means, and the numbers of steps that make means of them."""

    terms: PPOTerms
    unforced: Tensor  # [] steps whose action was not forced: a forced one teaches the policy nothing
    active: Tensor  # [] steps whose episode had not ended


SUMMED_TERMS = ("policy", "value", "entropy", "kl", "kl_k1", "clip_fraction")  # scalars that are means over steps


def ppo_terms(policy: Policy, minibatch: Rollout, config: PPOConfig, ranks: Ranks = ALONE) -> PPOTerms:
    """Compute the terms of a minibatch of whole sequences, relative to the policy that acted.

    With several ranks `minibatch` is this rank's part, which may be empty; see `Ranks.sum_with_gradient`.
    """
    is_empty = minibatch.steps.log_prob.shape[1] == 0
    sums = empty_sums(policy, minibatch) if is_empty else sum_terms(policy, minibatch, config)
    if ranks.world > 1:
        sums = sum_over_ranks(sums, ranks)
    terms, unforced, active = sums.terms, sums.unforced.detach().clamp(min=1), sums.active.detach().clamp(min=1)
    choices = terms.head_choice_share.detach()  # [heads] number of steps with a choice
    return terms._replace(
        policy=terms.policy / unforced,
        value=terms.value / active,
        entropy=terms.entropy / unforced,
        kl=terms.kl.detach() / unforced,
        kl_k1=terms.kl_k1.detach() / unforced,
        clip_fraction=terms.clip_fraction.detach() / unforced,
        # Steps without a choice are excluded, because their entropy is 0 for any policy.
        head_entropy=terms.head_entropy.detach() / choices.clamp(min=1e-6),
        head_choice_share=choices / unforced,
    )


def empty_sums(policy: Policy, minibatch: Rollout) -> TermSums:
    """Return the sums of a minibatch without steps: this rank averages gradients of 0 with those of the others."""
    zero = torch.stack([(parameter * 0.0).sum() for parameter in policy.parameters()]).sum()
    constant = zero.detach()
    summed = {name: zero if name in ("policy", "value", "entropy") else constant for name in SUMMED_TERMS}
    ratios = {"ratio_low": constant + torch.inf, "ratio_high": constant - torch.inf, "ratio": minibatch.steps.log_prob}
    by_head = constant.expand(len(policy.heads.sizes))
    terms = PPOTerms(**summed, **ratios, head_entropy=by_head, head_choice_share=by_head)
    return TermSums(terms, unforced=constant, active=constant)


def sum_over_ranks(sums: TermSums, ranks: Ranks) -> TermSums:
    """Return the sums, smallest and largest ratios of all ranks, given those of this rank; `ratio` stays its own."""
    terms = sums.terms
    counts = [count.to(terms.policy.dtype) for count in (sums.unforced, sums.active)]
    scalars = torch.stack([*(getattr(terms, name) for name in SUMMED_TERMS), *counts])
    sections = [scalars, terms.head_entropy, terms.head_choice_share]
    total = ranks.sum_with_gradient(torch.cat(sections).double()).to(scalars.dtype)  # one reduction for all
    scalars, head_entropy, head_choice_share = total.split([len(section) for section in sections])
    *summed, unforced, active = scalars.unbind()
    negative_low, high = ranks.maximum(torch.stack([-terms.ratio_low, terms.ratio_high]))
    by_head = {"head_entropy": head_entropy, "head_choice_share": head_choice_share}
    total_by_name = dict(zip(SUMMED_TERMS, summed, strict=True)) | by_head
    return TermSums(terms._replace(**total_by_name, ratio_low=-negative_low, ratio_high=high), unforced, active)


def sum_terms(policy: Policy, minibatch: Rollout, config: PPOConfig) -> TermSums:
    """Compute the terms of this rank's minibatch, with sums over its steps in place of means."""
    steps = minibatch.steps
    distribution, values, _ = policy(
        steps.observation, minibatch.state, steps.masks, steps.starts, privileged=steps.privileged
    )
    unforced, active = ~steps.masks.forced, ~steps.masks.ended  # [T, n] bool
    log_ratio = distribution.log_prob(steps.action) - steps.log_prob
    ratio = log_ratio.exp()
    surrogate = clipped_surrogate(ratio, minibatch.advantages)
    error = value_loss(values, steps.values, minibatch.targets, clip=config.value_clip)
    entropy, relevance = distribution.entropy()  # [T, n, heads] both
    log_ratio = log_ratio.detach()
    terms = PPOTerms(
        policy=(surrogate * unforced).sum(),
        value=(error * active).sum(),
        entropy=((entropy * relevance).sum(-1) * unforced).sum(),
        kl=(kl_estimate(log_ratio) * unforced).sum(),
        kl_k1=(-log_ratio * unforced).sum(),
        clip_fraction=(((ratio.detach() - 1.0).abs() > CLIP) * unforced).sum(),
        ratio_low=ratio.detach().min(),
        ratio_high=ratio.detach().max(),
        head_entropy=(entropy.detach() * (unforced[..., None] * relevance.detach())).sum((0, 1)),
        head_choice_share=(unforced[..., None] * distribution.choice_probability().detach()).sum((0, 1)),
        ratio=torch.where(unforced, ratio.detach(), torch.nan),
    )
    return TermSums(terms, unforced.sum(), active.sum())


def update_metrics(
    terms: Sequence[PPOTerms], grad_norms: Sequence[Tensor], heads: Mapping[str, int], *, finite: Sequence[bool]
) -> dict[str, float]:
    """Return the metrics of one update by name, given terms of minibatches, norms of gradients and choices by head.

    `finite` is False for each gradient step that was skipped; its minibatch is left out of means, unless all were
    skipped. The last minibatch has no gradient step if `target_kl` ended the update there.
    """
    if any(finite):
        without_step = terms[len(finite) :]  # the last minibatch, or none
        terms = [*compress(terms, finite), *without_step]
        grad_norms = list(compress(grad_norms, finite))
    first, last = terms[0], terms[-1]  # first: the policy that acted; last: how far the update moved it

    def per_minibatch(name: str) -> Tensor:
        return torch.stack([getattr(minibatch, name) for minibatch in terms])

    metrics = {
        "loss.policy": per_minibatch("policy").mean(),
        "loss.value": per_minibatch("value").mean(),
        "entropy": per_minibatch("entropy").mean(),
        "kl": last.kl,
        "kl_k1": last.kl_k1,
        "clip_fraction": per_minibatch("clip_fraction").mean(),
        "first_ratio_error": first.ratio_error,
        "ratio_low": per_minibatch("ratio_low").min(),
        "ratio_high": per_minibatch("ratio_high").max(),
        "grad_norm": torch.stack(list(grad_norms)).mean() if grad_norms else torch.zeros_like(last.kl),
    }
    numbers = dict(zip(metrics, torch.stack(list(metrics.values())).tolist(), strict=True))
    for name, values in (("entropy", first.head_entropy), ("choice_share", first.head_choice_share)):
        by_head = zip(heads.items(), values.tolist(), strict=True)
        numbers |= {f"{name}.{head}": number for (head, choices), number in by_head if choices > 1}
    return numbers | {"minibatches": float(sum(finite)), "skipped": float(finite.count(False))}
