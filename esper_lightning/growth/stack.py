"""Growth in depth by copies of trained blocks (https://arxiv.org/abs/2405.15319)."""

import copy
import re
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from itertools import chain
from numbers import Integral
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, get_args
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.optim import Optimizer

from esper_lightning.growth.attach import attach_at, attached_places
from esper_lightning.growth.blocks import BlockFields, BlockList, find_blocks, numbered
from esper_lightning.growth.param_groups import optimizers_in
from esper_lightning.growth.residual import branch_ends, outputs
from esper_lightning.growth.slot import SeedSlot, SlotHook, pass_on
from esper_lightning.runtime.nested import (
    COPY_ERRORS,
    ExampleInput,
    computed_tensors,
    copy_module,
    hooks_of,
    iter_tensors,
    map_tensors,
)

OrderName = Literal["stack", "interleave", "last", "middle"]
Order = OrderName | str | Sequence[int]
"""Sources of the blocks of a list that has grown: by a name, as ranges (`"0-3, 2-5"`), or one by one."""

Content = Literal["copy", "zero", "fresh"]

State = Literal["copy", "reset"]

FLAT_OPTIMIZERS = ("LBFGS", "ZeroRedundancyOptimizer")
"""Optimizers that keep their parameters elsewhere than in their groups, too."""

SHARDING = "__composable_api"
"""Beginning of attributes in which torch keeps how it shards a module, such as by `fully_shard`."""

STORAGE = {"_parameters", "_buffers", "_modules", "_compiled_call_impl"}
"""Attributes of a module that are no settings of it: its parts, and its compiled form."""

FEWEST_FLAGS = 9
"""Fewest entries of a list in an optimizer, one for each parameter, by which it is not taken for other settings."""

DEEPEST = 4
"""Levels of nested containers and objects in which settings of a block are looked for."""


def stack(
    network: nn.Module,
    blocks: str = "",
    *,
    to: int | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    order: Order = "stack",
    new: Content = "copy",
    state: State = "copy",
    zero: Sequence[str] = (),
    example: ExampleInput | None = None,
    freeze: Literal["old"] | None = None,
) -> list[int]:
    """Grow a list of like blocks, in place, and return the index of each block's source.

    Call it between two steps: copies have no gradients. Blocks that exist stay the same objects, and a copy has all
    that its source has: buffers, extra state, modes, `requires_grad` and hooks, where a hook that holds a part of its
    block holds the copy's part. What blocks share with each other stays shared. Slots in a copy are its own, and empty.
    Indices that blocks know, such as `layer_idx`, and the configuration of the network follow. If the first backward
    pass gives a new block no gradient, a warning says that it is not run. The guide is docs/guides/depth.md.

    Raises ValueError, and changes nothing, if the list cannot grow.

    Args:
        network: The network that runs the blocks, with its configuration.
        blocks: Name of the `nn.ModuleList` or `nn.Sequential` in the network, as `model.layers`. `encoder.block[1:]`
            leaves out the first block, and `to` and `order` count the others.
        to: Number of blocks afterwards; need not be a multiple of the present number. None: as `order` lists them.
        optimizer: Optimizer or optimizers with the blocks' parameters, whose groups new parameters join. An optimizer
            within another one, as in SAM and Lookahead, is found. None: you make a new one.
        order: Source of each block afterwards, one by one from 0 on (`[0, 1, 1, 2, 3, 3]`), or as ranges with both
            ends (`"0-3, 2-5"`), in which each present block occurs, for the first time behind those before it. Or a
            name: `stack` (0 1 2 0 1 2), `interleave` (0 0 1 1 2 2), `last` (0 1 2 2 2 2) or `middle` (0 1 1 1 1 2).
        new: Content of new blocks. `copy`: that of the source. `zero`: the same, but the layers named by `zero` are
            zero, so that residual blocks change nothing at first. `fresh`: `reset_parameters` of all modules.
        state: `copy`: new parameters, but fresh ones and those at zero, begin with the optimizer state of their source.
            `reset`: with none.
        zero: Names or ends of names of the last layer of each residual branch, or of its parameters, as in
            `("attention.project", "mlp.2")`; the whole name of a parameter stands for it alone. `auto`: they are found
            by trial on `example`; see `branch_ends`.
        example: Input of the network, for `zero`: a tensor, a tuple of arguments, or a mapping of keyword arguments. In
            evaluation mode the network then returns the same tensors as before, bit for bit, or is refused.
        freeze: `old`: new blocks alone learn, and all present parameters, shared ones too, have `requires_grad` False.
    """
    try:
        found = find_blocks(network, blocks)
    except ValueError as error:
        raise ValueError(f"{'' if str(error).startswith('stack: ') else 'stack: '}{error}") from None
    count, listed = len(found.blocks), listed_order(order)
    to = len(listed) if to is None and listed is not None else to
    if not isinstance(to, int) or to <= count:
        raise ValueError(f"stack: to must be a number of blocks above {count}, the present one, got {to!r}")
    sources = sources_of(count, to, order)
    zero = [zero] if isinstance(zero, str) else list(zero or ())
    if new != "zero" and example is not None:
        raise ValueError(f"stack: example= shows what zero= changes, and new is {new!r}; leave it out, or new='zero'")
    if new == "zero" and zero == ["auto"]:
        if example is None:
            raise ValueError("stack: zero='auto' needs example=, an input of the network")
        copied = next(source for i, source in enumerate(sources) if source in sources[:i])
        zero = branch_ends(network, found.blocks[copied], example)
    check_options(found.blocks, order=order, new=new, state=state, zero=zero)
    if freeze not in (None, "old"):
        raise ValueError(f"stack: freeze must be 'old' or None, got {freeze!r}")
    given: Any = [] if optimizer is None else optimizer
    optimizers: list[Optimizer] = list(given) if isinstance(given, list | tuple) else [given]
    check_optimizers(optimizers, found.blocks)
    fields = BlockFields(found)
    per_block = any(field.per_block for field in fields.counts)
    varying = [] if per_block else _varying(found, sources, {x[:2] for x in fields.indices})
    present = set(network.parameters())
    added = deepen(found, sources, optimizers, new=new, state=state, zero=zero, example=example)
    if freeze:
        for parameter in network.parameters():
            if parameter.is_floating_point():  # others cannot learn
                parameter.requires_grad_(parameter not in present)
    warn_without_gradients(found, added)
    if varying:
        warnings.warn(
            f"{found.name!r}: blocks differ by their index in {', '.join(varying)}, which no state dict holds, and "
            f"copies have that of their source; {type(network).__name__} built with {len(found.modules)} blocks may "
            f"differ, so compare its outputs before you load the weights there",
            stacklevel=2,
        )
    return sources


def deepen(
    found: BlockList,
    order: Sequence[int],
    optimizers: Sequence[Optimizer],
    *,
    new: Content = "copy",
    state: State = "copy",
    zero: Sequence[str] = (),
    example: ExampleInput | None = None,
) -> list[nn.Module]:
    """Grow a list to the blocks whose sources `order` names, and return the new ones; see `stack`, which checks it."""
    old, sources = list(found.modules), found.whole_order(order)
    is_new = [source in sources[:i] for i, source in enumerate(sources)]
    places = _places_of_copies(found, sources, is_new)
    fields = BlockFields(found)
    grown = [_copy_of(old[s], s, found) if n else old[s] for s, n in zip(sources, is_new, strict=True)]
    added = [block for block, n in zip(grown, is_new, strict=True) if n]
    before = [] if example is None else outputs(found.network, example)
    emptied = set[int]().union(*(_refill(block, new, zero) for block in added))
    unchanged = False
    try:
        fields.fill(grown, sources)
        behind = [] if example is None else outputs(found.network, example)
        unchanged = len(before) == len(behind) and all(map(torch.equal, before, behind))
    finally:
        if not unchanged:  # the example may also make the grown network raise
            fields.restore()
    if not unchanged:
        raise ValueError(
            f"stack: with {', '.join(zero)} of new blocks at zero {type(found.network).__name__} returns other outputs "
            f"than before on the example; name the last layer of each residual branch in zero=, or use new='copy'"
        )
    origins = [old[source] for source in sources]
    for optimizer in optimizers_in(*optimizers):
        join_groups(optimizer, origins, grown)
        for origin, block in zip(origins, grown, strict=True):
            pairs = [(p, block.get_parameter(name)) for name, p in origin.named_parameters()]
            _move_state(optimizer, pairs, emptied, keep=state == "copy")
    for owner, records in places:
        attach_at(owner, records)
    for i in [i for i, is_copy in enumerate(is_new) if is_copy]:
        for name, part in grown[i].named_modules():
            if isinstance(part, SeedSlot):
                part.name = f"{found.name}.{i}.{name}"
    return added


def shorten(found: BlockList, to: int) -> None:
    """Remove the last blocks of a list, down to `to` blocks. Optimizers still hold their parameters."""
    blocks, sources = list(found.modules), found.whole_order(range(to))
    BlockFields(found).fill([blocks[source] for source in sources], sources)


def listed_order(order: Order) -> list[int] | None:
    """Return the sources that an order lists, as ranges or one by one; None for a name.

    Raises ValueError if it is none of these.
    """
    if isinstance(order, str) and order in get_args(OrderName):
        return None
    if not isinstance(order, str):
        sources: list[Any] = list(order) if isinstance(order, Iterable) else [order]
        if all(isinstance(source, Integral) and not isinstance(source, bool) for source in sources):
            return [int(source) for source in sources]
    elif re.fullmatch(r"\s*\d+(\s*-\s*\d+)?(\s*,\s*\d+(\s*-\s*\d+)?)*\s*", order):
        ends = [[int(number) for number in part.split("-")] for part in order.split(",")]
        if all(part[0] <= part[-1] for part in ends):
            return [source for part in ends for source in range(part[0], part[-1] + 1)]
    raise ValueError(
        f"stack: order must be one of {', '.join(get_args(OrderName))}, sources such as [0, 1, 1, 2], or ranges such "
        f"as '0-3, 2-5', got {order!r}"
    )


def sources_of(count: int, to: int, order: Order) -> list[int]:
    """Return the source of each of `to` blocks that grow from `count`. The first block of each source is itself.

    Raises ValueError if a listed order has another number of blocks, leaves one out or moves one ahead of another.
    """
    listed = listed_order(order)
    if listed is None:
        added = range(to - count)
        return {
            "stack": [i % count for i in range(to)],
            "interleave": [i * count // to for i in range(to)],
            "last": [*range(count), *(count - 1 for _ in added)],
            "middle": sorted([*range(count), *((count - 1) // 2 for _ in added)]),
        }[str(order)]
    if len(listed) != to:
        raise ValueError(f"stack: order lists {len(listed)} blocks, and to is {to}; leave one of them out")
    firsts = [source for i, source in enumerate(listed) if source not in listed[:i]]
    if firsts != list(range(count)):
        raise ValueError(
            f"stack: order must name each of the blocks 0 to {count - 1}, for the first time behind those before it, "
            f"got {order!r}"
        )
    return listed


def _varying(found: BlockList, order: Sequence[int], indices: set[tuple[str, str]]) -> list[str]:
    """Return what differs between the blocks of a list, outside of their state dicts, unless it goes on as it began.

    With windows in every second of four blocks, and `order` for the sources of eight, every second one of eight has
    one. Indices themselves, `indices`, are left out.
    """
    blocks, names = found.blocks, []
    named = [dict(block.named_modules()) for block in blocks]
    for name in {name: None for parts in named for name in parts}:
        parts = [parts.get(name) for parts in named]
        present = [part for part in parts if part is not None]
        kept = {key for part in present for key in part._buffers.keys() - part._non_persistent_buffers_set}
        compared: dict[str, list[Any]] = {"": [type(part) for part in parts]}
        for key in {key: None for part in present for key in (*vars(part), *part._buffers)}:
            if not (key in STORAGE | kept or "hook" in key or key == "training" or (name, key) in indices):
                compared[key] = [getattr(part, key, None) for part in parts]
        for key, values in compared.items():
            kinds = [next(k for k, other in enumerate(values) if _same(other, value)) for value in values]
            period = next(p for p in range(1, len(kinds) + 1) if all(k == kinds[i % p] for i, k in enumerate(kinds)))
            repeats = period == 1 or 2 * period <= len(kinds)
            if not repeats or any(kinds[source] != kinds[i % period] for i, source in enumerate(order)):
                names.append(".".join(filter(None, (name, key))) or "their class")
    return names


def _same(a: Any, b: Any) -> bool:
    """Return True if two settings are equal, or of a kind that is not compared, such as functions and modules."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    parts = chain.from_iterable(x if isinstance(x, list | tuple) else [x] for x in (a, b))
    return a is b or not all(isinstance(x, str | int | float | type | None) for x in parts) or a == b


def check_options(blocks: Sequence[nn.Module], *, order: Order, new: str, state: str, zero: Sequence[str]) -> None:
    """Raise ValueError if an option of `stack` is unknown, or cannot be carried out in these blocks."""
    listed_order(order)
    for name, value, kind in (("new", new, Content), ("state", state, State)):
        if value not in get_args(kind):
            raise ValueError(f"stack: {name} must be one of {', '.join(get_args(kind))}, got {value!r}")
    parts = dict(blocks[0].named_modules())
    if (new == "zero") != bool(zero):
        layers = ", ".join(name for name, part in parts.items() if isinstance(part, nn.Linear)) or "none"
        raise ValueError(
            f"stack: new='zero' needs in zero=(…) the last layer of each residual branch, and nothing else does; "
            f"linear layers of a block: {layers}"
        )
    for end in zero:
        named = [name for name in parts if f".{name}".endswith(f".{end}")]
        if not named and not _zeroed(blocks[0], [end]):
            raise ValueError(
                f"stack: a block has no layer {end!r} to set to zero; it has {', '.join(filter(None, parts))}"
            )
        if any(is_parametrized(parts[name]) or not list(parts[name].parameters(recurse=False)) for name in named):
            raise ValueError(
                f"stack: {named[0]!r} of a block has no parameters of its own to set to zero; name its last layer"
            )
    holders = Counter(chain.from_iterable({id(p) for p in block.parameters()} for block in blocks))
    changed = _layers(blocks[0]) if new == "fresh" else [name.rpartition(".")[0] for name in _zeroed(blocks[0], zero)]
    for name in dict.fromkeys(changed):
        if new == "fresh" and not hasattr(parts[name], "reset_parameters"):
            kind = type(parts[name]).__name__
            raise ValueError(f"stack: {name!r} of a block, a {kind}, has no reset_parameters for new='fresh'; add it")
        if any(holders[id(p)] > 1 for block in blocks for p in block.get_submodule(name).parameters(recurse=False)):
            raise ValueError(
                f"stack: {name!r} is shared among blocks, so new={new!r} would change them all; use 'copy'"
            )


def _layers(block: nn.Module) -> list[str]:
    """Return the names of the modules of a block that have parameters of their own."""
    return [name for name, part in block.named_modules() if list(part.parameters(recurse=False))]


def _zeroed(block: nn.Module, zero: Sequence[str]) -> list[str]:
    """Return the names of the parameters of a block that `zero` names, or whose layers it names.

    The whole name of a parameter stands for it alone: `out.weight` is not `attention.out.weight`.
    """
    names = [name for name, _ in block.named_parameters()]
    ends = [end for end in zero if end not in names]
    ways = {name: (f".{name}", f".{name.rpartition('.')[0]}") for name in names}
    return [
        name for name in names if name in zero or any(way.endswith(f".{end}") for end in ends for way in ways[name])
    ]


def _refill(block: nn.Module, new: Content, zero: Sequence[str]) -> set[int]:
    """Set layers of a new block to zero, or all of it to fresh values; return the identities of those parameters."""
    if new == "fresh":
        for name in _layers(block):
            block.get_submodule(name).reset_parameters()  # pyright: ignore[reportCallIssue]
        return {id(parameter) for parameter in block.parameters()}
    set_to_zero(block, zero)
    return {id(block.get_parameter(name)) for name in _zeroed(block, zero)}


def set_to_zero(block: nn.Module, zero: Sequence[str]) -> None:
    """Set the parameters of a block to zero that `zero` names, or whose layers it names."""
    for name in _zeroed(block, zero):
        nn.init.zeros_(block.get_parameter(name))


# Copies of blocks, and what they share.


def _ids(block: nn.Module) -> set[int]:
    """Return the identities of a block's modules, parameters and buffers."""
    return {id(x) for x in (*block.modules(), *block.parameters(), *block.buffers())}


def _shared_with(block: nn.Module, found: BlockList) -> dict[int, Any]:
    """Return what a copy of a block must not copy, by identity: a memo for `deepcopy`.

    This is what the block has in common with other blocks of the list, and all else of the network that is no part of
    the block, but that one of its attributes may refer to, such as a configuration.
    """
    ids, parts = _ids(block), set(block.modules())
    between = set().union(*(_ids(other) for other in found.modules if other is not block))
    memo: dict[int, Any] = {}
    for module in found.network.modules():
        for x in (module, *module._parameters.values(), *module._buffers.values()):
            if id(x) not in ids or id(x) in between:
                memo[id(x)] = x
        if module not in parts or id(module) in between:
            values = (value for name, value in vars(module).items() if name not in STORAGE and "hook" not in name)
            memo |= {id(value): value for value in values if id(value) not in ids}
    memo.pop(id(None), None)
    return memo


def _copy_of(block: nn.Module, index: int, found: BlockList) -> nn.Module:
    """Return a copy of a block with all that it has, and empty slots. Raises ValueError if it cannot be copied."""
    memo = _shared_with(block, found)
    ids = _ids(block) - memo.keys()
    memo |= _hooks_not_copied(block, ids)
    try:
        copied = copy_module(block, memo)
    except ValueError as error:
        raise ValueError(f"stack: block {index}: {error}") from error
    for name, part in copied.named_modules():
        for attribute, value in vars(part).items():
            if "hook" in attribute and isinstance(value, dict):
                for key in [key for key, hook in value.items() if hook is pass_on]:
                    del value[key]
            if id(value) not in memo and _holds(value, ids):
                raise ValueError(
                    f"stack: {attribute} of {name or 'a block'} ({type(part).__name__}) holds a function that refers "
                    f"to block {index}, so that a copy would run the original; make it a method, or take the module "
                    f"as its argument"
                )
        if isinstance(part, SeedSlot):
            part.empty()
    for name, parameter in block.named_parameters():
        _copy_extras(parameter, copied.get_parameter(name), ids)
    return copied


def _hooks_not_copied(block: nn.Module, ids: set[int]) -> dict[int, Any]:
    """Return the entries of a memo for `deepcopy` by which hooks of a block are not copied.

    A hook that holds no part of the block (`ids`) is shared. `pass_on` stands for those of slots and of sharding, which
    each block has for itself, and the caller removes it.
    """
    hooks = [hook for part in block.modules() for hook in hooks_of(part)]
    left_out = {id(hook) for hook in hooks if isinstance(hook, SlotHook) or _is_of_sharding(hook)}
    return {
        id(hook): pass_on if id(hook) in left_out else hook
        for hook in hooks
        if id(hook) in left_out or not _holds(hook, ids)
    }


def _is_of_sharding(hook: Any) -> bool:
    """Return True if a hook is one by which torch shards a module: each block has its own."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _copy_extras(source: nn.Parameter, target: nn.Parameter, ids: set[int]) -> None:
    """Give a new parameter the attributes of its source, and its hooks unless it has some of its own.

    Raises ValueError if a hook refers to the block of the source, whose parts are `ids`.
    """
    if target is source:
        return
    for name, value in vars(source).items():
        vars(target).setdefault(name, value)
    for table, add in (
        ("_backward_hooks", target.register_hook),
        ("_post_accumulate_grad_hooks", target.register_post_accumulate_grad_hook),
    ):
        for hook in (getattr(source, table, None) or {}).values() if not getattr(target, table, None) else ():
            if _holds(hook, ids):
                raise ValueError(
                    "stack: a hook on a gradient refers to its own block or parameter, so that a copy would have that "
                    "of the original; let it take the gradient or the parameter as its argument"
                )
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # such as that of an earlier growth
                add(hook)


def _holds(value: Any, parts: set[int], depth: int = 0) -> bool:
    """Return True if a value is, or refers to, one of the parts of a block; other modules are not looked into."""
    if id(value) in parts:
        return True
    if depth == DEEPEST or isinstance(value, nn.Module | Tensor | type | str | int | float | None):
        return False
    inner: Iterable[Any]
    if isinstance(value, ref):
        inner = [value()]
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple | set):
        inner = value
    elif isinstance(value, MethodType):
        inner = [value.__self__]
    elif isinstance(value, partial):
        inner = [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        filled = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]  # not an empty cell
        inner = [*filled, *(value.__defaults__ or ())]
    else:
        inner = getattr(value, "__dict__", {}).values()
    return any(_holds(x, parts, depth + 1) for x in inner)


def _places_of_copies(
    found: BlockList, sources: Sequence[int], is_new: Sequence[bool]
) -> list[tuple[nn.Module, list[dict[str, Any]]]]:
    """Return where slots are to be attached in new blocks, as in their sources, by the module that holds them.

    Raises ValueError if a slot is attached in a block that would get another index.
    """
    names, old_names = numbered(found.modules, len(sources)), list(found.modules._modules)
    added: list[tuple[nn.Module, list[dict[str, Any]]]] = []
    for owner, path in found.owners():
        records: list[dict[str, Any]] = []
        for record in attached_places(owner):
            for source, old_name in enumerate(old_names):
                prefix = ".".join([*path, old_name])
                if not f"{record['module']}.".startswith(f"{prefix}."):
                    continue
                for i in (i for i, s in enumerate(sources) if s == source):
                    moved = f"{'.'.join([*path, names[i]])}{record['module'].removeprefix(prefix)}"
                    if is_new[i]:
                        records.append({**record, "module": moved, "slot": moved})
                    elif i != source:
                        raise ValueError(
                            f"stack: slot {record['slot']!r} is in block {source}, which would become block {i}; grow "
                            f"with order='stack' or 'last', or before slots are attached"
                        )
        added.append((owner, records))
    return added


def warn_without_gradients(found: BlockList, added: Sequence[nn.Module]) -> None:
    """Warn after the first backward pass through a list if it has given a new block no gradient."""
    new = [(i, block) for i, block in enumerate(found.modules) if any(block is other for other in added)]
    owner = {id(p): i for i, block in new for p in block.parameters()}
    waiting = [p for _, block in new for p in block.parameters() if p.requires_grad]
    old = [p for p in found.modules.parameters() if p.requires_grad and id(p) not in owner]
    old = old or [p for p in found.network.parameters() if p.requires_grad and id(p) not in owner]
    indices = {id(p): i for i, block in enumerate(found.modules) for p in block.parameters()}
    expected = {indices.get(id(p), -1) for p in old}
    reached: set[int] = set()

    def judge(gradients: Sequence[Tensor | None]) -> None:
        reached.update(indices.get(id(p), -1) for p, x in zip(watched, gradients, strict=True) if x is not None)
        if not expected <= reached:  # a part of a pass, such as the backward pass of one checkpointed block
            return
        handle.remove()
        idle = sorted({owner[id(p)] for p in waiting} - reached)
        if idle:
            warnings.warn(
                f"{found.name!r} has grown, but its new blocks {', '.join(map(str, idle))} got no gradient in the "
                f"first backward pass: the forward pass of {type(found.network).__name__} does not run them",
                stacklevel=2,
            )

    watched = (*waiting, *old)
    if waiting:
        handle = torch.autograd.graph.register_multi_grad_hook(watched, judge)


# Optimizers.


def check_optimizers(optimizers: Sequence[Optimizer], blocks: Iterable[nn.Module]) -> None:
    """Raise ValueError if the optimizers cannot take parameters, or lack a trainable one of the blocks."""
    if not optimizers:
        return
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"stack: optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}")
    every = optimizers_in(*optimizers)
    groups = chain.from_iterable(optimizer.param_groups for optimizer in every)
    held: dict[int, Tensor] = {id(p): p for group in groups for p in group["params"]}
    for i, block in enumerate(blocks):
        for name, parameter in block.named_parameters():
            if parameter.requires_grad and id(parameter) not in held:
                raise ValueError(
                    f"stack: no optimizer holds parameter {name!r} of block {i}; pass the one that trains it, or "
                    f"freeze it by requires_grad_(False)"
                )
    for optimizer in every:
        kind = type(optimizer).__name__
        if kind in FLAT_OPTIMIZERS:
            raise ValueError(f"stack: {kind} cannot take new parameters; use SGD, Adam or AdamW")
        shapes = [[p.shape for p in group["params"]] for group in optimizer.param_groups]
        attributes = {k: v for k, v in vars(optimizer).items() if k != "param_groups" and not isinstance(v, Optimizer)}
        known = ("params", "param_names")
        in_groups = [{k: v for k, v in group.items() if k not in known} for group in optimizer.param_groups]
        for name, value in chain(attributes.items(), *(group.items() for group in in_groups)):
            if any(value is table for table in _tables(optimizer)):
                continue
            of_value = [x.shape for x in iter_tensors(value)]
            alike = of_value and (of_value in shapes or of_value == list(chain(*shapes)))
            flags = isinstance(value, list) and len(value) == len(held) >= FEWEST_FLAGS
            ids = isinstance(value, set | frozenset | list | tuple) and any(x in held for x in value if type(x) is int)
            if alike or flags or ids or _holds(value, set(held)):
                raise ValueError(
                    f"stack: {kind} keeps something for each parameter in {name!r}, where new ones cannot be added; "
                    f"grow with the optimizer that it wraps, or make a new one afterwards"
                )


def _tables(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Return the states that an optimizer keeps by parameter."""
    attributes = [value for value in vars(optimizer).values() if value is not optimizer.state]
    by_parameter = (x for x in attributes if isinstance(x, dict) and any(isinstance(key, Tensor) for key in x))
    return [optimizer.state, *by_parameter]


def _move_state(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]], emptied: set[int], *, keep: bool) -> None:
    """Give the second parameter of each pair the optimizer's state of the first one, or none.

    Those that hold other values than their source, whose identities are `emptied`, have none: a state may hold values
    of the parameter, as in schedule-free optimizers.
    """
    for source, target in pairs:
        for table in _tables(optimizer) if target is not source else ():
            table.pop(target, None)
            if keep and source in table and id(target) not in emptied:
                table[target] = copy.deepcopy(map_tensors(table[source], Tensor.detach))


def join_groups(optimizer: Optimizer, origins: list[nn.Module], grown: list[nn.Module]) -> None:
    """Put the parameters of new blocks into the groups of their sources, and name them if parameters have names."""
    positions: dict[int, tuple[int, str]] = {}
    for i in reversed(range(len(grown))):  # a parameter that blocks share is at the first of them
        positions |= {id(p): (i, name) for name, p in grown[i].named_parameters()}
    before: dict[int, int] = {}
    for block in origins:
        before.setdefault(id(block), len(before))
    for group in optimizer.param_groups:
        params, names = group["params"], group.get("param_names")
        known = [positions[id(p)] for p in params if id(p) in positions]
        block_by_block = [i for i, _ in known] == sorted(i for i, _ in known)
        if names is not None:
            for k, parameter in enumerate(params):
                if id(parameter) in positions:
                    i, name = positions[id(parameter)]
                    names[k] = _renamed(names[k], name, before[id(grown[i])], i)
        order = {id(p): k for k, p in enumerate(params)}  # of parameters within a block, as the user has them
        for i, (origin, block) in enumerate(zip(origins, grown, strict=True)):
            named = sorted(origin.named_parameters(), key=lambda pair: order.get(id(pair[1]), 0))
            for name, source in named if block is not origin else ():
                target = block.get_parameter(name)
                if target is source or not any(source is p for p in params) or any(target is p for p in params):
                    continue
                ahead = [positions.get(id(p), (len(grown), "")) for p in params]
                index = 1 + max(k for k, (j, n) in enumerate(ahead) if j <= i and (block_by_block or n == name))
                if names is not None:
                    origin_index = next(k for k, p in enumerate(params) if p is source)
                    names.insert(index, _renamed(names[origin_index], name, positions[id(source)][0], i))
                params.insert(index, target)


def _renamed(name: str, in_block: str, before: int, after: int) -> str:
    """Return `blocks.5.weight` for `blocks.2.weight`, where block 2 has become block 5."""
    end = f"{before}.{in_block}"
    return f"{name.removesuffix(end)}{after}.{in_block}" if name.endswith(end) else f"{name}.{after}"


# Blocks that a class has built for a list that begins with fewer.


class BuiltBlocks:
    """The blocks that a class has built for a list, which holds only the first ones while the network is shallow.

    Each block keeps the index for which it was built, with what the class gave it there: buffers that no state dict
    holds, and settings. Growth gives it the weights and the state of its source, and whatever has changed in
    the source since the blocks were built, such as hooks, rates of dropout, flags and modes.
    """

    def __init__(self, found: BlockList) -> None:
        self.found = found
        self.whole = list(found.modules)
        self._fields = BlockFields(found)
        parts = [part for block in self.whole for part in block.modules()]
        self._settings = {
            id(part): {name: _frozen(value) for name, value in vars(part).items() if name not in STORAGE}
            for part in parts
        }
        self._names = {id(part): {*part._modules, *part._parameters} for part in parts}
        self._classes = {id(part): type(part) for part in parts}
        # What no checkpoint holds is compared by its values: a network that is moved or cast has other tensors.
        self._buffers = {
            (id(part), name): buffer.clone()
            for part in parts
            for name, buffer in part._buffers.items()
            if buffer is not None and name in part._non_persistent_buffers_set
        }
        self._shared = {
            key for key, number in Counter(chain.from_iterable(map(_ids, self.whole))).items() if number > 1
        }

    @property
    def depth(self) -> int:
        """Number of blocks in the list now, without those that are left out."""
        return len(self.found.modules) - self.found.before - self.found.behind

    @property
    def most(self) -> int:
        """Number of blocks that the class has built, without those that are left out."""
        return self.before_end - self.found.before

    @property
    def before_end(self) -> int:
        """Index behind the last block that is not left out."""
        return len(self.whole) - self.found.behind

    def spare(self, to: int) -> list[nn.Module]:
        """Return the blocks that are not in the list yet, and will be when it has grown to `to` blocks."""
        present = list(self.found.modules)
        return [b for b in (self.whole[i] for i in self._indices(to)) if not any(b is other for other in present)]

    def _inside(self) -> set[int]:
        """Return the identities of all parts of all blocks."""
        return {id(part) for block in self.whole for part in block.modules()}

    def count_parameters(self, depths: Iterable[int]) -> dict[int, int]:
        """Return the number of parameters of the network by numbers of blocks in the list."""
        inside = self._inside()
        rest = [p for part in self.found.network.modules() if id(part) not in inside for p in part._parameters.values()]
        counts: dict[int, int] = {}
        for depth in depths:
            blocks = [self.whole[i] for i in self._indices(depth)]
            every = {id(p): p for p in (*rest, *(p for b in blocks for p in b.parameters())) if p is not None}
            counts[depth] = sum(p.numel() for p in every.values())
        return counts

    def run_elsewhere(self) -> str:
        """Return where the network holds a block beside the list, which it then runs at any depth; empty if nowhere."""
        blocks = {id(block) for block in self.whole}
        inside = self._inside()
        for name, part in self.found.network.named_modules():
            if part is self.found.modules or id(part) in inside:
                continue
            for key, value in {**vars(part), **part._modules}.items():
                held = value.values() if isinstance(value, Mapping) else value
                held = held if isinstance(held, list | tuple | ValuesView) else [value]
                if key not in STORAGE and any(id(x) in blocks for x in held):
                    return repr(".".join(filter(None, (name, key))))
        return ""

    def check_present(self) -> None:
        """Raise ValueError if the list has other blocks than those that its class has built."""
        indices = self._indices(self.depth) if self.depth <= self.most else []
        if [id(block) for block in self.found.modules] != [id(self.whole[i]) for i in indices]:
            raise ValueError(
                f"stack: blocks of {self.found.name!r} were replaced or added after setup, so that new ones would lack "
                f"what they have; change them in __init__, setup or configure_model"
            )

    def show(self, depth: int) -> None:
        """Let the list hold the first `depth` blocks, and the network know that it does."""
        indices = self._indices(depth)
        self._fields.fill([self.whole[i] for i in indices], indices)

    def _indices(self, depth: int) -> list[int]:
        return [*range(self.found.before + depth), *range(len(self.whole) - self.found.behind, len(self.whole))]

    def grow(
        self,
        to: int,
        optimizers: Sequence[Optimizer],
        *,
        order: Order,
        new: Content,
        state: State,
        zero: Sequence[str] = (),
    ) -> list[int]:
        """Grow to `to` blocks, with the options of `stack`, and return the indices of copies in the whole list."""
        found, old = self.found, list(self.found.modules)
        self.check_present()
        sources = found.whole_order(sources_of(self.depth, to, order))
        targets = [self.whole[i] for i in self._indices(to)]
        check_optimizers(optimizers, found.blocks)
        every = optimizers_in(*optimizers)
        inside = self._inside()
        rest = [part for part in found.network.modules() if id(part) not in inside]
        outside = {id(x) for part in rest for x in (*part._parameters.values(), *part._buffers.values())}
        present = outside.union(*map(_ids, old))
        holders = Counter(chain(outside, *map(_ids, self.whole)))
        filled: set[int] = set()
        # From the last block on: no block is filled before those that take over its present content.
        for i in reversed(range(len(targets))):
            source, target = old[sources[i]], targets[i]
            if source is target:
                continue
            is_new = sources[i] in sources[:i]
            # What other blocks share with this one stays as it is, and so does what the network has already.
            moved = i < len(old) and old[i] is target
            kept = filled | {key for key in _ids(target) if (holders[key] > 1 if moved else key in present)}
            pairs = self._take_over(target, source, kept)
            emptied = _refill(target, new, zero) if is_new else set[int]()
            for optimizer in every:
                _move_state(optimizer, pairs, emptied, keep=not is_new or state == "copy")
            filled |= _ids(target)
        for optimizer in every:
            join_groups(optimizer, [old[source] for source in sources], targets)
        self.show(to)
        return [i for i in range(len(targets)) if sources[i] in sources[:i]]

    def _take_over(
        self, target: nn.Module, source: nn.Module, kept: set[int]
    ) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give a block the content of its source, but for what `kept` names; return the parameters of both in pairs."""
        memo = _shared_with(source, self.found)
        ids, late = _ids(source) - memo.keys(), (_ids(source) & memo.keys()) - self._shared
        memo |= {key: x for key, x in computed_tensors(source).items() if key not in memo}
        matched = list(self._matched(source, target, late))
        counterparts = {id(part) for part, _ in matched}
        for part, other in matched:
            memo[id(part)] = other
            memo |= {
                id(p): other._parameters[name] for name, p in part._parameters.items() if name in other._parameters
            }
        memo |= _hooks_not_copied(source, ids)
        pairs: list[tuple[nn.Parameter, nn.Parameter]] = []
        taken: dict[int, nn.Parameter] = {}
        for part, other in matched:
            if isinstance(part, SeedSlot) or id(other) in kept:
                continue
            self._take_settings(other, part, memo, ids)
            was_there = self._names.get(id(part), set())
            for name, child in part._modules.items():
                if child is None or child is other._modules.get(name) or id(child) in counterparts:
                    continue
                if id(child) in late:
                    other._modules[name] = child
                elif name not in was_there or self._classes.get(id(child)) is not type(child):
                    other._modules[name] = copied = copy_module(child, memo)
                    pairs += [(p, copied.get_parameter(key)) for key, p in child.named_parameters()]
            for name, parameter in part._parameters.items():
                filled = other._parameters.get(name)
                if parameter is None or filled is parameter or id(filled) in kept:
                    continue
                if id(parameter) in late or id(parameter) in taken:  # in the latter case it has two names in the block
                    other._parameters[name] = parameter if id(parameter) in late else taken[id(parameter)]
                    continue
                if filled is None or filled.shape != parameter.shape:
                    other._parameters[name] = filled = copy.deepcopy(parameter)
                if hasattr(filled, "device_mesh"):  # a DTensor, whose storage its sharding holds
                    filled.detach().copy_(parameter.detach())
                else:
                    filled.data = parameter.detach().clone()
                filled.grad = None
                filled.requires_grad_(parameter.requires_grad)
                _copy_extras(parameter, filled, ids)
                taken[id(parameter)] = filled
                pairs.append((parameter, filled))
            for name, buffer in part._buffers.items():
                built = other._buffers.get(name)
                if buffer is None or built is buffer or id(built) in kept:
                    continue
                if built is None:
                    other._buffers[name] = buffer.detach().clone()
                elif name in part._non_persistent_buffers_set and not self._has_changed(part, name):
                    built.data = built.to(buffer.device, buffer.dtype)  # as the class has it there
                else:
                    built.data = buffer.detach().clone()
            for gone, there in ((other._modules, part._modules), (other._parameters, part._parameters)):
                for name in (gone.keys() - there.keys()) & was_there:
                    del gone[name]
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                other.set_extra_state(copy.deepcopy(part.get_extra_state(), memo))
        return pairs

    def _matched(self, source: nn.Module, target: nn.Module, late: set[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the modules of two blocks that have the same name in both.

        Left out, with all below them, are modules that both blocks hold, those that became shared after the network
        was built (`late`), and those that were replaced since by one of another type than the target has.
        """
        if source is target:
            return
        yield source, target
        for name, child in source._modules.items():
            other = target._modules.get(name)
            if child is None or other is None or id(child) in late:
                continue
            if self._classes.get(id(child)) is type(child) or type(other) is type(child):
                yield from self._matched(child, other, late)

    def _has_changed(self, part: nn.Module, name: str) -> bool:
        """Return True if a buffer that no state dict holds has other values than the class gave it."""
        now, then = part._buffers[name], self._buffers.get((id(part), name))
        if now is None or then is None or now.shape != then.shape:
            return True
        then = then.to(now.device)
        return not (torch.equal(now, then.to(now.dtype)) or torch.equal(now.to(then.dtype), then))

    def _take_settings(self, target: nn.Module, source: nn.Module, memo: dict[int, Any], ids: set[int]) -> None:
        """Give a part of a block the attributes of its source that have changed since the class has built it.

        Raises ValueError if one cannot be copied, or refers to the block of the source, whose parts are `ids`.
        """
        built, present = self._settings.get(id(source), {}), vars(target)
        before = self._settings.get(id(target), {})
        for name, value in vars(source).items():
            if name in STORAGE or name.startswith(SHARDING):
                continue
            # A block that moves leaves its own changes behind.
            left = name in present and name in before and before[name] != _frozen(present[name])
            changed = left or name == "training" or name not in built or built[name] != _frozen(value)
            if not (changed or ("hook" in name and not present.get(name))):
                continue
            try:
                copied = copy.deepcopy(value, memo)
            except COPY_ERRORS as error:
                raise ValueError(f"stack: {name} of {type(source).__name__} cannot be copied: {error}") from error
            if isinstance(value, dict) and "hook" in name:
                tables = [table for key, table in present.items() if key.endswith("_hooks")]
                kept = {key for table in tables for key, hook in table.items() if _is_of_sharding(hook)}
                copied = type(value)(
                    [(key, hook) for key, hook in present.get(name, {}).items() if key in kept]
                    + [(key, hook) for key, hook in copied.items() if hook is not pass_on]
                )
            if _holds(copied, ids):
                raise ValueError(
                    f"stack: {name} of {type(source).__name__} holds a function that refers to its own block, so that "
                    f"a new block would run that one; make it a method, or take the module as its argument"
                )
            present[name] = copied
        for name in built.keys() - vars(source).keys():
            present.pop(name, None)


def _frozen(value: Any, depth: int = 0) -> Any:
    """Return something that is equal later only if an attribute has not changed by then."""
    if isinstance(value, Tensor):
        return id(value), 0 if value.is_inference() else value._version, value
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if depth < DEEPEST and isinstance(value, Mapping):
        return [(_frozen(k, depth + 1), _frozen(x, depth + 1)) for k, x in value.items()]
    if depth < DEEPEST and isinstance(value, list | tuple | deque):
        return type(value), [_frozen(x, depth + 1) for x in value]
    if isinstance(value, str | bytes | int | float | complex | None):
        return value
    if depth < DEEPEST and not isinstance(value, nn.Module | type | FunctionType | MethodType):
        return id(value), value, _frozen(getattr(value, "__dict__", {}), depth + 1)
    return id(value), value
