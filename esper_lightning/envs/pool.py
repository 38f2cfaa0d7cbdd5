"""A vector environment of N host networks, which are trained, grown and validated together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.actions import HEADS, Action, to_action
from esper_lightning.envs.bench import Bench
from esper_lightning.envs.compiling import compile_hosts
from esper_lightning.envs.config import EnvConfig, HostFactory, check_fits
from esper_lightning.envs.execution import LoopExecutor, PhaseClock, make_timer
from esper_lightning.envs.execution.auto import Selection, select
from esper_lightning.envs.execution.choice import Choice, candidates, go_on
from esper_lightning.envs.failure import alone
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.observation import Observation
from esper_lightning.envs.oversight import finish_epoch, veto_of
from esper_lightning.envs.paying import after_action, as_tick, reward_terms, status_of
from esper_lightning.envs.places import Common
from esper_lightning.envs.result import HostEvent, PoolMetrics, StepResult, Transition
from esper_lightning.envs.sight import Sight
from esper_lightning.envs.transfer import download, pack_epochs, send, unpack_epochs, unpack_validations
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.restoring import check_count, check_parts
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import settled
from esper_lightning.tasks import Split, Task, TaskData

WAIT = (0,) * len(HEADS)
"""Action that changes nothing: choice 0 of every head."""


class HostPool:
    """A vector environment of N hosts, built once and reset in place.

    Args:
        task: Computes loss and accuracy of outputs on `data`.
        data: The data set; all hosts on one device share one copy.
        host: Factory of host networks.
        config: Settings of the environments.
        n_envs: Number of environments N.
        device: Device of observations, rewards and masks, and the first device of hosts.
        others: Further devices for hosts, which are assigned to `device` and these in turn.
        held_out: True to draw the held-out contexts of the family, which training never draws.
        common: Slots and blueprints shared with the hosts of other tasks, for one policy that grows all of them.

    Attributes:
        privileged: Hidden context variables of each episode, [N, P] float, for the critic alone. None: nothing is
            hidden.
    """

    goes_on = False  # a rollout is exactly one episode of every host
    tasks: Mapping[str, slice] = {}  # host indices of each task; empty for a pool of one task

    def __init__(
        self,
        task: Task,
        data: TaskData,
        host: HostFactory,
        config: EnvConfig,
        n_envs: int,
        device: torch.device,
        others: Sequence[torch.device] = (),
        held_out: bool = False,
        common: Common | None = None,
    ) -> None:
        check_fits(config, data, n_envs, device)
        self.config = config
        self.device = device
        devices = [device, *others]
        self.task = task
        self.clock = PhaseClock(make_timer(device))
        self.bench = Bench(task, data.spread(devices), host, config, devices, held_out, common)
        self.data, self.space, growable = self.bench.data, self.bench.space, self.bench.growable
        self.envs = [self.bench.seat(i, i) for i in range(n_envs)]
        if config.training.compile is not None:
            trials = [self.bench.seat(n_envs * len(devices) + i, 0) for i in range(len(devices))]
            batch = Split(*(part[: config.training.batch_size] for part in self.data.train))
            compile_hosts(self.envs, trials, LoopExecutor(task, config.training), batch)
        self._choose(growable)
        # Losses and accuracies have the precision of the hosts, at least float32.
        self._dtype = torch.promote_types(next(self.envs[0].network.parameters()).dtype, torch.float32)
        self.sight = Sight(self.envs, self.bench, device)
        self.masks, self.masks_on_cpu = self.sight.masks, self.sight.masks_on_cpu
        self.observation, self.feature_names = self.sight.observation, self.sight.names
        self.privileged = self.sight.privileged
        self.episode_starts = torch.zeros(n_envs, dtype=torch.bool, device=device)  # True after a rollback
        self.reset(range(n_envs))

    def _choose(self, growable: Tensor) -> None:
        """Choose the executor that trains and validates the hosts."""
        self.selection: Selection | None = None  # measurements behind the choice of executor `auto`
        choice = Choice(self.config.executor, self.config.training.onednn is not False)
        self.choices = [choice]
        if self.config.executor == "auto":
            self.choices = candidates(self.device, self.config.training)
            self.selection = select(self.envs, growable, self.task, self.data, self.choices)
            choice = self.selection.choice
        self._execute(choice)

    @property
    def host_kind(self) -> str:
        """Description of the hosts that differs between pools of different hosts."""
        return self.bench.host_kind

    def _execute(self, choice: Choice) -> None:
        """Switch to the executor that `choice` describes."""
        self.choice = choice
        self.executor = choice.make(self.task, self.config.training)
        self.executor.prepare(self.bench.samples(), self.data.train)

    @property
    def n_envs(self) -> int:
        return len(self.envs)

    @property
    def horizon(self) -> int:
        return self.config.horizon

    @property
    def categories(self) -> int:
        """Number of blueprint ids in an observation; id 0 is an empty slot."""
        return len(self.space.blueprint) + 1

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Start an episode in every environment; environment i depends on the RNG seed `seeds[i]` alone."""
        assert len(seeds) == self.n_envs, "one RNG seed per environment"
        with self.clock.measure("bookkeeping"):
            for i, seed in enumerate(seeds):
                self.envs[i] = self.bench.seat(i, seed)
                self.envs[i].reset(seed)
            self.sight.tell()
            self.episode_starts.zero_()
        with self.clock.measure("validate", [env.laps for env in self.envs]):
            validated = self.executor.validate(self.envs, self.data.validation)
        self._insist()  # there is no snapshot yet to roll back to
        with self.clock.measure("bookkeeping"):
            self._record(self.envs, validated)
            for env in self.envs:
                env.measure()
            self.sight.look()
        self._keep(self.envs)
        return self.observation

    def load_host(self, place: int, state: dict[str, Any]) -> None:
        """Restore the host of index `place` from a state of `HostEnv.state_dict`."""
        check_parts("a host", state, ("seed",))
        self.envs[place] = self.bench.seat(place, check_count("seed", state["seed"], 2**64))
        self.envs[place].load_state_dict(state)

    def _record(self, envs: Sequence[HostEnv], validated: Tensor) -> None:
        """Record a validation of hosts that have not trained since their last one; `validated` is [N, 2, V]."""
        validations = unpack_validations(download(validated), len(self.space.slot))
        for env, validation in zip(envs, validations, strict=True):
            if env.failure is None:
                env.record(validation)
            elif env.ended:  # its measurements no longer change, so the failure has no consequence
                env.failure = None

    def _insist(self) -> None:
        """Raise MemoryError if a host ran out of memory in the measurement just made."""
        for i, env in enumerate(self.envs):
            if env.failure is not None:
                raise MemoryError(
                    f"host {i} (seed {env.seed}): {env.failure}; make hosts smaller, or lower data.n_envs"
                )

    def step(self, action: Action) -> StepResult:
        """Apply the actions, train every host for one epoch, validate it, and return the result.

        One step makes two device-to-host transfers: the actions, because they decide which modules exist, and all
        measurements together, because the next action depends on them. A rollback adds a third one, since the restored
        host is validated again.

        Raises ValueError if the masks forbid an action.
        """
        with self.clock.measure("bookkeeping"):
            action, transitions = self._decode(action)
            for transition in transitions:
                self._apply(transition)
        # A fossilized seed must survive a rollback. The host is healthy here, or the action would have been vetoed.
        self._keep(each.env for each in transitions if fossilized(each))
        self._train(transitions)
        self._judge(transitions, watched=self.config.governor.enabled)
        with self.clock.measure("bookkeeping"):
            result = self._conclude(action, transitions)
        self._keep(env for env in self.envs if env.guard is not None and env.guard.due and not env.ended)
        return result

    def _decode(self, action: Action) -> tuple[Action, list[Transition]]:
        """Read and check the actions; a vetoed one, or an impossible one under `masks: false`, is executed as WAIT.

        Returns the actions that the policy learns from, in which only vetoed ones are replaced, and one transition per
        host with the executed action. Raises ValueError if an action is not allowed; then no host has changed.
        """
        chosen = list(zip(*download(torch.stack(action)).tolist(), strict=True))
        possible = self.sight.possible(chosen, WAIT)
        for i, row in enumerate(possible):
            self._check(i, row)
        vetoes = [veto_of(i, env, row) for i, (env, row) in enumerate(zip(self.envs, possible, strict=True))]
        if any(vetoes):
            action = to_action([WAIT if veto else row for row, veto in zip(chosen, vetoes, strict=True)], self.device)
        rows = zip(self.envs, possible, vetoes, strict=True)
        return action, [Transition(i, env, WAIT if veto else row, veto) for i, (env, row, veto) in enumerate(rows)]

    def _check(self, host: int, action: tuple[int, ...]) -> None:
        env, sizes = self.envs[host], tuple(self.space.sizes.values())
        if env.tick >= self.config.horizon:
            raise ValueError(f"host {host}: the episode is over after {env.tick} ticks; reset the pool")
        if not all(0 <= choice < size for choice, size in zip(action, sizes, strict=True)):
            raise ValueError(f"host {host}: {action} is no action; the heads {HEADS} have {sizes} choices")
        if not self.masks_on_cpu.allow(host, action):
            raise ValueError(f"host {host}: {self.space.describe(action)} is masked; choose within the masks")

    def _apply(self, transition: Transition) -> None:
        """Execute the action of one host and record its status before and after it."""
        env, with_seeds = transition.env, self.config.reward.looks_at_seeds
        transition.before = status_of(env, with_seeds)
        with alone(env):
            changes = env.apply(transition.action)
            transition.events_of_action = [HostEvent(transition.host, env.tick + 1, change) for change in changes]
        transition.after_action = after_action(env) if with_seeds else None

    def _train(self, transitions: Sequence[Transition]) -> None:
        """Train every active host for one epoch and validate it. Ended and failed hosts are skipped."""
        learning = [each for each in transitions if not each.env.ended and each.env.failure is None]
        if not learning:
            return
        envs = [each.env for each in learning]
        trained, validated = self.executor.tick(envs, self.data.train, self.data.validation, self.clock)
        with self.clock.measure("bookkeeping"):
            # A single transfer for all measurements; after it, everything is Python numbers.
            results = unpack_epochs(download(pack_epochs(trained, validated)), len(self.space.slot))
            for transition, result in zip(learning, results, strict=True):
                transition.result = result

    def _judge(self, transitions: Sequence[Transition], watched: bool) -> None:
        """Call `finish_epoch` for every host, and validate again those that were rolled back."""
        with self.clock.measure("bookkeeping"):
            for transition in transitions:
                finish_epoch(transition, watched)
        restored = [each.env for each in transitions if each.diverged]
        if restored:
            with self.clock.measure("validate"):
                validated = self.executor.validate(restored, self.data.validation)
            self._record(restored, validated)

    def _conclude(self, action: Action, transitions: Sequence[Transition]) -> StepResult:
        """Compute rewards and metrics of the step and the observation after it."""
        scores = [env.measure() for env in self.envs]
        terms = self._pay(transitions)
        loss, accuracy = torch.tensor(scores, dtype=self._dtype).unbind(1)
        metrics = PoolMetrics(
            accuracy=accuracy,
            loss=loss,
            objective=torch.tensor([env.objective for env in self.envs], dtype=self._dtype),
            parameters=self.parameters,
            reward=torch.stack(list(terms.values())).sum(0).to(self._dtype),
        )
        self.sight.look()
        diverged = torch.tensor([each.diverged for each in transitions])
        self.episode_starts.copy_(send(diverged, self.device))
        truncated = torch.tensor([env.tick >= self.config.horizon for env in self.envs])
        return StepResult(
            action=action,
            observation=self.observation,
            reward=send(metrics.reward, self.device),
            terminated=send(diverged, self.device),
            truncated=send(truncated, self.device),
            masks=self.masks,
            events=[
                *(event for each in transitions for event in each.events_of_action),
                *(event for each in transitions for event in each.events_of_epoch),
            ],
            verdicts=[each.verdict for each in transitions if each.verdict is not None],
            vetoes=[each.veto for each in transitions if each.veto is not None],
            metrics=metrics,
            terms=terms,
            refusals=self.sight.refusals,
        )

    def _pay(self, transitions: Sequence[Transition]) -> dict[str, Tensor]:  # [N] each, float64 on the CPU
        """Compute the reward terms of every host by name, and update the reward accounts of its seeds."""
        paid = []
        for each in transitions:
            after = status_of(each.env, self.config.reward.looks_at_seeds)
            tick = as_tick(each.op, each.before, each.after_action, after, each.diverged)
            paid.append(reward_terms(tick, self.config))
            if tick.slots and not tick.over:
                each.env.accounts = [settled(slot, tick) for slot in tick.slots]
        return {name: torch.tensor([row[name] for row in paid], dtype=torch.float64) for name in paid[0]}

    def carry_on(self, ticks: int) -> None:
        """Train all hosts for `ticks` epochs without actions and without the Governor, beyond the horizon too.

        Seeds still advance and are culled automatically.
        """
        for _ in range(ticks):
            transitions = [Transition(i, env, WAIT) for i, env in enumerate(self.envs)]
            self._train(transitions)
            self._judge(transitions, watched=False)
        self.sight.look()

    def _keep(self, envs: Iterable[HostEnv]) -> None:
        """Take snapshots of these hosts if the Governor is enabled."""
        if self.config.governor.enabled:
            with self.clock.measure("governor"):
                for env in envs:
                    env.keep()

    def test(self, committed: bool = True) -> Tensor:
        """Return the test accuracy [N] of each host, with its fossilized seeds only or with all its seeds."""
        return self.test_scores(committed)[1]

    def test_scores(self, committed: bool = True) -> tuple[Tensor, Tensor]:
        """Return test loss and accuracy [N] of each host, with its fossilized seeds only or with all its seeds.

        Raises MemoryError if a host runs out of memory.
        """
        validated = self.executor.validate(self.envs, self.data.test)
        self._insist()
        validations = unpack_validations(download(validated), len(self.space.slot))
        scores = [each.committed if committed else each.all_seeds for each in validations]
        loss, accuracy = torch.tensor(scores, dtype=validated.dtype).unbind(1)
        return loss, accuracy

    def accuracy_of(self, host: int, variants: Sequence[Variant], data: Split) -> Tensor:
        """Return the accuracy [V] of one host on `data`, a split of this pool, with each combination of seeds."""
        _, accuracy = self.executor.measure(self.envs[host], data, variants)
        self._insist()
        return accuracy.cpu()

    def home_of(self, host: int) -> "tuple[HostPool, int]":
        """Return the single-task pool that holds a host, and the host's index in it."""
        return self, host

    @property
    def samples_per_epoch(self) -> tuple[float, float]:
        """Training and validation samples of one host epoch; with several tasks, averaged over hosts."""
        training = self.config.training
        return training.steps(self.data.train.samples) * training.batch_size, self.data.validation.samples

    @property
    def parameters(self) -> Tensor:
        """Parameters of each host with its fossilized seeds, [N]."""
        return torch.tensor([env.committed_parameters for env in self.envs])

    def state_dict(self) -> dict[str, Any]:
        return {"executor": list(self.choice), "envs": [env.state_dict() for env in self.envs]}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore a state of `state_dict`, with its executor if the setting of this pool is `auto`.

        Returns a note for the user if the executor differs from that of the state, else None. Raises ValueError if the
        state has another number of environments.
        """
        if len(state["envs"]) != self.n_envs:
            raise ValueError(
                f"the checkpoint holds {len(state['envs'])} environments, this run has {self.n_envs}; "
                f"set data.n_envs to {len(state['envs'])}"
            )
        # Older checkpoints do not name the executor.
        choice, note = go_on(Choice(*state.get("executor", self.choice)), self.choice, self.choices)
        if choice != self.choice:
            self._execute(choice)
            self.reset(range(self.n_envs))  # executors must be prepared on hosts with empty slots
        for i, saved in enumerate(state["envs"]):
            self.load_host(i, saved)
        self.sight.tell()
        self.episode_starts.zero_()
        self.sight.look()
        return note


def fossilized(transition: Transition) -> bool:
    """Return True if the action of this step fossilized a seed."""
    return any(event.seed.after is Stage.FOSSILIZED for event in transition.events_of_action)
