"""Network of the policy, recurrent or feedforward, with its action heads and a symmetric or asymmetric critic.

Hosts are observed in rows. The same layers encode every blueprint and every slot, and slots exchange information
through the mean and the maximum over their rows (https://arxiv.org/abs/1703.06114), which also feed the recurrent core.
Any other environment has global features alone. Heads of hosts point at rows (https://arxiv.org/abs/1506.03134).

T steps, N environments, K slots, B blueprints, P privileged features, W = width of the policy, H = W // 2.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence

from esper_lightning.envs import Action, HostPool, Masks, MixedPool
from esper_lightning.envs.actions import ActionSpace
from esper_lightning.envs.observation import RowSizes
from esper_lightning.envs.vector_env import ChoiceAction, ChoiceMasks, ChoiceSpace, Observation, VectorEnv
from esper_lightning.ppo.distribution import (
    HOST_PARENTS,
    ChoiceDistribution,
    HeadTables,
    HostDistribution,
    host_action,
    host_mask,
    masked_log_softmax,
    select_row,
)
from esper_lightning.runtime.compiled import Compiled
from esper_lightning.runtime.machine import FLOAT32_PARTS
from esper_lightning.runtime.nested import map_tensors

SMALL_GAIN = 0.01
"""Gain of the layers that end in logits: at first all choices are about equally likely."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Size and architecture of the policy's network."""

    width: int = 128
    """Number of hidden features and of LSTM cells."""

    memory: Literal["lstm", "none"] = "lstm"
    """Recurrent layer: an LSTM, or none."""

    asymmetric: bool = False
    """Give the critic, which only training uses, the privileged features that environments keep from the policy."""

    def __post_init__(self) -> None:
        if self.width < 2:
            raise ValueError(f"policy.width must be at least 2, got {self.width}")


class PolicyShape(NamedTuple):
    """Sizes of the policy's inputs and outputs."""

    features: int
    """Number of features of the environment as a whole."""
    space: ActionSpace | ChoiceSpace
    privileged: int = 0
    """Number P of features that only the critic may receive."""
    slot_features: int = 0
    """Number of features of a slot. 0: the environment is no host, and has no slots."""
    blueprint_features: int = 0
    """Number of features of a blueprint in a slot."""

    @property
    def rows(self) -> RowSizes | None:
        """Sizes of the parts of a row. None: the environment has no slots."""
        return RowSizes(self.features, self.slot_features, self.blueprint_features) if self.slot_features else None

    def state_dict(self) -> dict[str, Any]:
        space = self.space._asdict() if isinstance(self.space, ActionSpace) else asdict(self.space)
        return self._asdict() | {"space": space}

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Any]) -> "PolicyShape":
        """Return the sizes that `state_dict` has turned into plain data."""
        choices = saved["space"]
        if "op" in choices:  # earlier versions had a head `style`, too
            space = ActionSpace(**{head: choices[head] for head in ActionSpace._fields})
        else:
            space = ChoiceSpace(**choices)
        return cls(**{**saved, "space": space})


def policy_shape(env: VectorEnv) -> PolicyShape:
    """Return the input and output sizes of a policy for these environments."""
    privileged = 0 if env.privileged is None else env.privileged.shape[-1]
    if isinstance(env, HostPool | MixedPool):
        rows = env.rows
        return PolicyShape(rows.host, env.space, privileged, slot_features=rows.slot, blueprint_features=rows.blueprint)
    assert isinstance(env.space, ChoiceSpace), "the action heads know no other kind"
    return PolicyShape(env.observation.features.shape[-1], env.space, privileged)


class Hidden(NamedTuple):
    """Hidden features of environments. Only those of hosts have slots and blueprints."""

    core: Tensor  # [..., W] of the environment as a whole, with memory
    slots: Tensor | None = None  # [..., K, W]
    blueprints: Tensor | None = None  # [..., K, B, H] of each blueprint in each slot


def linear(inputs: int, outputs: int, gain: float = math.sqrt(2)) -> nn.Linear:
    """Return a linear layer with orthogonal weights and without initial bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


class CoreTable(nn.Module):
    """Logits of choices from the core alone."""

    def __init__(self, width: int, choices: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(linear(width, width // 2), nn.ReLU(), linear(width // 2, choices, SMALL_GAIN))

    def forward(self, core: Tensor) -> Tensor:  # [..., W] -> [..., 1, choices]
        return self.layers(core).unsqueeze(-2)


class SlotTable(nn.Module):
    """Logits of the slots for each op: the core's query for the op times the slot's key, plus the slot's own merit."""

    def __init__(self, width: int, ops: int) -> None:
        super().__init__()
        self.ops = ops
        self.query = linear(width, ops * (width // 2), 0.1)
        self.merit = linear(width // 2, ops, SMALL_GAIN)

    def forward(self, core: Tensor, slots: Tensor) -> Tensor:  # [..., W], [..., K, H] -> [..., ops, K]
        query = self.query(core).unflatten(-1, (self.ops, -1))  # [..., ops, H]
        return query @ slots.mT / slots.shape[-1] + self.merit(slots).mT


class BlueprintTable(nn.Module):
    """Logits of the blueprints for each slot: the slot's query times the blueprint's key, plus a network of both."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.query = linear(half, half, 0.1)
        self.of_blueprint, self.of_slot = linear(half, half), linear(half, half)
        self.merit = linear(half, 1, SMALL_GAIN)

    def forward(self, blueprints: Tensor, slots: Tensor) -> Tensor:  # [..., K, B, H], [..., K, H] -> [..., K, B]
        # The blueprints, of which there are most, are their own keys.
        match = (blueprints @ self.query(slots).unsqueeze(-1)).squeeze(-1) / math.sqrt(slots.shape[-1])
        joint = F.relu_(self.of_blueprint(blueprints).add_(self.of_slot(slots).unsqueeze(-2)))  # [..., K, B, H]
        return match + self.merit(joint).squeeze(-1)


class RowTable(nn.Module):
    """Logits of `choices` for each slot."""

    def __init__(self, width: int, choices: int) -> None:
        super().__init__()
        self.output = linear(width // 2, choices, SMALL_GAIN)

    def forward(self, slots: Tensor) -> Tensor:  # [..., K, H] -> [..., K, choices]
        return self.output(slots)


class HostHeads(nn.Module):
    """Heads of the actions of hosts. The numbers of slots and blueprints in `space` determine no weights."""

    def __init__(self, width: int, space: ActionSpace) -> None:
        super().__init__()
        self.sizes = space.sizes  # number of choices of each head on the training hosts
        self.of_slot, self.of_core = linear(width, width // 2), linear(width, width // 2)
        ops = self.sizes["op"]
        self.tables = nn.ModuleDict(
            {
                "op": CoreTable(width, ops),
                "slot": SlotTable(width, ops),
                "blueprint": BlueprintTable(width),
                "tempo": RowTable(width, self.sizes["tempo"]),
            }
        )

    def encode_slots(self, hidden: Hidden) -> Tensor:  # [..., K, H]
        return F.relu(self.of_slot(hidden.slots) + self.of_core(hidden.core).unsqueeze(-2))

    def forward(self, hidden: Hidden) -> HeadTables:
        slots = self.encode_slots(hidden)
        return {head: self.table(head, hidden.core, slots, blueprints=hidden.blueprints) for head in self.sizes}

    def table(self, head: str, core: Tensor, slots: Tensor, *, blueprints: Tensor | None) -> Tensor:
        """Return the logits of one head, [..., rows, choices], given core, encoded slots and blueprints."""
        inputs = {"op": (core,), "slot": (core, slots), "blueprint": (blueprints, slots)}.get(head, (slots,))
        return self.tables[head](*inputs)

    def distribution(self, tables: HeadTables, masks: Masks) -> HostDistribution:
        """Return the distribution over actions [...], given the logits that the forward pass returns."""
        return HostDistribution(tables, masks)

    def decide(self, hidden: Hidden, masks: Masks) -> Action:
        """Return the most likely action of each host, [N]; to save time, with later heads of the chosen slot alone."""
        core, slots, blueprints = hidden.core, self.encode_slots(hidden), hidden.blueprints
        assert blueprints is not None, "hidden features of hosts have them"
        chosen: dict[str, Tensor] = {}  # index of the choice of each head, [N]
        for head in self.sizes:
            parent = HOST_PARENTS.get(head)
            if parent == "slot":
                chosen_slot = torch.arange(len(core), device=core.device), chosen["slot"]  # indexes [N, K, …]
                one_slot, its_blueprints = slots[chosen_slot].unsqueeze(1), blueprints[chosen_slot].unsqueeze(1)
                logits = self.table(head, core, one_slot, blueprints=its_blueprints).squeeze(-2)
                mask = masks.blueprint[chosen_slot] if head == "blueprint" else torch.ones_like(logits).bool()
            else:
                table = self.table(head, core, slots, blueprints=blueprints)
                row = None if parent is None else chosen[parent]
                logits, mask = select_row(table, row), select_row(host_mask(head, masks, table), row)
            chosen[head] = masked_log_softmax(logits, mask).argmax(-1)
        return host_action(chosen)


class ChoiceHeads(nn.Module):
    """Heads of any other action space, as `HostHeads`."""

    def __init__(self, width: int, space: ChoiceSpace) -> None:
        super().__init__()
        self.space = space
        self.sizes: Mapping[str, int] = space.sizes
        self.tables = nn.ModuleDict({head: CoreTable(width, choices) for head, choices in space.sizes.items()})

    def forward(self, hidden: Hidden) -> HeadTables:
        return {head: table(hidden.core) for head, table in self.tables.items()}

    def distribution(self, tables: HeadTables, masks: ChoiceMasks) -> ChoiceDistribution:
        return ChoiceDistribution(tables, masks, self.space)

    def decide(self, hidden: Hidden, masks: ChoiceMasks) -> ChoiceAction:
        return self.distribution(self(hidden), masks).mode()


class RecurrentState(NamedTuple):
    """State of the LSTM, an explicit input and output of the policy. Without an LSTM both parts have no columns."""

    hidden: Tensor  # [N, W]
    cell: Tensor  # [N, W]


def use_ieee_float32() -> None:
    """Let cuBLAS and cuDNN compute float32 without rounding to TF32, in the whole process.

    Acting and learning use different kernels; with different rounding the probability ratio would not begin at 1.
    """
    torch.backends.cudnn.allow_tf32 = False  # the former interface, which torch itself reads and compares with the new
    torch.set_float32_matmul_precision("highest")
    for part in FLOAT32_PARTS:
        part.fp32_precision = "ieee"


def pool_rows(rows: Tensor, present: Tensor) -> Tensor:  # [..., n, C] -> [..., 2·C]
    """Return mean and maximum over the non-negative rows that are `present` [..., n], 1 or 0; both are 0 if none is."""
    kept = rows * present.unsqueeze(-1)
    mean = kept.sum(-2) / present.sum(-1, keepdim=True).clamp(min=1)
    return torch.cat([mean, kept.amax(-2)], -1)


class Policy(nn.Module):
    """Policy and critic with a shared body.

    Linear -> LayerNorm -> ReLU -> LSTM, added to its input -> LayerNorm -> action heads and critic. Without an LSTM the
    action heads and the critic follow the ReLU. Hosts' slots and blueprints are encoded and pooled before. In training,
    the layers ahead of the LSTM and the action heads run through `compiled`.
    """

    def __init__(self, shape: PolicyShape, config: PolicyConfig) -> None:
        super().__init__()
        if config.asymmetric and not shape.privileged:
            raise ValueError("policy.asymmetric: these environments keep nothing from the policy; leave it at false")
        width, half = config.width, config.width // 2
        self.compiled = Compiled("the policy", enabled=False)
        self.width = width
        self.state_width = width if config.memory == "lstm" else 0
        self.asymmetric = config.asymmetric
        self.rows = shape.rows  # None: the environment has no slots
        inputs = shape.features
        if self.rows is not None:
            self.blueprint_encoder = nn.Sequential(
                linear(self.rows.blueprint, half), nn.ReLU(inplace=True), linear(half, half), nn.ReLU(inplace=True)
            )
            self.slot_encoder = nn.Sequential(linear(self.rows.slot + 2 * half, width), nn.LayerNorm(width), nn.ReLU())
            inputs += 2 * width
        self.encoder = nn.Linear(inputs, width)
        self.encoder_norm = nn.LayerNorm(width)
        self.lstm: nn.LSTM | None = None
        if config.memory == "lstm":
            self.lstm = nn.LSTM(width, width)
            self.lstm_norm = nn.LayerNorm(width)
        space = shape.space
        self.heads: Any = HostHeads(width, space) if isinstance(space, ActionSpace) else ChoiceHeads(width, space)
        critic_inputs = width + (shape.privileged if config.asymmetric else 0)
        self.value = nn.Sequential(nn.Linear(critic_inputs, half), nn.ReLU(), nn.Linear(half, 1))
        for layer, gain in ((self.encoder, math.sqrt(2)), (self.value[0], math.sqrt(2)), (self.value[2], 1.0)):
            assert isinstance(layer, nn.Linear)
            nn.init.orthogonal_(layer.weight, gain)
            nn.init.zeros_(layer.bias)
        if self.lstm is not None:
            for name, parameter in self.lstm.named_parameters():
                nn.init.orthogonal_(parameter) if name.startswith("weight") else nn.init.zeros_(parameter)
            with torch.no_grad():  # forget gate: keep the state at first
                self.lstm.get_parameter("bias_ih_l0")[width : 2 * width] = 1.0

    def initial_state(self, n_envs: int) -> RecurrentState:
        """Return the recurrent state at the start of an episode."""
        zeros = self.encoder.weight.new_zeros(n_envs, self.state_width)
        return RecurrentState(zeros, zeros.clone())

    def forward(
        self,
        observation: Observation,  # [T, N, …] with normalised features
        state: RecurrentState,  # before the first step
        masks: Any,  # [T, N, …]
        starts: Tensor,  # [T, N] bool: the state is reset before this step
        privileged: Tensor | None = None,  # [T, N, P] normalised; required if the critic is asymmetric
    ) -> tuple[Any, Tensor, RecurrentState]:
        """Return the distribution over actions and the normalised values, [T, N], and the state after the last step."""
        hidden, state = self._encode(observation, state, starts)
        return self.distribution(hidden, masks), self.estimate_value(hidden, privileged), state

    def distribution(self, hidden: Hidden, masks: Any) -> Any:
        """Return the distribution over actions [...] for hidden features [...]."""
        return self.heads.distribution(self.compiled(self.heads, hidden, kind="heads"), masks)

    def encode_step(
        self, observation: Observation, state: RecurrentState, starts: Tensor
    ) -> tuple[Hidden, RecurrentState]:
        """Return the hidden features of one step [N, …], for the heads and the critic, and the state after it."""
        hidden, state = self._encode(Observation(observation.features[None]), state, starts[None])
        return map_tensors(hidden, lambda features: features[0]), state

    def estimate_value(self, hidden: Hidden, privileged: Tensor | None = None) -> Tensor:  # [...]
        """Return the normalised values of hidden features [..., width]."""
        core = hidden.core
        if self.asymmetric:
            assert privileged is not None, "an asymmetric critic needs the privileged features"
            core = torch.cat([core, privileged], -1)
        return self.value(core).squeeze(-1)

    def _encode(self, observation: Observation, state: RecurrentState, starts: Tensor) -> tuple[Hidden, RecurrentState]:
        """Return the hidden features [T, N, …] of T steps and the state after the last one: see `forward`."""
        hidden = self.compiled(self._embed, observation.features, kind="body")
        if self.lstm is None:
            return hidden, state
        recurrent, state = self._run_lstm(hidden.core, state, starts)
        return hidden._replace(core=self.lstm_norm(recurrent + hidden.core)), state

    def _embed(self, features: Tensor) -> Hidden:
        """Return the hidden features [T, N, …] ahead of the LSTM."""
        slots, blueprints = None, None
        if self.rows is not None:
            # The first feature of a slot, and of a blueprint in it, is 1 if it is present, else 0.
            host_features, slot_features, blueprint_features = self.rows.split(features)
            blueprint_features = blueprint_features.contiguous()
            blueprints = self.blueprint_encoder(blueprint_features)  # [T, N, K, B, H]
            pooled_blueprints = pool_rows(blueprints, present=blueprint_features[..., 0])  # [T, N, K, 2·H]
            slots = self.slot_encoder(torch.cat([slot_features, pooled_blueprints], -1))  # [T, N, K, W]
            features = torch.cat([host_features, pool_rows(slots, present=slot_features[..., 0])], -1)
        return Hidden(F.relu(self.encoder_norm(self.encoder(features))), slots, blueprints)

    def _run_lstm(self, x: Tensor, state: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        """Run the LSTM over x [T, N, W]. Where `starts` [T, N] is True, its state is 0 before the step.

        Returns the outputs [T, N, W], and the state after the last step.
        """
        assert self.lstm is not None
        before = RecurrentState(*(tensor * ~starts[0, :, None] for tensor in state))
        if len(x) == 1 and not torch.is_grad_enabled():
            # A decision is one step, for which torch's LSTM takes twice as long as its cell.
            after = RecurrentState(*torch.lstm_cell(x[0], before, *self.lstm.all_weights[0]))
            return after.hidden[None], after
        # The length comes first, because to read a flag a GPU must be waited for.
        if len(x) == 1 or not starts[1:].any():
            output, after = self.lstm(x, tuple(tensor.unsqueeze(0) for tensor in before))
            return output, RecurrentState(*(tensor.squeeze(0) for tensor in after))
        return self._run_segments(x, before, starts)

    def _run_segments(self, x: Tensor, before: RecurrentState, starts: Tensor) -> tuple[Tensor, RecurrentState]:
        """Run the LSTM over x [T, N, W], see `_run_lstm`, with a reset after the first step of some environment.

        A segment is what lies between two resets of one environment. A PackedSequence holds all S segments as a batch,
        the longest first: the first steps of all of them, then the second steps …
        """
        assert self.lstm is not None
        steps, envs = starts.shape
        begins = starts.T.clone()  # [N, T] bool: a segment begins with this step
        begins[:, 0] = True
        begin = begins.flatten().nonzero().squeeze(1)  # [S] env * T + step of the first step of each segment
        lengths, order = torch.diff(begin, append=begin.new_full((1,), envs * steps)).sort(descending=True, stable=True)
        offset = torch.arange(int(lengths[0]), device=starts.device)[:, None]  # steps since a segment's begin
        is_inside = offset < lengths  # [longest, S]
        sources = (begin[order] + offset)[is_inside]  # [N·T] env * T + step of each element of the PackedSequence
        packed = PackedSequence(x.transpose(0, 1).flatten(0, 1)[sources], is_inside.sum(1).cpu())
        batch_index = order.argsort()  # [S] index in the batch of each segment
        last = begins.sum(1).cumsum(0) - 1  # [N] last segment of each environment
        first = last - begins.sum(1) + 1
        zeros = before.hidden.new_zeros(len(order), self.width)  # state after a reset
        initial = tuple(zeros.index_copy(0, batch_index[first], tensor).unsqueeze(0) for tensor in before)
        output, after = self.lstm(packed, initial)
        outputs = output.data[sources.argsort()].unflatten(0, (envs, steps)).transpose(0, 1)
        return outputs, RecurrentState(*(tensor.squeeze(0)[batch_index[last]] for tensor in after))
