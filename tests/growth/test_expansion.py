"""Block expansion: new blocks that change nothing at first, in networks of transformers and timm, and of one's own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from esper_lightning.growth import stack
from tests.callbacks.gpt import GPT, sentences
from tests.growth.test_stack_networks import (
    CASES,
    END,
    SIZES,
    START,
    WORDS,
    Case,
    assert_same_with_a_cache,
    assert_saved,
    logits,
    of,
    small,
    step,
)

HEADS = {"num_key_value_heads": 2}
EXPERTS = {"num_experts": 16, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
EXPANDED = {name: case for name, case in CASES.items() if name != "bert"} | {
    "mistral": Case(of(hf.MistralForCausalLM, **SIZES, **WORDS, **HEADS), "model.layers", generates=True),
    "qwen": Case(of(hf.Qwen2ForCausalLM, **SIZES, **WORDS, **HEADS), "model.layers", generates=True),
    "qwen experts": Case(of(hf.Qwen2MoeForCausalLM, **SIZES, **WORDS, **HEADS, **EXPERTS), "model.layers"),
    "neox": Case(of(hf.GPTNeoXForCausalLM, **SIZES, **WORDS), "gpt_neox.layers", generates=True),
    # Its branches end with a norm.
    "olmo": Case(of(hf.Olmo2ForCausalLM, **SIZES, **WORDS), "model.layers", generates=True),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_new_blocks_change_no_output_bit_and_learn_alone(name: str, tmp_path: Path) -> None:
    case = EXPANDED[name]
    network = small(case)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    step(network, optimizer, case)
    expected, old = logits(network, case), {key: x.clone() for key, x in network.named_parameters()}
    modes = [part.training for part in network.train().modules()]
    order = [*range(START - case.left_out), START - case.left_out - 1, START - case.left_out - 1]

    sources = stack(
        network,
        case.blocks,
        order=order,
        optimizer=optimizer,
        new="zero",
        zero="auto",
        example=case.batch,
        freeze="old",
    )

    assert sources == order and all(part.training for part in network.modules()) and all(modes)
    assert torch.equal(logits(network, case), expected)
    step(network, optimizer, case)
    step(network, optimizer, case)
    assert not torch.equal(logits(network, case), expected)
    new = tuple(f"{case.path}.{i}." for i in (START, START + 1))
    for key, parameter in network.named_parameters():
        assert parameter.requires_grad == key.startswith(new)
        assert parameter.requires_grad or torch.equal(parameter, old[key]), key
    for i in (START, START + 1):
        assert all(p.grad is not None and p.grad.any() for p in network.get_submodule(f"{case.path}.{i}").parameters())
    if hasattr(network, "save_pretrained"):
        assert_saved(network, case, tmp_path)
    if case.generates:
        assert_same_with_a_cache(network)


class Scaled(nn.Module):
    """Block whose branch ends with a parameter of its own, and has experts that few inputs choose."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((4,), 1e-5))
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.gamma * self.attention(x, x, x)[0]
        return x + self.experts[int(x.sum() > 0)](x)


def test_branches_of_unusual_blocks_are_found_and_all_experts_are_zero() -> None:
    network, x = Plain(), torch.ones(2, 3, 4)
    nn.init.zeros_(network.blocks[0].attention.out_proj.weight)  # as in a block that was added before
    stack(network, "blocks", order=[0, 0, 1], new="zero", zero="auto", example=x)

    zero = {name for name, p in network.blocks[1].named_parameters() if not p.any()}
    experts = {f"experts.{i}.{kind}" for i in range(3) for kind in ("weight", "bias")}
    assert zero == {"attention.in_proj_bias", "attention.out_proj.weight", "attention.out_proj.bias", *experts}
    for sign in (1, -1):
        assert torch.equal(network.blocks[1](sign * x), sign * x)


class Waiting(Scaled):
    """Block with a layer that few inputs reach."""

    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > -100 else x + self.rare(x)


class Plain(nn.Module):
    """Blocks one behind the other."""

    def __init__(self, block: Callable[[], nn.Module] = Scaled) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Ended(Plain):
    """Network of residual blocks without a config, whose outputs are in `pack`; `last` is the end of each branch."""

    def __init__(self, last: nn.Module | None = None, pack: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__(partial(Branch, last or nn.Identity()))
        self.pack = pack

    def forward(self, x: Tensor) -> Any:
        return self.pack(super().forward(x))


class Branch(nn.Module):
    """Residual block with a layer `out`, and another one of that name within a part."""

    def __init__(self, last: nn.Module) -> None:
        super().__init__()
        self.part = nn.ModuleDict({"out": nn.Linear(4, 4, bias=False)})
        self.out = nn.Linear(4, 4, bias=False)
        self.last = last
        self.step = nn.Parameter(torch.tensor(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.out(self.part["out"](x)))


def test_a_found_parameter_stands_for_itself_alone_and_new_blocks_learn_what_they_do_not_share() -> None:
    network = Ended()
    shared = network.blocks[0].part.out = network.blocks[1].part.out
    network(X).sum().backward()
    stack(network, "blocks", order=[0, 1, 1], new="zero", zero="auto", example=X, freeze="old")

    new = network.blocks[2]
    assert new.part.out is shared and shared.weight.any() and not new.out.weight.any()
    assert [p for p in network.parameters() if p.requires_grad] == [new.out.weight]
    assert all(p.grad is None for p in network.parameters()), "AdamW would decay weights whose gradient is 0"


class Scheduled(Ended):
    """Network with a number for each block, which it does not call so."""

    def forward(self, x: Tensor) -> Tensor:
        for block, factor in zip(self.blocks, (0.5, 2.0), strict=True):
            x = block(factor * x)
        return x


def test_a_network_whose_second_pass_raises_stays_as_it_was() -> None:
    network = Scheduled()
    network.n_layer, blocks = 2, list(network.blocks)
    with pytest.raises(ValueError, match="zip"):
        stack(network, "blocks", to=4, new="zero", zero="out", example=X)
    assert network.n_layer == 2 and list(network.blocks) == blocks
    network(X)


def tied(network: Any) -> Any:
    """Let two blocks behind the first one share a layer."""
    network.blocks.append(copy.deepcopy(network.blocks[1]))
    network.blocks[2].out = network.blocks[1].out
    return network


class Counted(Plain):
    """Network whose output depends on its number of blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / len(self.blocks)


class Idle(Plain):
    """Network that runs none of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        return x


@dataclass(slots=True)
class Boxed:
    """Output of a network in a field."""

    y: Tensor


X = torch.ones(2, 3, 4)
PART: dict[str, Any] = {"new": "zero", "zero": ["step"], "example": X}
AUTO: dict[str, Any] = {"new": "zero", "zero": "auto", "example": X}


@pytest.mark.parametrize(
    ("make", "blocks", "settings", "problem"),
    [
        (lambda: small(CASES["bert"]), "bert.encoder.layer", AUTO | {"example": CASES["bert"].batch}, "new='copy'"),
        (Counted, "blocks", AUTO, "Counted returns other outputs than before"),
        (Counted, "blocks", {"new": "zero", "zero": "auto"}, "zero='auto' needs example="),
        (Counted, "blocks", {"example": X}, "example= shows"),
        (Counted, "blocks", {"freeze": "new"}, "freeze must be 'old' or None"),
        (lambda: Plain(Waiting), "blocks", AUTO, "does not run rare.weight, rare.bias of a block"),
        (Idle, "blocks", AUTO, "does not run a block"),
        (lambda: tied(Ended()), "blocks", AUTO, "'out' is shared among blocks"),
        (lambda: Ended(nn.ReLU()), "blocks", AUTO, "out.weight then have no gradient and never learn"),
        (lambda: Ended(pack=lambda x: {"y": {"z": x}}), "blocks", PART, "Ended returns other outputs than before"),
        (lambda: Ended(pack=Boxed), "blocks", PART, "Ended returns other outputs than before"),
        (lambda: Ended(pack=str), "blocks", AUTO, "returns a str without tensors that can be compared"),
    ],
)
def test_what_cannot_be_expanded_is_refused_in_one_line_and_stays(
    make: Any, blocks: str, settings: dict[str, Any], problem: str
) -> None:
    network = make()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    before = {name: x.clone() for name, x in network.state_dict().items()}
    flags = [p.requires_grad for p in network.parameters()]

    with pytest.raises(ValueError, match=f"^stack: .*{problem}") as error:
        stack(network, blocks, to=END, optimizer=optimizer, **settings)

    assert "\n" not in str(error.value)
    after = network.state_dict()
    assert before.keys() == after.keys() and all(map(torch.equal, before.values(), after.values()))
    assert flags == [p.requires_grad for p in network.parameters()]
    assert len(optimizer.param_groups[0]["params"]) == len(flags)


def test_new_blocks_use_the_code_that_was_compiled_for_their_sources() -> None:
    losses, compiled = [], CompileCounterWithBackend("aot_eager")
    for compiles in (False, True):
        torch.manual_seed(0)
        network = GPT(2).eval()
        for block in network.blocks if compiles else ():
            block.compile(backend=compiled)
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        losses.append([])
        for seed in range(4):
            if seed == 2:
                before = compiled.frame_count
                stack(network, "blocks", to=4, optimizer=optimizer)
            words = sentences(seed)
            loss = nn.functional.cross_entropy(network(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())

    assert compiled.frame_count == before == 1
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
