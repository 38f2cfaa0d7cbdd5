"""SeedSlot: a module of the host in which a seed can grow."""

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth.blend import Isolation, Ramp, blend, proximal, straight_through
from esper_lightning.growth.blueprints import STACK, Birth, build_seed, get_blueprint
from esper_lightning.growth.stages import BLENDED, ISOLATED, LIVE, OCCUPIED, Stage, check_transition
from esper_lightning.runtime.nested import KeyPath, get_at, replace_at

Layout = Literal["image", "sequence", "vector"]
"""Layout of the feature at a slot: [B, C, H, W], [B, T, C] or [B, C], where C is the slot's width."""

ABSENT: Literal["absent"] = "absent"
"""Layout of a padded slot, which only exists to equalise the number of slots: no seed can grow in it."""

EXTRA_STATE = "_extra_state"  # name that torch gives to a module's extra state in a state dict


class SeedSlot(nn.Module):
    """Module of a host in which one seed can grow. An empty slot is the identity.

    Its extra state tells what grew in it, so that a state dict can be loaded into a slot in any state.

    Args:
        name: Location of the slot as shown to users, for example `block1.pool`.
        layout: Layout of the feature that passes through the slot.
        width: Number of channels C of that feature.
        detach_input: Let no gradient reach earlier layers through the seed until it is fossilized. They then learn by
            the host's share of the output alone, 1 - alpha, and not at all while alpha is 1.
        on_single_path: True if no shortcut bypasses the slot, so that a counterfactual pass may split the batch here.

    Attributes:
        occupied, live, isolated, blended: True if the stage is in the set of this name; see `stages`.
        seed: The growing module; an identity if the slot is empty.
        ramp_ticks, age, ticks_in_stage: Host epochs since BLENDING began, since germination, and in the present stage.
        isolation: How a seed learns before it is blended; `GrowingNetwork` sets it from its lifecycle.
        folded: Layer ahead of the slot that contains an earlier, folded seed.
        override: Replacement of the forward pass during counterfactual passes.
    """

    alpha: Tensor
    """Weight of the seed's output in the coming host epoch, in [0, 1]; shape []."""
    is_judged = True
    """True if the network without the seed tells what the seed is worth."""

    def __init__(
        self,
        name: str,
        layout: Layout | Literal["absent", "stack"],
        width: int,
        *,
        detach_input: bool = False,
        on_single_path: bool = True,
    ) -> None:
        super().__init__()
        self.name = name
        self.layout = layout
        self.width = width
        self.detach_input = detach_input
        self.on_single_path = on_single_path
        self.isolation: Isolation = "proximal"
        self.folded: nn.Conv2d | None = None
        self.override: Callable[[SeedSlot, Tensor], Tensor] | None = None
        self.register_buffer("alpha", torch.zeros(()), persistent=False)  # the extra state determines it
        self.register_load_state_dict_pre_hook(_accept_host_without_slots)
        self.empty()

    def empty(self) -> None:
        """Remove the seed and reset the slot to DORMANT; a folded layer stays."""
        self.stage = Stage.DORMANT
        self.seed: nn.Module = nn.Identity()
        self.blueprint: str | None = None
        self.ramp = Ramp()
        self.ramp_ticks = self.age = self.ticks_in_stage = 0
        self._counted: tuple[nn.Module | None, int] = None, 0  # a seed and its size
        self.alpha.zero_()

    def initialise(self, generator: torch.Generator) -> None:
        """Reset the slot to its initial state, without a seed or a folded layer; draws no random numbers."""
        self.empty()
        self.folded = None

    @property
    def stage(self) -> Stage:
        """Lifecycle stage of the seed; assigning it sets the attributes that depend on it."""
        return self._stage

    @stage.setter
    def stage(self, stage: Stage) -> None:
        self._stage = stage
        # `forward` reads these: torch.compile would not notice another stage in `stage in BLENDED`, but guards bools.
        self.occupied = stage in OCCUPIED
        self.live = stage in LIVE
        self.isolated = stage in ISOLATED
        self.blended = stage in BLENDED

    @property
    def is_open(self) -> bool:
        """True if a decider may put a seed in."""
        return self.stage is Stage.DORMANT and self.layout != ABSENT

    @property
    def ramping(self) -> bool:
        """True if alpha may still change: the seed is blended and not fossilized."""
        return self.blended and self.live

    @property
    def alpha_now(self) -> float:
        """Alpha in the coming host epoch: the value of the `alpha` buffer, without reading it from the device."""
        return self.ramp.value(self.ramp_ticks + 1) if self.ramping else float(self.blended)

    @property
    def alpha_before(self) -> float:
        """Alpha in the last host epoch, under which the latest measurements were taken."""
        return self.ramp.value(self.ramp_ticks) if self.ramping else self.alpha_now

    @property
    def alpha_velocity(self) -> float:
        """Change of alpha from the last host epoch to the coming one."""
        return self.alpha_now - self.alpha_before

    def move_to(self, stage: Stage) -> None:
        """Change the stage. Raises ValueError if the transition table forbids it."""
        check_transition(self.name, self.stage, stage)
        self.stage = stage
        self.ticks_in_stage = 0
        self.alpha.fill_(self.alpha_now)

    def start_ramp(self, ramp: Ramp) -> None:
        """Let alpha rise along a ramp from the coming host epoch on, or from the beginning of BLENDING."""
        self.ramp, self.ramp_ticks = ramp, 0
        self.alpha.fill_(self.alpha_now)

    def end_epoch(self) -> None:
        """Count one host epoch and move alpha along its ramp."""
        self.age += self.occupied
        self.ticks_in_stage += 1
        if self.ramping:
            self.ramp_ticks += 1
            if self.alpha_velocity:
                self.alpha.fill_(self.alpha_now)

    def seed_parameters(self, blueprint: str) -> int:
        """Return the number of parameters of a seed."""
        return get_blueprint(blueprint, self.layout).parameters(self.width)

    def grown_parameters(self) -> list[nn.Parameter]:
        """Return the parameters of what grew in the slot."""
        return list(self.seed.parameters())

    @property
    def size(self) -> int:
        """Number of parameters of what grew in the slot."""
        if self._counted[0] is not self.seed:  # counted once for each seed, because a tick asks five times
            self._counted = self.seed, sum(parameter.numel() for parameter in self.grown_parameters())
        return self._counted[1]

    def deepen(self, blueprint: str, optimizers: Sequence[Optimizer]) -> None:
        """Add the blocks of a blueprint to the list of the slot; a slot for seeds has none."""

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        if self.folded is not None:
            x = self.folded(x)
        return self.blend_output(x) if self.override is None else self.override(self, x)

    def blend_output(self, x: Tensor) -> Tensor:
        """Return the host's feature blended with the seed's output according to stage and alpha."""
        if self.isolated:
            if not self.training:  # the seed has no effect, so it is not run
                return x
            # The host's feature, bit for bit; the seed gets a gradient all the same.
            return (proximal if self.isolation == "proximal" else straight_through)(x, self.trial_output(x))
        if not self.blended:  # the slot is empty
            return x
        if not self.live:  # a fossilized seed is at full alpha
            return self.seed(x).to(x.dtype)
        return blend(x, self.seed(x.detach() if self.detach_input else x), self.alpha)

    def trial_output(self, x: Tensor) -> Tensor:
        """Return what the slot would return with the seed blended at full alpha; no gradient reaches `x`."""
        return self.seed(x.detach()).to(x.dtype)

    def get_extra_state(self) -> Tensor:  # uint8 [bytes]
        """Return what grew in the slot; torch puts it into the state dict."""
        return encode(
            {
                "stage": self.stage.name,
                "blueprint": self.blueprint,
                "ramp": list(self.ramp),
                "ramp_ticks": self.ramp_ticks,
                "age": self.age,
                "ticks_in_stage": self.ticks_in_stage,
                "folded": None if self.folded is None else self.folded.kernel_size[0],
            }
        )

    def set_extra_state(self, state: Tensor) -> None:
        """Become the slot that `get_extra_state` has described; torch then loads the weights of its modules."""
        saved = decode(state)
        # Modules that fit are kept, because an optimizer may hold their parameters.
        seed = self.seed
        if saved["blueprint"] != self.blueprint:
            seed = nn.Identity()
            if saved["blueprint"] is not None:
                # The drawn weights are overwritten. Any blueprint supports birth "random".
                generator = torch.Generator(self.alpha.device)
                seed = new_seed(self, saved["blueprint"], generator=generator, birth="random")
        if saved["folded"] is None:
            self.folded = None
        elif self.folded is None or self.folded.kernel_size[0] != saved["folded"]:
            self.folded = new_folded(self, saved["folded"])
        self.stage, self.seed, self.blueprint = Stage[saved["stage"]], seed, saved["blueprint"]
        self.ramp = Ramp(*saved["ramp"])
        self.ramp_ticks, self.age, self.ticks_in_stage = saved["ramp_ticks"], saved["age"], saved["ticks_in_stage"]
        self.alpha.fill_(self.alpha_now)


def _accept_host_without_slots(slot: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Let an empty slot load the state dict of a host that had no slots."""
    assert isinstance(slot, SeedSlot)
    if not slot.occupied and slot.folded is None:
        state.setdefault(prefix + EXTRA_STATE, slot.get_extra_state())


def encode(content: Any) -> Tensor:  # uint8 [bytes]
    """Return JSON in a tensor, because every file format for weights holds tensors."""
    return torch.frombuffer(bytearray(json.dumps(content).encode()), dtype=torch.uint8)


def decode(state: Tensor) -> Any:
    """Return the JSON value in a tensor that `encode` has made."""
    return json.loads(bytes(state.tolist()))


def new_seed(slot: SeedSlot, blueprint: str, *, generator: torch.Generator, birth: Birth = "identity") -> nn.Module:
    """Build a seed for `slot`, with its device, dtype and mode; `generator`, on the same device, draws the weights."""
    if slot.layout == STACK:  # what grows there are blocks of a list
        return nn.Identity()
    device = slot.alpha.device
    seed = build_seed(blueprint, slot.layout, slot.width, device=device, generator=generator, birth=birth)
    return seed.to(slot.alpha.dtype).train(slot.training)


class SlotHook:
    """Forward hook that passes a tensor of an output through a slot; no closure, so that copies use their own slots."""

    def __init__(self, slot: SeedSlot, path: KeyPath, channels_last: bool) -> None:
        self.slot, self.path, self.channels_last = slot, path, channels_last

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> Any:
        feature = get_at(output, self.path)
        grown = self.slot(feature.movedim(-1, 1)).movedim(1, -1) if self.channels_last else self.slot(feature)
        return replace_at(output, self.path, grown)


def pass_on(*_: Any) -> None:
    """Forward hook that leaves the output as it is, in the place of a slot's."""


def new_folded(slot: SeedSlot, kernel: int) -> nn.Conv2d:
    """Return a new convolution that fits `folded` in a slot of layout "image"."""
    conv = nn.Conv2d(slot.width, slot.width, kernel, padding=kernel // 2, device=slot.alpha.device)
    return conv.to(slot.alpha.dtype)
