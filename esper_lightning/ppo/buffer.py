"""The rollout: what the policy saw, did and earned, in storage that is allocated once. T ticks, N environments."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs import HEADS, Action, Masks, Observation, Op
from esper_lightning.growth.restoring import check_count, check_finite, check_like, check_parts
from esper_lightning.tamiyo.policy import RecurrentState


class Rollout(NamedTuple):
    """Whole sequences of n environments, ready to learn from."""

    observation: Observation  # [T, n, …], normalised: exactly what the policy saw
    masks: Masks  # [T, n, …]
    action: Action  # [T, n]
    log_prob: Tensor  # [T, n] of the action, by the policy that acted
    values: Tensor  # [T, n] normalised, by the policy that acted
    starts: Tensor  # [T, n] bool: the recurrent state was reset before this step
    state: RecurrentState  # [n, width] before the first step
    advantages: Tensor  # [T, n] normalised
    targets: Tensor  # [T, n] normalised returns

    def of(self, envs: Tensor) -> "Rollout":
        """The sequences of the environments with indices `envs`."""

        def pick(field: Any) -> Any:
            if isinstance(field, Tensor):
                return field[:, envs]
            return type(field)(*(part[:, envs] for part in field))

        fields = {name: pick(getattr(self, name)) for name in self._fields if name != "state"}
        return Rollout(**fields, state=RecurrentState(*(part[envs] for part in self.state)))

    def minibatches(self, epochs: int, parts: int, generator: torch.Generator) -> Iterator["Rollout"]:
        """Goes over the rollout `epochs` times, each time in `parts` random groups of environments."""
        device = self.log_prob.device
        n = self.log_prob.shape[1]
        for _ in range(epochs):
            for envs in torch.randperm(n, generator=generator, device=device).tensor_split(parts):
                yield self.of(envs)


class RolloutBuffer:
    """Storage for one rollout, filled tick by tick.

    Args:
        ticks: T.
        observation, masks: Examples with one row per environment.
        width: Of the recurrent state.
    """

    def __init__(self, ticks: int, observation: Observation, masks: Masks, width: int) -> None:
        n, device = observation.features.shape[0], observation.features.device

        def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(ticks, n, *shape, dtype=dtype, device=device)

        def like(example: Tensor) -> Tensor:
            return zeros(*example.shape[1:], dtype=example.dtype)

        self.ticks = ticks
        self.length = 0
        self.observation = Observation(*map(like, observation))
        self.masks = Masks(*map(like, masks))
        self.action = Action(*(zeros(dtype=torch.int64) for _ in HEADS))
        self.log_prob, self.values, self.rewards = zeros(), zeros(), zeros()
        self.terminated, self.truncated, self.starts = (zeros(dtype=torch.bool) for _ in range(3))
        self.state = RecurrentState(*(torch.zeros(n, width, device=device) for _ in RecurrentState._fields))

    def clear(self, state: RecurrentState) -> None:
        """Begins a rollout whose first step starts from `state`."""
        self.length = 0
        for mine, given in zip(self.state, state, strict=True):
            mine.copy_(given)

    def add_sight(self, observation: Observation, masks: Masks, values: Tensor, starts: Tensor) -> None:
        """Stores what the policy saw in the tick that begins, and thought of it; values are the normalised ones."""
        assert self.length < self.ticks, "the rollout is full"
        self._write(self._sight(), (*observation, *masks, values, starts))

    def add_decision(self, action: Action, log_prob: Tensor) -> None:
        """Stores what was done."""
        self._write((*self.action, self.log_prob), (*action, log_prob))

    def add_outcome(self, rewards: Tensor, terminated: Tensor, truncated: Tensor) -> None:
        """Stores what followed, and ends the tick."""
        self._write((self.rewards, self.terminated, self.truncated), (rewards, terminated, truncated))
        self.length += 1

    def _write(self, storage: tuple[Tensor, ...], rows: tuple[Tensor, ...]) -> None:
        for mine, row in zip(storage, rows, strict=True):
            mine[self.length].copy_(row)

    def _sight(self) -> tuple[Tensor, ...]:
        return (*self.observation, *self.masks, self.values, self.starts)

    def _all(self) -> tuple[Tensor, ...]:
        return (*self._sight(), *self.action, self.log_prob, self.rewards, self.terminated, self.truncated)

    def op_frequency(self) -> dict[str, float]:
        """Share of each op among the decisions that were not forced."""
        free = ~self.masks.forced[: self.length]
        chosen = self.action.op[: self.length][free]
        counts = torch.bincount(chosen, minlength=self.masks.slot.shape[-2]).tolist()
        return {Op(op).name: count / max(1, sum(counts)) for op, count in enumerate(counts)}

    def state_dict(self) -> dict[str, Any]:
        """The ticks filled so far."""
        return {"ticks": [t[: self.length].clone() for t in self._all()], "state": [t.clone() for t in self.state]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues where `state_dict` was taken. Raises ValueError unless it is a part of a rollout like this one."""
        check_parts("the rollout's buffer", state, ("ticks", "state"))
        length = check_count("the length of the rollout", len(state["ticks"][0]), self.ticks)
        stored = [t[:length] for t in self._all()]
        for mine, saved in zip((*stored, *self.state), (*state["ticks"], *state["state"]), strict=True):
            check_finite("the rollout", check_like("a part of the rollout", saved, mine))
            mine.copy_(saved)
        self.length = length
