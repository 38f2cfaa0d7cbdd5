"""HostPool: N environments stepped together, with the semantics of a Gym vector environment."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import build_on
from esper_lightning.envs.actions import HEADS, Action
from esper_lightning.envs.compiling import compile_hosts
from esper_lightning.envs.config import EnvConfig, HostFactory, check_fits
from esper_lightning.envs.execution import Laps, LoopExecutor, PhaseClock, make_timer
from esper_lightning.envs.execution.auto import Selection, select
from esper_lightning.envs.execution.choice import Choice, candidates, go_on
from esper_lightning.envs.host_env import HostEnv, Measured
from esper_lightning.envs.masks import Legal, Masks, legal, make_masks
from esper_lightning.envs.observation import Observation, features, observe
from esper_lightning.envs.offer import describe_host, offer
from esper_lightning.envs.transfer import download, send
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.gradients import GradientStats
from esper_lightning.growth.network import SeedEvent
from esper_lightning.rewards import objective
from esper_lightning.tasks import Split, Task, TaskData


class HostEvent(NamedTuple):
    """A change of a seed, with the host and the tick (from 1 on) in which it happened."""

    host: int
    tick: int
    seed: SeedEvent


class PoolMetrics(NamedTuple):
    """What was measured in a tick, [N] each, on the CPU."""

    accuracy: Tensor  # of the host with its live seeds; on the last tick: with the fossilized ones alone
    loss: Tensor
    objective: Tensor
    parameters: Tensor  # of the host and what is kept for good
    reward: Tensor  # change of the objective


class StepResult(NamedTuple):
    """What followed from a step. Observation and masks are the pool's own storage: the next step overwrites them."""

    observation: Observation
    reward: Tensor  # [N]
    terminated: Tensor  # [N] bool
    truncated: Tensor  # [N] bool: the horizon was reached
    masks: Masks
    events: list[HostEvent]
    metrics: PoolMetrics


class HostPool:
    """N environments, built once and reset in place.

    Args:
        task: Judges outputs; its data are `data`.
        data: The data set; one copy on each device serves all hosts there.
        host: Makes a host.
        config: What an environment is.
        n_envs: Environments N.
        device: Where observations, rewards and masks live, and hosts.
        others: More devices for hosts: they are dealt out to `device` and these in turn.
    """

    def __init__(
        self,
        task: Task,
        data: TaskData,
        host: HostFactory,
        config: EnvConfig,
        n_envs: int,
        device: torch.device,
        others: Sequence[torch.device] = (),
    ) -> None:
        check_fits(config, data, n_envs, device)
        self.config = config
        self.device = device
        devices = [device, *others]
        self.data = data.spread(devices)
        self.task = task
        self.clock = PhaseClock(make_timer(device))

        def build(on: torch.device) -> nn.Module:
            return build_on(on, lambda: host(data.input_shape, data.classes), torch.Generator(on).manual_seed(0))

        batch = Split(*(part[: config.training.batch_size] for part in self.data.train))
        self.space, growable = offer(build(device), task, batch, config.actions, config.lifecycle.birth)
        make = (config.training, config.lifecycle, config.actions, config.horizon)

        def make_env(on: torch.device) -> HostEnv:
            return HostEnv(build(on), self.space, *make, on, Laps(make_timer(on)))

        self.envs = [make_env(on) for on in islice(cycle(devices), n_envs)]
        if config.training.compile is not None:
            trials = [make_env(on) for on in devices]
            compile_hosts(self.envs, trials, LoopExecutor(task, config.training), batch)
        self.selection: Selection | None = None  # how auto came to its choice
        choice = Choice(config.executor, config.training.onednn is not False)
        self.choices = [choice]
        if config.executor == "auto":
            self.choices = candidates(device, config.training)
            self.selection = select(self.envs, growable, task, self.data, self.choices)
            choice = self.selection.choice
        self._execute(choice)
        self.host_parameters = self.envs[0].host_parameters
        self.host_kind = describe_host(self.envs[0].network)
        self.masks_on_cpu = make_masks(n_envs, self.space, growable)
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        self.feature_names = list(features(self.envs[0], config.objective))
        self.observation = Observation(
            features=torch.zeros(n_envs, len(self.feature_names), device=device),
            blueprints=torch.zeros(n_envs, len(self.space.slot), dtype=torch.int64, device=device),
        )
        self.reset(range(n_envs))

    def _execute(self, choice: Choice) -> None:
        """From now on hosts are executed so."""
        self.choice = choice
        self.executor = choice.make(self.task, self.config.training)

    @property
    def n_envs(self) -> int:
        return len(self.envs)

    def reset(self, seeds: Sequence[int]) -> Observation:
        """Starts an episode in every environment: the i-th depends on `seeds[i]` alone."""
        assert len(seeds) == self.n_envs, "one seed per environment"
        with self.clock.measure("bookkeeping"):
            for env, seed in zip(self.envs, seeds, strict=True):
                env.reset(seed)
        with self.clock.measure("validate", [env.laps for env in self.envs]):
            validated = self.executor.validate(self.envs, self.data.validation)
        with self.clock.measure("bookkeeping"):
            validated = download(validated)
            untrained = [_measured(row, len(self.space.slot)) for row in validated.tolist()]
            for env, measured in zip(self.envs, untrained, strict=True):
                env.record(measured)
            self._remember_objective(self._metrics(validated))
            self._look()
        return self.observation

    def step(self, action: Action) -> StepResult:
        """Applies the actions, trains and validates every host, and returns what followed.

        Reads twice what is on the device, each time in one transfer: the actions, for they decide which modules there
        are and so what is computed; and in the end all that was measured, for the next decision depends on it.

        Raises ValueError if an action is not allowed by the masks.
        """
        with self.clock.measure("bookkeeping"):
            events = self._apply(action)
        metrics, happened = self._tick()
        with self.clock.measure("bookkeeping"):
            return self._result(metrics, events + happened)

    def carry_on(self, ticks: int) -> None:
        """Host epochs without a decision, beyond the horizon too: seeds advance and are culled by themselves alone."""
        for _ in range(ticks):
            self._tick()
        self._look()

    def _tick(self) -> tuple[PoolMetrics, list[HostEvent]]:
        """Trains and validates every host, and lets time pass for its seeds."""
        trained, validated = self.executor.tick(self.envs, self.data.train, self.data.validation, self.clock)
        with self.clock.measure("bookkeeping"):
            # One transfer for all that was measured: after it everything is Python numbers.
            numbers = download(torch.cat([trained, validated.flatten(1)], 1))
            trained, validated = numbers[:, : trained.shape[1]], numbers[:, trained.shape[1] :].view(validated.shape)
            rows = zip(self.envs, trained.tolist(), validated.tolist(), strict=True)
            events = []
            for i, (env, training, validation) in enumerate(rows):
                measured = _measured(validation, len(self.space.slot), training)
                events += [HostEvent(i, env.tick, event) for event in env.finish_tick(measured)]
            return self._metrics(validated), events

    def _apply(self, action: Action) -> list[HostEvent]:
        decisions = list(zip(*download(torch.stack(action)).tolist(), strict=True))
        self._check(decisions)  # all of them first: a refused step leaves every host as it was
        events = []
        for i, (env, decision) in enumerate(zip(self.envs, decisions, strict=True)):
            events += [HostEvent(i, env.tick + 1, event) for event in env.apply(decision)]
        return events

    def _check(self, decisions: list[tuple[int, ...]]) -> None:
        sizes = tuple(self.space.sizes.values())
        for i, (env, decision) in enumerate(zip(self.envs, decisions, strict=True)):
            if env.tick >= self.config.horizon:
                raise ValueError(f"host {i}: the episode is over after {env.tick} ticks; reset the pool")
            if not all(0 <= choice < size for choice, size in zip(decision, sizes, strict=True)):
                raise ValueError(f"host {i}: {decision} is no action; the heads {HEADS} have {sizes} choices")
            if not self.masks_on_cpu.allow(i, decision):
                raise ValueError(f"host {i}: {self.space.describe(decision)} is masked; choose within the masks")

    def _metrics(self, validated: Tensor) -> PoolMetrics:
        """From [N, 2, V]; at the horizon what is not fossilized is dropped, so accuracy and J are those of the rest."""
        over = torch.tensor([env.tick >= self.config.horizon for env in self.envs])
        variant = torch.where(over, validated.shape[2] - 1, 0)[:, None, None].expand(-1, 2, 1)
        loss, accuracy = validated.gather(2, variant).squeeze(2).unbind(1)
        parameters = self.parameters
        worth = objective(accuracy, parameters, self.host_parameters, self.config.objective)
        before = torch.tensor([env.objective for env in self.envs])
        return PoolMetrics(accuracy, loss, worth, parameters, worth - before)

    def _result(self, metrics: PoolMetrics, events: list[HostEvent]) -> StepResult:
        truncated = send(torch.tensor([env.tick >= self.config.horizon for env in self.envs]), self.device)
        self._remember_objective(metrics)
        self._look()
        return StepResult(
            observation=self.observation,
            reward=send(metrics.reward, self.device),
            terminated=torch.zeros_like(truncated),
            truncated=truncated,
            masks=self.masks,
            events=events,
            metrics=metrics,
        )

    def _remember_objective(self, metrics: PoolMetrics) -> None:
        for env, value in zip(self.envs, metrics.objective.tolist(), strict=True):
            env.objective = value

    def _look(self) -> None:
        """Brings observation and masks up to date, in their storage."""
        rows = zip(*(legal(env.growing, self.space, self.config.actions) for env in self.envs), strict=True)
        for name, row in zip(Legal._fields, rows, strict=True):
            known: Tensor = getattr(self.masks_on_cpu, name)
            known.copy_(torch.tensor(row))
            getattr(self.masks, name).copy_(send(known, self.device))
        observe(self.envs, self.config.objective, self.observation)

    def test(self, committed: bool = True) -> Tensor:
        """Accuracy [N] on the test split of each host with what it has fossilized, or else with all its seeds."""
        return self.executor.validate(self.envs, self.data.test)[:, 1, -1 if committed else 0].cpu()

    def accuracy_of(self, host: int, variants: Sequence[Variant]) -> Tensor:
        """Accuracy [V] on the test split of one host with each of these combinations of seeds."""
        return self.executor.measure(self.envs[host], self.data.test, variants)[1].cpu()

    @property
    def parameters(self) -> Tensor:
        """Of each host with what it has fossilized, [N]."""
        return torch.tensor([env.committed_parameters for env in self.envs])

    def state_dict(self) -> dict[str, Any]:
        return {"executor": list(self.choice), "envs": [env.state_dict() for env in self.envs]}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Continues where `state_dict` was taken, with its executor if this pool may choose.

        Returns what there is to say if that is another one. Raises ValueError if the state is of another number of
        environments.
        """
        if len(state["envs"]) != self.n_envs:
            raise ValueError(
                f"the checkpoint holds {len(state['envs'])} environments, this run has {self.n_envs}; "
                f"set data.n_envs to {len(state['envs'])}"
            )
        # An older checkpoint names none.
        choice, note = go_on(Choice(*state.get("executor", self.choice)), self.choice, self.choices)
        if choice != self.choice:
            self._execute(choice)
            self.reset(range(self.n_envs))  # an executor meets hosts before anything has grown on them
        for env, saved in zip(self.envs, state["envs"], strict=True):
            env.load_state_dict(saved)
        self._look()
        return note


def _measured(validation: list[list[float]], slots: int, training: list[float] | None = None) -> Measured:
    """The executor's rows as one record; without `training`, of a host that has not trained yet."""
    loss, accuracy = validation
    size = len(GradientStats._fields)
    t = training or [0.0] * (3 + size * (1 + slots))
    host, *seeds = (GradientStats(*t[begin : begin + size]) for begin in range(3, len(t), size))
    return Measured(t[0], t[1], int(t[2]), host, seeds, loss, accuracy)
