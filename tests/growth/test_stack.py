"""stack: a list of blocks grows by copies, with the optimizer of a loop that knows nothing of it."""

import warnings
from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from threading import Lock
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from esper_lightning.growth import GrowingNetwork, attach_from_state_dict, attach_slots, slots_of, stack
from tests.growth.test_param_groups import Sam

WIDTH = 4


class Block(nn.Module):
    """Residual block with a parameter, a buffer and an index."""

    def __init__(self, index: int = 0, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(layer or nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:  # [B, C] -> [B, C]
        self.calls += 1
        return x + self.mlp(self.norm(x))


class Network(nn.Module):
    def __init__(self, blocks: nn.Module | None = None, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks: Any = blocks if blocks is not None else nn.ModuleList(Block(i) for i in range(depth))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:  # [B, C] -> [B, 1]
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def two_groups(network: nn.Module, *, named: bool = False) -> AdamW:
    """Return AdamW with weight decay for matrices alone."""
    groups: list[list[Any]] = [[], []]
    for name, parameter in network.named_parameters():
        groups[parameter.ndim < 2].append((name, parameter) if named else parameter)
    return AdamW([{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}], lr=0.01)


def train(network: nn.Module, optimizer: Optimizer, steps: int = 3) -> None:
    for step in range(steps):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        F.mse_loss(network(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()


def one_group(network: nn.Module, *, by_name: bool) -> AdamW:
    """Return AdamW with all parameters in one group, so many that a list may be one of flags."""
    named = dict(network.named_parameters())
    return AdamW([(name, named[name]) for name in (sorted(named) if by_name else named)], lr=0.01)


def trained(make: Callable[[nn.Module], AdamW] = two_groups) -> tuple[Network, AdamW]:
    network = Network()
    optimizer = make(network)
    train(network, optimizer)
    return network, optimizer


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one.parameters(), other.parameters(), strict=True))


def warnings_of(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in said]


@pytest.mark.parametrize(
    ("order", "to", "sources"),
    [
        ("stack", 6, [0, 1, 2, 0, 1, 2]),
        ("interleave", 5, [0, 0, 1, 1, 2]),
        ("last", 5, [0, 1, 2, 2, 2]),
        ("middle", 5, [0, 1, 1, 1, 2]),
        (np.array([0, 1, 1, 2, 0]), None, [0, 1, 1, 2, 0]),
        ("0-1, 1-2, 2", 5, [0, 1, 1, 2, 2]),
    ],
)
def test_each_block_is_that_of_its_source_and_goes_on_by_itself(order: Any, to: Any, sources: list[int]) -> None:
    network, optimizer = trained()
    before, objects = deepcopy(network), list(network.blocks)

    assert stack(network, "blocks", to=to, optimizer=optimizer, order=order) == sources

    assert all(equal(block, before.blocks[s]) for block, s in zip(network.blocks, sources, strict=True))
    assert [network.blocks[sources.index(i)] for i in range(3)] == objects, "blocks that exist stay the same objects"
    grown = deepcopy(network)
    train(network, optimizer, steps=1)
    assert not any(equal(block, other) for block, other in zip(network.blocks, grown.blocks, strict=True))
    assert len({id(p) for p in network.parameters()}) == len(list(network.parameters()))


@pytest.mark.parametrize(
    ("order", "make"),
    [
        ("stack", two_groups),
        ("last", two_groups),
        ("interleave", partial(two_groups, named=True)),
        ("interleave", partial(one_group, by_name=True)),
        ("middle", partial(one_group, by_name=False)),
    ],
)
def test_the_optimizer_is_that_of_a_network_of_the_new_depth(order: Any, make: Callable[[nn.Module], AdamW]) -> None:
    network, optimizer = trained(make)
    states = [[optimizer.state[p] for p in block.parameters()] for block in network.blocks]

    sources = stack(network, "blocks", to=7, optimizer=optimizer, order=order)

    fresh = make(network)
    for group, other in zip(optimizer.param_groups, fresh.param_groups, strict=True):
        assert [id(p) for p in group["params"]] == [id(p) for p in other["params"]]
        assert group.get("param_names") == other.get("param_names")
    for block, source in zip(network.blocks, sources, strict=True):
        for parameter, state in zip(block.parameters(), states[source], strict=True):
            assert all(torch.equal(optimizer.state[parameter][key], value) for key, value in state.items())
    ids = [id(value) for state in optimizer.state.values() for value in state.values()]
    assert len(set(ids)) == len(ids), "no state is shared"
    plain = Network(depth=7)
    make(plain).load_state_dict(optimizer.state_dict())


def test_zero_blocks_change_nothing_at_first_and_learn() -> None:
    network, optimizer = trained()
    x = torch.randn(5, WIDTH)
    before = network(x)

    stack(network, "blocks", to=6, optimizer=optimizer, order="interleave", new="zero", zero=["mlp.2"])

    assert torch.equal(network(x), before)
    assert equal(network.blocks[1].norm, network.blocks[0].norm)
    train(network, optimizer, steps=1)
    assert not torch.equal(network(x), before)


def test_fresh_blocks_are_drawn_by_torch_and_have_no_state() -> None:
    network, optimizer = trained()
    torch.manual_seed(3)
    expected = deepcopy(network.blocks[0])
    for name in ("norm", "mlp.0", "mlp.2"):
        expected.get_submodule(name).reset_parameters()
    torch.manual_seed(3)

    stack(network, "blocks", to=4, optimizer=optimizer, new="fresh")

    assert equal(network.blocks[3], expected)
    assert not any(p in optimizer.state for p in network.blocks[3].parameters())


def test_what_blocks_share_stays_shared_and_buffers_are_copied() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    network = Network(nn.ModuleList(Block(i, layer) for i in range(2)))
    for block in network.blocks:
        block.mlp[2].bias = block.norm.bias  # shared within the block
        block.calls += 5
    optimizer = two_groups(network)

    stack(network, "blocks", to=4, optimizer=optimizer)

    assert all(block.mlp[0] is layer for block in network.blocks)
    assert all(block.mlp[2].bias is block.norm.bias for block in network.blocks)
    assert len({id(block.norm.bias) for block in network.blocks}) == 4
    assert len({id(block.calls) for block in network.blocks}) == 4 and network.blocks[3].calls == 5
    assert len({id(p) for g in optimizer.param_groups for p in g["params"]}) == len(list(network.parameters()))


# Optimizers that wrap another one.


def test_a_block_that_is_run_several_times_is_run_more_often_and_stays_one() -> None:
    network = Network(nn.ModuleList([Block()] * 3))
    optimizer, parameters = two_groups(network), list(network.parameters())

    stack(network, "blocks", to=6, optimizer=optimizer)
    train(network, optimizer)

    assert list(network.parameters()) == parameters and len(set(network.blocks)) == 1 and len(network.blocks) == 6
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(parameters)
    assert network.blocks[0].calls == 18


def test_a_network_in_distributed_data_parallel_is_refused() -> None:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        wrapped = DistributedDataParallel(Network())
        with pytest.raises(ValueError, match="does not average gradients of blocks that it has not seen; give its"):
            stack(wrapped, "module.blocks", to=4)
        with pytest.raises(ValueError, match="would not average the gradients of seeds; use the callback Grow"):
            attach_slots(wrapped, ["module.blocks.0"], torch.zeros(2, 1))
    finally:
        torch.distributed.destroy_process_group()


class Lookahead(Optimizer):
    """Has slow weights by parameter beside the state of the inner optimizer, in a dictionary of its own."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups, self.state = optimizer, optimizer.param_groups, optimizer.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter.detach(), 0.5)


class Inside(Optimizer):
    """Has an optimizer with groups of its own in a dictionary."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})
        groups = [{"params": list(group["params"])} for group in self.param_groups]
        self.inner = {"all": SGD(groups, lr=0.01, momentum=0.9)}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner["all"].step()


@pytest.mark.parametrize(
    ("make", "inner_of"),
    [
        (lambda network: Sam(network.parameters()), lambda sam: sam.inner),
        (lambda network: Lookahead(AdamW(network.parameters())), lambda ahead: ahead.optimizer),
        (lambda network: Inside(network.parameters()), lambda outer: outer.inner["all"]),
    ],
)
def test_the_state_of_an_inner_optimizer_is_copied(
    make: Callable[[Network], Any], inner_of: Callable[[Any], Optimizer]
) -> None:
    network = Network()
    optimizer = make(network)
    train(network, optimizer)
    inner, slow = inner_of(optimizer), getattr(optimizer, "slow", {})

    stack(network, "blocks", to=4, optimizer=optimizer)

    for each in (optimizer, inner):
        held = [id(p) for group in each.param_groups for p in group["params"]]
        assert len(held) == len(set(held)) == len(list(network.parameters()))
    for source, copied in zip(network.blocks[0].parameters(), network.blocks[3].parameters(), strict=True):
        state, copied_state = inner.state[source], inner.state[copied]
        assert state and all(torch.equal(x, copied_state[k]) for k, x in state.items())
        assert source not in slow or torch.equal(slow[source], slow[copied])
    grown = deepcopy(network)
    train(network, optimizer, steps=1)
    assert not any(equal(block, before) for block, before in zip(network.blocks, grown.blocks, strict=True))


# What hooks, attributes and slots of a block hold.


def test_a_copy_of_a_block_with_a_slot_has_an_empty_slot_of_its_own() -> None:
    network, x = Network(), torch.randn(4, WIDTH)
    attach_slots(network, ["blocks.0.mlp.0", "blocks.2"], x)
    growing = GrowingNetwork(network, AdamW(network.parameters()), horizon=9)
    growing.germinate("blocks.0.mlp.0", "mlp", stage="BLENDING", ticks=1)
    growing.end_epoch()

    stack(network, "blocks", to=6, optimizer=growing.optimizer)

    slots = slots_of(network)
    assert list(slots) == ["blocks.0.mlp.0", "blocks.2", "blocks.3.mlp.0", "blocks.5"]
    assert [slot.occupied for slot in slots.values()] == [True, False, False, False]
    GrowingNetwork(network, AdamW(network.parameters()), horizon=9).germinate("blocks.3.mlp.0", "mlp")
    other = Network(depth=6)
    attach_from_state_dict(other, network.state_dict())
    other.load_state_dict(network.state_dict())
    assert torch.equal(other.eval()(x), network.eval()(x))


class Scaled(Block):
    """A block whose method is its hook, and whose inner layer holds a bound method of the block."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))
        self.act = self.scale
        self.norm.register_forward_hook(self.hook)

    def scale(self, x: Tensor) -> Tensor:
        return self.factor * x

    def hook(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        return self.act(output)


class Recorder:
    """Hook that is an object, and holds the whole network, not to be copied along, and its records."""

    def __init__(self, network: nn.Module) -> None:
        self.network, self.seen = network, []

    def __call__(self, module: nn.Module, *_: object) -> None:
        self.seen.append(module)


def test_a_hook_holds_the_parts_of_its_own_block_and_shares_all_else_and_modes_are_copied() -> None:
    network = Network(nn.ModuleList(Scaled() for _ in range(2)))
    recorder, settings = Recorder(network), {"eps": 1}
    for block in network.blocks:
        block.settings, block.root = settings, (network,)
        block.register_forward_hook(recorder)
        block.norm.requires_grad_(False)
        block.norm.eval()

    stack(network, "blocks", to=4, order="interleave")
    network(torch.randn(3, WIDTH)).sum().backward()

    assert recorder.seen == list(network.blocks)
    assert all(block.settings is settings and block.root == (network,) for block in network.blocks)
    assert all(block.act.__self__ is block and block.factor.grad is not None for block in network.blocks)
    assert not any(block.norm.weight.requires_grad or block.norm.training for block in network.blocks)


def test_hooks_on_the_gradient_of_a_parameter_and_its_attributes_are_copied() -> None:
    network, seen = Network(), []
    weight = network.blocks[0].mlp[0].weight
    weight.register_hook(torch.zeros_like)
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(id(parameter)))
    weight.no_decay, weight.mask, weight.scale = True, torch.ones_like(weight), torch.ones(1)

    stack(network, "blocks", to=4)
    network(torch.randn(3, WIDTH)).sum().backward()
    network.blocks[3].mlp[0].weight.mask.zero_()

    assert [bool(block.mlp[0].weight.grad.any()) for block in network.blocks] == [False, True, True, False]
    assert set(seen) == {id(network.blocks[i].mlp[0].weight) for i in (0, 3)}
    assert [hasattr(block.mlp[0].weight, "no_decay") for block in network.blocks] == [True, False, False, True]
    assert weight.mask.all() and network.blocks[3].mlp[0].weight.scale is weight.scale


# Whether new blocks are run.


class Cut(Network):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:3]:
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize(
    ("kind", "frozen", "order", "told"),
    [
        (Cut, [], "stack", "3, 4"),
        (Cut, [], "interleave", "3"),
        (Cut, [0], "stack", "4"),
        (Cut, [0, 1, 2], "stack", None),
        (Network, [1], "stack", None),
        (Network, [], "stack", None),
    ],
)
def test_new_blocks_that_learn_and_get_no_gradient_before_the_next_step_are_warned_of(
    kind: type[Network], frozen: list[int], order: Any, told: str | None
) -> None:
    network = kind()
    for i in frozen:
        network.blocks[i].requires_grad_(False)
    used, other = SGD(network.parameters(), lr=0.1), SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    stack(network, "blocks", to=5, order=order, optimizer=[used, other])

    def step() -> None:
        other.step()  # has no gradient, and says nothing
        network(torch.randn(3, WIDTH)).sum().backward()
        used.step()

    first, second = (warnings_of(step) for _ in range(2))

    expected = f"'blocks' has grown, but its new blocks {told} got no gradient before the next step: "
    assert [line.startswith(expected) for line in first] == [True] * (told is not None) and second == []


@pytest.mark.parametrize(
    ("kept", "told"),
    [
        (lambda blocks: [block.norm for block in blocks], True),
        (lambda blocks: nn.ModuleList(block.norm for block in blocks), True),
        (lambda blocks: {"norms": tuple((i, block.norm) for i, block in enumerate(blocks))}, True),
        (lambda blocks: [p for block in blocks for p in block.parameters() if p.ndim > 1], True),
        (lambda blocks: blocks[0].norm, False),
        (lambda blocks: [blocks[0].norm], False),
        (lambda blocks: [block.mlp[1] for block in blocks], False),
    ],
)
def test_parts_of_blocks_that_the_network_keeps_elsewhere_are_warned_of(
    kept: Callable[[nn.ModuleList], Any], told: bool
) -> None:
    network = Network()
    for block in network.blocks:
        block.mlp[1] = network.blocks[0].mlp[1]  # what blocks share belongs to the new ones, too
    network.kept = kept(network.blocks)

    said = warnings_of(lambda: stack(network, "blocks", to=6))

    assert ["parts of its blocks are also in 'kept' of Network" in line for line in said] == [True] * told


def test_a_list_grows_twice_between_two_steps() -> None:
    network = Network()
    optimizer = SGD(network.parameters(), lr=0.1)
    stack(network, "blocks", to=6, optimizer=optimizer)
    stack(network, "blocks", to=12, optimizer=optimizer)

    network(torch.randn(3, WIDTH)).sum().backward()

    assert warnings_of(optimizer.step) == [] and len(network.blocks) == 12
    assert all(p.grad is not None for p in network.blocks.parameters())


class Alternating(Block):
    """Every second block has a mask, by a buffer that no state dict holds, and a flag."""

    def __init__(self, i: int) -> None:
        super().__init__(i)
        self.flag = i % 2 == 0
        self.register_buffer("mask", torch.tensor([1.0, float(self.flag)]), persistent=False)


@pytest.mark.parametrize(
    ("depth", "order", "warned"), [(4, "stack", False), (4, "interleave", True), (3, "stack", True), (2, "stack", True)]
)
def test_copies_that_break_a_pattern_which_no_state_dict_holds_are_warned_of(
    depth: int, order: Any, warned: bool
) -> None:
    network = Network(nn.ModuleList(map(Alternating, range(depth))))

    said = warnings_of(lambda: stack(network, "blocks", to=8, order=order))

    assert ["flag, mask" in line for line in said] == [True] * warned


def test_parametrized_layers_of_one_kind_are_not_told_apart() -> None:
    network = Network(
        nn.ModuleList(Block(0, nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))) for _ in range(2))
    )

    assert warnings_of(lambda: stack(network, "blocks", to=4)) == []


def test_a_setting_with_a_value_for_each_block_explains_what_it_decides_and_nothing_else() -> None:
    network = Network(nn.ModuleList(map(Alternating, range(4))))
    network.config = SimpleNamespace(n_layer=4, layer_types=["a", "b", "a", "b"])  # type: ignore[assignment]
    for i, block in enumerate(network.blocks):
        block.scale = 1.0 / (1 + i)

    (said,) = warnings_of(lambda: stack(network, "blocks", to=8, order="interleave"))

    assert "differ by their index in scale, which" in said
    assert network.config.layer_types == ["a", "a", "b", "b"] * 2  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("depth", "name", "first", "follows"),
    [
        (1, "layer_idx", 0, True),
        (1, "layer_number", 1, True),
        (1, "padding_idx", 0, False),
        (1, "padding", 0, False),
        (1, "pad_id", 0, False),
        (2, "i", 0, True),
        (2, "use_rope", 0, False),
        (2, "groups", 1, False),
        (2, "level", 1, True),
        (2, "shift_size", 0, False),
        (3, "any", 0, True),
        (3, "any", 2, False),
    ],
)
def test_an_attribute_that_is_the_place_of_each_block_follows_it(
    depth: int, name: str, first: int, follows: bool
) -> None:
    network = Network(nn.ModuleList(Block() for _ in range(depth)))
    for i, block in enumerate(network.blocks):
        setattr(block.mlp, name, first + i)
        block.index = 7

    warnings_of(lambda: stack(network, "blocks", to=4))

    expected = [first + i if follows else first + i % depth for i in range(4)]
    assert [getattr(block.mlp, name) for block in network.blocks] == expected


def test_experts_of_an_only_block_keep_their_numbers_and_its_attention_follows() -> None:
    network = Network(depth=1)
    network.blocks[0].experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    network.blocks[0].mlp.idx = 0
    for i, expert in enumerate(network.blocks[0].experts):
        expert.expert_idx = i

    stack(network, "blocks", to=3)

    assert [[expert.expert_idx for expert in block.experts] for block in network.blocks] == [[0, 1]] * 3
    assert [block.mlp.idx for block in network.blocks] == [0, 1, 2]


# What cannot grow.


def pair(layer: Callable[[], nn.Module]) -> Network:
    return Network(nn.ModuleList(Block(layer=layer()) for _ in range(2)))


def weight_normed() -> Network:
    return pair(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)))


def old_weight_norm() -> Network:
    with warnings.catch_warnings(action="ignore"):  # torch no longer recommends it
        return pair(lambda: nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)))


def sharing() -> Network:
    layer = nn.Linear(WIDTH, WIDTH)
    return pair(lambda: layer)


def changed(change: Callable[[Any], Any]) -> Network:
    network = Network()
    change(network.blocks[1])
    return network


def hook_itself(block: nn.Module) -> None:
    block.register_forward_hook(lambda module, inputs, output, own=block: output * own.norm.weight)


def with_a_slot() -> Network:
    network = Network()
    attach_slots(network, ["blocks.1"], torch.randn(4, WIDTH))
    return network


@pytest.mark.parametrize(
    ("make", "settings", "reason"),
    [
        (Network, {"blocks": None}, r"name the list .*, as in stack\(network, 'model.layers', to=6\)"),
        (Network, {"blocks": "block"}, "there is no 'block' in Network; lists in it: blocks"),
        (Network, {"blocks": "first"}, "'first' cannot grow: it must be an nn.ModuleList or .*, got Linear"),
        (Network, {"blocks": "blocks[3:]"}, r".*grow: \[3:\] of its 3 blocks is empty; lists that can: blocks"),
        (lambda: Network(nn.ModuleList()), {}, ".*nn.ModuleList or nn.Sequential that is not empty, got ModuleList"),
        (lambda: Network(nn.Sequential(OrderedDict(a=Block(), b=Block()))), {}, ".*called a, b; give them names that"),
        (lambda: Network(nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 3)])), {}, ".*blocks 0 and 1 differ in their"),
        (Network, {"to": 3}, "to must be a number of blocks above 3, the present one, got 3"),
        (Network, {"order": "first"}, "order must be one of stack, interleave, last, middle, sources .* got 'first'"),
        (Network, {"order": "0-2, 2-1"}, "order must be one of .* got '0-2, 2-1'"),
        (Network, {"order": [False, True, 2, 2]}, "order must be one of .* got .False, True, 2, 2."),
        (Network, {"to": None}, "to must be a number of blocks above 3, the present one, got None"),
        (Network, {"order": "0-2, 2"}, "order lists 4 blocks, and to is 5; leave one of them out"),
        (Network, {"to": None, "order": "0-1, 1-1, 1"}, "order must name each of the blocks 0 to 2"),
        (Network, {"to": None, "order": [0, 2, 1, 1]}, ".*for the first time behind those before it"),
        (Network, {"new": "zero"}, r".*needs in zero=\(…\) the last .*; linear layers of a block: mlp.0, mlp.2"),
        (Network, {"zero": ["mlp.2"]}, "new='zero' needs"),
        (Network, {"new": "zero", "zero": ["out"]}, ".*has no layer 'out' to set to zero; it has norm, mlp, mlp.0"),
        (Network, {"new": "zero", "zero": ["mlp"]}, "'mlp' of a block has no parameters of its own"),
        (weight_normed, {"new": "zero", "zero": ["mlp.0"]}, "'mlp.0' of a block has no parameters of its own"),
        (sharing, {"new": "zero", "zero": ["mlp.0"]}, "'mlp.0' is shared among blocks, so new='zero'"),
        (sharing, {"new": "fresh"}, "'mlp.0' is shared among blocks, so new='fresh'"),
        (lambda: pair(lambda: nn.ParameterList([torch.ones(4)])), {"new": "fresh"}, "'mlp.0' .* no reset_parameters"),
        (old_weight_norm, {"new": "fresh"}, "reset_parameters does not reach 'mlp.0.weight_g' of a"),
        (with_a_slot, {"order": "interleave"}, "slot 'blocks.1' is in block 1, .* become block 2; grow with"),
        (lambda: changed(hook_itself), {}, "_forward_hooks .*function that refers to block 1.*make it a method"),
        (lambda: changed(lambda b: setattr(b, "act", lambda x: b.mlp(x))), {}, "act .*refers to block 1.*a method"),
        (lambda: changed(lambda b: setattr(b, "lock", Lock())), {}, "block 1: Block cannot be copied: cannot"),
    ],
)
def test_a_list_that_cannot_grow_is_refused_in_one_line_and_stays(
    make: Callable[[], Network], settings: dict[str, Any], reason: str
) -> None:
    network = make()
    before = dict(network.named_modules())

    with pytest.raises(ValueError, match=f"^stack: {reason}") as refusal:
        stack(network, **{"blocks": "blocks", "to": 5, **settings})

    assert "\n" not in str(refusal.value)
    assert dict(network.named_modules()) == before


def copies(network: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in network.parameters()]


def keeping(network: nn.Module, **kept: Any) -> Optimizer:
    optimizer = SGD(network.parameters(), lr=0.1)
    vars(optimizer).update(kept)
    return optimizer


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda net: SGD(net.first.parameters(), lr=0.1), "no optimizer holds parameter 'norm.weight' of block 0"),
        (lambda net: torch.optim.LBFGS(net.parameters()), "LBFGS cannot take new parameters"),
        (lambda net: "adam", "optimizer must be a torch.optim.Optimizer, got str"),
        (lambda net: SGD([{"params": net.parameters(), "slow": copies(net)}], lr=0.1), "SGD keeps .* in 'slow'"),
        (lambda net: keeping(net, slow=[copies(net)]), "SGD keeps something for each parameter in 'slow'"),
        (lambda net: keeping(net, decay={p for p in net.parameters() if p.ndim == 2}), "SGD keeps .* in 'decay'"),
        (lambda net: keeping(net, is_matrix=[p.ndim == 2 for p in net.parameters()]), "SGD keeps .* in 'is_matrix'"),
    ],
)
def test_an_optimizer_that_cannot_take_the_parameters_is_refused(make: Callable[[Network], Any], reason: str) -> None:
    network = Network()

    with pytest.raises(ValueError, match=f"^stack: {reason}"):
        stack(network, "blocks", to=4, optimizer=make(network))

    assert len(network.blocks) == 3
