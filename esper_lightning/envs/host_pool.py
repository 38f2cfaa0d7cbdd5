"""A vector environment of N host networks, which are trained, grown and validated together."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.config import EnvConfig, HostFactory, check_compatible
from esper_lightning.envs.context.env_factory import EnvFactory
from esper_lightning.envs.device_transfer import (
    copy_to_device,
    download,
    pack_epochs,
    unpack_epochs,
    unpack_validations,
)
from esper_lightning.envs.executors import AUTO, EXECUTORS, FusedExecutor, LoopExecutor
from esper_lightning.envs.executors.out_of_memory import isolate_oom
from esper_lightning.envs.executors.threads import usable_cores
from esper_lightning.envs.governing import Overseer, finish_epoch
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.memory import check_host_memory
from esper_lightning.envs.packing import unpack
from esper_lightning.envs.reward import host_status, make_step_record, reward_terms, status_after_action
from esper_lightning.envs.spaces.action_discovery import SharedSpace
from esper_lightning.envs.spaces.actions import HEADS, Action, ActionError, check_is_action, to_action
from esper_lightning.envs.spaces.observation_builder import ObservationBuilder
from esper_lightning.envs.step_result import HostEvent, PoolMetrics, StepResult, Transition
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.stages import Stage
from esper_lightning.profiling import PhaseClock, make_timer
from esper_lightning.rewards import account_after
from esper_lightning.tasks import Split, Task, TaskData

SMALL_HOST = 5_000_000
"""Largest product of the parameters and the inputs of a host for which `auto` stands for `fused` on the CPU.

With 6,418 parameters and 16 hosts on two cores, `fused` is 1.2 to 1.7 times as fast as `threads` on 768 inputs, and 0.6
to 0.8 times on 3,072."""

WAIT_ACTION = (0,) * len(HEADS)
"""Action that changes nothing: choice 0 of every head."""


class HostPool:
    """A vector environment of N hosts, built once and reset in place.

    Args:
        task: Computes loss and accuracy of outputs on `data`.
        data: The data set; all hosts on one device share one copy.
        host: Factory of host networks.
        config: Settings of the environments.
        n_envs: Number of environments N.
        device: Device of observations, rewards and masks.
        host_devices: Devices of hosts, which are assigned to them in turn. None: `device`.
        held_out: True to draw the held-out contexts of the family, which training never draws.
        shared_space: Slots and blueprints shared with the hosts of other tasks, for one policy that grows all of them.
        overseer: Overseer that watches the hosts. None: no host is rolled back, and a host that runs out of memory
            is an error.

    Attributes:
        executor_choice: Name or import path of the executor; the one that was chosen, where the setting is `auto`.
        growable: True where a blueprint can grow in a slot of some host, whatever its episode offers, [K, blueprints].
        privileged: Hidden context variables of each episode, [N, P] float, for the critic alone. None: nothing is
            hidden.
        rows: Sizes of the parts of a row of the observation.
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
        overseer: Overseer | None = None,
    ) -> None:
        check_compatible(config, data, n_envs, device=device)
        self.config = config
        self.device = device
        devices = [device] if host_devices is None else host_devices
        self.task = task
        self.clock = PhaseClock(make_timer(device))
        self.env_factory = EnvFactory(
            task,
            data.copy_to(devices),
            host,
            config=config,
            devices=devices,
            held_out=held_out,
            shared_space=shared_space,
        )
        self.data, self.space = self.env_factory.data, self.env_factory.space
        first = self.env_factory.make(0, 0)
        check_host_memory(first.network, n_envs, device)
        self.envs = [self.env_factory.make(index, index) for index in range(n_envs)]
        self.growable = torch.stack(list(self.env_factory.growable.values())).any(0)
        kinds = self.env_factory.one_per_architecture()
        self.executor_choice = self._fitting_executor(kinds) if config.executor == AUTO else config.executor
        self.executor: LoopExecutor = EXECUTORS.find(self.executor_choice)(task, config.training)
        self.executor.prepare(kinds, self.data.train)
        # Losses and accuracies have the precision of the hosts, at least float32.
        self._score_dtype = torch.promote_types(next(self.envs[0].network.parameters()).dtype, torch.float32)
        self.observation_builder = ObservationBuilder(
            self.envs,
            self.space,
            self.env_factory.growable_in(first) if self.env_factory.is_uniform else self._offered(),
            config=config,
            device=device,
            num_privileged=self.env_factory.num_privileged,
        )
        self.masks, self.masks_on_cpu = self.observation_builder.masks, self.observation_builder.masks_on_cpu
        self.observation, self.feature_names = self.observation_builder.observation, self.observation_builder.names
        self.rows = self.observation_builder.rows
        self.privileged = self.observation_builder.privileged
        self.episode_starts = torch.zeros(n_envs, dtype=torch.bool, device=device)  # True after a rollback
        self.overseer: Overseer | None = None
        self.reset(range(n_envs))
        self.oversee(overseer)

    def oversee(self, overseer: Overseer | None) -> None:
        """Let an overseer watch the hosts from their present state on. None: stop watching."""
        self.overseer = overseer
        self.env_factory.oversee(overseer)
        self._take_snapshots(self.envs)

    def _fitting_executor(self, kinds: Sequence[HostEnv]) -> str:
        """Return the name of the executor for which `auto` stands, given one environment of each architecture."""
        if self.device.type == "cuda":
            return "streams"
        inputs = math.prod(self.data.input_shape)
        are_small = all(env.host_parameters * inputs <= SMALL_HOST for env in kinds)
        without = "threads" if self.device.type == "cpu" and min(self.n_envs, usable_cores()) > 1 else "loop"
        if not are_small or self.n_envs == 1:
            return without
        try:
            FusedExecutor(self.task, self.config.training).prepare(kinds, self.data.train)
        except ValueError:  # these hosts cannot be stacked
            return without
        return "fused"

    @property
    def host_kind(self) -> str:
        """Description of the hosts that differs between pools of different hosts."""
        return self.env_factory.host_kind

    @property
    def n_envs(self) -> int:
        return len(self.envs)

    @property
    def horizon(self) -> int:
        """Length T of the longest episodes in environment steps."""
        return self.config.horizon

    def _offered(self) -> Tensor:  # [N, K, blueprints] bool
        """Return which blueprint can grow in which slot of each host in its present episode."""
        return torch.stack([self.env_factory.growable_in(env) for env in self.envs])

    def reset(self, rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `rng_seeds[i]` alone."""
        assert len(rng_seeds) == self.n_envs, "one RNG seed per environment"
        return self.reset_hosts(range(self.n_envs), rng_seeds)

    def reset_hosts(self, hosts: Sequence[int], rng_seeds: Sequence[int]) -> Observation:
        """Start an episode in some environments. The others continue theirs, so hosts may be at different ticks.

        Args:
            hosts: Indices of the environments.
            rng_seeds: RNG seed of each new episode.
        """
        with self.clock.measure("bookkeeping"):
            for i, rng_seed in zip(hosts, rng_seeds, strict=True):
                self.envs[i] = self.env_factory.make(i, rng_seed)
                self.envs[i].reset(rng_seed)
                self.episode_starts[i] = False
            self._update_constants()
        envs = [self.envs[i] for i in hosts]
        with self.clock.measure("validate", [env.timer for env in envs]):
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
        """Update what stays the same in an episode: privileged features, and what can grow in which host."""
        if not self.env_factory.is_uniform:
            self.observation_builder.update_growable(self._offered())
        self.observation_builder.update_privileged([self.env_factory.privileged_features(env) for env in self.envs])

    def load_host(self, index: int, state: Mapping[str, Any]) -> None:
        """Restore the host of this index from a state of `HostEnv.state_dict`."""
        self.envs[index] = self.env_factory.make(index, state["rng_seed"])
        self.envs[index].load_state_dict(state)

    def _record_validations(self, envs: Sequence[HostEnv], validated: Tensor) -> None:
        """Record a validation of hosts that have not trained since their last one; `validated` is [N, 2, V]."""
        validations = unpack_validations(download(validated), len(self.space.slot))
        for env, validation in zip(envs, validations, strict=True):
            if env.failure is None:
                env.record_validation(validation)
            elif env.ended:  # its measurements are final, so the failure has no consequence
                env.failure = None

    def _raise_failures(self) -> None:
        """Raise MemoryError if a host ran out of memory in the measurement just made."""
        for i, env in enumerate(self.envs):
            if env.failure is not None:
                raise MemoryError(
                    f"host {i} (RNG seed {env.rng_seed}): {env.failure}; make hosts smaller, or lower data.n_envs"
                )

    def step(self, action: Action) -> StepResult:
        """Apply the actions, train every host for one epoch, validate it, and return the result.

        One step makes two device-to-host transfers: the actions, because they decide which modules exist, and all
        measurements together, because the next action depends on them. A rollback adds a third one, since the restored
        host is validated again.

        Raises ActionError, a ValueError, if the masks forbid an action.
        """
        with self.clock.measure("bookkeeping"):
            action, transitions = self._decode_actions(action)
            for transition in transitions:
                self._apply_action(transition)
        # A fossilized seed must survive a rollback. The host is healthy here, or the action would have been vetoed.
        self._take_snapshots(transition.env for transition in transitions if has_fossilized(transition))
        self._train_epoch(transitions)
        self._finish_epochs(transitions, self.overseer)
        with self.clock.measure("bookkeeping"):
            result = self._make_result(action, transitions)
        if self.overseer is not None:
            with self.clock.measure("governor"):
                self.overseer.take_due_snapshots(self.envs)
        return result

    def _decode_actions(self, action: Action) -> tuple[Action, list[Transition]]:
        """Read and check the actions; a vetoed one, or an impossible one under `masks: false`, is executed as WAIT.

        Returns the actions that the policy learns from, in which only vetoed ones are replaced, and one transition per
        host with the executed action. Raises ActionError if an action is not allowed; then no host has changed.
        """
        chosen, executable = self.read_action(action)
        vetoes = [
            None if self.overseer is None else self.overseer.find_veto(i, env, row)
            for i, (env, row) in enumerate(zip(self.envs, executable, strict=True))
        ]
        if any(vetoes):
            action = to_action(
                [WAIT_ACTION if veto else row for row, veto in zip(chosen, vetoes, strict=True)], self.device
            )
        rows = zip(self.envs, executable, vetoes, strict=True)
        return action, [
            Transition(i, env, WAIT_ACTION if veto else row, veto=veto) for i, (env, row, veto) in enumerate(rows)
        ]

    def read_action(self, action: Action) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """Return the indices of each host's action as they are given, and as they would be executed now.

        They differ under `masks: false` only. Raises ActionError if an action is not allowed.
        """
        check_is_action(action, self.n_envs)
        chosen = list(zip(*download(torch.stack(action)).tolist(), strict=True))
        executable = self.observation_builder.mask_invalid(chosen, WAIT_ACTION)
        for i, row in enumerate(executable):
            self._check_action(i, row)
        return chosen, executable

    def _check_action(self, host: int, action: tuple[int, ...]) -> None:
        env, sizes = self.envs[host], tuple(self.space.sizes.values())
        if env.tick >= self.horizon:
            raise ValueError(f"host {host}: the episode is over after {env.tick} ticks; reset the pool")
        if not all(0 <= choice < size for choice, size in zip(action, sizes, strict=True)):
            raise ActionError(f"host {host}: {action} is no action; the heads {HEADS} have {sizes} choices")
        if not self.masks_on_cpu.allows(host, action):
            raise ActionError(
                f"host {host}: {self.space.describe(action)} is masked; choose within the masks, as "
                f"pool.masks_on_cpu.allows(host, action) tells"
            )

    def _apply_action(self, transition: Transition) -> None:
        """Execute the action of one host and record its status before and after it."""
        env, with_seeds = transition.env, self.config.reward.depends_on_seeds
        transition.before = host_status(env, with_seeds)
        with isolate_oom(env):
            changes = env.apply(transition.action)
            transition.events_of_action = [HostEvent(transition.host, env.tick + 1, change) for change in changes]
        transition.after_action = status_after_action(env) if with_seeds else None

    def _train_epoch(self, transitions: Sequence[Transition]) -> None:
        """Train every active host for one epoch and validate it. Ended and failed hosts are skipped."""
        active = [
            transition for transition in transitions if not transition.env.ended and transition.env.failure is None
        ]
        if not active:
            return
        envs = [transition.env for transition in active]
        trained, validated = self.executor.train_and_validate(
            envs, self.data.train, self.data.validation, clock=self.clock
        )
        with self.clock.measure("bookkeeping"):
            # A single transfer for all measurements; after it, everything is Python numbers.
            results = unpack_epochs(download(pack_epochs(trained, validated)), len(self.space.slot))
            for transition, result in zip(active, results, strict=True):
                transition.result = result

    def _finish_epochs(self, transitions: Sequence[Transition], overseer: Overseer | None) -> None:
        """Call `finish_epoch` for every host, and validate again those that were rolled back.

        Raises MemoryError if a host ran out of memory and no overseer can roll it back.
        """
        if overseer is None:
            self._raise_failures()
        with self.clock.measure("bookkeeping"):
            for transition in transitions:
                finish_epoch(transition, overseer)
        restored = [transition.env for transition in transitions if transition.diverged]
        if restored:
            with self.clock.measure("validate"):
                validated = self.executor.validate(restored, self.data.validation)
            self._record_validations(restored, validated)

    def _make_result(self, action: Action, transitions: Sequence[Transition]) -> StepResult:
        """Compute rewards and metrics of the step and the observation after it."""
        scores = [env.update_objective() for env in self.envs]
        terms = self._compute_rewards(transitions)
        loss, accuracy = torch.tensor(scores, dtype=self._score_dtype).unbind(1)
        metrics = PoolMetrics(
            accuracy=accuracy,
            loss=loss,
            objective=torch.tensor([env.objective for env in self.envs], dtype=self._score_dtype),
            parameters=self.parameter_counts,
            reward=torch.stack(list(terms.values())).sum(0).to(self._score_dtype),
        )
        self.observation_builder.update()
        diverged = torch.tensor([transition.diverged for transition in transitions])
        self.episode_starts.copy_(copy_to_device(diverged, self.device))
        truncated = torch.tensor([env.tick >= env.horizon for env in self.envs])
        return StepResult(
            action=action,
            ops=torch.tensor([transition.action[0] for transition in transitions]),
            observation=self.observation,
            reward=copy_to_device(metrics.reward, self.device),
            terminated=copy_to_device(diverged, self.device),
            truncated=copy_to_device(truncated, self.device),
            masks=self.masks,
            events=[
                *(event for transition in transitions for event in transition.events_of_action),
                *(event for transition in transitions for event in transition.events_of_epoch),
            ],
            verdicts=[transition.verdict for transition in transitions if transition.verdict is not None],
            vetoes=[transition.veto for transition in transitions if transition.veto is not None],
            metrics=metrics,
            terms=terms,
            refusals=self.observation_builder.refusals,
        )

    def _compute_rewards(self, transitions: Sequence[Transition]) -> dict[str, Tensor]:  # [N] each, float64 on the CPU
        """Compute the reward terms of every host by name, and update the reward accounts of its seeds."""
        rewards = []
        penalty = None if self.overseer is None else self.overseer.config.penalty
        for transition in transitions:
            assert transition.before is not None, "the step has an action"
            record = make_step_record(
                transition.op,
                before=transition.before,
                after_action=transition.after_action,
                after=host_status(transition.env, self.config.reward.depends_on_seeds),
                diverged=transition.diverged,
            )
            rewards.append(reward_terms(record, self.config.reward, penalty))
            if record.slots and not record.already_ended:
                transition.env.accounts = [account_after(slot, record) for slot in record.slots]
        return {name: torch.tensor([row[name] for row in rewards], dtype=torch.float64) for name in rewards[0]}

    def train_without_actions(self, ticks: int) -> None:
        """Train all hosts for `ticks` epochs without actions and without the overseer, beyond the horizon too.

        Seeds still advance and are culled automatically.
        """
        for _ in range(ticks):
            transitions = [Transition(i, env, WAIT_ACTION) for i, env in enumerate(self.envs)]
            self._train_epoch(transitions)
            self._finish_epochs(transitions, None)
        self.observation_builder.update()

    def _take_snapshots(self, envs: Iterable[HostEnv]) -> None:
        """Take snapshots of these hosts if an overseer watches them."""
        if self.overseer is not None:
            with self.clock.measure("governor"):
                self.overseer.take_snapshots(envs)

    def test_accuracy(self, fossilized_only: bool = True) -> Tensor:
        """Return the test accuracy [N] of each host, with its fossilized seeds only or with all its seeds."""
        return self.test_scores(fossilized_only)[1]

    def test_scores(self, fossilized_only: bool = True) -> tuple[Tensor, Tensor]:
        """Return test loss and accuracy [N] of each host, with its fossilized seeds only or with all its seeds.

        Raises MemoryError if a host runs out of memory.
        """
        validated = self.executor.validate(self.envs, self.data.test)
        self._raise_failures()
        validations = unpack_validations(download(validated), len(self.space.slot))
        scores = [validation.fossilized if fossilized_only else validation.all_seeds for validation in validations]
        loss, accuracy = torch.tensor(scores, dtype=validated.dtype).unbind(1)
        return loss, accuracy

    def test_metrics(self) -> dict[str, Tensor]:
        """Return the task's further test metrics by name, [N] each, of each host with its fossilized seeds only."""
        rows = [self.task.test_metrics(*self.executor.predict(env, self.data.test)) for env in self.envs]
        return {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}

    def variant_accuracies(self, host: int, variants: Sequence[SeedVariant], data: Split) -> Tensor:
        """Return the accuracy [V] of one host on `data`, a split of this pool, with each combination of seeds."""
        _, accuracy = self.executor.measure(self.envs[host], data, variants)
        self._raise_failures()
        return accuracy.cpu()

    def locate_host(self, host: int) -> "tuple[HostPool, int]":
        """Return the single-task pool that holds a host, and the host's index in it."""
        return self, host

    @property
    def samples_per_epoch(self) -> tuple[float, float]:
        """Training and validation samples of one host epoch; with several tasks, averaged over hosts."""
        training = self.config.training
        return training.steps_per_epoch(self.data.train.samples) * training.batch_size, self.data.validation.samples

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


def has_fossilized(transition: Transition) -> bool:
    """Return True if the action of this step fossilized a seed."""
    return any(event.seed_event.after is Stage.FOSSILIZED for event in transition.events_of_action)
