"""Independent PPO reference in numpy and float64, step by step and by definition.

It reads the policy's weights by name and imports nothing from the package.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
State = tuple[Array, Array]


class Policy:
    """Policy of one environment with two heads; any weights and masks.

    Args:
        weights: A state dict.
        rows, columns: Numbers of choices of the heads.
    """

    def __init__(self, weights: Mapping[str, Any], rows: int, columns: int) -> None:
        self.w = {name: value.double().numpy() for name, value in weights.items()}
        self.rows, self.columns = rows, columns
        self.width = len(self.w["encoder.bias"])
        self.remembers = "lstm.weight_ih_l0" in self.w

    def initial(self) -> State:
        return np.zeros(self.width), np.zeros(self.width)

    def _linear(self, name: str, x: Array) -> Array:
        return self.w[f"{name}.weight"] @ x + self.w[f"{name}.bias"]

    def _norm(self, name: str, x: Array) -> Array:
        scaled = (x - x.mean()) / np.sqrt(((x - x.mean()) ** 2).mean() + 1e-5)
        return scaled * self.w[f"{name}.weight"] + self.w[f"{name}.bias"]

    def hidden(self, features: Array, state: State) -> tuple[Array, State]:
        encoded = np.maximum(0.0, self._norm("encoder_norm", self._linear("encoder", features)))
        if not self.remembers:
            return encoded, state
        h, c = state
        gates = self.w["lstm.weight_ih_l0"] @ encoded + self.w["lstm.bias_ih_l0"]
        gates = gates + self.w["lstm.weight_hh_l0"] @ h + self.w["lstm.bias_hh_l0"]
        i, f, g, o = np.split(gates, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
        h = sigmoid(o) * np.tanh(c)
        return self._norm("lstm_norm", h + encoded), (h, c)

    def value(self, hidden: Array, privileged: Array) -> float:
        seen = np.concatenate([hidden, privileged])
        return self._linear("value.2", np.maximum(0.0, self._linear("value.0", seen)))[0]

    def _chances(self, head: str, hidden: Array, possible: Array) -> Array:
        inner = np.maximum(0.0, self._linear(f"heads.tables.{head}.layers.0", hidden))
        logits = np.where(possible, self._linear(f"heads.tables.{head}.layers.2", inner), -np.inf)
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    def joint(self, hidden: Array, possible: Array) -> Array:  # [rows, columns]
        """Return the probability of every action; `possible` holds the masks of both heads."""
        row = self._chances("row", hidden, possible[: self.rows])
        return row[:, None] * self._chances("column", hidden, possible[self.rows :])


def sigmoid(x: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-x))


def entropies(joint: Array, possible: Array) -> Array:
    """Return the entropy of each head relative to that of a uniform choice."""

    def even(probabilities: Array, there: Array) -> float:
        p = probabilities[probabilities > 0.0]
        return -(p * np.log(p)).sum() / np.log(there.sum()) if there.sum() > 1 else 0.0

    return np.array([even(joint.sum(1), possible[: len(joint)]), even(joint.sum(0), possible[len(joint) :])])


def choices(joint: Array, possible: Array) -> Array:
    """Return whether each head has more than one possible choice."""
    return np.array([possible[: len(joint)].sum() > 1, possible[len(joint) :].sum() > 1], dtype=float)


class ReferenceRollout(NamedTuple):
    """Rollout of one environment, T steps, normalised where stated."""

    features: Array  # [T + 1, D] normalised; the last row follows the last step
    privileged: Array  # [T + 1, P]
    possible: Array  # [T, C]
    actions: Array  # [T, 2]
    rewards: Array  # [T]
    terminated: Array  # [T]
    truncated: Array  # [T]
    final: dict[int, tuple[Array, Array]]  # (features, privileged) after each truncated step


class ReferenceEvaluation(NamedTuple):
    """Log-probabilities, values and entropies of a policy on a rollout."""

    log_probs: Array  # [T]
    values: Array  # [T]
    final_values: Array  # [T] value of the next state, before any reset; 0 after termination
    entropies: Array  # [T, heads]
    choices: Array  # [T, heads] probability that the head has a choice


def evaluate(policy: Policy, played: ReferenceRollout, state: State) -> ReferenceEvaluation:
    """Evaluate a policy on a rollout, step by step."""
    rows, values, beyond = [], [], []
    for t, (row, column) in enumerate(played.actions):
        hidden, state = policy.hidden(played.features[t], state)
        joint = policy.joint(hidden, played.possible[t])
        possible = played.possible[t]
        rows.append([np.log(joint[row, column]), *entropies(joint, possible), *choices(joint, possible)])
        values.append(policy.value(hidden, played.privileged[t]))
        if played.terminated[t]:
            worth = 0.0
        else:
            cut = (played.features[t + 1], played.privileged[t + 1])
            features, privileged = played.final[t] if played.truncated[t] else cut
            worth = policy.value(policy.hidden(features, state)[0], privileged)
        beyond.append(worth)
        if played.terminated[t] or played.truncated[t]:
            state = policy.initial()
    table = np.array(rows)
    return ReferenceEvaluation(table[:, 0], np.array(values), np.array(beyond), table[:, 1:3], table[:, 3:])


def advantages(rewards: Array, values: Array, beyond: Array, over: Array, *, gamma: float, lam: float) -> Array:
    """Return A_t = sum over k of (gamma·lam)^k · delta_{t+k}, up to the end of the episode or of the rollout, [T].

    `beyond` are the values of the next states, and `over` is True where an episode ends.
    """
    deltas = rewards + gamma * beyond - values
    result = np.zeros(len(deltas))
    for t in range(len(deltas)):
        for k in range(t, len(deltas)):
            result[t] += (gamma * lam) ** (k - t) * deltas[k]
            if over[k]:
                break
    return result


def reward_deviations(rollouts: list[tuple[Array, Array]], gamma: float) -> list[float]:
    """Return the deviation, after each rollout, of the discounted sums of rewards of all episodes at all steps so far.

    Args:
        rollouts: Rewards and ends of episodes of consecutive rollouts, [T, N] each.
        gamma: Discount per step.
    """
    rewards, ends = (np.concatenate(parts) for parts in zip(*rollouts, strict=True))
    sums = np.zeros(rewards.shape)
    for t, n in np.ndindex(rewards.shape):
        begin = max([0, *(np.flatnonzero(ends[:t, n]) + 1)])
        sums[t, n] = sum(gamma ** (t - k) * rewards[k, n] for k in range(begin, t + 1))
    return [sums[: len(rollouts[0][0]) * (i + 1)].std() for i in range(len(rollouts))]
