"""Growth in depth by copies of trained blocks (https://arxiv.org/abs/2405.15319)."""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations
from torch.optim import Optimizer

from esper_lightning.growth.attach import attach_at, attached_places
from esper_lightning.growth.block_optimizers import (
    check_optimizers,
    join_groups,
    move_state,
    warn_without_gradients,
)
from esper_lightning.growth.block_parts import (
    STORAGE,
    copy_extras,
    hooks_not_copied,
    ids_of,
    kept_elsewhere,
    refers_to,
    shared_with,
)
from esper_lightning.growth.blocks import (
    BlockFields,
    BlockList,
    errors_of,
    find_blocks,
    lists_of_one_count,
    numbered,
)
from esper_lightning.growth.param_groups import optimizers_in
from esper_lightning.growth.residual import are_equal, branch_ends, outputs
from esper_lightning.growth.slot import SeedSlot, pass_on
from esper_lightning.runtime.nested import ExampleInput, copy_module

OrderName = Literal["stack", "interleave", "last", "middle"]

Order = OrderName | str | Sequence[int]
"""Sources of the blocks of a list that has grown: by a name, as ranges (`"0-3, 2-5"`), or one by one."""

Content = Literal["copy", "zero", "fresh"]

State = Literal["copy", "reset"]


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
    refilled = set[int]().union(*(refill(block, new, zero) for block in added))
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
            move_state(optimizer, pairs, refilled=refilled, keep=state == "copy")
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
        refill(block, "fresh", ())
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


def refill(block: nn.Module, new: Content, zero: Sequence[str]) -> set[int]:
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


def _copy_of(block: nn.Module, index: int, block_list: BlockList) -> nn.Module:
    """Return a copy of block `index` of a list, with empty slots. Raises ValueError if it cannot be copied."""
    memo = shared_with(block, block_list)
    ids = ids_of(block) - memo.keys()
    memo |= hooks_not_copied(block, ids)
    try:
        copied = copy_module(block, memo)
    except ValueError as error:
        raise ValueError(f"stack: block {index}: {error}") from error
    for name, part in copied.named_modules():
        for attribute, value in vars(part).items():
            if "hook" in attribute and isinstance(value, dict):
                for key in [key for key, hook in value.items() if hook is pass_on]:
                    del value[key]
            if id(value) not in memo and refers_to(value, ids):
                raise ValueError(
                    f"stack: {attribute} of {name or 'a block'} ({type(part).__name__}) holds a function that refers "
                    f"to block {index}, so that a copy would run the original; make it a method, or take the module "
                    f"as its argument"
                )
        if isinstance(part, SeedSlot):
            part.empty()
    for name, parameter in block.named_parameters():
        copy_extras(parameter, copied.get_parameter(name), ids)
    return copied


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
