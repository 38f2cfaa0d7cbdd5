"""Growth in depth by copies of trained blocks (https://arxiv.org/abs/2405.15319)."""

import copy
import re
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from itertools import chain, combinations
from numbers import Integral
from types import CellType, FunctionType, MethodType
from typing import Any, Literal, NamedTuple, get_args
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.optim import Optimizer

from esper_lightning.growth.attach import attach_at, attached_places
from esper_lightning.growth.blocks import (
    BlockFields,
    BlockList,
    errors_of,
    find_blocks,
    lists_of_one_count,
    numbered,
)
from esper_lightning.growth.param_groups import hooked_optimizers, optimizers_in
from esper_lightning.growth.residual import are_equal, branch_ends, outputs
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

CONTAINERS = (dict, list, tuple, set, deque, ValuesView)

MOST_PARTS = 100_000
"""Most entries of a container in which parts of blocks are looked for; one with more holds data."""

DEEPEST = 4  # levels of nested containers and objects in which settings of a block are looked for


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

    Call it between two steps: copies have no gradients. Wrap a network in DistributedDataParallel anew afterwards.
    Blocks that exist stay the same objects, and a copy has all that its source has: buffers, extra state, modes,
    `requires_grad` and hooks, where a hook that holds a part of its block holds the copy's part. What blocks share with
    each other stays shared. Slots in a copy are its own, and empty. Indices that blocks know, such as `layer_idx`, and
    the configuration of the network follow. If a new block has no gradient in the next step of `optimizer`, a warning
    says that it is not run. Raises ValueError, and changes nothing, if the list cannot grow. See docs/methods/stack.md.

    Args:
        network: The network that runs the blocks, with its configuration.
        blocks: Name of the `nn.ModuleList` or `nn.Sequential` in the network, as `model.layers`. `encoder.block[1:]`
            leaves out the first block, and `to` and `order` count the others.
        to: Number of blocks afterwards; need not be a multiple of the present number. None: as `order` lists them.
        optimizer: Optimizer or optimizers with the blocks' parameters, whose groups new parameters join. An optimizer
            within another one, as in SAM and Lookahead, is found. None: you make a new one.
        order: Source of each block afterwards, one by one from 0 on (`[0, 1, 1, 2, 3, 3]`), or as ranges with both
            ends (`"0-3, 2-5"`); each present block must occur, and first occurrences must be in ascending order. Or a
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
    if any(isinstance(part, DistributedDataParallel) for part in network.modules()):
        raise ValueError(
            "stack: DistributedDataParallel does not average gradients of blocks that it has not seen; give its "
            "`module`, and wrap that anew"
        )
    with errors_of("stack"):
        block_list = find_blocks(network, blocks)
    count, listed = len(block_list.blocks), listed_order(order)
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
        zero = branch_ends(network, block_list.blocks[copied], example)
    check_options(block_list.blocks, order=order, new=new, state=state, zero=zero)
    if freeze not in (None, "old"):
        raise ValueError(f"stack: freeze must be 'old' or None, got {freeze!r}")
    given: Any = [] if optimizer is None else optimizer
    optimizers: list[Optimizer] = list(given) if isinstance(given, list | tuple) else [given]
    check_optimizers(optimizers, block_list.blocks)
    fields = BlockFields(block_list)
    lists = [field.holder[field.name] for field in fields.counts if field.per_block]
    index_names = {(field.part, field.name) for field in fields.indices}
    varying = _varying(block_list, sources, index_names, lists)
    present, others = set(network.parameters()), lists_of_one_count(block_list)
    containers = kept_elsewhere(block_list, block_list.blocks, optimizers)
    kept = [name for name, of_blocks in containers if all(of_blocks)]
    added = deepen(block_list, sources, optimizers, new=new, state=state, zero=zero, example=example)
    if freeze:
        for parameter in network.parameters():
            if parameter.is_floating_point():  # others cannot learn
                parameter.requires_grad_(parameter not in present)
                parameter.grad = None  # an optimizer would step by one that is 0
    warn_without_gradients(block_list, added, optimizers)
    if others:
        warnings.warn(one_count(blocks, others), stacklevel=2)
    if kept:
        warnings.warn(
            f"{block_list.name!r} has grown, but parts of its blocks are also in {', '.join(map(repr, kept))} of "
            f"{type(network).__name__}, without those of new blocks; read them from the list where they are used",
            stacklevel=2,
        )
    if varying:
        warnings.warn(
            f"{block_list.name!r}: blocks differ by their index in {', '.join(varying)}, which no state dict holds, "
            f"and copies have that of their source; {type(network).__name__} built with {len(block_list.modules)} "
            f"blocks may differ, so compare its outputs before you load the weights there",
            stacklevel=2,
        )
    return sources


def one_count(name: str, others: Sequence[str]) -> str:
    """Return the text of a warning that `others` may read the setting with the number of blocks of the list `name`."""
    return (
        f"{name!r} grows, and the configuration with its number of blocks is that of {', '.join(map(repr, others))}, "
        f"too, which may then run, or be saved, with a wrong number; build each list with a configuration of its own, "
        f"as copy.deepcopy makes it"
    )


def kept_elsewhere(
    block_list: BlockList,
    blocks: Sequence[nn.Module],
    optimizers: Sequence[Optimizer],
    *,
    others: Sequence[Any] = (),
) -> list[tuple[str, list[bool]]]:
    """Return containers outside of a list's blocks that hold parts of blocks, by name, with True for each such block.

    An example is a list of attentions. What blocks share does not count, nor do the groups of optimizers, which follow.
    `others` are objects such as callbacks, whose attributes are searched, too.
    """
    holders = Counter(chain.from_iterable(map(_ids, {*block_list.modules, *blocks})))
    own = [{key for key in _ids(block) if holders[key] == 1} for block in blocks]
    attributes: list[tuple[str, Any]] = []
    for module_name, module in block_list.network.named_modules():
        if module is block_list.modules or id(module) in holders:
            continue
        for name, value in vars(module).items():
            if name not in STORAGE and "hook" not in name:
                attributes.append((".".join(filter(None, (module_name, name))), value))
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential | nn.ParameterList | nn.ParameterDict):
            attributes.append((module_name, [*module._modules.values(), *module._parameters.values()]))
    for other in others:
        attributes += [(f"{type(other).__name__}.{name}", value) for name, value in vars(other).items()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = []
    for name, value in attributes:
        if isinstance(value, CONTAINERS):
            held = {id(x) for x in _contents(value, left_out=groups) if id(x) in holders}
            found.append((name, [not held.isdisjoint(ids) for ids in own]))
    return [(name, of_blocks) for name, of_blocks in found if any(of_blocks)]


def _contents(value: Any, left_out: Sequence[Any] = ()) -> Iterator[Any]:
    """Yield what is in nested containers, for a bound method its object, and any other value itself.

    Containers in `left_out`, and those of more than MOST_PARTS entries, are not opened.
    """
    opened, waiting = set(map(id, left_out)), [(value, 0)]
    while waiting:
        inner, depth = waiting.pop()
        inner = inner.__self__ if isinstance(inner, MethodType) else inner
        if not isinstance(inner, CONTAINERS) or depth == DEEPEST:
            yield inner
        elif id(inner) not in opened and len(inner) <= MOST_PARTS:
            opened.add(id(inner))
            entries = chain(inner.keys(), inner.values()) if isinstance(inner, dict) else inner
            waiting += [(entry, depth + 1) for entry in entries]


def deepen(
    block_list: BlockList,
    order: Sequence[int],
    optimizers: Sequence[Optimizer],
    *,
    new: Content = "copy",
    state: State = "copy",
    zero: Sequence[str] = (),
    example: ExampleInput | None = None,
) -> list[nn.Module]:
    """Grow a list to the blocks whose sources `order` names, and return the new ones; see `stack`, which checks it."""
    old, sources = list(block_list.modules), block_list.whole_order(order)
    # A block that the list holds several times is one block still.
    is_copy = [source in sources[:i] and old.count(old[source]) == 1 for i, source in enumerate(sources)]
    places_by_owner = _places_of_copies(block_list, sources, is_copy)
    fields = BlockFields(block_list)
    grown = [_copy_of(old[s], s, block_list) if copied else old[s] for s, copied in zip(sources, is_copy, strict=True)]
    added = [block for block, copied in zip(grown, is_copy, strict=True) if copied]
    outputs_before = [] if example is None else outputs(block_list.network, example)
    refilled = set[int]().union(*(_refill(block, new, zero) for block in added))
    unchanged = False
    try:
        fields.fill(grown, sources)
        outputs_after = [] if example is None else outputs(block_list.network, example)
        unchanged = are_equal(outputs_before, outputs_after)
    finally:
        if not unchanged:  # the example may also make the grown network raise
            fields.restore()
    if not unchanged:
        raise ValueError(
            f"stack: with {', '.join(zero)} of new blocks at zero {type(block_list.network).__name__} returns other "
            f"outputs than before on the example; name the last layer of each residual branch in zero=, or use "
            f"new='copy'"
        )
    origins = [old[source] for source in sources]
    for optimizer in optimizers_in(*optimizers):
        join_groups(optimizer, origins, grown)
        for origin, block in zip(origins, grown, strict=True):
            pairs = [(parameter, block.get_parameter(name)) for name, parameter in origin.named_parameters()]
            _move_state(optimizer, pairs, refilled=refilled, keep=state == "copy")
    for owner, places in places_by_owner:
        attach_at(owner, places)
    for i, (block, copied) in enumerate(zip(grown, is_copy, strict=True)):
        for name, module in block.named_modules() if copied else ():
            if isinstance(module, SeedSlot):
                module.name = f"{block_list.name}.{i}.{name}"
    return added


def shorten(block_list: BlockList, to: int) -> None:
    """Remove the last blocks of a list, down to `to` blocks. Optimizers still hold their parameters."""
    blocks, sources = list(block_list.modules), block_list.whole_order(range(to))
    BlockFields(block_list).fill([blocks[source] for source in sources], sources)


def listed_order(order: Order) -> list[int] | None:
    """Return the sources that an order lists, as ranges or one by one; None for a name. Raises ValueError otherwise."""
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


def _varying(
    block_list: BlockList, order: Sequence[int], index_names: set[tuple[str, str]], lists: Sequence[Sequence[Any]]
) -> list[str]:
    """Return the names of attributes that copies have otherwise than blocks that the class would build at their place.

    These are attributes that no state dict holds, that differ between the present blocks, and whose pattern the grown
    list does not continue. With windows in every second of four blocks, and `order` for the sources of eight, every
    second one of eight has one. Attributes with a block's index, as (module, attribute) in `index_names`, are left out,
    and those that settings with a value for each block, in `lists`, decide.
    """
    names, count, places = [], len(block_list.modules), range(block_list.skip_first, len(block_list.modules))
    # Some of these settings list the indices of blocks.
    kinds = [tuple(values[i] if len(values) == count else i in values for values in lists) for i in places]
    modules_of_blocks = [dict(block.named_modules()) for block in block_list.blocks]
    for module_name in {name: None for modules in modules_of_blocks for name in modules}:  # in order
        values_by_name = _values_outside_state_dicts([modules.get(module_name) for modules in modules_of_blocks])
        for name, values in values_by_name.items():
            if (module_name, name) in index_names or _continues(values, order):
                continue
            pairs = combinations(zip(kinds, values, strict=False), 2)
            if not lists or not all(_same(one, other) for (a, one), (b, other) in pairs if a == b):
                names.append(".".join(filter(None, (module_name, name))) or "their class")
    return names


def _values_outside_state_dicts(modules: Sequence[nn.Module | None]) -> dict[str, list[Any]]:
    """Return for each attribute that no state dict holds its value in each module; the name "" stands for the class."""
    present = [module for module in modules if module is not None]
    saved = {name for module in present for name in module._buffers.keys() - module._non_persistent_buffers_set}
    values: dict[str, list[Any]] = {
        "": [module if module is None else type_before_parametrizations(module) for module in modules]
    }
    for name in {name: None for module in present for name in (*vars(module), *module._buffers)}:  # in order
        if name not in STORAGE | saved | {"training"} and "hook" not in name:
            values[name] = [getattr(module, name, None) for module in modules]
    return values


def _continues(values: Sequence[Any], order: Sequence[int]) -> bool:
    """Return True if values of blocks repeat a pattern, at least twice, or are equal, and `order` continues this."""
    kinds = [next(k for k, other in enumerate(values) if _same(other, value)) for value in values]
    period = next(p for p in range(1, len(kinds) + 1) if all(kind == kinds[i % p] for i, kind in enumerate(kinds)))
    repeats = period == 1 or 2 * period <= len(kinds)
    return repeats and all(kinds[source] == kinds[i % period] for i, source in enumerate(order))


def _same(a: Any, b: Any) -> bool:
    """Return True if two settings are equal, or of a kind that is not compared, such as functions and modules."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)
    entries = chain.from_iterable(value if isinstance(value, list | tuple) else [value] for value in (a, b))
    return a is b or not all(isinstance(entry, str | int | float | type | None) for entry in entries) or a == b


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
    if new == "fresh":
        _try_fresh(copy_module(blocks[0]))


def _try_fresh(block: nn.Module) -> None:
    """Draw all parameters of a block anew, with random numbers that are put back. Raises ValueError if some are not
    reached, as with the hooks of `weight_norm` and of pruning, which compute the weight from others."""
    for parameter in filter(Tensor.is_floating_point, block.parameters()):
        parameter.detach().fill_(float("nan"))
    with torch.random.fork_rng({p.device.index for p in block.parameters() if p.is_cuda}):
        _refill(block, "fresh", ())
    for name, parameter in block.named_parameters():
        if bool(parameter.isnan().any()):
            raise ValueError(
                f"stack: reset_parameters does not reach {name!r} of a block, so that new='fresh' would copy it; use "
                f"'copy'"
            )


def _layers(block: nn.Module) -> list[str]:
    """Return the names of the modules of a block that have parameters of their own."""
    return [name for name, part in block.named_modules() if list(part.parameters(recurse=False))]


def _zeroed(block: nn.Module, zero: Sequence[str]) -> list[str]:
    """Return the names of the parameters of a block that `zero` names, or whose layers it names.

    The whole name of a parameter stands for it alone: `out.weight` is not `attention.out.weight`.
    """
    names = [name for name, _ in block.named_parameters()]
    endings = tuple(f".{end}" for end in zero if end not in names)

    def is_named(name: str) -> bool:
        layer = name.rpartition(".")[0]
        return name in zero or f".{name}".endswith(endings) or f".{layer}".endswith(endings)

    return [name for name in names if is_named(name)]


def _refill(block: nn.Module, new: Content, zero: Sequence[str]) -> set[int]:
    """Set layers of a new block to zero, or all of it to fresh values; return the `id` of each changed parameter."""
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
    """Return the `id` of each module, parameter and buffer of a block."""
    return {id(x) for x in (*block.modules(), *block.parameters(), *block.buffers())}


def _shared_with(block: nn.Module, block_list: BlockList) -> dict[int, Any]:
    """Return what a copy of a block must not copy, by `id`: a memo for `deepcopy`.

    This is what the block has in common with other blocks of the list, and all of the network outside of the block to
    which one of its attributes may refer, such as a configuration.
    """
    ids, modules = _ids(block), set(block.modules())
    ids_of_others = set().union(*(_ids(other) for other in block_list.modules if other is not block))
    memo: dict[int, Any] = {}
    for module in block_list.network.modules():
        for member in (module, *module._parameters.values(), *module._buffers.values()):
            if id(member) not in ids or id(member) in ids_of_others:
                memo[id(member)] = member
        if module not in modules or id(module) in ids_of_others:
            # Its attributes, such as a configuration, but for torch's tables of parts and of hooks.
            values = (value for name, value in vars(module).items() if name not in STORAGE and "hook" not in name)
            memo |= {id(value): value for value in values if id(value) not in ids}
    memo.pop(id(None), None)  # `deepcopy` takes None in a memo for an object that it has not copied
    return memo


def _copy_of(block: nn.Module, index: int, block_list: BlockList) -> nn.Module:
    """Return a copy of block `index` of a list, with empty slots. Raises ValueError if it cannot be copied."""
    memo = _shared_with(block, block_list)
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
            if id(value) not in memo and _refers_to(value, ids):
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

    A hook that refers to no part of the block is shared; `ids` has the `id` of each part. In place of the hooks of
    slots and of sharding, which each block has for itself, the copy gets `pass_on`, and the caller removes it.
    """
    hooks = [hook for part in block.modules() for hook in hooks_of(part)]
    left_out = {id(hook) for hook in hooks if isinstance(hook, SlotHook) or _is_of_sharding(hook)}
    return {
        id(hook): pass_on if id(hook) in left_out else hook
        for hook in hooks
        if id(hook) in left_out or not _refers_to(hook, ids)
    }


def _is_of_sharding(hook: Any) -> bool:
    """Return True if a hook is one by which torch shards a module: each block has its own."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def _copy_extras(source: nn.Parameter, target: nn.Parameter, ids: set[int]) -> None:
    """Give a new parameter the attributes and hooks of its source, unless it has such. Raises ValueError if a hook
    refers to the block of the source, which has parts with these `ids`."""
    if target is source:
        return
    for name, value in vars(source).items():
        # A tensor of its shape, such as a mask or an average, belongs to its values; other settings to the place.
        is_of_values = isinstance(value, Tensor) and value.shape == source.shape and id(value) not in ids
        if is_of_values and vars(target).get(name) is not value:
            vars(target)[name] = value.detach().clone()
        else:
            vars(target).setdefault(name, value)
    for table, add in (
        ("_backward_hooks", target.register_hook),
        ("_post_accumulate_grad_hooks", target.register_post_accumulate_grad_hook),
    ):
        for hook in (getattr(source, table, None) or {}).values() if not getattr(target, table, None) else ():
            if _refers_to(hook, ids):
                raise ValueError(
                    "stack: a hook on a gradient refers to its own block or parameter, so that a copy would have that "
                    "of the original; let it take the gradient or the parameter as its argument"
                )
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # one that waits for several parameters
                add(hook)


def _refers_to(value: Any, ids: set[int], depth: int = 0) -> bool:
    """Return True if a value, within `depth` containers, is or refers to an object with one of the `ids`."""
    if id(value) in ids:
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
    return any(_refers_to(content, ids, depth + 1) for content in inner)


def _places_of_copies(
    block_list: BlockList, sources: Sequence[int], is_copy: Sequence[bool]
) -> list[tuple[nn.Module, list[dict[str, Any]]]]:
    """Return by owner the places where copies get slots like their sources. Raises ValueError if a slot would move."""
    new_names, old_names = numbered(block_list.modules, len(sources)), list(block_list.modules._modules)
    places_by_owner: list[tuple[nn.Module, list[dict[str, Any]]]] = []  # an owner is a module with attached slots
    for owner, path in block_list.owners():
        old_prefixes = [".".join([*path, name]) for name in old_names]
        new_prefixes = [".".join([*path, name]) for name in new_names]
        places: list[dict[str, Any]] = []
        for place in attached_places(owner):
            module = place["module"]
            within = (k for k, prefix in enumerate(old_prefixes) if f"{module}.".startswith(f"{prefix}."))
            block = next(within, None)  # index of the block that has the slot; None: the slot is not in the list
            for i in [i for i, source in enumerate(sources) if source == block]:
                name = f"{new_prefixes[i]}{module.removeprefix(old_prefixes[sources[i]])}"
                if is_copy[i]:
                    places.append({**place, "module": name, "slot": name})
                elif i != block:
                    raise ValueError(
                        f"stack: slot {place['slot']!r} is in block {block}, which would become block {i}; grow "
                        f"with order='stack' or 'last', or before slots are attached"
                    )
        places_by_owner.append((owner, places))
    return places_by_owner


def warn_without_gradients(block_list: BlockList, added: Sequence[nn.Module], optimizers: Sequence[Optimizer]) -> None:
    """Warn after the next step of an optimizer if a block of `added` that it trains has no gradient then."""
    waiting = {i: block for i, block in enumerate(block_list.modules) if any(block is other for other in added)}
    judged: set[int] = set()  # optimizers by id: torch forbids that a hook removes itself before other hooks

    def judge(optimizer: Optimizer, *_: object) -> None:
        if id(optimizer) in judged:
            return
        held = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        if all(p.grad is None for p in held.values()):  # the step of another part of the training
            return
        judged.add(id(optimizer))
        idle = []
        for i, block in list(waiting.items()):
            learning = [p for p in block.parameters() if p.requires_grad and id(p) in held]
            if learning:
                del waiting[i]
            if learning and all(p.grad is None for p in learning):
                idle.append(i)
        if idle:
            warnings.warn(
                f"{block_list.name!r} has grown, but its new blocks {', '.join(map(str, idle))} got no gradient before "
                f"the next step: the forward pass of {type(block_list.network).__name__} does not run them",
                stacklevel=2,
            )

    for optimizer in hooked_optimizers(*optimizers):
        optimizer.register_step_post_hook(judge)


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
        name = next(_kept_per_parameter(optimizer, set(held)), None)
        if name is not None:
            raise ValueError(
                f"stack: {kind} keeps something for each parameter in {name!r}, where new ones cannot be added; "
                f"grow with the optimizer that it wraps, or make a new one afterwards"
            )


def _kept_per_parameter(optimizer: Optimizer, held: set[int]) -> Iterator[str]:
    """Yield the names of attributes and options, but for states, that keep something for each parameter in `held`."""
    shapes = [[p.shape for p in group["params"]] for group in optimizer.param_groups]
    attributes = {k: v for k, v in vars(optimizer).items() if k != "param_groups" and not isinstance(v, Optimizer)}
    options = [{**group, "params": None, "param_names": None} for group in optimizer.param_groups]
    for name, value in chain(attributes.items(), *(group.items() for group in options)):
        if any(value is table for table in _tables(optimizer)):
            continue
        value_shapes = [x.shape for x in iter_tensors(value)]
        has_shapes = value_shapes and (value_shapes in shapes or value_shapes == list(chain(*shapes)))
        is_flags = isinstance(value, list) and len(value) == len(held) >= FEWEST_FLAGS
        is_ids = isinstance(value, set | frozenset | list | tuple) and any(x in held for x in value if type(x) is int)
        if has_shapes or is_flags or is_ids or _refers_to(value, held):
            yield name


def _tables(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Return the dictionaries in which an optimizer keeps states by parameter: `state`, and others of its class."""
    attributes = [value for value in vars(optimizer).values() if value is not optimizer.state]
    by_parameter = (x for x in attributes if isinstance(x, dict) and any(isinstance(key, Tensor) for key in x))
    return [optimizer.state, *by_parameter]


def _move_state(
    optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]], *, refilled: set[int], keep: bool
) -> None:
    """Give the second parameter of each pair, the target, the optimizer's state of the first one; none without `keep`.

    Targets with other values than their source, whose `id` is in `refilled`, get none: a state may hold values of the
    parameter, as in schedule-free optimizers.
    """
    for source, target in pairs:
        for table in _tables(optimizer) if target is not source else ():
            table.pop(target, None)
            if keep and source in table and id(target) not in refilled:
                table[target] = copy.deepcopy(map_tensors(table[source], Tensor.detach))


class _Position(NamedTuple):
    """Position of a parameter in a list of blocks that has grown."""

    block: int  # index of its block, or of the first one if blocks share it
    name: str  # within the block


def join_groups(optimizer: Optimizer, origins: list[nn.Module], grown: list[nn.Module]) -> None:
    """Put parameters of blocks with a source into its groups, with names if these have some, and take them from others.

    `origins` has the source of each block of the list `grown`: for a block that stays as it is, the block itself.
    """
    positions: dict[int, _Position] = {}  # by id
    for i in reversed(range(len(grown))):  # from the last block on, so that a shared parameter is at the first one
        positions |= {id(parameter): _Position(i, name) for name, parameter in grown[i].named_parameters()}
    former_index: dict[int, int] = {}  # of each source, by id
    for block in origins:
        former_index.setdefault(id(block), len(former_index))
    for group in optimizer.param_groups:
        params, names = group["params"], group.get("param_names")
        blocks_in_order = [positions[id(p)].block for p in params if id(p) in positions]
        block_by_block = blocks_in_order == sorted(blocks_in_order)  # else all weights, then all biases, say
        for k, parameter in enumerate(params):
            if names is not None and id(parameter) in positions:
                i, name = positions[id(parameter)]
                names[k] = _renamed(names[k], name, before=former_index[id(grown[i])], after=i)
        order = {id(p): k for k, p in enumerate(params)}  # new parameters follow in the order of their sources
        source_names = list(names or ())
        for i, (origin, block) in enumerate(zip(origins, grown, strict=True)):
            named = sorted(origin.named_parameters(), key=lambda pair: order.get(id(pair[1]), 0))
            for name, source in named if block is not origin else ():
                target = block.get_parameter(name)
                held = next((k for k, p in enumerate(params) if p is target), None)
                if held is not None and id(source) not in order:  # of a present block, which changes its group
                    del params[held]
                    if names is not None:
                        del names[held]
                if target is source or held is not None or id(source) not in order:
                    continue
                index = 0  # behind the last parameter of this or an earlier block; of this name, if not block by block
                for k, position in enumerate(positions.get(id(p)) for p in params):
                    if position and position.block <= i and (block_by_block or position.name == name):
                        index = k + 1
                if names is not None:
                    source_name = source_names[order[id(source)]]
                    names.insert(index, _renamed(source_name, name, before=positions[id(source)].block, after=i))
                params.insert(index, target)


def _renamed(name: str, in_block: str, *, before: int, after: int) -> str:
    """Return `blocks.5.weight` for `blocks.2.weight`, where block 2 has become block 5; `in_block` is `weight`."""
    end = f"{before}.{in_block}"
    return f"{name.removesuffix(end)}{after}.{in_block}" if name.endswith(end) else f"{name}.{after}"


# Blocks that a class has built for a list that begins with fewer.


class _TakeOver(NamedTuple):
    """State of a take-over, by which one block, the target, gets the content of another, its source; ids are `id`s."""

    memo: dict[int, Any]  # for `deepcopy`: what is not copied, and the target's parts in place of the source's
    ids: set[int]  # modules, parameters and buffers that the source shares with no other block
    newly_shared: set[int]  # those that blocks share only since the network was built
    kept: set[int]  # modules, parameters and buffers of the target that stay as they are
    matched: set[int]  # modules of the source that have a counterpart in the target
    filled: dict[int, nn.Parameter]  # parameter of the target that has the values of one of the source
    pairs: list[tuple[nn.Parameter, nn.Parameter]]  # parameters of the source, and those of the target


class BuiltBlocks:
    """The blocks that a class has built for a list, which holds only the first ones while the network is shallow.

    Each block keeps the index for which it was built, with its settings and the buffers that training has not changed.
    Growth gives it the weights and the state of its source, and whatever has changed in the source since the blocks
    were built, such as hooks, rates of dropout, flags and modes.
    """

    def __init__(self, block_list: BlockList) -> None:
        self.block_list = block_list
        self.blocks = list(block_list.modules)  # all that the class has built, with those that are skipped
        self._fields = BlockFields(block_list)
        self.of_one_count = lists_of_one_count(block_list)
        # As the class has built them, by the `id` of each module: settings, names of children and parameters, classes.
        modules = [module for block in self.blocks for module in block.modules()]
        kept: dict[int, Tensor] = {}
        self._built_settings = {
            id(module): {name: _frozen(value, kept=kept) for name, value in vars(module).items() if name not in STORAGE}
            for module in modules
        }
        self._built_names = {id(module): {*module._modules, *module._parameters} for module in modules}
        self._built_classes = {id(module): type(module) for module in modules}
        # Buffers are compared by values: a network that is moved or cast has other tensors.
        self._built_buffers = {
            (id(module), name): buffer.clone()
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }
        holders = Counter(chain.from_iterable(map(_ids, self.blocks)))
        self._built_shared = {key for key, number in holders.items() if number > 1}  # ids of what blocks share

    @property
    def depth(self) -> int:
        """Number of blocks in the list now, without those that are skipped."""
        return len(self.block_list.modules) - self.block_list.skip_first - self.block_list.skip_last

    @property
    def most(self) -> int:
        """Number of blocks that the class has built, without those that are skipped."""
        return self.end - self.block_list.skip_first

    @property
    def end(self) -> int:
        """Index in `blocks` behind the last block that is not skipped."""
        return len(self.blocks) - self.block_list.skip_last

    def spare(self, to: int) -> list[nn.Module]:
        """Return the blocks that are not in the list yet, and will be when it has grown to `to` blocks."""
        present = set(map(id, self.block_list.modules))
        return [self.blocks[i] for i in self._indices(to) if id(self.blocks[i]) not in present]

    def _inside(self) -> set[int]:
        """Return the `id` of each module in a block."""
        return {id(module) for block in self.blocks for module in block.modules()}

    def _outside(self) -> list[nn.Module]:
        """Return the modules of the network that are in no block."""
        inside = self._inside()
        return [module for module in self.block_list.network.modules() if id(module) not in inside]

    def count_parameters(self, depths: Iterable[int]) -> dict[int, int]:
        """Return the number of parameters of the network for each number of blocks in the list."""
        outside = [p for module in self._outside() for p in module._parameters.values() if p is not None]
        counts: dict[int, int] = {}
        for depth in depths:
            blocks = nn.ModuleList(self.blocks[i] for i in self._indices(depth))
            distinct = {id(p): p for p in (*outside, *blocks.parameters())}
            counts[depth] = sum(p.numel() for p in distinct.values())
        return counts

    def run_elsewhere(self) -> str:
        """Return the attribute outside of the list that holds a block, which then runs at any depth; empty if none."""
        blocks = {id(block) for block in self.blocks}
        inside = self._inside()
        for module_name, module in self.block_list.network.named_modules():
            if module is self.block_list.modules or id(module) in inside:
                continue
            for name, value in {**vars(module), **module._modules}.items():
                is_searched = name not in STORAGE and "hook" not in name
                if is_searched and any(id(entry) in blocks for entry in _contents(value)):
                    return repr(".".join(filter(None, (module_name, name))))
        return ""

    def check_present(self) -> None:
        """Raise ValueError if the list has other blocks than those that its class has built."""
        indices = self._indices(self.depth) if self.depth <= self.most else []
        if [id(block) for block in self.block_list.modules] != [id(self.blocks[i]) for i in indices]:
            raise ValueError(
                f"stack: blocks of {self.block_list.name!r} were replaced or added after setup, so that new ones would "
                f"lack what they have; change them in __init__, setup or configure_model"
            )

    def show(self, depth: int) -> None:
        """Let the list hold the first `depth` blocks, and set indices and the network's settings accordingly."""
        indices = self._indices(depth)
        self._fields.fill([self.blocks[i] for i in indices], indices)

    def _indices(self, depth: int) -> list[int]:
        """Return the index in `blocks` of each block in a list of `depth` blocks, with those that are skipped."""
        return [*range(self.block_list.skip_first + depth), *range(self.end, len(self.blocks))]

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
        block_list, old = self.block_list, list(self.block_list.modules)
        self.check_present()
        sources = block_list.whole_order(sources_of(self.depth, to, order))
        targets = [self.blocks[i] for i in self._indices(to)]
        check_optimizers(optimizers, block_list.blocks)
        every = optimizers_in(*optimizers)
        outside = set[int]()  # parameters and buffers of the network that are in no block, by `id`
        for module in self._outside():
            outside.update(map(id, (*module._parameters.values(), *module._buffers.values())))
        present = outside.union(*map(_ids, old))
        holders = Counter(chain(outside, *map(_ids, self.blocks)))
        filled: set[int] = set()
        # From the last block on: no block is filled before those that take over its present content.
        for i in reversed(range(len(targets))):
            source, target = old[sources[i]], targets[i]
            if source is target:
                continue
            is_copy = sources[i] in sources[:i]
            # A block of the list keeps what it shares with others; a spare one keeps what the network has already.
            is_in_list = i < len(old) and old[i] is target
            kept = filled | {key for key in _ids(target) if (holders[key] > 1 if is_in_list else key in present)}
            pairs = self._take_over(target, source, kept)
            refilled = _refill(target, new, zero) if is_copy else set[int]()
            for optimizer in every:
                _move_state(optimizer, pairs, refilled=refilled, keep=not is_copy or state == "copy")
            filled |= _ids(target)
        for optimizer in every:
            join_groups(optimizer, [old[source] for source in sources], targets)
        self.show(to)
        return [i for i in range(len(targets)) if sources[i] in sources[:i]]

    def _take_over(
        self, target: nn.Module, source: nn.Module, kept: set[int]
    ) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give a block the content of its source, but for objects whose `id` is `kept`; return parameters in pairs."""
        memo = _shared_with(source, self.block_list)
        ids = _ids(source) - memo.keys()
        newly_shared = (_ids(source) & memo.keys()) - self._built_shared
        memo |= {key: tensor for key, tensor in computed_tensors(source).items() if key not in memo}
        matched = list(self._matched(source, target, newly_shared))
        for module, other in matched:
            memo[id(module)] = other
            for name, parameter in module._parameters.items():
                if name in other._parameters:
                    memo[id(parameter)] = other._parameters[name]
        memo |= _hooks_not_copied(source, ids)
        matched_ids = {id(module) for module, _ in matched}
        takeover = _TakeOver(memo, ids, newly_shared, kept, matched=matched_ids, filled={}, pairs=[])
        for module, other in matched:
            if isinstance(module, SeedSlot) or id(other) in kept:
                continue
            built_names = self._built_names.get(id(module), set())
            self._take_settings(other, module, takeover)
            self._take_children(other, module, takeover)
            self._take_parameters(other, module, takeover)
            self._take_buffers(other, module, kept)
            for taken, given in ((other._modules, module._modules), (other._parameters, module._parameters)):
                for name in (taken.keys() - given.keys()) & built_names:  # removed since the class built it
                    del taken[name]
            if type(module).get_extra_state is not nn.Module.get_extra_state:
                other.set_extra_state(copy.deepcopy(module.get_extra_state(), memo))
        return takeover.pairs

    def _take_children(self, target: nn.Module, source: nn.Module, takeover: _TakeOver) -> None:
        """Give a module the children of its source that were added or replaced since the class has built it.

        Other children are filled on their own. Their new parameters join `takeover.pairs`, for optimizers.
        """
        built_names = self._built_names.get(id(source), set())
        for name, child in source._modules.items():
            if child is None or child is target._modules.get(name) or id(child) in takeover.matched:
                continue
            if id(child) in takeover.newly_shared:
                target._modules[name] = child
            elif name not in built_names or self._built_classes.get(id(child)) is not type(child):
                target._modules[name] = copied = copy_module(child, takeover.memo)
                takeover.pairs.extend((p, copied.get_parameter(key)) for key, p in child.named_parameters())

    def _take_parameters(self, target: nn.Module, source: nn.Module, takeover: _TakeOver) -> None:
        """Give a module the values, the flags `requires_grad` and the hooks of its source's parameters."""
        for name, parameter in source._parameters.items():
            present = target._parameters.get(name)
            if parameter is None or present is parameter or id(present) in takeover.kept:
                continue
            if id(parameter) in takeover.newly_shared:
                target._parameters[name] = parameter
                continue
            if id(parameter) in takeover.filled:  # the parameter has two names in the block
                target._parameters[name] = takeover.filled[id(parameter)]
                continue
            if present is None or present.shape != parameter.shape:
                target._parameters[name] = present = copy.deepcopy(parameter)
            if hasattr(present, "device_mesh"):  # a DTensor, whose storage its sharding holds
                present.detach().copy_(parameter.detach())
            else:
                present.data = parameter.detach().clone()
            present.grad = None
            present.requires_grad_(parameter.requires_grad)
            _copy_extras(parameter, present, takeover.ids)
            takeover.filled[id(parameter)] = present
            takeover.pairs.append((parameter, present))

    def _take_buffers(self, target: nn.Module, source: nn.Module, kept: set[int]) -> None:
        """Give a module the buffers of its source, in place, but for those whose `id` is `kept`.

        A buffer that has not changed in the source since the network was built, such as a mask, stays as the class has
        built it at the target's place, or as absent as it is there.
        """
        for name, buffer in source._buffers.items():
            present = target._buffers.get(name)
            if buffer is None or present is buffer or id(present) in kept:
                continue
            is_own = name in target._buffers and self._is_computed(source, name)
            if is_own and not self._built_alike(source, target):
                continue
            if not self._has_changed(source, name):
                if present is not None:  # it keeps the values that the class gave it
                    present.data = present.to(buffer.device, buffer.dtype)
            elif present is None:
                target._buffers[name] = buffer.detach().clone()
            else:
                present.data = buffer.detach().clone()

    def _matched(self, source: nn.Module, target: nn.Module, shared: set[int]) -> Iterator[tuple[nn.Module, nn.Module]]:
        """Yield the modules of two blocks that have the same name in both: that of the source, and that of the target.

        Left out, with all below them, are modules that both blocks hold, those that blocks share only since the network
        was built (`shared`), and those that were replaced since by one of another type than the target has.
        """
        if source is target:
            return
        yield source, target
        for name, child in source._modules.items():
            other = target._modules.get(name)
            if child is None or other is None or id(child) in shared:
                continue
            if self._built_classes.get(id(child)) is type(child) or type(other) is type(child):
                yield from self._matched(child, other, shared)

    def _is_computed(self, module: nn.Module, name: str) -> bool:
        """Return True if a module has tensors in an attribute or a buffer that its class left empty, such as a mask."""
        if name in module._buffers:
            is_saved = name not in module._non_persistent_buffers_set
            return not is_saved and module._buffers[name] is not None and (id(module), name) not in self._built_buffers
        built = self._built_settings.get(id(module), {})
        is_filled = name in built and _is_empty(built[name])
        return is_filled and any(isinstance(x, Tensor) for x in _contents(vars(module)[name]))

    def _built_alike(self, source: nn.Module, target: nn.Module) -> bool:
        """Return True if the class has built two modules with the same settings and buffers, but for their index."""
        one, other = (self._built_settings.get(id(module), {}) for module in (source, target))
        for name in (one.keys() | other.keys()) - {field.name for field in self._fields.indices}:
            values = one.get(name), other.get(name)
            if any(map(_is_setting, values)) and values[0] != values[1]:
                return False
        for name in source._buffers:
            a, b = (self._built_buffers.get((id(module), name)) for module in (source, target))
            if a is not b and (a is None or b is None or not are_same(a, b)):
                return False
        return True

    def _has_changed(self, module: nn.Module, name: str) -> bool:
        """Return True if a buffer has other values than the class gave it."""
        now, built = module._buffers[name], self._built_buffers.get((id(module), name))
        if now is None or built is None:
            return True
        return not are_same(now, built)

    def _take_settings(self, target: nn.Module, source: nn.Module, takeover: _TakeOver) -> None:
        """Give a module its source's attributes that changed since they were built. Raises ValueError if it cannot."""
        source_built, present = self._built_settings.get(id(source), {}), vars(target)
        target_built, alike = self._built_settings.get(id(target), {}), self._built_alike(source, target)
        computes = any(self._is_computed(source, name) for name in (*vars(source), *source._buffers))
        for name, value in vars(source).items():
            is_shared = name in present and present[name] is value
            if name in STORAGE or name.startswith(SHARDING) or is_shared:
                continue
            # A target that was in the list, and has changed there itself, takes the setting of its source, too.
            target_changed = name in present and name in target_built and target_built[name] != _frozen(present[name])
            source_changed = name == "training" or name not in source_built or source_built[name] != _frozen(value)
            lacks_hooks = "hook" in name and not present.get(name)
            if not (target_changed or source_changed or lacks_hooks):
                continue
            # What a block has computed for its own window stays with it, and so does the length that it was for.
            is_key = type(value) in (int, float) and source_built.get(name, True) in (None, 0)
            if not alike and computes and (is_key or self._is_computed(source, name)):
                continue
            try:
                copied = copy.deepcopy(value, takeover.memo)
            except COPY_ERRORS as error:
                raise ValueError(f"stack: {name} of {type(source).__name__} cannot be copied: {error}") from error
            if isinstance(value, dict) and "hook" in name:
                tables = [table for key, table in present.items() if key.endswith("_hooks")]
                of_sharding = {key for table in tables for key, hook in table.items() if _is_of_sharding(hook)}
                copied = type(value)(
                    [(key, hook) for key, hook in present.get(name, {}).items() if key in of_sharding]
                    + [(key, hook) for key, hook in copied.items() if hook is not pass_on]
                )
            if _refers_to(copied, takeover.ids):
                raise ValueError(
                    f"stack: {name} of {type(source).__name__} holds a function that refers to its own block, so that "
                    f"a new block would run that one; make it a method, or take the module as its argument"
                )
            present[name] = copied
        for name in source_built.keys() - vars(source).keys():
            present.pop(name, None)


class _Values:
    """Tensor that is equal to another one with the same values, on any device and in the dtype of either."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Values) and are_same(self.tensor, other.tensor)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def are_same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have the same shape, and the same values in the dtype of one of them."""
    kinds = [(x.shape, x.is_floating_point(), x.is_complex()) for x in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    one = one.to(other.device)
    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)


def _is_empty(frozen: Any) -> bool:
    """Return True if `_frozen` has noted None, an empty container, or a tensor without entries."""
    if isinstance(frozen, _Values):
        return not frozen.tensor.numel()
    return frozen is None or frozen in ([], (list, []), (tuple, []), frozenset())


def _is_setting(frozen: Any) -> bool:
    """Return True if `_frozen` has noted a number, a text, None, a tensor, or a list of such."""
    if isinstance(frozen, tuple) and len(frozen) == 2 and isinstance(frozen[1], list):
        return all(map(_is_setting, frozen[1]))
    return isinstance(frozen, str | int | float | None | _Values)


def _frozen(value: Any, depth: int = 0, *, kept: dict[int, Tensor] | None = None) -> Any:
    """Return something that is equal later only if an attribute has not changed by then.

    `kept` has copies of tensors by `id`, and gets those that it lacks; without it tensors are not copied.
    """
    if isinstance(value, Tensor):
        # Of parameters and of tensors that cannot be compared, the object counts, and whether it was written to.
        is_odd = value.layout is not torch.strided or value.is_meta or value.is_nested or value.is_quantized
        if type(value) is not Tensor or is_odd:
            return id(value), 0 if value.is_inference() else value._version, value
        if kept is not None and id(value) not in kept:
            kept[id(value)] = value.detach().clone()
        return _Values(value if kept is None else kept[id(value)])
    if isinstance(value, set | frozenset):
        return frozenset(value)
    if isinstance(value, np.ndarray):
        return value.shape, value.tobytes()
    if depth < DEEPEST and isinstance(value, Mapping):
        return [(_frozen(k, depth + 1, kept=kept), _frozen(x, depth + 1, kept=kept)) for k, x in value.items()]
    if depth < DEEPEST and isinstance(value, list | tuple | deque):
        return type(value), [_frozen(x, depth + 1, kept=kept) for x in value]
    if isinstance(value, str | bytes | int | float | complex | None):
        return value
    if depth < DEEPEST and not isinstance(value, nn.Module | type | FunctionType | MethodType):
        return id(value), value, _frozen(getattr(value, "__dict__", {}), depth + 1, kept=kept)
    return id(value), value
