"""Parts of blocks: what blocks share, what a copy takes along, and what else in the network holds them."""

from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType
from typing import Any
from weakref import ref

from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth.blocks import BlockList, Blocks
from esper_lightning.growth.slot import SlotHook, pass_on
from esper_lightning.runtime.nested import hooks_of

SHARDING = "__composable_api"
"""Beginning of attributes in which torch keeps how it shards a module, such as by `fully_shard`."""

STORAGE = {"_parameters", "_buffers", "_modules", "_compiled_call_impl"}
"""Attributes of a module that are no settings of it: its parts, and its compiled form."""

CONTAINERS = (dict, list, tuple, set, deque, ValuesView)

MOST_PARTS = 100_000
"""Most entries of a container in which parts of blocks are looked for; one with more holds data."""

DEEPEST = 4  # levels of nested containers and objects in which settings of a block are looked for


def ids_of(block: nn.Module) -> set[int]:
    """Return the `id` of each module, parameter and buffer of a block."""
    return {id(x) for x in (*block.modules(), *block.parameters(), *block.buffers())}


def shared_with(block: nn.Module, block_list: BlockList) -> dict[int, Any]:
    """Return what a copy of a block must not copy, by `id`: a memo for `deepcopy`.

    This is what the block has in common with other blocks of the list, and all of the network outside of the block to
    which one of its attributes may refer, such as a configuration.
    """
    ids, modules = ids_of(block), set(block.modules())
    ids_of_others = set().union(*(ids_of(other) for other in block_list.modules if other is not block))
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


def hooks_not_copied(block: nn.Module, ids: set[int]) -> dict[int, Any]:
    """Return the entries of a memo for `deepcopy` by which hooks of a block are not copied.

    A hook that refers to no part of the block is shared; `ids` has the `id` of each part. In place of the hooks of
    slots and of sharding, which each block has for itself, the copy gets `pass_on`, and the caller removes it.
    """
    hooks = [hook for part in block.modules() for hook in hooks_of(part)]
    left_out = {id(hook) for hook in hooks if isinstance(hook, SlotHook) or is_of_sharding(hook)}
    return {
        id(hook): pass_on if id(hook) in left_out else hook
        for hook in hooks
        if id(hook) in left_out or not refers_to(hook, ids)
    }


def is_of_sharding(hook: Any) -> bool:
    """Return True if a hook is one by which torch shards a module: each block has its own."""
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def copy_extras(source: nn.Parameter, target: nn.Parameter, ids: set[int]) -> None:
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
            if refers_to(hook, ids):
                raise ValueError(
                    "stack: a hook on a gradient refers to its own block or parameter, so that a copy would have that "
                    "of the original; let it take the gradient or the parameter as its argument"
                )
            if not str(getattr(hook, "__module__", "")).startswith("torch."):  # one that waits for several parameters
                add(hook)


def refers_to(value: Any, ids: set[int], depth: int = 0) -> bool:
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
    return any(refers_to(content, ids, depth + 1) for content in inner)


def attributes_outside(block_list: BlockList, inside: Container[int]) -> Iterator[tuple[str, Any]]:
    """Yield names and values of the attributes and children of a network's modules.

    The list itself and the modules whose `id` is in `inside` are left out.
    """
    for module_name, module in block_list.network.named_modules():
        if module is block_list.modules or id(module) in inside:
            continue
        for name, value in {**vars(module), **module._modules}.items():
            if name not in STORAGE and "hook" not in name:
                yield ".".join(filter(None, (module_name, name))), value


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
    holders = Counter(chain.from_iterable(map(ids_of, {*block_list.modules, *blocks})))
    own = [{key for key in ids_of(block) if holders[key] == 1} for block in blocks]
    attributes = list(attributes_outside(block_list, holders))
    for name, module in block_list.network.named_modules():
        is_container = isinstance(module, Blocks | nn.ModuleDict | nn.ParameterList | nn.ParameterDict)
        if is_container and module is not block_list.modules and id(module) not in holders:
            attributes.append((name, [*module._modules.values(), *module._parameters.values()]))
    for other in others:
        attributes += [(f"{type(other).__name__}.{name}", value) for name, value in vars(other).items()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    found = []
    for name, value in attributes:
        if isinstance(value, CONTAINERS):
            held = {id(x) for x in contents_of(value, left_out=groups) if id(x) in holders}
            found.append((name, [not held.isdisjoint(ids) for ids in own]))
    return [(name, of_blocks) for name, of_blocks in found if any(of_blocks)]


def contents_of(value: Any, left_out: Sequence[Any] = ()) -> Iterator[Any]:
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
