"""A vector environment of the hosts of several tasks. N environments in all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.governor.judge import GovernorConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_pool import HostPool, PoolMetrics, StepResult
from esper_lightning.envs.spaces.actions import Action, Masks
from esper_lightning.envs.vector_env import Observation
from esper_lightning.runtime.machine import PhaseClock


class MixedPool:
    """Pools of different tasks, one task per pool, joined into one vector environment.

    Args:
        pools: Pool of each task by name. All have the same `SharedSpace`, horizon, reward and action choices.

    Attributes:
        privileged: One-hot encoding of each host's task, [N, tasks], for the critic alone.
    """

    autoreset = False

    def __init__(self, pools: Mapping[str, HostPool]) -> None:
        self.pools = dict(pools)
        first, *further_pools = self.pools.values()
        assert all(pool.space == first.space and pool.feature_names == first.feature_names for pool in further_pools)
        self.config, self.device, self.space = first.config, first.device, first.space
        self.feature_names, self.horizon = first.feature_names, first.horizon
        self.clock: PhaseClock = first.clock
        for pool in further_pools:
            pool.clock = self.clock
        sizes = torch.tensor([pool.n_envs for pool in self.pools.values()])
        self.n_envs = int(sizes.sum())
        task_one_hot = torch.eye(len(sizes)).repeat_interleave(sizes, 0)
        self.privileged = task_one_hot.to(self.device)
        self.rows = first.rows
        self.observation = Observation(*self._concatenate(lambda pool: pool.observation))
        self.masks = Masks(*self._concatenate(lambda pool: pool.masks))
        self.masks_on_cpu = Masks(*self._concatenate(lambda pool: pool.masks_on_cpu))
        self.episode_starts = torch.cat([pool.episode_starts for pool in self.pools.values()])

    def _concatenate(self, get_record: Any) -> Iterator[Tensor]:
        """Concatenate each field of a record over all pools, into new storage."""
        return (torch.cat(fields) for fields in zip(*map(get_record, self.pools.values()), strict=True))

    def _pool_slices(self) -> Iterator[tuple[HostPool, slice]]:
        """Iterate over the pools with the slice of their host indices."""
        start = 0
        for pool in self.pools.values():
            yield pool, slice(start, start + pool.n_envs)
            start += pool.n_envs

    def _copy_from_pools(self) -> None:
        """Copy observations, masks and episode starts from the pools."""
        for pool, span in self._pool_slices():
            for targets, sources in (
                (self.observation, pool.observation),
                (self.masks, pool.masks),
                (self.masks_on_cpu, pool.masks_on_cpu),
                ((self.episode_starts,), (pool.episode_starts,)),
            ):
                for target, source in zip(targets, sources, strict=True):
                    target[span].copy_(source)

    @property
    def task_slices(self) -> dict[str, slice]:
        """Slice of the host indices of each task."""
        return {name: span for name, (_, span) in zip(self.pools, self._pool_slices(), strict=True)}

    @property
    def governor(self) -> GovernorConfig | None:
        """Rules by which all hosts are watched. None: they are not watched."""
        return next(iter(self.pools.values())).governor

    @property
    def envs(self) -> list[HostEnv]:
        return [env for pool in self.pools.values() for env in pool.envs]

    @property
    def executor_choice(self) -> str:
        """Description of the executor of each task."""
        return ", ".join(f"{name}: {pool.executor_choice}" for name, pool in self.pools.items())

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        for pool, span in self._pool_slices():
            pool.reset(rng_seeds[span])
        self._copy_from_pools()
        return self.observation

    def step(self, action: Action) -> StepResult:
        """Step all pools and join the results; see `HostPool.step`."""
        steps = [
            (pool.step(Action(*(part[span] for part in action))), span.start) for pool, span in self._pool_slices()
        ]
        self._copy_from_pools()
        results = [result for result, _ in steps]

        def joined(name: str) -> Tensor:
            return torch.cat([getattr(result, name) for result in results])

        def renumbered(name: str) -> list[Any]:
            return [one._replace(host=one.host + start) for result, start in steps for one in getattr(result, name)]

        return StepResult(
            action=Action(*(torch.cat(parts) for parts in zip(*(result.action for result in results), strict=True))),
            ops=joined("ops"),
            observation=self.observation,
            reward=joined("reward"),
            terminated=joined("terminated"),
            truncated=joined("truncated"),
            masks=self.masks,
            events=renumbered("events"),
            verdicts=renumbered("verdicts"),
            vetoes=renumbered("vetoes"),
            metrics=PoolMetrics(
                *(torch.cat(parts) for parts in zip(*(result.metrics for result in results), strict=True))
            ),
            terms={name: torch.cat([result.terms[name] for result in results]) for name in results[0].terms},
            refusals=[host for result in results for host in result.refusals],
        )

    def state_dict(self) -> dict[str, Any]:
        return {"envs": [env for pool in self.pools.values() for env in pool.state_dict()["envs"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of every pool; see `HostPool.load_state_dict`."""
        for pool, span in self._pool_slices():
            pool.load_state_dict({"envs": state["envs"][span]})
        self._copy_from_pools()
