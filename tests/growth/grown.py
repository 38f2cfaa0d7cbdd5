"""Small hosts and networks, and helpers that bring their seeds to a given stage."""

from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.attach import attach_slots, attached_places
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.gates import GradientStats
from esper_lightning.growth.lifecycle import germinate, slots_of
from esper_lightning.growth.slot import Layout, SeedSlot, decode
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN

CPU = torch.device("cpu")

LIFE = [Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.PROBATIONARY, Stage.FOSSILIZED]


FOLLOWERS = {
    "DORMANT": ["GERMINATED"],
    "GERMINATED": ["TRAINING", "CULLED"],
    "TRAINING": ["BLENDING", "CULLED"],
    "BLENDING": ["PROBATIONARY", "CULLED"],
    "PROBATIONARY": ["FOSSILIZED", "CULLED"],
    "FOSSILIZED": [],
    "CULLED": ["EMBARGOED"],
    "EMBARGOED": ["DORMANT"],
}
"""Stages that may follow each stage."""

LAYOUTS: list[Layout] = list(get_args(Layout))

SIMPLE: dict[str, str] = {"image": "conv_light", "sequence": "lora", "vector": "mlp_small"}
"""A blueprint for each layout."""

CALM = GradientStats(norm=1.0, rms=0.1, vanished=0.0, exploded=0.0)
"""Gradient statistics of a healthy seed."""

SLOTS = ["block1", "block1.pool", "block2", "block2.pool", "block3", "block3.pool"]


def generator_of(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def small_cnn(slots: list[str] | None = None, seed: int = 0, isolate: bool = False, base: int = 4) -> CNN:
    """Return a CNN of three 3×3 blocks for images of 1×8×8; its weights depend on the RNG seed `seed` alone."""
    return build_on(CPU, lambda: CNN((1, 8, 8), 10, base=base, slots=slots, isolate=isolate), generator_of(seed))


def small_batch(samples: int = 16, seed: int = 7) -> tuple[Tensor, Tensor]:  # [B, 1, 8, 8], [B]
    generator = generator_of(seed)
    return torch.randn(samples, 1, 8, 8, generator=generator), torch.randint(10, (samples,), generator=generator)


def loss_of(network: nn.Module, seed: int = 7) -> Tensor:
    images, digits = small_batch(seed=seed)
    return F.cross_entropy(network(images), digits)


class TinyHost(nn.Module):
    """Two layers, each followed by a slot (`first`, `second`), for sequences [B, T, 5] or vectors [B, 5]; 3 classes."""

    def __init__(self, layout: Layout, width: int = 6, isolate: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, width), nn.Linear(width, width)])
        self.slots = nn.ModuleList(SeedSlot(name, layout, width, detach_input=isolate) for name in ("first", "second"))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:  # -> [B, 3]
        for layer, slot in zip(self.layers, self.slots, strict=True):
            x = slot(torch.tanh(layer(x)))
        return self.head(x.mean(1) if x.ndim == 3 else x)


def host_of(layout: Layout, seed: int = 0, isolate: bool = False) -> nn.Module:
    """Return a small host with at least two slots of `layout`; its weights depend on the RNG seed `seed` alone."""
    if layout == "image":
        return small_cnn(["block1", "block2.pool"], seed, isolate)
    return build_on(CPU, lambda: TinyHost(layout, isolate=isolate), generator_of(seed))


def batch_of(layout: Layout, samples: int = 16, seed: int = 7) -> tuple[Tensor, Tensor]:
    """Return inputs and classes for `host_of(layout)`."""
    if layout == "image":
        return small_batch(samples, seed)
    shape = (samples, 4, 5) if layout == "sequence" else (samples, 5)
    return torch.randn(shape, generator=generator_of(seed)), torch.randint(3, (samples,), generator=generator_of(seed))


def loss_on(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, classes = batch
    return F.cross_entropy(network(inputs), classes)


@torch.no_grad()
def add_noise(module: nn.Module, seed: int = 0, scale: float = 0.3) -> None:
    """Add noise to every parameter, so that no seed is the identity."""
    generator = generator_of(seed)
    for parameter in module.parameters():
        parameter += scale * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def grow(slot: SeedSlot, stage: Stage, blueprint: str = "conv_light", ramp: Ramp = Ramp(), seed: int = 0) -> None:
    """Put a seed with noisy weights in the empty `slot` and advance it to `stage`."""
    germinate(slot, blueprint, ramp, generator=generator_of(seed))
    add_noise(slot.seed, seed)
    for step in LIFE[1 : LIFE.index(stage) + 1]:
        if step is Stage.PROBATIONARY:
            slot.ramp_ticks = ramp.ticks  # as many host epochs have passed
        slot.move_to(step)


def bits(x: Tensor) -> Tensor:
    """Return the bit patterns as integers, which distinguish 0 from -0 and make NaN equal to itself."""
    return x.detach().view(torch.int32)


def slot_named(network: nn.Module, name: str) -> SeedSlot:
    return slots_of(network)[name]


def story(network: nn.Module) -> dict[str, dict[str, Any]]:
    """Return by slot what grew in a network, as its state dict tells it."""
    return {name: decode(slot.get_extra_state()) for name, slot in slots_of(network).items()}


def outputs_in_both_modes(network: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Return the network's outputs in training and in evaluation mode."""
    return [network.train(mode)(inputs).detach() for mode in (True, False)]


def same(network: nn.Module, copy: nn.Module, inputs: Tensor) -> bool:
    """Return True if two networks have grown alike and give the same outputs."""
    pairs = zip(outputs_in_both_modes(network, inputs), outputs_in_both_modes(copy, inputs), strict=True)
    return story(network) == story(copy) and all(torch.equal(a, b) for a, b in pairs)


def same_host(network: nn.Module, other: nn.Module) -> bool:
    """Return True if the weights and statistics of two hosts are equal bit for bit."""
    own, others = (
        {
            name: x
            for name, x in (*n.named_parameters(), *n.named_buffers())
            if ".seed." not in name and "alpha" not in name
        }
        for n in (network, other)
    )
    return own.keys() == others.keys() and all(torch.equal(own[name], others[name]) for name in own)


# Networks for attached slots.


WIDTH = 6


def small_network() -> nn.Sequential:
    """Return a network with image features after `0` to `3` and vectors after `4` to `6`; 2 classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, WIDTH, 3, padding=1),
            nn.BatchNorm2d(WIDTH),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, 2),
        )


def images(samples: int = 4) -> Tensor:
    return torch.randn(samples, 3, 8, 8, generator=generator_of(3))


def grown_network() -> nn.Sequential:
    """Return the small network with fossilized seeds after the activation and the hidden layer, in evaluation mode."""
    network = small_network()
    slots = attach_slots(network, ["2", "5"], images())
    grow(slots["2"], Stage.FOSSILIZED, "conv_light")
    grow(slots["5"], Stage.FOSSILIZED, "mlp_small")
    return network.eval()


class Residual(nn.Module):
    """Residual block x + body(x) between two layers, with a layer whose output is unused and one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, WIDTH)
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.aside = nn.Linear(WIDTH, 4)
        self.never = nn.Linear(WIDTH, 4)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:  # [B, 5] -> [B, 3]
        x = self.stem(x)
        self.aside(x)
        return self.head(x + self.body(x))


def assert_untouched(network: nn.Module) -> None:
    assert slots_of(network) == {}
    assert attached_places(network) == []
    assert not any(module._forward_hooks for module in network.modules())
