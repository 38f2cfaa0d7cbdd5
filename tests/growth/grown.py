"""Small hosts, and ways to bring their seeds to a stage of life."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.blueprints import build_on
from esper_lightning.growth.alpha import FULL, Ramp
from esper_lightning.growth.network import germinate, slots_of
from esper_lightning.growth.slot import SeedSlot
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN

CPU = torch.device("cpu")

LIFE = [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED]

SLOTS = ["block1", "block1.pool", "block2", "block2.pool", "block3", "block3.pool"]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_cnn(slots: list[str] | None = None, seed: int = 0, isolate: bool | None = None, base: int = 4) -> CNN:
    """Three 3×3 blocks on images of 1×8×8; its weights depend on `seed` alone."""
    return build_on(CPU, lambda: CNN((1, 8, 8), 10, base=base, slots=slots, isolate=isolate), seeded(seed))


def small_batch(samples: int = 16, seed: int = 7) -> tuple[Tensor, Tensor]:  # [B, 1, 8, 8], [B]
    generator = seeded(seed)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)


def loss_of(network: nn.Module, seed: int = 7) -> Tensor:
    images, digits = small_batch(seed=seed)
    return F.cross_entropy(network(images), digits)


@torch.no_grad()
def stir(module: nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Moves every parameter a little, so that no seed is the identity."""
    generator = seeded(seed)
    for parameter in module.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def grow(slot: SeedSlot, stage: Stage, blueprint: str = "conv_light", ramp: Ramp = FULL, seed: int = 0) -> None:
    """Gives the empty `slot` a stirred seed and leads it through its life to `stage`."""
    germinate(slot, blueprint, ramp, seeded(seed))
    stir(slot.seed, seed)
    for step in LIFE[1 : LIFE.index(stage) + 1]:
        slot.move_to(step)


def slot_named(network: nn.Module, name: str) -> SeedSlot:
    return slots_of(network)[name]
