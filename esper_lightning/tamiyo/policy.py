"""Tamiyo's network: recurrent, with factored masked heads. N environments, K slots, D features."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import Masks, Observation
from esper_lightning.tamiyo.heads import FactoredDistribution, Heads


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Size of Tamiyo's network."""

    width: int = 128
    """Hidden features, and cells of the LSTM."""

    blueprint_embedding: int = 4
    """Numbers that stand for the blueprint of the seed in a slot."""

    def __post_init__(self) -> None:
        if self.width < 2 or self.blueprint_embedding < 1:
            raise ValueError(
                f"policy: width must be at least 2 and blueprint_embedding at least 1, "
                f"got {self.width} and {self.blueprint_embedding}"
            )


class RecurrentState(NamedTuple):
    """Of the LSTM; passed in and out, never kept."""

    hidden: Tensor  # [N, width]
    cell: Tensor  # [N, width]


class Policy(nn.Module):
    """Features -> linear -> LayerNorm -> ReLU -> LSTM, added to its input -> LayerNorm -> heads and value.

    Args:
        features: Number D of features.
        sizes: Number of choices by head.
        config: Its size.
    """

    def __init__(self, features: int, sizes: Mapping[str, int], config: PolicyConfig) -> None:
        super().__init__()
        width = config.width
        self.width = width
        self.embedding = nn.Embedding(sizes["blueprint"] + 1, config.blueprint_embedding)  # 0: no seed
        self.encoder = nn.Linear(features + sizes["slot"] * config.blueprint_embedding, width)
        self.encoder_norm = nn.LayerNorm(width)
        self.lstm = nn.LSTM(width, width)
        self.lstm_norm = nn.LayerNorm(width)
        self.heads = Heads(width, sizes)
        self.value = nn.Sequential(nn.Linear(width, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))
        self._initialise()

    def _initialise(self) -> None:
        for layer, gain in ((self.encoder, math.sqrt(2)), (self.value[0], math.sqrt(2)), (self.value[2], 1.0)):
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        with torch.no_grad():
            self.lstm.bias_ih_l0[self.width : 2 * self.width] = 1.0  # forget gate: remember at first

    def initial_state(self, n_envs: int) -> RecurrentState:
        """The state at the start of an episode."""
        zeros = self.encoder.weight.new_zeros(n_envs, self.width)
        return RecurrentState(zeros, zeros.clone())

    def forward(
        self, observation: Observation, state: RecurrentState, masks: Masks, starts: Tensor
    ) -> tuple[FactoredDistribution, Tensor, RecurrentState]:
        """Goes through T steps of N environments.

        Args:
            observation: [T, N, …], features normalised.
            state: Before the first step.
            masks: [T, N, …].
            starts: [T, N] bool: the state is reset before this step.

        Returns:
            The distribution over actions [T, N], normalised values [T, N], and the state after the last step.
        """
        hidden, state = self._hidden(observation, state, starts)
        return FactoredDistribution(self.heads(hidden), masks), self.value(hidden).squeeze(-1), state

    def step(
        self, observation: Observation, state: RecurrentState, masks: Masks, starts: Tensor
    ) -> tuple[FactoredDistribution, Tensor, RecurrentState]:
        """`forward` for one step: everything without the axis T."""
        hidden, state = self._hidden(Observation(*(part[None] for part in observation)), state, starts[None])
        return FactoredDistribution(self.heads(hidden[0]), masks), self.value(hidden[0]).squeeze(-1), state

    def _hidden(
        self, observation: Observation, state: RecurrentState, starts: Tensor
    ) -> tuple[Tensor, RecurrentState]:  # [T, N, width]
        seeds = self.embedding(observation.blueprints).flatten(-2)  # [T, N, K·E]
        encoded = F.relu(self.encoder_norm(self.encoder(torch.cat([observation.features, seeds], -1))))
        remembered, state = self._remember(encoded, state, starts)
        return self.lstm_norm(remembered + encoded), state

    def _remember(self, x: Tensor, state: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        # The LSTM runs whole stretches at once; a stretch ends where any environment's state is reset. Where the first
        # one begins is known: a single step reads nothing back from the device.
        resets = [t for t, any_starts in enumerate(starts[1:].any(1).tolist(), 1) if any_starts] if len(x) > 1 else []
        cuts = sorted({0, *resets, len(x)})
        outputs = []
        for begin, end in pairwise(cuts):
            keep = ~starts[begin, :, None]  # [N, 1]
            before = tuple((part * keep).unsqueeze(0) for part in state)
            output, after = self.lstm(x[begin:end], before)
            state = RecurrentState(*(part.squeeze(0) for part in after))
            outputs.append(output)
        return torch.cat(outputs), state
