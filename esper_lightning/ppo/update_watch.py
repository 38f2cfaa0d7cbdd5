"""Diagnostics of one PPO update on hosts: gradient norms of the policy, and transitions whose ratio exploded.

T steps of a rollout, N hosts.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs import HostPool
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.telemetry.events import RatioExploded

WORST_TRANSITIONS = 5
"""Largest number of transitions that are reported per update."""


class RatioRange(NamedTuple):
    """Range of probability ratios that are not worth a report."""

    low: float
    high: float


class UpdateWatch:
    """Watches the policy during one update. It changes nothing and draws no random numbers.

    Call `before_step` before every optimizer step, then `gradient_norms` and `exploded_ratios` after the update.

    Args:
        collector: Collector whose buffer holds the rollout of the update.
        pool: Its hosts.
    """

    def __init__(self, collector: RolloutCollector, pool: HostPool) -> None:
        self.collector = collector
        self.space = pool.space
        self._norms: list[Tensor] = []  # [parameters] for each optimizer step
        self._before: Tensor | None = None  # [T, N, heads] log-probabilities under the policy that acted

    @torch.no_grad()
    def before_step(self) -> None:
        """Measure the gradients of the next optimizer step; before the first one, also the policy that acted."""
        if self._before is None:
            self._before = self._log_probs()
        parameters = self.collector.policy.parameters()
        norms = [torch.linalg.vector_norm(p.new_zeros(()) if p.grad is None else p.grad) for p in parameters]
        self._norms.append(torch.stack(norms))

    def gradient_norms(self) -> dict[str, float]:
        """Return the gradient norm of each parameter before clipping, mean over the optimizer steps; only finite ones.

        Without an optimizer step there are none.
        """
        if not self._norms:
            return {}
        names = [name for name, _ in self.collector.policy.named_parameters()]
        means = torch.stack(self._norms).mean(0).tolist()
        return {name: norm for name, norm in zip(names, means, strict=True) if math.isfinite(norm)}

    @torch.no_grad()
    def exploded_ratios(self, usual: RatioRange, update: int) -> list[RatioExploded]:
        """Return the transitions whose ratio over the whole update lies furthest outside of `usual`, the worst first.

        A ratio that is not a number counts as the worst.

        Args:
            usual: Ratios that are not reported.
            update: Number of the update, from 1 on.
        """
        if self._before is None:
            return []
        after = self._log_probs()
        log_ratio = (after - self._before).sum(-1)  # [T, N]
        is_usual = (log_ratio.exp() >= usual.low) & (log_ratio.exp() <= usual.high)  # False for NaN
        distance = log_ratio.abs().nan_to_num(nan=math.inf, posinf=math.inf)
        distance = torch.where(is_usual | self.collector.buffer.masks.forced, -1.0, distance).flatten()
        worst = distance.topk(min(WORST_TRANSITIONS, len(distance)))
        steps_and_hosts = [divmod(place, log_ratio.shape[1]) for place in worst.indices[worst.values >= 0.0].tolist()]
        return [self._event(step, host, after, update=update) for step, host in steps_and_hosts]

    def _log_probs(self) -> Tensor:  # [T, N, heads]
        """Return the log-probabilities of the rollout's choices under the present policy, 0 where none mattered."""
        buffer = self.collector.buffer
        inputs = (buffer.observation, buffer.state, buffer.masks, buffer.starts, buffer.privileged)
        return self.collector.policy(*inputs)[0].head_log_probs(buffer.action)

    def _event(self, step: int, host: int, after: Tensor, *, update: int) -> RatioExploded:
        collector, buffer = self.collector, self.collector.buffer
        assert self._before is not None, "there is something to compare with"
        action = [int(head[step, host]) for head in buffer.action]
        names = collector.policy.heads.tables
        rows = zip(names, self._before[step, host].tolist(), after[step, host].tolist(), strict=True)
        # A head with log-probability 0 under both policies did not matter, or had a single choice.
        rows = [row for row in rows if any(row[1:])]
        return RatioExploded(
            tick=collector.ticks,
            update=update,
            host=host,
            action_tick=collector.ticks - buffer.ticks + step + 1,
            action=self.space.describe(action),
            heads=[head for head, _, _ in rows],
            before=[log_prob for _, log_prob, _ in rows],
            after=[log_prob for _, _, log_prob in rows],
        )
