"""Data module that owns the environments; a Lightning batch is one tick."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

import torch
from lightning import LightningDataModule

from esper_lightning.checkpointing.resize import (
    move_environments,
    resize_environments,
    saved_on_another_device,
)
from esper_lightning.console import print_status
from esper_lightning.datamodules.tasks import TaskConfig, load_task, make_task_configs
from esper_lightning.envs import HEADS, EnvConfig, HostFactory, HostPool, MixedPool, Overseer, check_host_count
from esper_lightning.envs.seeding import EVALUATION, check_rng_seed, episode_rng_seeds
from esper_lightning.envs.spaces.action_discovery import union_of_slots
from esper_lightning.envs.spaces.actions import CHOICES_KEY
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.envs.vector_env import VectorEnv
from esper_lightning.ranks import Ranks, pack_state, unpack_state
from esper_lightning.registry import describe_factory
from esper_lightning.tasks import Task

Result = TypeVar("Result")

SIGHT_KEY = "data.env.sight"
"""Key of the observation in the identity of a run whose observation is in rows."""


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


class EpisodeLoader:
    """Loader of one batch, an episode: the RNG seeds of its hosts. Lightning would flatten a list of lists."""

    def __init__(self, rng_seeds: list[int]) -> None:
        self.rng_seeds = rng_seeds

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[list[int]]:
        yield self.rng_seeds


class PolicyData(Protocol):
    """Interface of the data modules that `TamiyoModule` accepts: they own the environments the policy is trained in."""

    n_envs: int
    """Number of environments of all processes."""
    ranks: Ranks
    """The processes that share the environments; `pool` has those of this one."""
    seed: int
    """RNG seed of the run."""

    @property
    def horizon(self) -> int:
        """Environment steps in one rollout."""
        ...

    @property
    def pool(self) -> VectorEnv:
        """The environments, once they are built."""
        ...

    @property
    def heads(self) -> Iterable[str]:
        """Names of the components of an action."""
        ...

    def identity(self) -> dict[str, Any]:
        """Return the properties that a resumed run must share with the saved one, by setting name."""
        ...

    def growth_rules(self) -> dict[str, Any] | None:
        """Return the rules by which the policy grows other networks later; None where nothing grows."""
        ...

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Change a loaded checkpoint in place where this run differs from the saved one, as in the number of hosts.

        Raises ValueError if the checkpoint cannot be resumed. The default changes nothing.
        """


class HostPoolData(LightningDataModule):
    """The hosts on which the policy is trained.

    Args:
        task: The task that hosts learn: data and measures.
        host: Class of the network that grows; it is given the shape of an input and the number of outputs.
        env: Settings of the environment: host training, the lifecycle of seeds, rewards, and the cost of growth.
        n_envs: Hosts trained side by side. Where several processes train, each of them has an equal part.
        val_hosts: Fresh hosts of each task on which `validate`, and the validation within `fit`, play one episode.
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
        *,
        n_envs: int = 48,
        val_hosts: int = 16,
        seed: int = 0,
        also: dict[str, TaskConfig] | None = None,
    ) -> None:
        super().__init__()
        check_rng_seed("data.seed", seed)
        check_host_count("data.val_hosts", val_hosts)
        self.val_hosts = val_hosts
        self.env = env
        self.seed = seed
        self.task_configs = make_task_configs(TaskConfig(task=task, host=host, n_envs=n_envs), also or {}, env)
        self.n_envs = sum(ground.n_envs for ground in self.task_configs.values())
        self.ranks = Ranks([ground.n_envs for ground in self.task_configs.values()])
        self.overseer: Overseer | None = None
        self.pools: dict[str, HostPool] = {}  # by task
        self._pool: HostPool | MixedPool | None = None
        self._validation_pools: list[HostPool] = []
        described = {
            name: {"task": describe_factory(type(one.task)), "host": describe_factory(one.host), "n_envs": one.n_envs}
            for name, one in self.task_configs.items()
        }
        self.save_hyperparameters({"tasks": described, "env": asdict(env), "val_hosts": val_hosts, "seed": seed})

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        assert trainer is not None, "the trainer calls this"
        self.build(trainer.strategy.root_device, rank=trainer.global_rank, world=trainer.world_size)

    def build(self, device: torch.device, *, rank: int = 0, world: int = 1) -> None:
        """Build the pool with the hosts of one of `world` processes, unless it is built already.

        Raises ValueError if the settings do not fit together, or if the processes cannot share the hosts evenly.
        """
        if self._pool is not None:
            return
        self.ranks = Ranks(self.ranks.sizes, rank, world)
        self.pools = self._make_pools(device, world)
        (first, *others) = self.pools.values()
        self._pool = MixedPool(self.pools) if others else first

    def _make_pools(self, device: torch.device, world: int) -> dict[str, HostPool]:
        self.loaded_tasks = self._for_each_task(
            lambda name: load_task(self.task_configs[name], self.env, device, alone=world == 1)
        )
        shared_space = (
            union_of_slots(
                list(self._for_each_task(lambda name: self.loaded_tasks[name].discover_action_space()).values())
            )
            if len(self.task_configs) > 1
            else None
        )
        return self._for_each_task(
            lambda name: self.loaded_tasks[name].make_pool(
                self.task_configs[name].n_envs // world, shared_space=shared_space, overseer=self.overseer
            )
        )

    def oversee(self, overseer: Overseer | None) -> None:
        """Let an overseer watch all hosts, those of pools made later too. None: stop watching."""
        self.overseer = overseer
        for pool in self.pools.values():
            pool.oversee(overseer)

    @property
    def pool(self) -> HostPool | MixedPool:
        """The hosts of the first task, or of all tasks side by side. Only after `setup` or `build`."""
        assert self._pool is not None, "build the hosts first, by `build` or `setup`"
        return self._pool

    @property
    def precision(self) -> str:
        """Precision of the hosts of each task on their device."""
        return "; ".join(pool.config.training.precision_on(pool.device) for pool in self.pools.values())

    def _for_each_task(self, make: Callable[[str], Result]) -> dict[str, Result]:
        """Return the result of `make` for each task, by name. A ValueError names the task if there are several."""
        results = {}
        for name in self.task_configs:
            try:
                results[name] = make(name)
            except ValueError as error:
                raise ValueError(f"hosts of {name}: {error}" if len(self.task_configs) > 1 else str(error)) from error
        return results

    def make_pool(
        self,
        n_envs: int,
        held_out: bool = False,
        task: str | None = None,
        *,
        sight: ObservationConfig | None = None,
    ) -> HostPool:
        """Return another pool with the same task, hosts, rules, executor and overseer.

        Args:
            n_envs: Number of hosts.
            held_out: Draw hosts from the held-out contexts of the family instead of the training contexts.
            task: Name of the task, where there are several. None: the first.
            sight: Features that a policy observes. None: as configured.
        """
        name = task or next(iter(self.pools))
        return self.loaded_tasks[name].make_pool(
            n_envs, held_out, self.pools[name], overseer=self.overseer, sight=sight
        )

    @property
    def horizon(self) -> int:
        return self.env.horizon

    def identity(self) -> dict[str, Any]:
        """Return the properties of hosts, data, observation and actions that a resumed run must share."""
        pool = self.pool
        hosts = [f"{name}: {self.task_configs[name].n_envs} hosts, {one.host_kind}" for name, one in self.pools.items()]
        return {
            "data.env.horizon": pool.config.horizon,
            "data.env.training.optimizer": "; ".join(one.config.training.optimizer for one in self.pools.values()),
            **{CHOICES_KEY.format(head): choices for head, choices in zip(HEADS, pool.space, strict=True)},
            "observed features": pool.feature_names,
            **({} if pool.rows is None else {SIGHT_KEY: asdict(pool.config.sight)}),
            "host": "; ".join(hosts) if len(self.pools) > 1 else next(iter(self.pools.values())).host_kind,
            "data set": "; ".join(one.fingerprint for one in self.loaded_tasks.values()),
        }

    def growth_rules(self) -> dict[str, Any]:
        """Return lifecycle, actions and observation as plain data."""
        env = self.env
        return {"lifecycle": asdict(env.lifecycle), "actions": asdict(env.actions), "sight": asdict(env.sight)}

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adapt a checkpoint to this run's device and number of hosts. Raises ValueError if it cannot be resumed."""
        own = checkpoint.get(type(self).__qualname__)
        if own is None:
            raise ValueError(
                f"the checkpoint lacks {type(self).__qualname__}, the state of its hosts; give another one"
            )
        if saved_on_another_device(checkpoint, device := self.pool.device):
            move_environments(checkpoint, own["pool"], self.n_envs, device=device, rng_seed=self.seed)
            print_status(
                f"this run is on {device.type}, the run so far was on another type of device: it resumes at the next "
                f"rollout; results differ from those of an uninterrupted run"
            )
        elif (saved := len(own["pool"]["envs"])) != self.n_envs:
            resize_environments(checkpoint, self.n_envs)
            print_status(
                f"{self.n_envs} environments, the run so far had {saved}: it resumes at the next rollout; "
                f"results differ from those of an uninterrupted run"
            )

    def train_dataloader(self) -> TickLoader:
        return TickLoader(self.env.horizon)

    def val_dataloader(self) -> EpisodeLoader:
        """Return the loader of one batch: the RNG seeds of the hosts of a validation, the same in every validation."""
        return EpisodeLoader(episode_rng_seeds(self.seed, EVALUATION, 1, n_envs=self.val_hosts))

    def test_dataloader(self) -> EpisodeLoader:
        """Return the loader of one batch, which stands for the comparison: it knows its own hosts."""
        return EpisodeLoader([])

    def validation_pools(self, n_envs: int) -> list[HostPool]:
        """Return a pool of so many hosts of each task, apart from those that the policy is trained on."""
        if not self._validation_pools or self._validation_pools[0].n_envs != n_envs:
            self._validation_pools = [self.make_pool(n_envs, task=task) for task in self.pools]
        for pool in self._validation_pools:
            pool.oversee(self.overseer)
        return self._validation_pools

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hosts: of all ranks on rank 0, which writes it, elsewhere of this rank."""
        state, ranks = self.pool.state_dict(), self.ranks
        if ranks.world == 1:
            return {"pool": state}
        of_all = [unpack_state(part) for part in ranks.gather(pack_state(state.pop("envs")))]
        return {"pool": state | {"envs": ranks.join(of_all) if of_all else []}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["pool"]
        if len(state["envs"]) != self.n_envs:
            return  # another number of hosts: the next rollout begins with new ones
        self.pool.load_state_dict(state | {"envs": self.ranks.rows(state["envs"])})
