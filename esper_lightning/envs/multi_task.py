"""A vector environment of the hosts of several tasks. N environments in all."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.actions import Action, Masks
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_pool import HostPool, StepResult
from esper_lightning.envs.vector_env import Observation
from esper_lightning.runtime.machine import PhaseClock


def join(parts: Sequence[Any]) -> Any:
    """Join records of several pools: tensors and lists by concatenation, dicts and other records field by field."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, list):
        return [element for part in parts for element in part]
    if isinstance(first, dict):
        return {name: join([part[name] for part in parts]) for name in first}
    return type(first)(*map(join, zip(*parts, strict=True)))


class MixedPool:
    """Pools of different tasks, one per task by name, joined into one vector environment.

    All have the same `SharedSpace`, horizon, reward and action choices.
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
        self.rows = first.rows
        pools_in_order = list(self.pools.values())
        # One-hot encoding of each host's task, then what each pool hides, in columns of its own; for the critic alone.
        hidden = [0 if pool.privileged is None else pool.privileged.shape[1] for pool in pools_in_order]
        one_hot = torch.eye(len(sizes)).repeat_interleave(sizes, 0)
        self.privileged = torch.cat([one_hot, torch.zeros(self.n_envs, sum(hidden))], 1).to(self.device)
        self._hidden = self.privileged[:, len(sizes) :].split(hidden, 1)  # views, one for each pool
        self.observation: Observation = join([pool.observation for pool in pools_in_order])
        self.masks: Masks = join([pool.masks for pool in pools_in_order])
        self.masks_on_cpu: Masks = join([pool.masks_on_cpu for pool in pools_in_order])
        self.episode_starts: Tensor = join([pool.episode_starts for pool in pools_in_order])

    def _pool_slices(self) -> Iterator[tuple[HostPool, slice]]:
        """Iterate over the pools with the slice of their host indices."""
        start = 0
        for pool in self.pools.values():
            yield pool, slice(start, start + pool.n_envs)
            start += pool.n_envs

    def _copy_from_pools(self) -> None:
        for (pool, span), hidden in zip(self._pool_slices(), self._hidden, strict=True):
            if pool.privileged is not None:
                hidden[span].copy_(pool.privileged)
            for targets, sources in (
                (self.observation, pool.observation),
                (self.masks, pool.masks),
                (self.masks_on_cpu, pool.masks_on_cpu),
                ((self.episode_starts,), (pool.episode_starts,)),
            ):
                for target, source in zip(targets, sources, strict=True):
                    target[span].copy_(source)

    @property
    def task_slices(self) -> dict[str, slice]:  # of the host indices
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
        return ", ".join(f"{name}: {pool.executor_choice}" for name, pool in self.pools.items())

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        for pool, span in self._pool_slices():
            pool.reset(rng_seeds[span])
        self._copy_from_pools()
        return self.observation

    def step(self, action: Action) -> StepResult:
        """Step all pools and join the results; see `HostPool.step`."""
        results = []
        for pool, span in self._pool_slices():
            result = pool.step(Action(*(part[span] for part in action)))
            renumbered = {
                name: [record._replace(host=record.host + span.start) for record in getattr(result, name)]
                for name in ("events", "verdicts", "vetoes")
            }
            results.append(result._replace(**renumbered))
        self._copy_from_pools()
        stored = {"observation": self.observation, "masks": self.masks}
        names = [name for name in StepResult._fields if name not in stored]
        return StepResult(**stored, **{name: join([getattr(result, name) for result in results]) for name in names})

    def state_dict(self) -> dict[str, Any]:
        return {"envs": [env for pool in self.pools.values() for env in pool.state_dict()["envs"]]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for pool, span in self._pool_slices():
            pool.load_state_dict({"envs": state["envs"][span]})
        self._copy_from_pools()
