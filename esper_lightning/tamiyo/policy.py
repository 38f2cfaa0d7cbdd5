"""Network of the policy: recurrent or feedforward, with a symmetric or asymmetric critic.

T steps, N environments, D features, K categorical fields, P privileged features.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.envs import HostPool, MixedPool
from esper_lightning.envs.spaces.actions import ActionSpace
from esper_lightning.envs.spaces.choices import ChoiceSpace
from esper_lightning.envs.spaces.rows import RowSizes
from esper_lightning.envs.vector_env import ActionSpaceProtocol, VectorEnv
from esper_lightning.serialization.checks import check_count
from esper_lightning.tamiyo.heads import Heads
from esper_lightning.tamiyo.segments import split_segments


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Size and architecture of the policy's network."""

    width: int = 128
    """Number of hidden features and of LSTM cells."""

    blueprint_embedding: int = 4
    """Size of the embedding of the blueprint in each slot."""

    memory: Literal["lstm", "none"] = "lstm"
    """Recurrent layer: an LSTM, or none, so that every action depends on the current observation only."""

    asymmetric: bool = False
    """Give the critic the privileged features, which environments keep from the policy (the critic is used in training
    only)."""

    probability_floors: dict[str, float] | None = None
    """Least probability of each possible choice of an action head, by name (op, slot, blueprint, tempo …), less than
    1 / its number of choices. Probabilities are mixed with a uniform choice in training and wherever actions are
    sampled; the most likely choice stays the same. None: no floors."""

    def __post_init__(self) -> None:
        if self.width < 2 or self.blueprint_embedding < 1:
            raise ValueError(
                f"policy: width must be at least 2 and blueprint_embedding at least 1, "
                f"got {self.width} and {self.blueprint_embedding}"
            )


class PolicyShape(NamedTuple):
    """Sizes of the policy's inputs and outputs."""

    features: int
    """Number D of features; where the observation has rows, of those of the host."""
    space: ActionSpaceProtocol
    categorical_fields: int = 0
    """Number K of categorical fields in an observation."""
    categories: int = 0
    """Number of values of each categorical field."""
    privileged: int = 0
    """Number of features that only the critic may receive."""
    slot_features: int = 0
    """Number of features of a slot in an observation in rows. 0: the observation is flat."""
    blueprint_features: int = 0
    """Number of features of a blueprint in a slot in an observation in rows."""

    @property
    def rows(self) -> RowSizes | None:
        """Sizes of the parts of a row. None: the observation is flat."""
        return RowSizes(self.features, self.slot_features, self.blueprint_features) if self.slot_features else None

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes as plain data, for a checkpoint."""
        assert isinstance(self.space, ActionSpace | ChoiceSpace), "the action heads know no other kind"
        space = self.space._asdict() if isinstance(self.space, ActionSpace) else asdict(self.space)
        return self._asdict() | {"space": space}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> "PolicyShape":
        """Return the sizes that `state_dict` has turned into plain data. Raises ValueError or TypeError if they are
        damaged."""
        sizes = {name: check_count(f"the policy's {name}", size) for name, size in saved.items() if name != "space"}
        kind = ActionSpace if set(saved["space"]) == set(ActionSpace._fields) else ChoiceSpace
        return cls(**sizes, space=kind(**saved["space"]))


def policy_shape(env: VectorEnv) -> PolicyShape:
    """Return the input and output sizes of a policy for these environments."""
    features, *categorical = env.observation
    rows = env.rows if isinstance(env, HostPool | MixedPool) else None
    fields = categorical[0].shape[-1] if env.num_categories else 0
    privileged = 0 if env.privileged is None else env.privileged.shape[-1]
    if rows is not None:
        return PolicyShape(
            rows.host,
            env.space,
            privileged=privileged,
            slot_features=rows.slot,
            blueprint_features=rows.blueprint,
        )
    return PolicyShape(features.shape[-1], env.space, fields, env.num_categories, privileged)


class RecurrentState(NamedTuple):
    """State of the LSTM, an explicit input and output of the policy. Without an LSTM both parts have no columns."""

    hidden: Tensor  # [N, width]
    cell: Tensor  # [N, width]


def use_ieee_float32() -> None:
    """Let cuDNN compute float32 without rounding to TF32, in the whole process.

    By default torch lets it round. The policy acts on one time step and learns from many, with different kernels, and
    rounded differently its probability ratio would not begin at 1. Executors choose the precision of hosts themselves.
    """
    torch.backends.cudnn.allow_tf32 = False


class Policy(nn.Module):
    """Policy and critic with a shared body.

    Linear -> LayerNorm -> ReLU -> LSTM, added to its input -> LayerNorm -> action heads and critic. Without an LSTM the
    action heads and the critic follow the ReLU.

    Args:
        shape: Sizes of inputs and outputs.
        config: Size and architecture.

    Raises ValueError if the critic is asymmetric but there are no privileged features, or if the probability floors do
    not fit the action heads.
    """

    def __init__(self, shape: PolicyShape, config: PolicyConfig) -> None:
        super().__init__()
        if config.asymmetric and not shape.privileged:
            raise ValueError("policy.asymmetric: these environments keep nothing from the policy; leave it at false")
        width = config.width
        self.width = width
        self.state_width = width if config.memory == "lstm" else 0
        self.asymmetric = config.asymmetric
        self.encoder = nn.Linear(self._make_inputs(shape, config), width)
        self.encoder_norm = nn.LayerNorm(width)
        self.lstm: nn.LSTM | None = None
        if config.memory == "lstm":
            self.lstm = nn.LSTM(width, width)
            self.lstm_norm = nn.LayerNorm(width)
        self.heads = self._make_heads(shape, config)
        n_critic_inputs = width + (shape.privileged if config.asymmetric else 0)
        self.value = nn.Sequential(nn.Linear(n_critic_inputs, width // 2), nn.ReLU(), nn.Linear(width // 2, 1))
        self._initialise()

    def _make_inputs(self, shape: PolicyShape, config: PolicyConfig) -> int:
        """Create the layers before the encoder, and return the number of its inputs."""
        self.embedding: nn.Embedding | None = None
        if not shape.categories:
            return shape.features
        self.embedding = nn.Embedding(shape.categories, config.blueprint_embedding)
        return shape.features + shape.categorical_fields * config.blueprint_embedding

    def _make_heads(self, shape: PolicyShape, config: PolicyConfig) -> Any:
        """Create the action heads."""
        return Heads(config.width, shape.space, config.probability_floors)

    def _initialise(self) -> None:
        for layer, gain in ((self.encoder, math.sqrt(2)), (self.value[0], math.sqrt(2)), (self.value[2], 1.0)):
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        if self.lstm is None:
            return
        for name, parameter in self.lstm.named_parameters():
            if name.startswith("weight"):
                nn.init.orthogonal_(parameter)
            else:
                nn.init.zeros_(parameter)
        bias = self.lstm.get_parameter("bias_ih_l0")
        with torch.no_grad():
            bias[self.width : 2 * self.width] = 1.0  # forget gate: keep the state at first

    def initial_state(self, n_envs: int) -> RecurrentState:
        """Return the recurrent state at the start of an episode."""
        zeros = self.encoder.weight.new_zeros(n_envs, self.state_width)
        return RecurrentState(zeros, zeros.clone())

    def forward(
        self, observation: Any, state: RecurrentState, masks: Any, starts: Tensor, privileged: Tensor | None = None
    ) -> tuple[Any, Tensor, RecurrentState]:
        """Process T steps of N environments.

        Args:
            observation: [T, N, …], features normalised.
            state: Recurrent state before the first step.
            masks: [T, N, …].
            starts: [T, N] bool: the state is reset before this step.
            privileged: [T, N, P], normalised; required if the critic is asymmetric.

        Returns:
            The distribution over actions [T, N], normalised values [T, N], and the state after the last step.
        """
        hidden, state = self.encode(observation, state, starts)
        return *self.decode(hidden, masks, privileged), state

    def encode(self, observation: Any, state: RecurrentState, starts: Tensor) -> tuple[Any, RecurrentState]:
        """Return the hidden features [T, N, width] of T steps and the state after the last one: see `forward`."""
        features, *categorical = observation
        if self.embedding is not None:
            features = torch.cat([features, self.embedding(categorical[0]).flatten(-2)], -1)  # [T, N, D + K·E]
        return self._encode_host(features, state, starts)

    def _encode_host(self, x: Tensor, state: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        """Return the output [T, N, width] of encoder and LSTM for the encoder's inputs [T, N, …], and the new state."""
        encoded = F.relu(self.encoder_norm(self.encoder(x)))
        if self.lstm is None:
            return encoded, state
        recurrent, state = self._run_lstm(encoded, state, starts)
        return self.lstm_norm(recurrent + encoded), state

    def decode(self, hidden: Any, masks: Any, privileged: Tensor | None) -> tuple[Any, Tensor]:
        """Return the distribution over actions and the normalised values [...] for hidden features [..., width]."""
        return self.heads.distribution(hidden, masks), self._critic_value(hidden, privileged)

    def step(
        self, observation: Any, state: RecurrentState, masks: Any, *, starts: Tensor, privileged: Tensor | None = None
    ) -> tuple[Any, Tensor, RecurrentState]:
        """Process one step: as `forward`, but without the axis T."""
        hidden, state = self._encode_step(observation, state, starts)
        return *self.decode(hidden, masks, privileged), state

    def step_actor(
        self, observation: Any, state: RecurrentState, masks: Any, *, starts: Tensor
    ) -> tuple[Any, RecurrentState]:
        """Process one step without the critic, whose privileged features may be unavailable after training."""
        hidden, state = self._encode_step(observation, state, starts)
        return self.heads.distribution(hidden, masks), state

    def decide(
        self, observation: Any, state: RecurrentState, masks: Any, *, starts: Tensor
    ) -> tuple[Any, RecurrentState]:
        """Process one step and return the most likely action, and the new state."""
        hidden, state = self._encode_step(observation, state, starts)
        return self.heads.decide(hidden, masks), state

    def estimate_value(
        self, observation: Any, state: RecurrentState, starts: Tensor, *, privileged: Tensor | None = None
    ) -> Tensor:  # [N]
        """Return the normalised values of one step, without an action distribution."""
        return self._critic_value(self._encode_step(observation, state, starts)[0], privileged)

    def _critic_value(self, hidden: Any, privileged: Tensor | None) -> Tensor:  # [..., width] -> [...]
        if self.asymmetric:
            assert privileged is not None, "an asymmetric critic needs the privileged features"
            hidden = torch.cat([hidden, privileged], -1)
        return self.value(hidden).squeeze(-1)

    def _encode_step(self, observation: Any, state: RecurrentState, starts: Tensor) -> tuple[Any, RecurrentState]:
        hidden, state = self.encode([part[None] for part in observation], state, starts[None])
        return hidden[0], state

    def _run_lstm(self, x: Tensor, state: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        assert self.lstm is not None
        before = RecurrentState(*(part * ~starts[0, :, None] for part in state))
        # A single step needs no transfer from the device.
        if len(x) == 1 or not starts[1:].any():
            output, after = self.lstm(x, tuple(part.unsqueeze(0) for part in before))
            return output, RecurrentState(*(part.squeeze(0) for part in after))
        segments = split_segments(starts)
        output, after = self.lstm(
            segments.pack(x), tuple(segments.initial_states(part).unsqueeze(0) for part in before)
        )
        return segments.unpack(output.data), RecurrentState(*(part.squeeze(0)[segments.last] for part in after))
