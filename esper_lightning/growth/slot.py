"""SeedSlot: one place in a host where a seed can grow."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.blend import add, straight_through
from esper_lightning.growth.stages import BLENDED, LIVE, OCCUPIED, STRAIGHT_THROUGH, Stage, check_transition

Layout = Literal["image", "sequence", "vector"]
"""Shape of the feature at a slot: [B, C, H, W], [B, T, C] or [B, C], with C the slot's width."""


class SeedSlot(nn.Module):
    """A place in the host where one seed can grow. Empty, it is the identity.

    Args:
        name: Where the slot is, as users see it: `block1.pool`.
        layout: Shape of the feature that passes through.
        width: Channels C of that feature.
        isolate: Detach the seed's input until it is fossilized, so that the host below learns only through the
            (1 - alpha) part. None: yes for images, no for sequences and vectors.

    Attributes:
        stage: Where the seed is in its life; `growth.network` moves it.
        seed: The module that grows, or an identity.
        blueprint: Its kind, or None.
        ramp: The path of alpha, which begins with BLENDING.
        age, ticks_in_stage: Host epochs since germination, and in this stage.
    """

    alpha: Tensor

    def __init__(self, name: str, layout: Layout, width: int, isolate: bool | None = None) -> None:
        super().__init__()
        self.name = name
        self.layout: Layout = layout
        self.width = width
        self.isolate = layout == "image" if isolate is None else isolate
        self.branch: Callable[[SeedSlot, Tensor], Tensor] | None = None  # set while a counterfactual pass runs
        self.register_buffer("alpha", torch.zeros(()))
        self.empty()

    def empty(self) -> None:
        """Forgets whatever grew here."""
        self.stage = Stage.DORMANT
        self.seed: nn.Module = nn.Identity()
        self.blueprint: str | None = None
        self.ramp: Ramp = FULL
        self.age = 0  # host epochs since germination
        self.ticks_in_stage = 0
        self.alpha.zero_()

    def initialise(self, generator: torch.Generator) -> None:
        """A host that starts anew has nothing grown in it."""
        self.empty()

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
    def alpha_now(self) -> float:
        """The value in the `alpha` buffer, known without reading the device."""
        if self.stage is Stage.BLENDING:
            return self.ramp.value(self.ticks_in_stage + 1)
        return self.ramp.target if self.blended else self.ramp.start

    @property
    def alpha_velocity(self) -> float:
        """Change of alpha in the present host epoch."""
        if self.stage is not Stage.BLENDING:
            return 0.0
        return self.alpha_now - self.ramp.value(self.ticks_in_stage)

    def move_to(self, stage: Stage) -> None:
        """Changes the stage, or raises ValueError if the transition table forbids it."""
        check_transition(self.name, self.stage, stage)
        self.stage = stage
        self.ticks_in_stage = 0
        self.alpha.fill_(self.alpha_now)

    def tick(self) -> None:
        """Counts one host epoch and moves alpha along its ramp."""
        self.age += self.occupied
        self.ticks_in_stage += 1
        if self.stage is Stage.BLENDING:
            self.alpha.fill_(self.alpha_now)

    def forward(self, x: Tensor) -> Tensor:  # same shape in and out
        if self.branch is not None:
            return self.branch(self, x)
        return self.express(x)

    def express(self, x: Tensor) -> Tensor:
        """The host's feature with the seed as its stage and alpha say."""
        if self.stage in STRAIGHT_THROUGH:
            # In evaluation the seed cannot change anything, so it need not run.
            return straight_through(x, self.seed(x.detach())) if self.training else x
        if not self.blended:
            return x
        if self.stage is Stage.FOSSILIZED and self.ramp.target == 1.0:
            return self.seed(x)
        return add(x, self.seed(x.detach() if self.isolate and self.live else x), self.alpha)
