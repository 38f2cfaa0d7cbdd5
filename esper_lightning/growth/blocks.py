"""Lists of like blocks in a network, and what the network keeps about the index and the number of its blocks."""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from itertools import chain, pairwise
from string import digits
from typing import Any, NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

Blocks = nn.ModuleList | nn.Sequential

CONFIGS = ("config", "_config", "configuration", "cfg", "conf", "args", "model_args", "params", "hps", "opt")
"""Attributes in which modules keep the settings that they were built with."""

COUNT_WORDS = {"layer", "layers", "nlayer", "nlayers", "block", "blocks", "nblocks", "depth", "depths"}
"""One of these words is in the name of a setting that holds a number of blocks, or a value for each block."""

CONFIG_WORDS = {"config", "configuration", "cfg", "conf", "args", "params", "model", "net", "network"}
"""Words that do not say of which part of a network a configuration within another one is, unlike `vision`."""

PLAIN_WORDS = COUNT_WORDS | {"num", "n", "number", "of", "hidden", "total"}
"""Words that do not say of which list of a network a number of blocks is, unlike `decoder` in `num_decoder_layers`."""

INDEX_NAME = re.compile(
    r"^(idx|index|i|layer|block|depth|level|place|position|number)$|(?<!padding)_(idx|index)$"
    r"|^(layer|block)\w*(id|number|num|no)$"
)
"""Name of an attribute that holds a block's index, where one block or two give too little other evidence."""


class BlockList(NamedTuple):
    """A list of blocks in a network, of which some at its ends may be left out."""

    network: nn.Module
    name: str
    """Name of the list in the network, as in `named_modules`."""
    modules: Blocks
    """The whole list."""
    before: int = 0
    """Number of blocks at the beginning that are left out."""
    behind: int = 0
    """Number of blocks at the end that are left out."""

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are like each other, without those that are left out."""
        return list(self.modules)[self.before : len(self.modules) - self.behind]

    def whole_order(self, order: Sequence[int]) -> list[int]:
        """Return the source of each block of the whole list for the sources of the blocks that are not left out."""
        first, last = range(self.before), range(len(self.modules) - self.behind, len(self.modules))
        return [*first, *(self.before + source for source in order), *last]

    def holders(self) -> Iterator[tuple[Any, list[str]]]:
        """Yield what may hold the number of blocks: attributes and configurations of the modules on the way to the
        list, of the list, and configurations of its blocks; each with the names from there to the list."""
        for owner, path in self.owners():
            yield vars(owner), path
            yield from ((fields, path) for fields in self._configs(owner))
        yield vars(self.modules), []
        for part in self.modules.modules():
            yield from ((fields, []) for fields in self._configs(part))

    def _configs(self, module: nn.Module) -> Iterator[Any]:
        for config in (getattr(module, name, None) for name in CONFIGS):
            fields = config if isinstance(config, MutableMapping) else getattr(config, "__dict__", {})
            yield fields
            for name, inner in fields.items():
                words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", str(name))} - CONFIG_WORDS
                if all(word in self.name for word in words) and not isinstance(inner, nn.Module):
                    yield inner if isinstance(inner, MutableMapping) else getattr(inner, "__dict__", {})

    def owners(self) -> Iterator[tuple[nn.Module, list[str]]]:
        """Yield each module on the way from the network to the list, and the names from there to the list."""
        parts, named = self.name.split("."), _named_modules(self.network)
        for i in range(len(parts)):
            owner = named[".".join(parts[:i])]
            yield getattr(owner, "_orig_mod", owner), parts[i:]


def find_blocks(network: nn.Module, name: str) -> BlockList:
    """Return the list of blocks called `name`. `encoder.block[1:]` leaves out the first block of `encoder.block`.

    Raises ValueError if there is no such list, or if its blocks are not numbered or differ in parameters or shapes.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(
            "stack: name the list of blocks within its network, as in stack(network, 'model.layers', to=6); the list "
            "alone knows neither the configuration nor the other parts of the network"
        )
    match = re.fullmatch(r"(.+?)(\[(-?\d*):(-?\d*)\])?", name)
    assert match is not None, "any text that is not empty"
    path, sliced, start, stop = match.groups()
    modules = _named_modules(network)
    if path not in modules:
        raise ValueError(f"there is no {path!r} in {type(network).__name__}; lists in it: {_growable(modules)}")
    part = modules[path]
    blocks: Any = getattr(part, "_orig_mod", part)  # compiled
    try:
        if not isinstance(blocks, Blocks) or len(blocks) == 0:
            kind = type(part).__name__
            raise ValueError(f"it must be an nn.ModuleList or nn.Sequential that is not empty, got {kind}")
        chosen = range(len(blocks))[slice(int(start or 0), int(stop) if stop else None)]
        if not chosen:
            raise ValueError(f"{sliced} of its {len(blocks)} blocks is empty")
        found = BlockList(network, path, blocks, chosen[0], len(blocks) - 1 - chosen[-1])
        _check_like(found)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot grow: {error}; lists that can: {_growable(modules)}") from None
    return found


def _named_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name; a compiled module has its names in a module within it."""
    return {k.replace("_orig_mod.", ""): part for k, part in network.named_modules(remove_duplicate=False)}


def _growable(modules: Mapping[str, nn.Module]) -> str:
    """Return the names of the lists of like blocks among named modules, for an error message."""
    names = []
    for name, part in modules.items():
        if name and isinstance(part, Blocks) and len(part):
            with suppress(ValueError):
                _check_like(BlockList(part, "", part))
                names.append(name)
    return ", ".join(names) or "none"


def _check_like(found: BlockList) -> None:
    """Raise ValueError if the blocks of a list are not numbered, or not like each other."""
    names = list(found.modules._modules)
    if names != numbered(found.modules, len(names)):
        raise ValueError(f"blocks are called {', '.join(names)}; give them names that differ by their number")
    for i, block in enumerate(found.blocks, found.before):
        if any(map(is_lazy, chain(block.parameters(), block.buffers()))):
            raise ValueError(f"block {i} has parameters without a shape yet; run the network once before")
        if _signature(block) != _signature(found.blocks[0]):
            raise ValueError(
                f"blocks {found.before} and {i} differ in their parameters or shapes; grow a list of like blocks, or "
                f"leave out those that differ, as in 'blocks[1:]'"
            )


def _signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of what a state dict holds; other buffers may change their shape with the data."""
    tensors = [(name, tuple(x.shape)) for name, x in block.named_parameters(remove_duplicate=False)]
    for name, part in block.named_modules(remove_duplicate=False):
        kept = {key: x for key, x in part._buffers.items() if key not in part._non_persistent_buffers_set}
        tensors += [(f"{name}.{key}", tuple(x.shape)) for key, x in kept.items() if x is not None]
    return tensors


def numbered(modules: Blocks, count: int) -> list[str]:
    """Return `count` names that begin with the first name of a list: `layer_0`, `layer_1`, …"""
    first = next(iter(modules._modules))
    stem = first.rstrip(digits)
    return [f"{stem}{int(first.removeprefix(stem) or 0) + i}" for i in range(count)]


class IndexField(NamedTuple):
    """Attribute in which each block of a list keeps its index."""

    part: str
    """Name of the part of a block that has it, empty for the block."""
    name: str
    first: int
    """Its value in the first block of the list: 0, or 1 where blocks are counted from 1."""


def index_fields(modules: Blocks) -> list[IndexField]:
    """Return the attributes that hold, in every block of a list, the block's index: `layer_idx` of an attention.

    Where the list has one block or two, the attribute's name must say so, too.
    """
    fields, blocks = [], list(modules)
    parts = [dict(block.named_modules()) for block in blocks]
    for part, module in parts[-1].items():
        owners = [vars(named[part]) for named in parts if part in named]
        if len(owners) < len(blocks):
            continue
        for name, last in vars(module).items():
            first = last - len(blocks) + 1 if type(last) is int else -1
            values = [attributes.get(name) for attributes in owners]
            counts = first in (0, 1) and values == [*range(first, last + 1)] and bool not in map(type, values)
            if counts and (len(blocks) > 2 or INDEX_NAME.search(name)):
                fields.append(IndexField(part, name, first))
    return fields


class CountField(NamedTuple):
    """Setting or attribute of a network that depends on its number of blocks."""

    holder: MutableMapping[str, Any]
    name: str
    value: Callable[[Sequence[int]], Any]
    """Function of the source of each block, by the blocks that were there when the field was found."""

    @property
    def per_block(self) -> bool:
        """True if it is a list with a value for each block; a list of `depths` has one for each stage."""
        return isinstance(self.holder[self.name], list | tuple) and "depth" not in self.name


def count_fields(found: BlockList) -> list[CountField]:
    """Return what the modules on the way to a list, and their configurations, keep about its number of blocks.

    These are numbers of blocks (`num_hidden_layers`, `n_layer`, `depth`, also `depths[k]` of the k-th stage), lists
    with a value for each block (`layer_types`), and lists of the indices of some blocks (`mlp_only_layers`).
    """
    fields: dict[tuple[int, str], CountField] = {}
    for holder, path in found.holders():
        named = {name: words for name in holder if (words := _count_words(str(name)))}
        values = {name: _value_by_order(holder[name], words, path, found) for name, words in named.items()}
        values = {name: value for name, value in values.items() if value is not None}
        # `num_layers` beside `num_decoder_layers` is that of another list; beside `encoder_layers` it is the same.
        others = "decoder" in ".".join(path) and any("decoder" in named[name] for name in values)
        for name, value in values.items():
            if not others or named[name] - PLAIN_WORDS:
                fields.setdefault((id(holder), name), CountField(holder, name, value))
    return list(fields.values())


def _count_words(name: str) -> set[str]:
    """Return the words of a name that may speak of blocks; none for another one."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
    return words if words & COUNT_WORDS or words == {"attention", "types"} else set()


def _value_by_order(
    value: Any, words: set[str], path: Sequence[str], found: BlockList
) -> Callable[[Sequence[int]], Any] | None:
    """Return how a setting depends on the sources of the blocks; None if it is not about this list."""
    count, way = len(found.modules), found.name
    if type(value) is int:
        ours = value == count and all(word in way for word in words - PLAIN_WORDS)
        return len if ours else None
    if type(value) not in (list, tuple) or not value:
        return None
    kind = type(value)
    if not all(word in way for word in words & {"encoder", "decoder"}):
        return None
    if all(type(x) is int for x in value):
        if words & {"depth", "depths"}:  # a number for each stage of a network
            stage = next((int(part) for part in path if part.isdigit()), len(value))
            if stage >= len(value) or value[stage] != count:
                return None
            return lambda order: kind([*value[:stage], len(order), *value[stage + 1 :]])
        increases = all(a < b for a, b in pairwise(value)) and 0 <= value[0] <= value[-1] < count
        if increases and (len(value) != count or count > 2):  # indices of some blocks
            return lambda order: kind(i for i, source in enumerate(order) if source in value)
    if len(value) == count and all(isinstance(x, str | int | float | None) for x in value):
        return lambda order: kind(value[source] for source in order)
    try:  # pairs of a pattern and how often it is repeated, as in GPT-Neo
        types = list(chain.from_iterable(list(pattern) * times for pattern, times in value))
    except (TypeError, ValueError):
        return None
    return (lambda order: [[[types[source] for source in order], 1]]) if len(types) == count else None


class BlockFields:
    """Attributes in which a network keeps the index of each block of a list, and settings with the number of blocks."""

    def __init__(self, found: BlockList) -> None:
        self.modules, self.indices, self.counts = found.modules, index_fields(found.modules), count_fields(found)
        self._named = dict(found.modules._modules)
        self._values = [field.holder[field.name] for field in self.counts]

    def fill(self, blocks: Sequence[nn.Module], sources: Sequence[int]) -> None:
        """Fill the list with blocks, in place, and tell them and the network; names such as `layer_0` are continued.

        Args:
            blocks: All blocks of the list.
            sources: Source of each, by the blocks that were there when this object was made.
        """
        names = numbered(self.modules, len(blocks))
        self.modules._modules.clear()
        for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
            self.modules.add_module(name, block)
            for field in self.indices:
                setattr(block.get_submodule(field.part), field.name, field.first + i)
        self.set_counts(sources)

    def restore(self) -> None:
        """Undo `fill`: list, indices and settings are again as they were when this object was made."""
        self.modules._modules.clear()
        self.modules._modules.update(self._named)
        for i, block in enumerate(self._named.values()):
            for field in self.indices:
                setattr(block.get_submodule(field.part), field.name, field.first + i)
        for field, value in zip(self.counts, self._values, strict=True):
            field.holder[field.name] = value

    def set_counts(self, sources: Sequence[int]) -> None:
        """Tell the network the source of each block, without a change of the list."""
        for field in self.counts:
            field.holder[field.name] = field.value(sources)
