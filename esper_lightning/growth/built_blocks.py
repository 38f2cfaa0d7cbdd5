"""Blocks that a class has built for a list, which begins with fewer and grows to all of them."""

import copy
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from esper_lightning.growth.block_optimizers import check_optimizers, join_groups, move_state
from esper_lightning.growth.block_parts import (
    DEEPEST,
    SHARDING,
    STORAGE,
    attributes_outside,
    contents_of,
    copy_extras,
    hooks_not_copied,
    ids_of,
    is_of_sharding,
    refers_to,
    shared_with,
)
from esper_lightning.growth.blocks import BlockFields, BlockList, lists_of_one_count
from esper_lightning.growth.param_groups import optimizers_in
from esper_lightning.growth.slot import SeedSlot, pass_on
from esper_lightning.growth.stack import Content, Order, State, refill, sources_of
from esper_lightning.runtime.nested import COPY_ERRORS, computed_tensors, copy_module


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
        holders = Counter(chain.from_iterable(map(ids_of, self.blocks)))
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
        for name, value in attributes_outside(self.block_list, self._inside()):
            if any(id(entry) in blocks for entry in contents_of(value)):
                return repr(name)
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
        present = outside.union(*map(ids_of, old))
        holders = Counter(chain(outside, *map(ids_of, self.blocks)))
        filled: set[int] = set()
        # From the last block on: no block is filled before those that take over its present content.
        for i in reversed(range(len(targets))):
            source, target = old[sources[i]], targets[i]
            if source is target:
                continue
            is_copy = sources[i] in sources[:i]
            # A block of the list keeps what it shares with others; a spare one keeps what the network has already.
            is_in_list = i < len(old) and old[i] is target
            kept = filled | {key for key in ids_of(target) if (holders[key] > 1 if is_in_list else key in present)}
            pairs = self._take_over(target, source, kept)
            refilled = refill(target, new, zero) if is_copy else set[int]()
            for optimizer in every:
                move_state(optimizer, pairs, refilled=refilled, keep=not is_copy or state == "copy")
            filled |= ids_of(target)
        for optimizer in every:
            join_groups(optimizer, [old[source] for source in sources], targets)
        self.show(to)
        return [i for i in range(len(targets)) if sources[i] in sources[:i]]

    def _take_over(
        self, target: nn.Module, source: nn.Module, kept: set[int]
    ) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Give a block the content of its source, but for objects whose `id` is `kept`; return parameters in pairs."""
        memo = shared_with(source, self.block_list)
        ids = ids_of(source) - memo.keys()
        newly_shared = (ids_of(source) & memo.keys()) - self._built_shared
        memo |= {key: tensor for key, tensor in computed_tensors(source).items() if key not in memo}
        matched = list(self._matched(source, target, newly_shared))
        for module, other in matched:
            memo[id(module)] = other
            for name, parameter in module._parameters.items():
                if name in other._parameters:
                    memo[id(parameter)] = other._parameters[name]
        memo |= hooks_not_copied(source, ids)
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
            copy_extras(parameter, present, takeover.ids)
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
        return is_filled and any(isinstance(x, Tensor) for x in contents_of(vars(module)[name]))

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
                of_sharding = {key for table in tables for key, hook in table.items() if is_of_sharding(hook)}
                copied = type(value)(
                    [(key, hook) for key, hook in present.get(name, {}).items() if key in of_sharding]
                    + [(key, hook) for key, hook in copied.items() if hook is not pass_on]
                )
            if refers_to(copied, takeover.ids):
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
