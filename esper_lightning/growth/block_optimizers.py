"""Parameters of new blocks in the groups and the states of optimizers."""

import copy
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth.block_parts import refers_to
from esper_lightning.growth.blocks import BlockList
from esper_lightning.growth.param_groups import hooked_optimizers, optimizers_in
from esper_lightning.runtime.nested import iter_tensors, map_tensors

FLAT_OPTIMIZERS = ("LBFGS", "ZeroRedundancyOptimizer")
"""Optimizers that keep their parameters elsewhere than in their groups, too."""

FEWEST_FLAGS = 9
"""Fewest entries of a list in an optimizer, one for each parameter, by which it is not taken for other settings."""


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
        if has_shapes or is_flags or is_ids or refers_to(value, held):
            yield name


def _tables(optimizer: Optimizer) -> list[dict[Any, Any]]:
    """Return the dictionaries in which an optimizer keeps states by parameter: `state`, and others of its class."""
    attributes = [value for value in vars(optimizer).values() if value is not optimizer.state]
    by_parameter = (x for x in attributes if isinstance(x, dict) and any(isinstance(key, Tensor) for key in x))
    return [optimizer.state, *by_parameter]


def move_state(optimizer: Optimizer, pairs: Iterable[tuple[Tensor, Tensor]], *, refilled: set[int], keep: bool) -> None:
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
    """Put parameters of blocks that have a source into the groups of their sources, and remove them from other groups.

    Where groups have names of parameters, these follow. `origins` has the source of each block of the list `grown`: for
    a block that stays as it is, the block itself.
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
