"""Rollout storage, allocated once, and minibatches of it. T environment steps per rollout, N environments."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.vector_env import VectorEnv
from esper_lightning.ppo.policy import Policy, RecurrentState
from esper_lightning.runtime.nested import iter_tensors, map_tensors
from esper_lightning.runtime.ranks import ALONE, Ranks


class Steps(NamedTuple):
    """One step of N environments, or all steps of a rollout [T, N, …]. Checkpoints hold the parts in this order."""

    observation: Any  # [N, …] observation as given to the policy, with normalised features
    masks: Any  # [N, …] action masks
    values: Tensor  # [N] normalised values of the states before the action, by the critic that acted
    starts: Tensor  # [N] bool: the recurrent state was reset before this step
    privileged: Tensor | None  # [N, P] normalised features for the critic only
    action: Any  # [N, …] action as carried out
    log_prob: Tensor  # [N] log-probability of the action under the policy that acted
    rewards: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode ended
    truncated: Tensor  # [N] bool: a time limit cut the episode


class Rollout(NamedTuple):
    """Training data of PPO: whole sequences of n environments."""

    steps: Steps  # [T, n, …]
    advantages: Tensor  # [T, n] normalised advantages
    targets: Tensor  # [T, n] normalised returns
    state: RecurrentState  # [n, width] recurrent state before the first step

    def map_steps(self, change: Callable[[Tensor], Tensor], state: RecurrentState) -> "Rollout":
        """Return a rollout with every tensor of steps changed, and another recurrent state before the first step."""
        return Rollout(map_tensors(self.steps, change), change(self.advantages), change(self.targets), state)

    def select_envs(self, envs: Tensor) -> "Rollout":
        """Return the sequences of the environments with indices `envs` [m] int64."""
        return self.map_steps(lambda values: values[:, envs], map_tensors(self.state, lambda values: values[envs]))

    def split_sequences(self, sequence_length: int, sequence_states: RecurrentState) -> "Rollout":
        """Return the steps as sequences of L steps, each as an environment: k·n + i is sequence k of environment i.

        `sequence_states` are the recurrent states before each sequence but the first, [T / L - 1, n, width].
        """

        def split(values: Tensor) -> Tensor:  # [T, n, …] -> [L, T / L · n, …]
            return values.unflatten(0, (-1, sequence_length)).transpose(0, 1).flatten(1, 2)

        states = zip(self.state, sequence_states, strict=True)  # hidden, then cell
        return self.map_steps(
            split, RecurrentState(*(torch.cat([first, later.flatten(0, 1)]) for first, later in states))
        )

    def minibatches(
        self,
        epochs: int,
        groups: int,
        generator: torch.Generator,
        *,
        usable: Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> Iterator["Rollout"]:
        """Iterate over the rollout `epochs` times, each time in random groups of environments (or sequences).

        Groups are drawn from the `usable` environments of all ranks, [N] bool (None: all), alike on each rank by
        generators in the same state. A minibatch has those environments of a group that this rank owns, maybe none.
        """
        device = self.targets.device
        indices = torch.arange(self.targets.shape[1], device=device)  # of the sequences in this rollout
        candidates = indices  # for each sequence of all ranks its index in this rollout; -1: another rank has it
        if ranks.world > 1:
            per_env = len(indices) // len(ranks.own)  # sequences of one environment
            candidates = indices.new_full((len(indices) * ranks.world,), -1)
            candidates.view(per_env, ranks.total)[:, ranks.own] = indices.view(per_env, -1)
        if usable is not None:
            candidates = candidates[usable.repeat(len(candidates) // len(usable))]
        for _ in range(epochs):
            order = torch.randperm(len(candidates), generator=generator, device=device)
            for group in order.tensor_split(min(groups, len(candidates))):
                drawn = candidates[group]
                yield self.select_envs(drawn if ranks.world == 1 else drawn[drawn >= 0])


class RolloutBuffer:
    """Storage for one rollout of these environments and this policy, filled step by step.

    `sequence_length` is in environment steps; None: a rollout is one sequence. Raises ValueError if it does not divide
    the length of a rollout.
    """

    def __init__(self, env: VectorEnv, policy: Policy, sequence_length: int | None = None) -> None:
        n, device = env.n_envs, env.device
        self.ticks = env.horizon
        self.sequence_length = sequence_length or self.ticks
        if self.ticks % self.sequence_length:
            raise ValueError(
                f"ppo.sequence is {sequence_length}, but a rollout has {self.ticks} ticks; give a divisor of that"
            )
        number, flag = torch.zeros(n, device=device), torch.zeros(n, dtype=torch.bool, device=device)
        example = Steps(
            observation=env.observation,
            masks=env.masks,
            values=number,
            starts=flag,
            privileged=env.privileged if policy.asymmetric else None,
            action=env.space.zeros(n, device),
            log_prob=number,
            rewards=number,
            terminated=flag,
            truncated=flag,
        )
        self.length = 0
        self.steps: Steps = map_tensors(example, lambda part: part.new_zeros(self.ticks, *part.shape))
        self.state: RecurrentState = map_tensors(policy.initial_state(n), torch.zeros_like)
        cuts = self.ticks // self.sequence_length - 1
        # Recurrent states before each sequence but the first, [cuts, N, width].
        self.sequence_states: RecurrentState = map_tensors(self.state, lambda part: part.new_zeros(cuts, *part.shape))
        # Views of each step's rows, because creating a view costs as much as writing into it.
        self._rows = [part.unbind(0) for part in iter_tensors(self.steps)]

    def clear(self, state: RecurrentState) -> None:
        """Begin a rollout whose first step starts from `state`."""
        self.length = 0
        for stored, new in zip(self.state, state, strict=True):
            stored.copy_(new)

    def add(self, step: Steps, state: RecurrentState) -> None:
        """Store a copy of one step, and of the recurrent state before it if a later sequence begins there."""
        assert self.length < self.ticks, "the rollout is full"
        if self.length and self.length % self.sequence_length == 0:
            for stored, new in zip(self.sequence_states, state, strict=True):
                stored[self.length // self.sequence_length - 1].copy_(new)
        for rows, value in zip(self._rows, iter_tensors(step), strict=True):
            rows[self.length].copy_(value)
        self.length += 1

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps stored so far and of the recurrent states."""
        return {
            "ticks": [part[: self.length].clone() for part in iter_tensors(self.steps)],
            "state": [part.clone() for part in self.state],
            "sequence_states": [part.clone() for part in self.sequence_states],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`. Raises ValueError if the sequences have another length."""
        sequence_states = state["sequence_states"]
        if len(sequence_states[0]) != len(self.sequence_states[0]):
            raise ValueError("ppo.sequence is not that of the saved run; set it back")
        self.length = len(state["ticks"][0])
        for current, saved in zip(iter_tensors(self.steps), state["ticks"], strict=True):
            current[: self.length].copy_(saved)
        for current, saved in zip(self.state, state["state"], strict=True):
            current.copy_(saved)
        for current, saved in zip(self.sequence_states, sequence_states, strict=True):
            current.copy_(saved)
