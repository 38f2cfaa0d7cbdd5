"""A vector environment of N host networks, which are trained, grown and validated together. K slots."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.actions import (
    HEADS,
    Action,
    ActionError,
    Masks,
    Op,
    check_is_action,
    check_possible,
    to_action,
)
from esper_lightning.envs.config import EnvConfig, HostFactory, check_compatible
from esper_lightning.envs.env_factory import EnvFactory, SharedSpace
from esper_lightning.envs.executors import AUTO, EXECUTORS, LoopExecutor
from esper_lightning.envs.executors.loop import isolate_oom
from esper_lightning.envs.executors.parallel import usable_cores
from esper_lightning.envs.governor import GovernorConfig, Verdict
from esper_lightning.envs.host_env import GrowthRecord, HostEnv
from esper_lightning.envs.measurements import (
    EpochResult,
    Validation,
    copy_to_device,
    download,
    pack_epochs,
    unpack_epochs,
    unpack_validations,
)
from esper_lightning.envs.observation import ObservationBuilder
from esper_lightning.envs.rewards import ROLLBACK_TERM, compute_terms
from esper_lightning.envs.snapshot import unpack
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.growing_network import RefusalReasons
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.machine import PhaseClock
from esper_lightning.tasks import Task, TaskData, check_split

SMALL_HOST, SMALL_HOST_ON_ONE_CORE = 5_000_000, 20_000_000
"""Largest product of the parameters and the inputs of a host for which `auto` stands for `fused`.

With 6,418 parameters and 16 hosts on two cores, `fused` is 1.2 to 1.7 times as fast as `threads` on 768 inputs, and 0.6
to 0.8 times on 3,072. On one core it is there 1.0 to 1.6 times as fast as `loop`. On CUDA the first
number holds, not yet measured: 16 hosts with different seeds are 19,402 operations an epoch by `streams`, 5,388 by
`fused`."""

WAIT_ACTION = (0,) * len(HEADS)
"""Action that changes nothing: choice 0 of every head."""


class HostVerdict(NamedTuple):
    """Verdict of the Governor on a host that was not healthy."""

    tick: int  # from 1
    host: int
    seed: int  # RNG seed of the episode, which it reproduces
    decision: Verdict
    cause: str
    restored: int | None  # tick of the snapshot to which the host was rolled back. None: no rollback

    def __str__(self) -> str:
        """Describe the verdict, as in `host 3 (RNG seed 17) rolled back at tick 7, to tick 5: loss is nan`."""
        restored = "" if self.restored is None else f", to tick {self.restored}"
        return f"host {self.host} (RNG seed {self.seed}) {self.decision} at tick {self.tick}{restored}: {self.cause}"


class HostVeto(NamedTuple):
    """Action vetoed by the Governor; the host executed WAIT instead."""

    tick: int  # from 1
    host: int
    action: str
    reasons: list[str]

    def __str__(self) -> str:
        """Describe the veto, as in `host 3: GERMINATE norm in block1 vetoed at tick 7: …`."""
        return f"host {self.host}: {self.action} vetoed at tick {self.tick}: {'; '.join(self.reasons)}"


class PoolMetrics(NamedTuple):
    """Measurements of a step, [N] each, on the CPU."""

    score: Tensor  # with all seeds; after the last step: with the fossilized ones only
    loss: Tensor
    objective: Tensor
    parameters: Tensor  # of the host and its fossilized seeds
    reward: Tensor


class StepResult(NamedTuple):
    """Result of a step. Observation and masks are the pool's own storage, which the next step overwrites."""

    action: Action  # to learn from: the given action, with WAIT after a veto
    ops: Tensor  # [N] int64, on the CPU: op that each host executed
    observation: Observation
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool: a rollback ends the trajectory; the host continues unless `masks.ended`
    truncated: Tensor  # [N] bool: the horizon was reached
    masks: Masks
    events: list[SeedEvent]  # stage changes of seeds
    verdicts: list[HostVerdict]
    vetoes: list[HostVeto]
    metrics: PoolMetrics
    terms: dict[str, Tensor]  # [N] each, on the CPU: the reward is their sum
    refusals: list[list[RefusalReasons]]  # [N][K]: reasons of the gates against changes of each seed, after this step

    @property
    def log(self) -> dict[str, Tensor]:
        """Scalars to log: means over hosts."""
        return {name: getattr(self.metrics, name).mean() for name in ("score", "reward", "objective")}


class HostPool:
    """A vector environment of N hosts, built once and reset in place.

    Args:
        task: Computes loss and score of outputs on `data`.
        data: The data set; all hosts on one device share one copy.
        host: Factory of host networks.
        config: Settings of the environments.
        n_envs: Number of environments N.
        device: Device of observations, rewards and masks.
        host_devices: Devices of hosts, which are assigned to them in turn. None: `device`.
        held_out: True to draw the held-out contexts of the family, which training never draws.
        shared_space: Slots and blueprints shared with the hosts of other tasks, for one policy that grows all of them.
        governor: Rules by which the hosts are watched. None: no host is rolled back, and a host that runs out of memory
            is an error.
    """

    autoreset = False  # a rollout is exactly one episode of every host
    task_slices: Mapping[str, slice] = {}  # host indices of each task; empty for a pool of one task

    def __init__(
        self,
        task: Task,
        data: TaskData,
        host: HostFactory,
        *,
        config: EnvConfig,
        n_envs: int,
        device: torch.device,
        host_devices: Sequence[torch.device] | None = None,
        held_out: bool = False,
        shared_space: SharedSpace | None = None,
        governor: GovernorConfig | None = None,
    ) -> None:
        check_compatible(config, data, n_envs, device=device)
        self.task, self.device, self.clock = task, device, PhaseClock(device)
        self.n_envs, self.horizon = n_envs, config.horizon
        devices = [device] if host_devices is None else host_devices
        factory = self.env_factory = EnvFactory(
            task,
            data.copy_to(devices),
            host,
            config=config,
            devices=devices,
            held_out=held_out,
            shared_space=shared_space,
        )
        config = self.config = factory.config  # its precision is no longer `auto`
        self.data, self.space, self.host_kind = factory.data, factory.space, factory.host_kind
        self.envs = [factory.make(index, index) for index in range(n_envs)]
        # Where a blueprint can grow in a slot of some host, whatever its episode offers, [K, blueprints] bool.
        self.growable = torch.stack(list(factory.growable.values())).any(0)
        # `executor_choice`: the setting, or what `auto` stands for.
        self.executor_choice, self.executor = self._prepare_executor(config.executor, factory.one_per_architecture())
        self._score_dtype = self.envs[0].score_dtype
        builder = self.observation_builder = ObservationBuilder(
            self.envs,
            self.space,
            self.growable,
            config=config.observation,
            device=device,
            num_privileged=len(factory.privileged_features(self.envs[0])),
        )
        self.masks, self.masks_on_cpu = builder.masks, builder.masks_on_cpu
        self.observation, self.feature_names, self.rows = builder.observation, builder.names, builder.rows
        self.privileged = builder.privileged  # [N, P], hidden from all but the critic. None: nothing is hidden
        self.episode_starts = torch.zeros(n_envs, dtype=torch.bool, device=device)  # True after a rollback
        self.governor: GovernorConfig | None = None
        self.reset(range(n_envs))
        self.set_governor(governor)

    def set_governor(self, governor: GovernorConfig | None) -> None:
        """Let the Governor watch the hosts by these rules, from their present state on. None: stop watching."""
        self.governor = governor
        self.env_factory.set_governor(governor)
        self._take_snapshots(self.envs)

    def _prepare_executor(self, name: str, kinds: Sequence[HostEnv]) -> tuple[str, LoopExecutor]:
        """Return the executor of this name, prepared for one environment of each architecture, with its own name."""
        if name != AUTO:
            executor = EXECUTORS.find(name)(self.task, self.config.training)
            executor.prepare(kinds, self.data.train)
            return name, executor
        is_cuda, inputs = self.device.type == "cuda", math.prod(self.data.input_shape)
        has_workers = self.device.type == "cpu" and min(self.n_envs, usable_cores()) > 1
        limit = SMALL_HOST if has_workers or is_cuda else SMALL_HOST_ON_ONE_CORE
        if self.n_envs > 1 and all(env.host_parameters * inputs <= limit for env in kinds):
            with suppress(ValueError):  # these hosts cannot be batched
                return self._prepare_executor("fused", kinds)
        return self._prepare_executor("streams" if is_cuda else "threads" if has_workers else "loop", kinds)

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        assert len(rng_seeds) == self.n_envs, "one RNG seed per environment"
        return self.reset_hosts(range(self.n_envs), rng_seeds)

    def reset_hosts(self, hosts: Sequence[int], rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in the environments with these indices; the others continue theirs."""
        with self.clock.measure("bookkeeping"):
            for i, rng_seed in zip(hosts, rng_seeds, strict=True):
                self.envs[i] = self.env_factory.make(i, rng_seed)
                self.envs[i].reset(rng_seed)
                self.episode_starts[i].zero_()
            self._update_constants()
        envs = [self.envs[i] for i in hosts]
        with self.clock.measure("validate"):
            validated = self.executor.validate(envs, self.data.validation)
        self._raise_failures()  # there is no snapshot yet to roll back to
        with self.clock.measure("bookkeeping"):
            self._record_validations(envs, validated)
            for env in envs:
                env.update_objective()
            self.observation_builder.update()
        self._take_snapshots(envs)
        return self.observation

    def _update_constants(self) -> None:
        factory = self.env_factory
        growable = torch.stack([factory.growable_in(env) for env in self.envs])
        self.observation_builder.update_constants(growable, [factory.privileged_features(env) for env in self.envs])

    def _record_validations(self, envs: Sequence[HostEnv], validated: Tensor) -> None:
        """Record a validation of hosts that are as they were, or are fresh, so that nothing of a training is recorded.

        `validated` is [len(envs), 2, V]: loss and score with each of V combinations of seeds. A failure of a host that
        goes on stays for `_raise_failures`.
        """
        validations = unpack_validations(download(validated))
        for env, validation in zip(envs, validations, strict=True):
            if env.failure is None:
                env.record_validation(validation)
            elif env.ended:  # its measurements are final, so the failure has no consequence
                env.failure = None

    def _raise_failures(self) -> None:
        """Raise MemoryError if a host has run out of memory."""
        for i, env in enumerate(self.envs):
            if env.failure is not None:
                raise MemoryError(
                    f"host {i} (RNG seed {env.rng_seed}): {env.failure}; make hosts smaller, or lower data.n_envs"
                )

    def _take_snapshots(self, envs: Sequence[HostEnv]) -> None:
        """Take snapshots of these hosts if the Governor watches them."""
        if self.governor is not None and envs:
            with self.clock.measure("governor"):
                for env in envs:
                    env.take_snapshot()

    def step(self, action: Action) -> StepResult:
        """Apply the actions, train every host for one epoch, validate it, and return the result.

        Two transfers come from the device: the actions, and all measurements together; a rollback adds one. Raises
        ActionError, a ValueError, if the masks forbid an action; then no host has changed.
        """
        with self.clock.measure("bookkeeping"):
            executed = self.read_action(action)
            vetoes = []
            for i, env in enumerate(self.envs):
                if reasons := env.refusal_reasons(executed[i]):
                    vetoes.append(HostVeto(env.tick + 1, i, self.space.describe(executed[i]), reasons))
                    executed[i] = WAIT_ACTION
            if vetoes:
                action = to_action(executed, self.device)
            events = []
            for i, env in enumerate(self.envs):
                env.begin_step(Op(executed[i][0]))
                with isolate_oom(env):
                    events += [change._replace(host=i, tick=env.tick + 1) for change in env.apply(executed[i])]
        # A fossilized seed must survive a rollback. The host is healthy here, or the action would have been vetoed.
        fossilized = {event.host for event in events if event.after is Stage.FOSSILIZED}
        self._take_snapshots([self.envs[i] for i in sorted(fossilized)])

        results = self._train_epoch()
        if self.governor is None:
            self._raise_failures()
        with self.clock.measure("bookkeeping"):
            verdicts = []
            for i, (env, result) in enumerate(zip(self.envs, results, strict=True)):
                changes, judgement = env.finish_step(result)
                events += [change._replace(host=i, tick=env.tick) for change in changes]
                if judgement is not None and judgement.outcome is not Verdict.HEALTHY:
                    assert env.monitor is not None, "it gave the verdict"
                    restored = env.monitor.snapshot.view()["tick"] if judgement.outcome.diverged else None
                    verdicts.append(HostVerdict(env.tick, i, env.rng_seed, *judgement, restored))
        rolled_back = [verdict.host for verdict in verdicts if verdict.decision.diverged]
        if restored := [self.envs[i] for i in rolled_back]:
            with self.clock.measure("validate"):
                validated = self.executor.validate(restored, self.data.validation)
            self._record_validations(restored, validated)

        with self.clock.measure("bookkeeping"):
            scores = [env.update_objective() for env in self.envs]
            diverged = [i in rolled_back for i in range(self.n_envs)]
            rewards = []
            for env, was_rolled_back in zip(self.envs, diverged, strict=True):
                paid = compute_terms(env.reward_step(was_rolled_back), self.config.reward)
                if self.governor is not None:
                    paid[ROLLBACK_TERM] = -self.governor.penalty * was_rolled_back
                rewards.append(paid)
            terms = {name: torch.tensor([row[name] for row in rewards], dtype=torch.float64) for name in rewards[0]}
            loss, score = torch.tensor(scores, dtype=self._score_dtype).unbind(1)
            metrics = PoolMetrics(
                score=score,
                loss=loss,
                objective=torch.tensor([env.objective for env in self.envs], dtype=self._score_dtype),
                parameters=self.parameter_counts,
                reward=torch.stack(list(terms.values())).sum(0).to(self._score_dtype),
            )
            self.observation_builder.update()
            terminated = copy_to_device(torch.tensor(diverged), self.device)
            self.episode_starts.copy_(terminated)
            truncated = torch.tensor([env.tick >= env.horizon for env in self.envs])
            result = StepResult(
                action=action,
                ops=torch.tensor([row[0] for row in executed]),
                observation=self.observation,
                reward=copy_to_device(metrics.reward, self.device),
                terminated=terminated,
                truncated=copy_to_device(truncated, self.device),
                masks=self.masks,
                events=events,
                verdicts=verdicts,
                vetoes=vetoes,
                metrics=metrics,
                terms=terms,
                refusals=self.observation_builder.refusals,
            )
        # Hosts that have been healthy for long enough, and whose episode goes on.
        self._take_snapshots([env for env in self.envs if env.monitor and env.monitor.snapshot_due and not env.ended])
        return result

    def read_action(self, action: Action) -> list[tuple[int, ...]]:
        """Return the indices of each host's action. Raises ActionError if an action is not allowed."""
        check_is_action(action, self.n_envs)
        chosen: list[tuple[int, ...]] = list(zip(*download(torch.stack(action)).tolist(), strict=True))
        for i, (env, row) in enumerate(zip(self.envs, chosen, strict=True)):
            if env.tick >= self.horizon:
                raise ValueError(f"host {i}: the episode is over after {env.tick} ticks; reset the pool")
            check_possible(self.space, self.masks_on_cpu, i, row)
        return chosen

    def _train_epoch(self) -> list[EpochResult | None]:  # [N]
        """Train every host for one epoch and validate it. None: its episode has ended, or it ran out of memory."""
        active = [i for i, env in enumerate(self.envs) if not env.ended and env.failure is None]
        results: list[EpochResult | None] = [None] * self.n_envs
        if not active:
            return results
        train = self.data.train
        if self.data.stream is not None:
            with self.clock.measure("train"):  # the first host says what is read
                first, factory = self.envs[0], self.env_factory
                train = self.data.stream.chunk(first.rng_seed, first.tick, factory.samples_per_epoch)
                check_split(train, self.data, f"task {type(self.task).__name__}: its training data", self.task.score)
                train = train.copy_to(factory.devices)
        trained, validated = self.executor.train_and_validate(
            [self.envs[i] for i in active], train, self.data.validation, clock=self.clock
        )
        with self.clock.measure("bookkeeping"):
            # A single transfer for all measurements; after it, everything is Python numbers.
            packed = download(pack_epochs(trained, validated))
            for i, result in zip(active, unpack_epochs(packed, len(self.space.slot)), strict=True):
                results[i] = result
        return results

    def train_without_actions(self, ticks: int) -> None:
        """Train all hosts for `ticks` epochs without actions and without the Governor, beyond the horizon too."""
        for _ in range(ticks):
            results = self._train_epoch()
            self._raise_failures()
            for env, result in zip(self.envs, results, strict=True):
                env.finish_step(result, judged=False)
        self.observation_builder.update()

    def test_scores(self) -> tuple[Tensor, Tensor]:
        """Return test loss and score [N] of each host with its fossilized seeds only; it may raise MemoryError."""
        validated = self.executor.validate(self.envs, self.data.test)
        self._raise_failures()
        scores = [validation.fossilized for validation in unpack_validations(download(validated))]
        loss, score = torch.tensor(scores, dtype=validated.dtype).unbind(1)
        return loss, score

    def test_metrics(self) -> dict[str, Tensor]:
        """Return the task's further test metrics by name, [N] each, of each host with its fossilized seeds only."""
        rows = [self.task.test_metrics(*self.executor.predict(env, self.data.test)) for env in self.envs]
        return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}

    @property
    def parameter_counts(self) -> Tensor:
        """Parameters of each host with its fossilized seeds, [N]."""
        return torch.tensor([env.fossilized_parameters for env in self.envs])

    def state_dict(self) -> dict[str, Any]:
        return {"envs": [env.packed_state() for env in self.envs]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state of `state_dict`. Raises ValueError if it has another number of environments."""
        if len(state["envs"]) != self.n_envs:
            raise ValueError(
                f"the checkpoint holds {len(state['envs'])} environments, this run has {self.n_envs}; "
                f"set data.n_envs to {len(state['envs'])}"
            )
        for i, saved in enumerate(state["envs"]):
            self.load_host(i, unpack(saved))
        self._update_constants()
        self.episode_starts.zero_()
        self.observation_builder.update()

    def load_host(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore the host of this index from a state of `HostEnv.state_dict`."""
        self.envs[index] = self.env_factory.make(index, state["rng_seed"])
        self.envs[index].load_state_dict(state)


class SinglePool:
    """A network in a training of its own as a pool of one; what trains it calls `record` after every epoch.

    `growable`: where a blueprint can grow in a slot, [K, blueprints] bool. Of `config` the training is not used.
    """

    n_envs = 1

    def __init__(self, env: GrowthRecord, growable: Tensor, config: EnvConfig) -> None:
        self.env, self.envs, self.space = env, [env], env.space
        self.growable, self.config, self.device = growable, config, torch.device("cpu")
        self._builder = ObservationBuilder(
            self.envs, self.space, growable, config=config.observation, device=self.device
        )
        self.masks, self.masks_on_cpu = self._builder.masks, self._builder.masks_on_cpu
        self.feature_names = self._builder.names
        self._is_observed = False  # whether the observation is that of the network as it is now
        self.episode_starts = torch.zeros(1, dtype=torch.bool)

    @property
    def observation(self) -> Observation:
        """Observation of the network. It is computed when it is asked for, because rules do not read it."""
        if not self._is_observed:
            self._builder.update_observation()
            self._is_observed = True
        return self._builder.observation

    def begin(self, validation: Validation) -> None:
        """Record the validation before the first epoch."""
        self.env.record_validation(validation)
        self.update()

    def record(
        self, result: EpochResult, contributions: Mapping[str, float], hold_stages: bool = False
    ) -> list[SeedEvent]:
        """Record an epoch, advance the seeds, and renew observation and masks.

        `contributions` are in points, by slot. With `hold_stages` no seed changes its stage.
        """
        events = self.env.record_epoch(result, contributions, hold_stages)
        self.update()
        return events

    def update(self) -> None:
        """Update observation and masks from the network."""
        self._builder.update_masks()
        self._is_observed = False

    def choose(self, controller: Any) -> list[int]:
        """Return the action that a controller chooses, an index per head. Raises ValueError if it is not allowed."""
        try:
            chosen = controller.act(self)
            check_is_action(chosen, self.n_envs)
            action = [int(index) for index in torch.stack(chosen).flatten().tolist()]
            check_possible(self.space, self.masks_on_cpu, 0, action)
        except ActionError as error:
            raise ValueError(f"{type(controller).__name__}: {error}") from error
        return action

    def apply(self, action: list[int]) -> list[SeedEvent]:
        """Execute an action, and return the changes of seeds."""
        last_op = self.env.last_op
        events = self.env.apply(action)
        if not (last_op is self.env.last_op is Op.WAIT):  # to wait again changes nothing
            self.update()
        return events
