"""Rollout storage, allocated once. T environment steps per rollout, N environments."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.vector_env import VectorEnv
from esper_lightning.serialization.checks import check_count, check_keys, check_matching_tensor
from esper_lightning.tamiyo.policy import Policy, RecurrentState


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

    def select_envs(self, envs: Tensor) -> "Rollout":
        """Return the sequences of the environments with indices `envs` [m] int64."""

        def pick(field: Any) -> Any:
            if field is None or isinstance(field, Tensor):
                return field if field is None else field[:, envs]
            return type(field)(*(part[:, envs] for part in field))

        fields = {name: pick(getattr(self, name)) for name in self._fields if name != "state"}
        return Rollout(**fields, state=RecurrentState(*(part[envs] for part in self.state)))

    def split_sequences(self, sequence_length: int, sequence_states: RecurrentState) -> "Rollout":
        """Return the same steps as shorter sequences, which become separate environments.

        Args:
            sequence_length: Environment steps L of a sequence; a divisor of T.
            sequence_states: Recurrent states before each sequence but the first, [T / L - 1, n, width].
        """

        def side_by_side(field: Tensor) -> Tensor:  # [T, n, …] -> [L, T / L · n, …]
            return field.unflatten(0, (-1, sequence_length)).transpose(0, 1).flatten(1, 2)

        def split_field(field: Any) -> Any:
            if field is None or isinstance(field, Tensor):
                return field if field is None else side_by_side(field)
            return type(field)(*map(side_by_side, field))

        fields = {name: split_field(getattr(self, name)) for name in self._fields if name != "state"}
        states = (
            torch.cat([first, rest.flatten(0, 1)]) for first, rest in zip(self.state, sequence_states, strict=True)
        )
        return Rollout(**fields, state=RecurrentState(*states))

    def minibatches(
        self, epochs: int, parts: int, generator: torch.Generator, *, places: Tensor | None = None
    ) -> Iterator["Rollout"]:
        """Iterate over the rollout `epochs` times, each time in `parts` random groups of environments.

        There is one group per environment if there are fewer than `parts`. With several ranks the groups are drawn from
        the environments of all ranks, alike on each of them. A rank gets its own part of a group, which may be empty.

        Args:
            epochs, parts: See above.
            generator: Generator of the groups, in the same state on all ranks.
            places: For each environment of all ranks its index in this rollout, or -1 if another rank has it, int64.
                None: this rollout has all environments.
        """
        device = self.log_prob.device
        n = self.log_prob.shape[1] if places is None else len(places)
        for _ in range(epochs):
            for envs in torch.randperm(n, generator=generator, device=device).tensor_split(min(parts, n)):
                if places is not None:
                    envs = places[envs]
                    envs = envs[envs >= 0]
                yield self.select_envs(envs)


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
            return type(example)(*(zeros(*part.shape[1:], dtype=part.dtype) for part in example))

        self.length = 0
        self.observation = like(env.observation)
        self.masks = like(env.masks)
        self.action = like(env.space.zeros(n, device))
        self.log_prob, self.values, self.rewards = zeros(), zeros(), zeros()
        self.terminated, self.truncated, self.starts = (zeros(dtype=torch.bool) for _ in range(3))
        self.privileged: Tensor | None = None
        if policy.asymmetric:
            assert env.privileged is not None, "policy_shape has seen them"
            self.privileged = zeros(env.privileged.shape[-1])
        self.state = RecurrentState(*(torch.zeros_like(part) for part in policy.initial_state(n)))
        n_splits = self.ticks // self.sequence_length - 1
        # Recurrent states before each sequence but the first, [cuts, N, width].
        self.sequence_states = (
            RecurrentState(*(part.new_zeros(n_splits, *part.shape) for part in self.state)) if n_splits else None
        )
        # Views of each step's rows, because creating a view costs as much as writing into it.
        self._rows = [t.unbind(0) for t in self._storage()]

    def clear(self, state: RecurrentState) -> None:
        """Begin a rollout whose first step starts from `state`."""
        self.length = 0
        for stored, new in zip(self.state, state, strict=True):
            stored.copy_(new)

    def add(self, step: Experience) -> None:
        """Store a copy of one step, and of the recurrent state before it if a sequence begins there."""
        assert self.length < self.ticks, "the rollout is full"
        if self.sequence_states is not None and self.length and self.length % self.sequence_length == 0:
            for stored, new in zip(self.sequence_states, step.state, strict=True):
                stored[self.length // self.sequence_length - 1].copy_(new)
        for rows, value in zip(self._rows, self._tensors_of(step), strict=True):
            rows[self.length].copy_(value)
        self.length += 1

    def _storage(self) -> tuple[Tensor, ...]:
        return self._tensors_of(self)

    def _tensors_of(self, record: "Experience | RolloutBuffer") -> tuple[Tensor, ...]:
        """Return the tensors of one step or of all steps, in the order of a checkpoint."""
        observed = (*record.observation, *record.masks, record.values, record.starts)
        extra: tuple[Tensor, ...] = ()
        if self.privileged is not None:
            assert record.privileged is not None, "an asymmetric critic needs the privileged features"
            extra = (record.privileged,)
        return (*observed, *extra, *record.action, record.log_prob, record.rewards, record.terminated, record.truncated)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the steps stored so far and of the recurrent states."""
        saved = {"ticks": [t[: self.length].clone() for t in self._storage()], "state": [t.clone() for t in self.state]}
        return (
            saved
            if self.sequence_states is None
            else saved | {"sequence_states": [t.clone() for t in self.sequence_states]}
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state from `state_dict`. Raises ValueError if its shapes or types do not fit this rollout."""
        check_keys(
            "the rollout's buffer",
            state,
            ("ticks", "state", *(() if self.sequence_states is None else ("sequence_states",))),
        )
        length = check_count("the length of the rollout", len(state["ticks"][0]), self.ticks)
        stored = [t[:length] for t in self._storage()]
        all_current = (*stored, *self.state, *(self.sequence_states or ()))
        all_saved = (*state["ticks"], *state["state"], *state.get("sequence_states", ()))
        for current, saved in zip(all_current, all_saved, strict=True):
            current.copy_(check_matching_tensor("a part of the rollout", saved, current))
        self.length = length
