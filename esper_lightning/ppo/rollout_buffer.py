"""Rollout storage, allocated once. T environment steps per rollout, N environments."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.vector_env import VectorEnv
from esper_lightning.ranks import ALONE, Ranks
from esper_lightning.tamiyo.policy import Policy, RecurrentState


def map_tensors(change: Callable[[Tensor], Any], record: Any) -> Any:
    """Return a nested record with every tensor changed by a function; None stays None."""
    if record is None or isinstance(record, Tensor):
        return record if record is None else change(record)
    return type(record)(*(map_tensors(change, part) for part in record))


class Rollout(NamedTuple):
    """Training data of PPO: whole sequences of n environments."""

    observation: Any  # [T, n, …] observation as given to the policy, with normalised features
    masks: Any  # [T, n, …] action masks
    action: Any  # [T, n, …] action as carried out
    log_prob: Tensor  # [T, n] log-probability of the action under the policy that acted
    values: Tensor  # [T, n] normalised values by the critic that acted
    starts: Tensor  # [T, n] bool: the recurrent state was reset before this step
    state: RecurrentState  # [n, width] recurrent state before the first step
    advantages: Tensor  # [T, n] normalised advantages
    targets: Tensor  # [T, n] normalised returns
    privileged: Tensor | None = None  # [T, n, P] normalised features for the critic only

    def map_steps(self, change: Callable[[Tensor], Tensor], state: RecurrentState) -> "Rollout":
        """Return a rollout with every tensor of steps changed, and another recurrent state before the first step."""
        steps = self._replace(state=None)  # pyright: ignore[reportArgumentType]  # for a moment
        return map_tensors(change, steps)._replace(state=state)

    def select_envs(self, envs: Tensor) -> "Rollout":
        """Return the sequences of the environments with indices `envs` [m] int64."""
        return self.map_steps(lambda part: part[:, envs], map_tensors(lambda part: part[envs], self.state))

    def split_sequences(self, sequence_length: int, sequence_states: RecurrentState) -> "Rollout":
        """Return the same steps as shorter sequences, each as an environment: k·n + i is sequence k of environment i.

        Args:
            sequence_length: Environment steps L of a sequence; a divisor of T.
            sequence_states: Recurrent states before each sequence but the first, [T / L - 1, n, width].
        """
        states = zip(self.state, sequence_states, strict=True)
        return self.map_steps(
            lambda part: part.unflatten(0, (-1, sequence_length)).transpose(0, 1).flatten(1, 2),
            RecurrentState(*(torch.cat([first, rest.flatten(0, 1)]) for first, rest in states)),
        )

    def minibatches(
        self,
        epochs: int,
        parts: int,
        generator: torch.Generator,
        *,
        usable: Tensor | None = None,
        ranks: Ranks = ALONE,
    ) -> Iterator["Rollout"]:
        """Iterate over the rollout `epochs` times, each time in `parts` random groups of environments (or sequences).

        There is one group per environment if there are fewer than `parts`. With several ranks the groups are drawn from
        the environments of all ranks, alike on each of them. A rank gets its own part of a group, which may be empty.

        Args:
            epochs, parts: See above.
            generator: Generator of the groups, in the same state on all ranks.
            usable: Environments of all ranks that are learned from, [N] bool. None: all.
            ranks: Processes that share the environments.
        """
        own, device = self.log_prob.shape[1], self.log_prob.device
        places = torch.arange(own, device=device)  # of the sequences of all ranks in this rollout; -1: of other ranks
        if ranks.world > 1:
            sequences, places = own // len(ranks.own), places.new_full((own * ranks.world,), -1)
            places.view(sequences, ranks.total)[:, ranks.own] = torch.arange(own, device=device).view(sequences, -1)
        if usable is not None:
            places = places[usable.repeat(len(places) // len(usable))]
        for _ in range(epochs):
            order = torch.randperm(len(places), generator=generator, device=device)
            for group in order.tensor_split(min(parts, len(places))):
                envs = places[group]
                yield self.select_envs(envs if ranks.world == 1 else envs[envs >= 0])


class Experience(NamedTuple):
    """One step of N environments, as stored for PPO."""

    observation: Any  # [N, …] observation as given to the policy, with normalised features
    masks: Any  # [N, …] action masks
    action: Any  # [N, …] action as carried out
    log_prob: Tensor  # [N] log-probability of the action under the policy that acted
    values: Tensor  # [N] normalised values of the states before the action
    starts: Tensor  # [N] bool: the recurrent state was reset before this step
    state: RecurrentState  # [N, width] recurrent state before this step
    rewards: Tensor  # [N]
    terminated: Tensor  # [N] bool: the episode ended
    truncated: Tensor  # [N] bool: a time limit cut the episode
    privileged: Tensor | None = None  # [N, P] normalised features for the critic only


class RolloutBuffer:
    """Storage for one rollout, filled step by step.

    Args:
        env: Environments that determine the number and shapes of what is stored.
        policy: Policy that determines the recurrent state, and whether privileged features are stored.
        sequence_length: Environment steps of one training sequence. None: the whole rollout.

    Raises ValueError if a rollout cannot be split into whole sequences.
    """

    def __init__(self, env: VectorEnv, policy: Policy, sequence_length: int | None = None) -> None:
        n, device = env.n_envs, env.device
        self.ticks = env.horizon
        self.sequence_length = sequence_length or self.ticks
        if self.ticks % self.sequence_length:
            raise ValueError(
                f"ppo.sequence is {sequence_length}, but a rollout has {self.ticks} ticks; give a divisor of that"
            )

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(self.ticks, n, *shape, dtype=dtype, device=device)

        def like(example: Any) -> Any:
            return map_tensors(lambda part: zeros(*part.shape[1:], dtype=part.dtype), example)

        self.length = 0
        self.observation, self.masks, self.action = map(like, (env.observation, env.masks, env.space.zeros(n, device)))
        self.log_prob, self.values, self.rewards = zeros(), zeros(), zeros()
        self.terminated, self.truncated, self.starts = (zeros(dtype=torch.bool) for _ in range(3))
        self.privileged: Tensor | None = like(env.privileged) if policy.asymmetric else None
        self.state: RecurrentState = map_tensors(torch.zeros_like, policy.initial_state(n))
        cuts = self.ticks // self.sequence_length - 1
        # Recurrent states before each sequence but the first, [cuts, N, width].
        self.sequence_states: RecurrentState = map_tensors(lambda part: part.new_zeros(cuts, *part.shape), self.state)
        # Views of each step's rows, because creating a view costs as much as writing into it.
        self._rows = [part.unbind(0) for part in self._tensors(self)]

    def clear(self, state: RecurrentState) -> None:
        """Begin a rollout whose first step starts from `state`."""
        self.length = 0
        for stored, new in zip(self.state, state, strict=True):
            stored.copy_(new)

    def add(self, step: Experience) -> None:
        """Store a copy of one step, and of the recurrent state before it if a sequence begins there."""
        assert self.length < self.ticks, "the rollout is full"
        if self.length and self.length % self.sequence_length == 0:
            for stored, new in zip(self.sequence_states, step.state, strict=True):
                stored[self.length // self.sequence_length - 1].copy_(new)
        for rows, value in zip(self._rows, self._tensors(step), strict=True):
            rows[self.length].copy_(value)
        self.length += 1

    def _tensors(self, record: "Experience | RolloutBuffer") -> list[Tensor]:
        """Return the tensors of one step or of all steps, in the order of a checkpoint."""
        privileged = [] if record.privileged is None else [record.privileged]
        observed = (*record.observation, *record.masks, record.values, record.starts, *privileged)
        return [*observed, *record.action, record.log_prob, record.rewards, record.terminated, record.truncated]

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps stored so far and of the recurrent states."""
        saved = {
            "ticks": [part[: self.length].clone() for part in self._tensors(self)],
            "state": [part.clone() for part in self.state],
        }
        if self.sequence_length < self.ticks:
            saved["sequence_states"] = [part.clone() for part in self.sequence_states]
        return saved

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`. Raises ValueError if the sequences have another length."""
        if len(state.get("sequence_states", [()])[0]) != len(self.sequence_states[0]):
            raise ValueError("ppo.sequence is not that of the saved run; set it back")
        self.length = len(state["ticks"][0])
        for current, saved in zip(self._tensors(self), state["ticks"], strict=True):
            current[: self.length].copy_(saved)
        for current, saved in zip(self.state, state["state"], strict=True):
            current.copy_(saved)
        for current, saved in zip(self.sequence_states, state.get("sequence_states", ()), strict=False):
            current.copy_(saved)
