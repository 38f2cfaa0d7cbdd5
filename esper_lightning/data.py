"""Data module that owns the environments; a Lightning batch is one tick."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from lightning import LightningDataModule
from rich.console import Console, RenderableType

from esper_lightning.checkpoint import check_schema
from esper_lightning.envs import HEADS, EnvConfig, HostFactory, HostPool, MixedPool
from esper_lightning.envs.places import share
from esper_lightning.envs.vector import VectorEnv
from esper_lightning.grounds import Ground, make_grounds, prepare
from esper_lightning.resuming import begin_rollout_with, saved_environments
from esper_lightning.tasks import Task

Made = TypeVar("Made")


class TickLoader:
    """Loader that yields the ticks 0 … horizon − 1 of a rollout.

    It has a length, so Lightning prefetches nothing. A torch DataLoader would draw a random number for each iterator.
    """

    def __init__(self, horizon: int) -> None:
        self.horizon = horizon
        self.position = 0
        self._start = 0

    def __len__(self) -> int:
        return self.horizon

    def __iter__(self) -> Iterator[int]:
        start, self._start = self._start, 0
        for tick in range(start, self.horizon):
            self.position = tick + 1
            yield tick

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position % self.horizon}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["position"]


def say(*parts: RenderableType) -> None:
    """Print status lines to the console."""
    for part in parts:
        Console().print(part, soft_wrap=isinstance(part, str))


class PolicyData(Protocol):
    """Interface of the data modules that `TamiyoModule` accepts: they own the environments the policy is trained in."""

    n_envs: int
    """Number of environments."""
    horizon: int
    """Environment steps in one rollout."""
    seed: int
    """RNG seed of the run."""
    pool: VectorEnv | None
    """The environments. None until they are built."""
    heads: Iterable[str]
    """Names of the components of an action."""

    def identity(self) -> dict[str, Any]:
        """Return the properties that a resumed run must share with the saved one, by setting name."""

    def settle(self, checkpoint: dict[str, Any]) -> None:
        """Adapt a checkpoint to this run before it is restored. Raises ValueError if that is impossible."""


class HostPoolData(LightningDataModule):
    """The hosts on which the policy is trained.

    Args:
        task: The task that hosts learn: data and measures.
        host: Class of the network that grows; it is given the shape of an input and the number of outputs.
        env: Settings of the environment: host training, the lifecycle of seeds, rewards, and the cost of growth.
        n_envs: Hosts trained side by side.
        seed: RNG seed of initial weights, the order of data, and exploration. The command line sets it to
            seed_everything.
        also: Further tasks, by name, whose hosts are trained at the same time. All hosts then name their slots place1,
            place2 …; hosts with fewer slots are padded with slots in which nothing can grow.
    """

    heads = HEADS

    def __init__(
        self,
        task: Task,
        host: HostFactory,
        env: EnvConfig = EnvConfig(),
        n_envs: int = 48,
        seed: int = 0,
        also: dict[str, Ground] | None = None,
    ) -> None:
        super().__init__()
        if seed < 0:
            raise ValueError(f"data.seed must not be negative, got {seed}")
        self.env = env
        self.seed = seed
        self.grounds = make_grounds(Ground(task=task, host=host, n_envs=n_envs), also or {}, env)
        self.n_envs = sum(ground.n_envs for ground in self.grounds.values())
        self.pool: HostPool | MixedPool | None = None

    def setup(self, stage: str) -> None:
        self.build(self.trainer.strategy.root_device)

    def build(self, device: torch.device) -> None:
        """Build the pool unless it is built already. Raises ValueError if the settings do not fit together."""
        if self.pool is not None:
            return
        self.prepared = self._of_each(lambda name: prepare(self.grounds[name], self.env, device))
        several = len(self.prepared) > 1
        common = share(list(self._of_each(lambda name: self.prepared[name].offer()).values())) if several else None
        self.pools = self._of_each(lambda name: self.prepared[name].make_pool(self.grounds[name].n_envs, common=common))
        for pool in self.pools.values():
            if pool.selection is not None:
                say(*pool.selection.report())
        (first, *others) = self.pools.values()
        self.pool = MixedPool(self.pools) if others else first

    def _of_each(self, make: Callable[[str], Made]) -> dict[str, Made]:
        """Return the result of `make` for each task, by name. A ValueError names the task if there are several."""
        made = {}
        for name in self.grounds:
            try:
                made[name] = make(name)
            except ValueError as error:
                raise ValueError(f"hosts of {name}: {error}" if len(self.grounds) > 1 else str(error)) from error
        return made

    def make_pool(self, n_envs: int, held_out: bool = False, task: str | None = None) -> HostPool:
        """Return another pool with the same task, hosts, rules and executor.

        Args:
            n_envs: Number of hosts.
            held_out: Draw hosts from the held-out contexts of the family instead of the training contexts.
            task: Name of the task, where there are several. None: the first.
        """
        name = task or next(iter(self.pools))
        return self.prepared[name].make_pool(n_envs, held_out, self.pools[name])

    @property
    def horizon(self) -> int:
        return self.env.horizon

    def identity(self) -> dict[str, Any]:
        """Return the properties of hosts, data, observation and actions that a resumed run must share."""
        pool = self.pool
        return {
            "data.env.horizon": pool.config.horizon,
            "data.env.training.optimizer": "; ".join(one.config.training.optimizer for one in self.pools.values()),
            **{f"choices of the {head} head": choices for head, choices in zip(HEADS, pool.space, strict=True)},
            "observed features": pool.feature_names,
            "host": pool.host_kind,
            "data set": "; ".join(one.fingerprint for one in self.prepared.values()),
        }

    def settle(self, checkpoint: dict[str, Any]) -> None:
        """Adapt a checkpoint to this run's number of hosts. Raises ValueError if it cannot be resumed."""
        check_schema(checkpoint)
        if (saved := saved_environments(checkpoint)) != self.n_envs:
            begin_rollout_with(checkpoint, self.n_envs)
            say(
                f"{self.n_envs} environments, the run so far had {saved}: it goes on with the next rollout, "
                f"not bit for bit"
            )

    def train_dataloader(self) -> TickLoader:
        return TickLoader(self.env.horizon)

    def state_dict(self) -> dict[str, Any]:
        return {"pool": self.pool.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if len(state["pool"]["envs"]) != self.n_envs:
            return  # another number of hosts: the next rollout begins with new ones
        if (note := self.pool.load_state_dict(state["pool"])) is not None:
            say(note)
