"""Data module that owns the environments; a Lightning batch is one tick."""

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from lightning import LightningDataModule

from esper_lightning.blueprints import check_blueprint_name
from esper_lightning.checkpointing import shards
from esper_lightning.checkpointing.resize import (
    count_saved_envs,
    move_environments,
    resize_environments,
    saved_on_another_device,
)
from esper_lightning.checkpointing.validate import check_schema
from esper_lightning.console import print_status
from esper_lightning.datamodules.tasks import TaskConfig, load_task, make_task_configs
from esper_lightning.envs import HEADS, EnvConfig, HostFactory, HostPool, MixedPool, Overseer
from esper_lightning.envs.execution.autotune import ExecutorChoice
from esper_lightning.envs.seeding import check_rng_seed
from esper_lightning.envs.spaces.action_discovery import union_of_slots
from esper_lightning.envs.spaces.actions import CHOICES_KEY
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.envs.vector_env import VectorEnv
from esper_lightning.ranks import Ranks, pack_state, unpack_state
from esper_lightning.tasks import Task
from esper_lightning.user_code import find_user_part

Result = TypeVar("Result")

BLUEPRINT_CHOICES = CHOICES_KEY.format("blueprint")
"""Key of the blueprints in the identity of a run."""

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
        seed: int = 0,
        also: dict[str, TaskConfig] | None = None,
    ) -> None:
        super().__init__()
        check_rng_seed("data.seed", seed)
        self.env = env
        self.seed = seed
        self.task_configs = make_task_configs(TaskConfig(task=task, host=host, n_envs=n_envs), also or {}, env)
        self.n_envs = sum(ground.n_envs for ground in self.task_configs.values())
        self.ranks = Ranks([ground.n_envs for ground in self.task_configs.values()])
        self.overseer: Overseer | None = None
        self.saved_blueprints: list[str] | None = None  # those of the run that this one continues or evaluates
        self.pools: dict[str, HostPool] = {}  # by task
        self._pool: HostPool | MixedPool | None = None
        self.saved_to: Path | None = None  # path of the checkpoint that is being saved, if the trainer tells it

    def keep_blueprints(self, identity: Mapping[str, Any]) -> None:
        """Offer the blueprints of a saved run where the settings name none, so that later ones change nothing.

        Args:
            identity: Identity of the saved run; see `identity`. Hosts must not be built yet.

        Raises ValueError if a blueprint of the saved run is not registered.
        """
        assert self._pool is None, "hosts are built for their action space"
        saved = identity.get(BLUEPRINT_CHOICES)
        if not isinstance(saved, list) or all(config.blueprints is not None for config in self.task_configs.values()):
            return
        for name in saved:
            try:
                check_blueprint_name(str(name))  # a name alone: a checkpoint must not import anything
            except ValueError as error:
                raise ValueError(f"the checkpoint is of hosts with an {error}; give its module by --imports") from error
        self.saved_blueprints = saved

    def setup(self, stage: str) -> None:
        trainer = self.trainer
        assert trainer is not None, "the trainer calls this"
        self.build(trainer.strategy.root_device, rank=trainer.global_rank, world=trainer.world_size)
        if self.ranks.world > 1:  # each may have measured another executor to be the fastest
            for pool, choice in zip(self.pools.values(), self.ranks.share(self._executor_choices()), strict=True):
                pool.switch_executor(choice)

    def _executor_choices(self) -> list[ExecutorChoice]:
        return [pool.executor_choice for pool in self.pools.values()]

    def build(self, device: torch.device, *, rank: int = 0, world: int = 1) -> None:
        """Build the pool with the hosts of one of `world` processes, unless it is built already.

        Raises ValueError if the settings do not fit together, or if the processes cannot share the hosts evenly.
        """
        if self._pool is not None:
            return
        self.ranks = Ranks(self.ranks.sizes, rank, world)
        configs = self.task_configs
        if self.saved_blueprints is not None and len(configs) == 1:
            ((name, config),) = configs.items()
            self.task_configs = {name: replace(config, blueprints=config.blueprints or self.saved_blueprints)}
        try:
            self.pools = self._make_pools(device, world)
        except ValueError:
            if self.task_configs is configs:
                raise
            # These are not the hosts of the saved run, which the check of identities tells better.
            self.task_configs = configs
            self.pools = self._make_pools(device, world)
        for pool in self.pools.values():
            if pool.selection is not None:
                print_status(*pool.selection.report())
        (first, *others) = self.pools.values()
        self._pool = MixedPool(self.pools) if others else first

    def _make_pools(self, device: torch.device, world: int) -> dict[str, HostPool]:
        self.loaded_tasks = self._for_each_task(
            lambda name: load_task(self.task_configs[name], self.env, device, alone=world == 1)
        )
        shared_space = (
            union_of_slots(
                list(self._for_each_task(lambda name: self.loaded_tasks[name].discover_action_space()).values()),
                self.saved_blueprints,
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
                if find_user_part(error) is not None:
                    raise
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
        """Return lifecycle and actions as plain data."""
        return {"lifecycle": asdict(self.env.lifecycle), "actions": asdict(self.env.actions)}

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adapt a checkpoint to this run's device and number of hosts. Raises ValueError if it cannot be resumed."""
        check_schema(checkpoint)
        if saved_on_another_device(checkpoint, device := self.pool.device):
            move_environments(checkpoint, self.n_envs, device=device, rng_seed=self.seed)
            print_status(
                f"this run is on {device.type}, the run so far was on another type of device: it resumes at the next "
                f"rollout; results differ from those of an uninterrupted run"
            )
        elif (saved := count_saved_envs(checkpoint["HostPoolData"]["pool"])) != self.n_envs:
            resize_environments(checkpoint, self.n_envs)
            print_status(
                f"{self.n_envs} environments, the run so far had {saved}: it resumes at the next rollout; "
                f"results differ from those of an uninterrupted run"
            )

    def train_dataloader(self) -> TickLoader:
        return TickLoader(self.env.horizon)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hosts: of all ranks on rank 0, which writes it, elsewhere of this rank."""
        state, ranks = self.pool.state_dict(), self.ranks
        if ranks.world == 1:
            return {"pool": state}
        content = pack_state(state.pop("envs"))
        size = int(ranks.sum(torch.tensor(len(content))))
        if size > shards.MAX_BYTES and self.saved_to is not None:
            token = ranks.share(secrets.token_hex(8))
            return {"pool": state | {shards.SHARDS_KEY: shards.write_shard(self.saved_to, token, content, ranks=ranks)}}
        of_all = [unpack_state(part) for part in ranks.gather(content)]
        return {"pool": state | {"envs": ranks.join(of_all) if of_all else []}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["pool"]
        if count_saved_envs(state) != self.n_envs:
            return  # another number of hosts: the next rollout begins with new ones
        if shards.SHARDS_KEY in state:
            assert self.trainer is not None and self.trainer.ckpt_path is not None, "the trainer calls this"
            envs = shards.read_shards(self.trainer.ckpt_path, state[shards.SHARDS_KEY], self.ranks)
        else:
            envs = self.ranks.rows(state["envs"])
        if (note := self.pool.load_state_dict(state | {"envs": envs})) is not None:
            print_status(note)
