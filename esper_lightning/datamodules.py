"""Lightning data modules, which own the environments in which the policy is trained."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from lightning import LightningDataModule, Trainer

from esper_lightning.envs import HEADS, EnvConfig, HostFactory, HostPool, MixedPool, check_host_count
from esper_lightning.envs.env_factory import SharedSpace, discover_spaces, union_of_slots
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.governor import GovernorConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.envs.vector_env import EVALUATION, VectorEnv, check_rng_seed, episode_rng_seeds
from esper_lightning.runtime.checkpoint import (
    FEATURES_KEY,
    HORIZON_KEY,
    check_identity,
    move_to_device,
)
from esper_lightning.runtime.console import print_status
from esper_lightning.runtime.ranks import Ranks, share_machine
from esper_lightning.runtime.registry import describe_factory, plain_factory
from esper_lightning.tasks import Task, TaskData, check_data, fingerprint


class TickLoader:
    """Loader of the ticks 0 … horizon − 1 of a rollout. A DataLoader would draw a random number for each iterator."""

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

    n_envs: int  # of all processes
    ranks: Ranks  # processes that share the environments
    seed: int  # RNG seed of the run

    @property
    def horizon(self) -> int: ...  # environment steps in one rollout

    @property
    def pool(self) -> VectorEnv: ...  # environments of this process, once they are built

    def resume_identity(self) -> dict[str, Any]: ...  # what a resumed run must share with the saved one, by name

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None: ...  # ValueError: it cannot be resumed


def attached_data(trainer: Any) -> PolicyData:
    """Return the data module of a trainer. Raises ValueError if it has none, or one without environments."""
    data = trainer.datamodule
    if not hasattr(data, "resume_identity"):
        found = "the Trainer has no data module" if data is None else f"{type(data).__name__} has no environments"
        raise ValueError(f"{found} for the policy; give datamodule=, a HostPoolData or VectorData, and no loaders")
    return data


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Settings of one task and its hosts."""

    task: Task
    """The task that these hosts learn."""

    host: HostFactory
    """Class of the network that grows."""

    n_envs: int = 16
    """Number of hosts trained side by side."""

    executor: str | None = None
    """Name or import path of the executor that trains these hosts. None: data.env.executor."""

    training: HostTraining | None = None
    """Optimizer and batch settings of these hosts. None: data.env.training."""

    blueprints: list[str] | None = None
    """Names or import paths of the blueprints available on these hosts. None: all of this package that fit."""

    family: FamilyConfig | None = None
    """Contexts of these hosts. None: all are alike."""

    def env_config(self, env: EnvConfig) -> EnvConfig:
        """Return the environment settings of these hosts: `env` with the changes of this task."""
        return replace(
            env,
            executor=self.executor or env.executor,
            training=self.training or env.training,
            actions=replace(env.actions, blueprints=self.blueprints),
            family=self.family or FamilyConfig(),
        )


class LoadedTask(NamedTuple):
    """A task with its data loaded."""

    env: EnvConfig  # settings of these hosts
    data: TaskData  # with one copy per device that all pools share
    host_devices: list[torch.device]
    fingerprint: str  # of the data


def find_host_devices(
    names: Sequence[str] | None, executor: str, device: torch.device, *, alone: bool = True
) -> list[torch.device]:
    """Return the devices of hosts, which are assigned to them in turn, given `env.devices` and the policy's device.

    `alone`: one process trains. False: several do, and each has its own device.
    """
    if names is None:
        if executor != "streams" or not alone or device.type != "cuda":
            return [device]
        first = torch.cuda.current_device() if device.index is None else device.index
        return [device, *(torch.device("cuda", i) for i in range(torch.cuda.device_count()) if i != first)]
    if not alone:
        raise ValueError("env.devices is for one process; leave it out, and each process has its own device")
    devices = [torch.device(name) for name in names]
    if not devices or any(other.type != device.type for other in devices):
        raise ValueError(f"env.devices: hosts on {names}, the policy on {device}; use trainer.accelerator to move it")
    return devices


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
        self.env, self.val_hosts, self.seed = env, val_hosts, seed
        first_name = type(task).__name__
        if first_name in (also or {}):
            raise ValueError(f"data.also: {first_name!r} is the name of data.task; choose another one")
        first = TaskConfig(task=task, host=host, n_envs=n_envs, blueprints=env.actions.blueprints, family=env.family)
        configs = {first_name: first, **(also or {})}
        self.task_configs = {name: replace(task, host=plain_factory(task.host)) for name, task in configs.items()}
        for name, config in self.task_configs.items():
            check_host_count("data.n_envs" if name == first_name else f"data.also.{name}.n_envs", config.n_envs)
        self.ranks = Ranks([config.n_envs for config in self.task_configs.values()])
        self.n_envs = self.ranks.total
        self.governor: GovernorConfig | None = None
        self.loaded_tasks: dict[str, LoadedTask] = {}
        self.pools: dict[str, HostPool] = {}  # by task
        self._shared_space: SharedSpace | None = None  # of the hosts of several tasks
        self._pool: HostPool | MixedPool | None = None
        self._validation_pools: list[HostPool] = []
        described = {
            name: {
                "task": describe_factory(type(config.task)),
                "score": config.task.score_name,
                "host": describe_factory(config.host),
                "n_envs": config.n_envs,
            }
            for name, config in self.task_configs.items()
        }
        for name in also or {}:
            config = self.task_configs[name]
            described[name] |= {
                "executor": config.executor,
                "blueprints": config.blueprints,
                "training": config.training and asdict(config.training),
                "family": config.family and asdict(config.family),
            }
        self.save_hyperparameters({"tasks": described, "env": asdict(env), "val_hosts": val_hosts, "seed": seed})

    def setup(self, stage: str) -> None:
        assert self.trainer is not None, "the trainer calls this"
        self.build_for(self.trainer)

    def build_for(self, trainer: Trainer) -> None:
        """Build the hosts of this process of a trainer; see `build`."""
        share_machine(trainer.num_devices)
        self.build(trainer.strategy.root_device, rank=trainer.global_rank, world=trainer.world_size)

    def build(self, device: torch.device, *, rank: int = 0, world: int = 1) -> None:
        """Build the pool with the hosts of one of `world` processes, unless it is built already."""
        if self._pool is not None:
            return
        self.ranks = Ranks(self.ranks.sizes, rank, world)
        self.device = device
        name, spaces, pools = "", [], {}
        try:
            for name, config in self.task_configs.items():
                loaded = self.loaded_tasks[name] = self._load(config, alone=world == 1)
                if len(self.task_configs) > 1:
                    device = loaded.host_devices[0]
                    spaces.append(discover_spaces(config.task, loaded.data, config.host, loaded.env, device).space)
            self._shared_space = union_of_slots(spaces) if spaces else None
            for name, config in self.task_configs.items():
                pools[name] = self.make_pool(config.n_envs // world, task=name)
        except ValueError as error:
            if len(self.task_configs) == 1:
                raise
            raise ValueError(f"hosts of {name}: {error}") from error
        self.pools = pools
        self._pool = MixedPool(pools) if len(pools) > 1 else next(iter(pools.values()))

    def _load(self, config: TaskConfig, *, alone: bool) -> LoadedTask:
        """Load the data of a task onto its devices. Raises ValueError if hosts cannot learn from them."""
        env, data, name = config.env_config(self.env), config.task.load(), type(config.task).__name__
        if not isinstance(data, TaskData):
            raise ValueError(f"task {name}: load returned a {type(data).__name__}; return a TaskData")
        check_data(data, name, config.task.score)
        host_devices = find_host_devices(env.devices, env.executor, self.device, alone=alone)
        return LoadedTask(env, data.copy_to(host_devices), host_devices, fingerprint(data))

    def make_pool(
        self,
        n_envs: int,
        held_out: bool = False,
        task: str | None = None,
        *,
        observation: ObservationConfig | None = None,
    ) -> HostPool:
        """Return another pool of `n_envs` hosts of a task (None: the first), with the same rules and executor.

        `held_out`: draw hosts from the held-out contexts of the family. `observation`: other features to observe.
        """
        name = task or next(iter(self.task_configs))
        config, loaded = self.task_configs[name], self.loaded_tasks[name]
        env = loaded.env if observation is None else replace(loaded.env, observation=observation)
        if name in self.pools:  # with `auto`, the executor that was chosen for the hosts of the run
            env = replace(env, executor=self.pools[name].executor_choice)
        return HostPool(
            config.task,
            loaded.data,
            config.host,
            config=env,
            n_envs=n_envs,
            device=self.device,
            host_devices=loaded.host_devices,
            held_out=held_out,
            shared_space=self._shared_space,
            governor=self.governor,
        )

    def set_governor(self, governor: GovernorConfig | None) -> None:
        """Let the Governor watch all hosts by these rules, those of pools made later too. None: stop watching."""
        self.governor = governor
        for pool in self.pools.values():
            pool.set_governor(governor)

    @property
    def pool(self) -> HostPool | MixedPool:
        """The hosts of the first task, or of all tasks side by side. Only after `setup` or `build`."""
        assert self._pool is not None, "build the hosts first, by `build` or `setup`"
        return self._pool

    @property
    def precision(self) -> str:
        """Precision of the hosts of each task on their device."""
        return "; ".join(pool.config.training.precision for pool in self.pools.values())

    @property
    def horizon(self) -> int:
        return self.env.horizon

    def resume_identity(self) -> dict[str, Any]:
        """Return the properties of hosts, data, observation and actions that a resumed run must share."""
        pool = self.pool
        hosts = [f"{name}: {self.task_configs[name].n_envs} hosts, {p.host_kind}" for name, p in self.pools.items()]
        return {
            HORIZON_KEY: pool.config.horizon,
            "data.env.training.optimizer": "; ".join(p.config.training.optimizer for p in self.pools.values()),
            **{f"choices of the {head} head": choices for head, choices in zip(HEADS, pool.space, strict=True)},
            FEATURES_KEY: pool.feature_names,
            "data.env.observation": asdict(pool.config.observation),
            "host": "; ".join(hosts) if len(self.pools) > 1 else next(iter(self.pools.values())).host_kind,
            "data set": "; ".join(task.fingerprint for task in self.loaded_tasks.values()),
        }

    def growth_rules(self) -> dict[str, Any]:
        """Return lifecycle, actions and observation as plain data."""
        env = self.env
        return {
            "lifecycle": asdict(env.lifecycle),
            "actions": asdict(env.actions),
            "observation": asdict(env.observation),
        }

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Adapt a checkpoint to this run's device. Raises ValueError if it cannot be resumed."""
        name, device = type(self).__qualname__, self.pool.device
        if name not in checkpoint:
            raise ValueError(f"the checkpoint lacks {name}, the state of its hosts; give another one")
        pool = checkpoint[name]["pool"]
        check_identity({"data.n_envs": len(pool["envs"])}, {"data.n_envs": self.n_envs})
        if move_to_device(checkpoint, pool, device=device, rng_seed=self.seed):
            print_status(
                f"this run is on {device.type}, the run so far was on another type of device: it resumes at the next "
                f"rollout; results differ from those of an uninterrupted run"
            )

    def train_dataloader(self) -> TickLoader:
        return TickLoader(self.env.horizon)

    def val_dataloader(self) -> EpisodeLoader:
        """Return the loader of one batch: the RNG seeds of the hosts of a validation, the same in every validation."""
        return EpisodeLoader(episode_rng_seeds(self.seed, EVALUATION, 1, n_envs=self.val_hosts))

    def test_dataloader(self) -> EpisodeLoader:  # one batch, which stands for the comparison: it knows its own hosts
        return EpisodeLoader([])

    def validation_pools(self, n_envs: int) -> list[HostPool]:
        """Return one pool of `n_envs` hosts for each task, for validation only; the next call has the same ones."""
        if not self._validation_pools or self._validation_pools[0].n_envs != n_envs:
            self._validation_pools = [self.make_pool(n_envs, task=task) for task in self.pools]
        for pool in self._validation_pools:
            pool.set_governor(self.governor)
        return self._validation_pools

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the hosts: of all ranks on rank 0, which writes it, elsewhere of this rank."""
        state, ranks = self.pool.state_dict(), self.ranks
        if ranks.world > 1:
            parts = ranks.gather(state["envs"])
            state |= {"envs": ranks.join(parts) if parts else []}
        return {"pool": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = state_dict["pool"]
        if state["envs"]:  # else the run comes from another type of device, and its next rollout begins with new hosts
            self.pool.load_state_dict(state | {"envs": self.ranks.rows(state["envs"])})


class VectorData(LightningDataModule):
    """Data module for any VectorEnv. A Lightning batch is a whole rollout, because a step may take microseconds.

    Checkpoints do not contain the state of the environments: a resumed run begins new episodes.

    Args:
        env: Function that returns a VectorEnv, as `esper_lightning.envs.gymnasium.gym_vector`.
        settings: Keyword arguments of this function.
        seed: RNG seed of episodes and exploration.
    """

    def __init__(self, env: Callable[..., Any], settings: dict[str, Any] | None = None, seed: int = 0) -> None:
        super().__init__()
        check_rng_seed("data.seed", seed)
        self.pool: VectorEnv = env(**(settings or {}))
        self.seed = seed
        self.n_envs, self.horizon = self.pool.n_envs, self.pool.horizon
        self.ranks = Ranks([self.n_envs])

    def setup(self, stage: str) -> None:
        assert self.trainer is not None, "the trainer calls this"
        if self.trainer.world_size > 1:
            raise ValueError("environments that are no hosts train in one process; set trainer.devices to 1")
        env_device, policy_device = self.pool.device, self.trainer.strategy.root_device
        if env_device.type != policy_device.type:
            raise ValueError(
                f"the policy would be on {policy_device.type}, its environments on {env_device.type}; "
                f"set trainer.accelerator, or the environments' device"
            )

    def resume_identity(self) -> dict[str, Any]:
        """Return the sizes of observations, actions and rollouts, which a resumed run must share."""
        pool = self.pool
        return {
            "choices": dict(pool.space.sizes),
            "features": pool.observation.features.shape[-1],
            "privileged": 0 if pool.privileged is None else pool.privileged.shape[-1],
            "steps of a rollout": pool.horizon,
            "environments": pool.n_envs,
        }

    def adapt_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Do nothing: checkpoints contain no state of the environments."""

    def train_dataloader(self) -> TickLoader:
        return TickLoader(1)
