"""Stack slots: copies of a list of blocks grow behind it, at once and for good."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from esper_lightning.envs.flops import measure_flops
from esper_lightning.growth.attach import attach_stacks, detach_slots
from esper_lightning.growth.export import load, save
from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.growth.stages import Stage
from esper_lightning.hosts import GPT

TOKENS = torch.arange(24).view(3, 8) % 7


def make_gpt(blocks: int, stacks: int = 0) -> GPT:
    torch.manual_seed(blocks)
    return GPT((8,), 7, width=16, blocks=blocks, heads=2, context=8, slots=[], stacks=stacks)


def growing(network: nn.Module) -> GrowingNetwork:
    return GrowingNetwork(network, torch.optim.Adam(network.parameters(), lr=0.01), horizon=9)


def learn(network: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()


def deep_twin(grown: GPT, sources: list[str]) -> GPT:
    """Return a plain network of as many blocks, with the weights of the named blocks of a grown one."""
    twin = make_gpt(len(sources))
    for block, name in zip(twin.blocks, sources, strict=True):
        block.load_state_dict(grown.get_submodule(name).state_dict())
    for name in ("tokens", "positions", "norm"):
        twin.get_submodule(name).load_state_dict(grown.get_submodule(name).state_dict())
    return twin


@pytest.mark.parametrize(
    ("growth", "added", "origins"),
    [
        ([("stack1", "stack")], ["stacks.0.seed.0", "stacks.0.seed.1"], ["blocks.0", "blocks.1"]),
        ([("stack1", "last")], ["stacks.0.seed.0"], ["blocks.1"]),
        (
            [("stack1", "last"), ("stack2", "stack")],
            ["stacks.0.seed.0", "stacks.1.seed.0", "stacks.1.seed.1"],
            ["blocks.1", "blocks.1", "blocks.1"],
        ),
    ],
    ids=["the list", "its last block", "what stands before the slot"],
)
def test_copies_grow_at_once_and_the_network_is_a_deeper_one(
    growth: list[tuple[str, str]], added: list[str], origins: list[str]
) -> None:
    network = make_gpt(2, stacks=3)
    growth_of = growing(network)
    learn(network, growth_of.optimizer, TOKENS)

    events = [growth_of.germinate(slot, blueprint, style="gate") for slot, blueprint in growth]

    assert [(event.before, event.after) for event in events] == [(Stage.DORMANT, Stage.FOSSILIZED)] * len(growth)
    for name, origin in zip(added, origins, strict=True):
        copy, source = network.get_submodule(name), network.get_submodule(origin)
        assert all(torch.equal(a, b) for a, b in zip(copy.parameters(), source.parameters(), strict=True))
    slots = slots_of(network).values()
    assert sum(slot.seed_parameters(name) for slot, (_, name) in zip(slots, growth, strict=False)) == sum(
        parameter.numel() for slot in slots for parameter in slot.seed.parameters()
    )
    learn(network, growth_of.optimizer, TOKENS)
    twin = deep_twin(network, ["blocks.0", "blocks.1", *added])
    assert torch.equal(network(TOKENS), twin(TOKENS))
    empty = measure_flops(make_gpt(2, stacks=3), TOKENS[:1])
    assert empty.with_seeds(slots) == measure_flops(twin, TOKENS[:1]).host


def test_a_grown_network_is_saved_and_loaded(tmp_path: Path) -> None:
    network = make_gpt(2, stacks=2)
    grown = growing(network)
    grown.germinate("stack2", "stack")
    learn(network, grown.optimizer, TOKENS)

    again, other = make_gpt(2, stacks=2), make_gpt(2, stacks=2)
    again.load_state_dict(network.state_dict())
    save(network, tmp_path / "grown.safetensors")
    load(other, tmp_path / "grown.safetensors")

    assert torch.equal(again(TOKENS), network(TOKENS)) and torch.equal(other(TOKENS), network(TOKENS))
    state = copy.deepcopy(grown.state_dict())  # as torch does, an optimizer takes over what it loads
    resumed = growing(make_gpt(2, stacks=2))
    resumed.load_state_dict(state)
    for one in (grown, resumed):
        learn(one.module, one.optimizer, TOKENS)
    assert all(torch.equal(a, b) for a, b in zip(network.parameters(), resumed.module.parameters(), strict=True))


def make_vit() -> nn.Module:
    torch.manual_seed(0)
    return VisionTransformer(8, 4, 2, 2, hidden_dim=16, mlp_dim=32, num_classes=5)


def test_stack_slots_are_attached_behind_the_blocks_of_a_network_of_others() -> None:
    network, images = make_vit(), torch.randn(3, 3, 8, 8)
    before = network.eval()(images)

    slots = attach_stacks(network, {"encoder.layers": 2}, images)

    assert list(slots) == ["encoder.layers.stack1", "encoder.layers.stack2"]
    torch.testing.assert_close(network(images), before, rtol=0, atol=0)
    grown = growing(network.train())
    grown.germinate("encoder.layers.stack1", "stack")
    grown.germinate("encoder.layers.stack2", "last")
    learn(network, grown.optimizer, images)
    deeper = VisionTransformer(8, 4, 5, 2, hidden_dim=16, mlp_dim=32, num_classes=5).eval()
    blocks = [*network.encoder.layers, *(block for slot in slots.values() for block in slot.seed)]
    detached = network.eval()(images)
    for target, source in zip(deeper.encoder.layers, blocks, strict=True):
        target.load_state_dict({k: v for k, v in source.state_dict().items() if "grown_slots" not in k})
    detach_slots(network)
    rest = {k: v for k, v in network.state_dict().items() if "encoder.layers" not in k}
    deeper.load_state_dict(rest, strict=False)
    torch.testing.assert_close(deeper(images), detached, rtol=0, atol=0)


class Masked(nn.Module):
    """Network whose blocks take a mask beside the feature."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        blocks = (nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True) for _ in range(depth))
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for i, block in enumerate(self.blocks):
            x = block(x, mask) if i else block(x, src_mask=mask)
        return x


@pytest.mark.parametrize(
    ("blueprints", "sources"), [(("stack", "last"), (0, 1, 0, 1, 1)), (("last", "stack"), (0, 1, 1, 1, 1))]
)
def test_copies_get_the_mask_of_the_block_before_them(blueprints: tuple[str, str], sources: tuple[int, ...]) -> None:
    network, x = Masked(), torch.randn(3, 4, 8)
    attach_stacks(network, {"blocks": 2}, x)
    grown = growing(network)
    for slot, blueprint in zip(slots_of(network), blueprints, strict=True):
        grown.germinate(slot, blueprint)
    deeper = Masked(5)
    for target, source in zip(deeper.blocks, sources, strict=True):
        target.load_state_dict(network.blocks[source].state_dict(), strict=False)

    torch.testing.assert_close(network(x), deeper(x), rtol=0, atol=0)
    torch.testing.assert_close(copy.deepcopy(network)(x), deeper(x), rtol=0, atol=0)
    assert all(slot.beside == ((), {}) for slot in slots_of(network).values())


class Pairs(nn.Module):
    """Network whose blocks return two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.LSTM(4, 4, batch_first=True)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)[0]


class Places(nn.Sequential):
    """Network whose blocks know their place."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.Sequential(nn.Linear(3, 3)))
        for i, block in enumerate(self.blocks):
            block.layer_idx = i  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "name", "example", "said"),
    [
        (make_vit, "encoder.blocks", torch.randn(3, 3, 8, 8), "has no module 'encoder.blocks'"),
        (make_vit, "encoder.ln", torch.randn(3, 3, 8, 8), "must be an nn.ModuleList or nn.Sequential"),
        (lambda: nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))), "0", torch.randn(3, 3), "differ in"),
        (Pairs, "blocks", torch.randn(3, 4, 4), "must take a feature as their first argument and return"),
        (
            Places,
            "blocks",
            torch.randn(3, 3),
            "know their place by 'layer_idx', .* by the callback Stack or growth.stack",
        ),
    ],
)
def test_a_list_whose_blocks_cannot_be_stacked_is_refused(
    make: Callable[[], nn.Module], name: str, example: Tensor, said: str
) -> None:
    network = make()
    with pytest.raises(ValueError, match=said):
        attach_stacks(network, {name: 1}, example)
    assert not slots_of(network)


def test_a_stack_slot_offers_copies_alone() -> None:
    network: Any = make_gpt(2, stacks=1)
    with pytest.raises(ValueError, match="does not grow in stack slots; these do: stack, last"):
        growing(network).germinate("stack1", "norm")
    assert not slots_of(network)["stack1"].occupied
