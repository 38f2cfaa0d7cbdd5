"""SeedSlot: one place in a host where a seed can grow."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.blend import Style, mix, straight_through
from esper_lightning.growth.stages import BLENDED, LIVE, OCCUPIED, STRAIGHT_THROUGH, Stage, check_transition

Layout = Literal["image", "sequence", "vector"]
"""Shape of the feature at a slot: [B, C, H, W], [B, T, C] or [B, C], with C the slot's width."""

Absent = Literal["absent"]
ABSENT: Absent = "absent"
"""In place of a layout: no feature passes through, for the slot is only counted, and nothing grows there."""


class SeedSlot(nn.Module):
    """A place in the host where one seed can grow. Empty, it is the identity.

    Args:
        name: Where the slot is, as users see it: `block1.pool`.
        layout: Shape of the feature that passes through.
        width: Channels C of that feature.
        isolate: Detach the seed's input until it is fossilized, so that the host below learns only through its own
            part of the blend. None: yes for images, no for sequences and vectors.
        trunk: All that follows sees the data through this slot, so a counterfactual pass may split the batch here.
            False where a shortcut leads around the slot.

    Attributes:
        stage: Where the seed is in its life; `growth.network` moves it.
        seed: The module that grows, or an identity.
        blueprint: Its kind, or None.
        style: How its output meets the host's feature.
        ramp: The path of alpha, which begins with BLENDING, and begins anew when alpha gets another target.
        ramp_ticks: Host epochs since the ramp began.
        folded: What became of a seed that was folded into this place: a layer of the host before the slot, or None.
        age, ticks_in_stage: Host epochs since germination, and in this stage.
    """

    alpha: Tensor

    def __init__(
        self, name: str, layout: Layout | Absent, width: int, isolate: bool | None = None, trunk: bool = True
    ) -> None:
        super().__init__()
        self.name = name
        self.layout = layout
        self.width = width
        self.isolate = layout == "image" if isolate is None else isolate
        self.trunk = trunk
        self.folded: nn.Module | None = None
        self.branch: Callable[[SeedSlot, Tensor], Tensor] | None = None  # set while a counterfactual pass runs
        # Follows from the manifest: so a host with empty slots has the state dict of a host without.
        self.register_buffer("alpha", torch.zeros(()), persistent=False)
        self.empty()

    def empty(self) -> None:
        """Forgets whatever grew here."""
        self.stage = Stage.DORMANT
        self.seed: nn.Module = nn.Identity()
        self.blueprint: str | None = None
        self.style: Style = "add"
        self.ramp: Ramp = FULL
        self.ramp_ticks = 0
        self.age = 0
        self.ticks_in_stage = 0
        self.alpha.zero_()

    def initialise(self, generator: torch.Generator) -> None:
        """A host that starts anew has nothing grown in it, and nothing folded into it."""
        self.empty()
        self.folded = None

    def layer_for(self, kernel: int) -> nn.Conv2d:
        """A convolution that can stand in this place of an image host as `folded`."""
        conv = nn.Conv2d(self.width, self.width, kernel, padding=kernel // 2, device=self.alpha.device)
        return conv.to(self.alpha.dtype)

    @property
    def occupied(self) -> bool:
        return self.stage in OCCUPIED

    @property
    def live(self) -> bool:
        """Holds a seed that is neither kept nor removed yet."""
        return self.stage in LIVE

    @property
    def blended(self) -> bool:
        """The seed's output is part of the host's: only then can it contribute."""
        return self.stage in BLENDED

    @property
    def ramping(self) -> bool:
        """Alpha may still change: the seed is part of the host's output and not yet kept."""
        return self.blended and self.live

    @property
    def fading(self) -> bool:
        """A slow cull is under way: alpha falls, and at 0 the seed is removed."""
        return self.ramping and self.ramp.target == 0.0

    @property
    def alpha_now(self) -> float:
        """The value in the `alpha` buffer, known without reading the device: that of the coming host epoch."""
        if self.ramping:
            return self.ramp.value(self.ramp_ticks + 1)
        return self.ramp.target if self.blended else self.ramp.start

    @property
    def alpha_before(self) -> float:
        """Alpha in the last host epoch: what has been measured was measured with it."""
        return self.ramp.value(self.ramp_ticks) if self.ramping else self.alpha_now

    @property
    def alpha_velocity(self) -> float:
        """Change of alpha from the last host epoch to the coming one."""
        return self.alpha_now - self.alpha_before

    @property
    def alpha_share(self) -> float:
        """How near alpha was to its target in the last host epoch, 0 … 1; a seed that fades has nowhere to arrive."""
        last, target = self.alpha_before, self.ramp.target
        return min(last, target) / max(last, target) if last > 0.0 else 0.0

    def move_to(self, stage: Stage) -> None:
        """Changes the stage, or raises ValueError if the transition table forbids it."""
        check_transition(self.name, self.stage, stage)
        self.stage = stage
        self.ticks_in_stage = 0
        self.alpha.fill_(self.alpha_now)

    def aim(self, ramp: Ramp) -> None:
        """Sends alpha along another path, from the coming host epoch on."""
        self.ramp, self.ramp_ticks = ramp, 0
        self.alpha.fill_(self.alpha_now)

    def tick(self) -> None:
        """Counts one host epoch and moves alpha along its ramp."""
        self.age += self.occupied
        self.ticks_in_stage += 1
        if self.ramping:
            self.ramp_ticks += 1
            self.alpha.fill_(self.alpha_now)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        if self.folded is not None:
            x = self.folded(x)
        if self.branch is not None:
            return self.branch(self, x)
        return self.express(x)

    def express(self, x: Tensor) -> Tensor:
        """The host's feature with the seed as its stage and alpha say."""
        if self.stage in STRAIGHT_THROUGH:
            # In evaluation the seed cannot change anything, so it need not run. While it learns, it learns to be
            # useful in its style at full alpha.
            return straight_through(x, self._mix(seen := x.detach(), seen, None)) if self.training else x
        if not self.blended:
            return x
        whole = self.stage is Stage.FOSSILIZED and self.ramp.target == 1.0
        return self._mix(x, x.detach() if self.isolate and self.live else x, None if whole else self.alpha)

    def _mix(self, x: Tensor, seen: Tensor, alpha: Tensor | None) -> Tensor:
        """Blends the seed's answer to `seen` into `x`; alpha None: all of it."""
        if alpha is None and self.style == "add":
            return self.seed(seen).to(x.dtype)
        return mix(self.style, x, self.seed, seen, x.new_ones(()) if alpha is None else alpha)
