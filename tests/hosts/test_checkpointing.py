"""Hosts that recompute activations in the backward pass, compared with hosts that store them."""

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import build_on
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import CNN, GPT
from tests.growth.grown import LIFE, grow

SAMPLES, LENGTH, VOCABULARY = 8, 12, 20

Make = Callable[[bool], nn.Module]


def cnn(checkpoint_activations: bool) -> nn.Module:
    def build() -> nn.Module:
        slots = ["block1", "block1.pool", "block2.pool", "block3"]
        return CNN((3, 16, 16), 10, base=4, slots=slots, checkpoint_activations=checkpoint_activations)

    return build_on(torch.device("cpu"), build, torch.Generator().manual_seed(0))


def gpt(checkpoint_activations: bool) -> nn.Module:
    def build() -> nn.Module:
        options = {"width": 16, "blocks": 4, "heads": 2, "context": LENGTH}
        return GPT((LENGTH,), VOCABULARY, **options, checkpoint_activations=checkpoint_activations)

    return build_on(torch.device("cpu"), build, torch.Generator().manual_seed(0))


HOSTS: list[tuple[Make, str]] = [(cnn, "conv_light"), (gpt, "attention")]

every_host = pytest.mark.parametrize(("make", "blueprint"), HOSTS, ids=["CNN", "GPT"])


def inputs_of(network: nn.Module, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if isinstance(network, CNN):
        return torch.randn(SAMPLES, 3, 16, 16, generator=generator)
    return torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def loss_of(network: nn.Module, seed: int = 1) -> Tensor:
    outputs = network(inputs_of(network, seed)).flatten(0, -2)
    return F.cross_entropy(outputs, torch.arange(len(outputs)) % outputs.shape[-1])


def trained(network: nn.Module, steps: int = 3) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the loss of every step, and the gradients of the last."""
    network.train()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(network, seed=step))
        losses[-1].backward()
        optimizer.step()
    return losses, [p.grad for p in network.parameters()]


def same(ours: Iterable[Tensor | None], theirs: Iterable[Tensor | None]) -> bool:
    return all(a is b is None or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def check_same_training(kept: nn.Module, recomputed: nn.Module) -> None:
    owned = dict(recomputed.named_buffers())
    losses, gradients = trained(kept)
    same_losses, same_gradients = trained(recomputed)
    assert same(losses, same_losses)
    assert same(gradients, same_gradients)
    assert same(kept.parameters(), recomputed.parameters())
    assert same(kept.buffers(), recomputed.buffers())
    assert all(buffer is owned[name] for name, buffer in recomputed.named_buffers()), "no buffer is replaced"


@every_host
@pytest.mark.parametrize("stage", [Stage.DORMANT, *LIFE], ids=lambda stage: stage.name)
def test_training_is_the_same_bit_for_bit_in_every_stage_of_a_seed(make: Make, blueprint: str, stage: Stage) -> None:
    """S17: with `checkpoint_activations` a host stores less for the backward pass and trains the same, bit for bit."""
    networks = make(False), make(True)
    for network in networks:
        for slot in slots_of(network).values():
            if stage is not Stage.DORMANT:
                grow(slot, stage, blueprint, Ramp(3))
    kept, recomputed = (kept_bytes(network.train()) for network in networks)
    assert recomputed < 0.5 * kept
    check_same_training(*networks)


def kept_bytes(network: nn.Module) -> int:
    """Return the bytes stored between the forward and the backward pass, without the weights."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = loss_of(network)  # keep all saved tensors alive, so that no address is reused
    del loss
    return sum(size for address, size in kept.items() if address not in weights)


@every_host
def test_only_training_computes_anything_twice(make: Make, blueprint: str) -> None:
    network, runs = make(True), []
    first = network.norms[0] if isinstance(network, CNN) else network.blocks[0]
    first.register_forward_pre_hook(lambda *_: runs.append(torch.is_grad_enabled()))
    loss_of(network.train()).backward()
    assert runs == [True, True]
    loss_of(network.eval()).backward()
    assert runs == [True, True, True]
    with torch.no_grad():
        loss_of(network.train())
    assert len(runs) == 4
