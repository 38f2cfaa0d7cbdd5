"""Growth in depth by copies of trained blocks (https://arxiv.org/abs/2405.15319)."""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from string import digits
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

Blocks = nn.ModuleList | nn.Sequential

Order = Literal["stack", "interleave", "last", "middle"]

Content = Literal["copy", "zero", "fresh"]

State = Literal["copy", "reset"]

FLAT_OPTIMIZERS = ("LBFGS", "ZeroRedundancyOptimizer")
"""Optimizers that keep their parameters in a further place than their groups."""


def stack(
    blocks: nn.Module,
    *,
    to: int,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    how: Order = "stack",
    new: Content = "copy",
    state: State = "copy",
    zero: Sequence[str] = (),
    into: Sequence[nn.Module] | None = None,
    renumber: Callable[[nn.Module, int], Any] | None = None,
) -> list[int]:
    """Grow a list of like blocks to `to` blocks, in place, and return the index of each block's source.

    Call it between two steps: copies have no gradients. Blocks that exist stay the same objects with their hooks and
    their optimizer state. Copies bring the hooks of modules, `requires_grad` and buffers along, and share what their
    sources share with each other; what a single block shares with the rest of the network is copied. A copy of a
    block after `block.compile()` is not compiled. Raises ValueError, and changes nothing, if the list cannot grow.

    Args:
        blocks: `nn.ModuleList` or `nn.Sequential` of blocks with the same parameters, such as those of a transformer.
        to: Number of blocks afterwards; need not be a multiple of the present number.
        optimizer: Optimizer or optimizers with the blocks' parameters. A new parameter joins the group of its source,
            where the optimizer of a network of this depth would have it. None: you make a new one.
        how: `stack`: 1 2 3 1 2 3, and 1 2 3 1 2 for 5. `interleave`: 1 1 2 2 3 3, and 1 1 2 2 3 for 5. `last`:
            1 2 3 3 3 3. `middle`: 1 2 2 2 2 3.
        new: Content of new blocks. `copy`: that of the source. `zero`: the same, but the layers named by `zero` are
            zero, so that a new block of residual branches changes nothing at first. `fresh`: `reset_parameters` of all
            modules, by torch's global generator.
        state: `copy`: new parameters begin with the optimizer state of their source. `reset`: with none, as
            parameters of fresh blocks always do.
        zero: Names or ends of names of the last layer of each residual branch, as in `("attention.project", "mlp.2")`.
        into: Modules that become the new blocks and take over the content of their sources. None: copies are made.
        renumber: Called with every block and its index afterwards, for blocks that know their index.
    """
    blocks = check_blocks(blocks)
    old, count = list(blocks), len(blocks)
    for name, value, kind in (("how", how, Order), ("new", new, Content), ("state", state, State)):
        if value not in get_args(kind):
            raise ValueError(f"stack: {name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    if to <= count:
        raise ValueError(f"stack: to must be above {count}, the present number of blocks, got {to}")
    if (new == "zero") != bool(zero):
        layers = ", ".join(name for name, part in old[0].named_modules() if isinstance(part, nn.Linear)) or "none"
        raise ValueError(
            f"stack: new='zero' needs in zero=(…) the last layer of each residual branch, and nothing else does; "
            f"linear layers of a block: {layers}"
        )
    shared = _shared_parts(old)
    changed = _layers_to_change(old[0], new, zero, shared)
    optimizers = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer or ())
    order = sources_of(count, to, how)
    is_new = [source in order[:i] for i, source in enumerate(order)]
    if optimizers:
        check_optimizers(optimizers, old)
    if into is not None and [_signature(block) for block in into] != [_signature(old[0])] * (to - count):
        raise ValueError(f"stack: into must hold {to - count} blocks with the parameters of those in the list")

    targets = iter([None] * (to - count) if into is None else into)
    grown = [_copy_of(old[s], next(targets), shared) if n else old[s] for s, n in zip(order, is_new, strict=True)]
    for layer in (block.get_submodule(name) for block, n in zip(grown, is_new, strict=True) if n for name in changed):
        if new == "fresh":
            layer.reset_parameters()  # pyright: ignore[reportCallIssue]
        for parameter in layer.parameters(recurse=False) if new == "zero" else ():
            nn.init.zeros_(parameter)
    origins = [old[source] for source in order]
    for each in optimizers:
        _adopt(each, origins, grown, keep_state=state == "copy" and new != "fresh")
    place(blocks, grown)
    if renumber is not None:
        for i, block in enumerate(grown):
            renumber(block, i)
    return order


def sources_of(count: int, to: int, how: Order) -> list[int]:
    """Return the source of each of `to` blocks that grow from `count`. The first block of each source is itself."""
    added = range(to - count)
    return {
        "stack": [i % count for i in range(to)],
        "interleave": [i * count // to for i in range(to)],
        "last": [*range(count), *(count - 1 for _ in added)],
        "middle": sorted([*range(count), *((count - 1) // 2 for _ in added)]),
    }[how]


def place(blocks: Blocks, modules: Sequence[nn.Module]) -> None:
    """Fill a list with modules, in place; names such as `layer_0`, `layer_1` are continued."""
    names = _numbered(blocks, len(modules))
    blocks._modules.clear()
    for name, module in zip(names, modules, strict=True):
        blocks.add_module(name, module)


def check_blocks(blocks: nn.Module) -> Blocks:
    """Return a list of blocks. Raises ValueError if they are not numbered, or differ in parameters or shapes."""
    if not isinstance(blocks, Blocks) or len(blocks) == 0:
        raise ValueError(
            f"stack: blocks must be an nn.ModuleList or nn.Sequential that is not empty, got {type(blocks).__name__}"
        )
    names = list(blocks._modules)
    if names != _numbered(blocks, len(blocks)):
        raise ValueError(f"stack: blocks are called {', '.join(names)}; give them names that differ by their number")
    for name, block in blocks._modules.items():
        if _signature(block) != _signature(blocks[0]):
            raise ValueError(
                f"stack: blocks {names[0]} and {name} differ in their parameters or shapes; grow a list of like blocks"
            )
    return blocks


def _numbered(blocks: Blocks, count: int) -> list[str]:
    """Return `count` names that begin with the first name of a list: `layer_0`, `layer_1`, …"""
    first = next(iter(blocks._modules))
    stem = first.rstrip(digits)
    return [f"{stem}{int(first.removeprefix(stem) or 0) + i}" for i in range(count)]


def check_optimizers(optimizers: Sequence[Optimizer], blocks: Iterable[nn.Module]) -> None:
    """Raise ValueError if the optimizers cannot take parameters, or lack a trainable one of the blocks."""
    for optimizer in optimizers:
        if type(optimizer).__name__ in FLAT_OPTIMIZERS:
            raise ValueError(f"stack: {type(optimizer).__name__} cannot take new parameters; use SGD, Adam or AdamW")
    groups = chain.from_iterable(optimizer.param_groups for optimizer in optimizers)
    held = {id(parameter) for group in groups for parameter in group["params"]}
    for i, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"stack: no optimizer holds parameter {name!r} of block {i}; pass the one that trains it, or "
                    f"freeze it by requires_grad_(False)"
                )


def _signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    named = chain(block.named_parameters(remove_duplicate=False), block.named_buffers(remove_duplicate=False))
    return [(name, tuple(x.shape)) for name, x in named]


def _shared_parts(blocks: Iterable[nn.Module]) -> dict[int, Any]:
    """Return modules, parameters and buffers that are in several blocks, by identity: a memo for `deepcopy`."""
    parts = [{id(x): x for x in (*block.modules(), *block.parameters(), *block.buffers())} for block in blocks]
    counts = Counter(chain.from_iterable(parts))
    return {key: x for one in parts for key, x in one.items() if counts[key] > 1}


def _layers_to_change(block: nn.Module, new: Content, zero: Sequence[str], shared: dict[int, Any]) -> list[str]:
    """Return the names of the modules of a block that are set to zero or made fresh; ValueError if one cannot be."""
    parts = dict(block.named_modules())
    if new == "fresh":
        chosen = [name for name, part in parts.items() if list(part.parameters(recurse=False))]
    else:
        chosen = [name for name in parts if any(name == end or name.endswith(f".{end}") for end in zero)]
    for end in zero:
        if not any(name == end or name.endswith(f".{end}") for name in chosen):
            raise ValueError(
                f"stack: a block has no layer {end!r} to set to zero; it has {', '.join(filter(None, parts))}"
            )
    for name in chosen:
        part = parts[name]
        if new == "fresh" and not hasattr(part, "reset_parameters"):
            kind = type(part).__name__
            raise ValueError(f"stack: {name!r} of a block, a {kind}, has no reset_parameters for new='fresh'; add it")
        if new == "zero" and (is_parametrized(part) or not list(part.parameters(recurse=False))):
            raise ValueError(
                f"stack: {name!r} of a block has no parameters of its own to set to zero; name its last layer"
            )
        if any(id(parameter) in shared for parameter in part.parameters(recurse=False)):
            raise ValueError(
                f"stack: {name!r} is shared among blocks, so new={new!r} would change them all; use 'copy'"
            )
    return chosen


def _copy_of(block: nn.Module, target: nn.Module | None, shared: dict[int, Any]) -> nn.Module:
    """Return a copy of a block, or `target` with its content."""
    if target is None:
        memo, own = dict(shared), {id(part) for part in block.modules()}
        for part in block.modules():  # a hook that is bound to something outside of the block would copy that, too
            for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
                memo |= {id(hook): hook for hook in hooks.values() if id(getattr(hook, "__self__", None)) not in own}
        return copy.deepcopy(block, memo)
    for name, parameter in block.named_parameters(remove_duplicate=False):
        other = target.get_parameter(name)
        if other is not parameter:
            other.data, other.grad = parameter.detach().clone(), None
            other.requires_grad_(parameter.requires_grad)
    for name, buffer in block.named_buffers(remove_duplicate=False):
        other = target.get_buffer(name)
        if other is not buffer:
            other.data = buffer.detach().clone()
    for name, part in block.named_modules():
        target.get_submodule(name).training = part.training
    return target


def _adopt(optimizer: Optimizer, origins: list[nn.Module], grown: list[nn.Module], *, keep_state: bool) -> None:
    """Put the parameters of new blocks into the groups of their sources, and name them if parameters have names."""
    places = {id(p): (i, name) for i in reversed(range(len(grown))) for name, p in grown[i].named_parameters()}
    before = {id(block): i for i, block in enumerate(dict.fromkeys(origins))}
    for group in optimizer.param_groups:
        params, names = group["params"], group.get("param_names")
        known = [places[id(p)] for p in params if id(p) in places]
        block_by_block = [i for i, _ in known] == sorted(i for i, _ in known)
        if names is not None:
            for k, parameter in enumerate(params):
                if id(parameter) in places:
                    i, name = places[id(parameter)]
                    names[k] = _renamed(names[k], name, before[id(grown[i])], i)
        for i, (origin, block) in enumerate(zip(origins, grown, strict=True)):
            for name, source in origin.named_parameters() if block is not origin else ():
                target = block.get_parameter(name)
                if target is source or not any(source is p for p in params) or any(target is p for p in params):
                    continue
                ahead = [places.get(id(p), (len(grown), "")) for p in params]
                index = 1 + max(k for k, (j, n) in enumerate(ahead) if j <= i and (block_by_block or n == name))
                if names is not None:
                    origin_index = next(k for k, p in enumerate(params) if p is source)
                    names.insert(index, _renamed(names[origin_index], name, places[id(source)][0], i))
                params.insert(index, target)
                if keep_state and source in optimizer.state:
                    optimizer.state[target] = {
                        key: value.clone() if torch.is_tensor(value) else copy.deepcopy(value)
                        for key, value in optimizer.state[source].items()
                    }


def _renamed(name: str, own: str, before: int, after: int) -> str:
    """Return `blocks.5.weight` for `blocks.2.weight`, where block 2 has become block 5."""
    end = f"{before}.{own}"
    return f"{name.removesuffix(end)}{after}.{own}" if name.endswith(end) else f"{name}.{after}"
