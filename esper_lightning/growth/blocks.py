"""Lists of like blocks in a network, and what the network keeps about the index and the number of its blocks."""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
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

OF_BLOCKS = re.compile("layer|block")
"""Pattern of a block's index in a numbered part of a list's only block; an expert's own index does not match it."""


class BlockList(NamedTuple):
    """A list of like blocks in a network. Blocks at its ends that differ may be skipped."""

    network: nn.Module
    name: str  # of the list in the network, as in `named_modules`
    modules: Blocks  # the whole list, with the skipped blocks
    skip_first: int = 0  # number of blocks at the beginning that are skipped
    skip_last: int = 0  # number of blocks at the end that are skipped

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that are like each other, without the skipped ones."""
        return list(self.modules)[self.skip_first : len(self.modules) - self.skip_last]

    def whole_order(self, order: Sequence[int]) -> list[int]:
        """Return the sources of the whole list from those of the other blocks; a skipped block is its own source."""
        first, last = range(self.skip_first), range(len(self.modules) - self.skip_last, len(self.modules))
        return [*first, *(self.skip_first + source for source in order), *last]

    def holders(self) -> Iterator[tuple[Any, list[str]]]:
        """Yield attributes and configurations, of modules on the way to the list and of the list, and configurations in
        its blocks, which may hold the number of blocks; each with the names from its module to the list."""
        for owner, path in self.owners():
            yield vars(owner), path
            yield from ((fields, path) for fields in self._configs(owner))
        yield vars(self.modules), []
        for part in self.modules.modules():
            yield from ((fields, []) for fields in self._configs(part))

    def _configs(self, module: nn.Module) -> Iterator[Any]:
        """Yield the settings in each configuration of a module, and in each inner one that may be about this list."""
        for attribute in CONFIGS:
            settings = _settings_in(getattr(module, attribute, None))
            yield settings
            for name, inner in settings.items():
                # An inner configuration is named after its part of the network, as in `vision_config`.
                part_words = {word.lower() for word in re.findall("[A-Z]?[a-z]+", str(name))} - CONFIG_WORDS
                if all(word in self.name for word in part_words) and not isinstance(inner, nn.Module):
                    yield _settings_in(inner)

    def owners(self) -> Iterator[tuple[nn.Module, list[str]]]:
        """Yield each module on the way from the network to the list, and the names from this module to the list."""
        path, modules = self.name.split("."), _named_modules(self.network)
        for i in range(len(path)):
            owner = modules[".".join(path[:i])]
            yield getattr(owner, "_orig_mod", owner), path[i:]


def _settings_in(config: Any) -> Any:
    """Return the settings of a configuration by name, whether it is a mapping or an object; empty if it is neither."""
    return config if isinstance(config, MutableMapping) else getattr(config, "__dict__", {})


@contextmanager
def errors_of(name: str) -> Iterator[None]:
    """Let ValueErrors of this package begin with the name of what the user has called: `stack`, `Stack` or `expand`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {str(error).removeprefix(f'{name}: ').removeprefix('stack: ')}") from None


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
        block_list = BlockList(network, path, blocks, chosen[0], len(blocks) - 1 - chosen[-1])
        _check_like(block_list)
    except ValueError as error:
        raise ValueError(f"{name!r} cannot grow: {error}; lists that can: {_growable(modules)}") from None
    return block_list


def _named_modules(network: nn.Module) -> dict[str, nn.Module]:
    """Return all modules by name, without the prefix that torch.compile adds to names within a compiled module."""
    named = network.named_modules(remove_duplicate=False)
    return {name.replace("_orig_mod.", ""): module for name, module in named}


def _growable(modules: Mapping[str, nn.Module]) -> str:
    """Return the names of the lists of like blocks among named modules, for an error message."""
    names = []
    for name, part in modules.items():
        if name and isinstance(part, Blocks) and len(part):
            with suppress(ValueError):
                _check_like(BlockList(part, "", part))
                names.append(name)
    return ", ".join(names) or "none"


def _check_like(block_list: BlockList) -> None:
    """Raise ValueError if the blocks of a list are not numbered, or not like each other."""
    names = list(block_list.modules._modules)
    if names != numbered(block_list.modules, len(names)):
        raise ValueError(f"blocks are called {', '.join(names)}; give them names that differ by their number")
    for i, block in enumerate(block_list.blocks, block_list.skip_first):
        if any(map(is_lazy, chain(block.parameters(), block.buffers()))):
            raise ValueError(f"block {i} has parameters without a shape yet; run the network once before")
        if _signature(block) != _signature(block_list.blocks[0]):
            raise ValueError(
                f"blocks {block_list.skip_first} and {i} differ in their parameters or shapes; grow a list of like "
                f"blocks, or leave out those that differ, as in '{block_list.name}[1:]'"
            )


def _signature(block: nn.Module) -> list[tuple[str, tuple[int, ...]]]:
    """Return name and shape of each tensor in a block's state dict; other buffers may change shape with the data."""
    tensors = [(name, tuple(parameter.shape)) for name, parameter in block.named_parameters(remove_duplicate=False)]
    for module_name, module in block.named_modules(remove_duplicate=False):
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors.append((f"{module_name}.{name}", tuple(buffer.shape)))
    return tensors


def numbered(modules: Blocks, count: int) -> list[str]:
    """Return `count` names that count on from the first name in a list: `layer_0`, `layer_1`, …"""
    first = next(iter(modules._modules))
    stem = first.rstrip(digits)
    return [f"{stem}{int(first.removeprefix(stem) or 0) + i}" for i in range(count)]


def depth_in_state(block_list: BlockList, state_dict: Mapping[str, Any], prefix: str) -> int:
    """Return the number of blocks of which a state dict has tensors, with keys that begin with `prefix` and the block.

    Skipped blocks are left out. A block without tensors counts if a later one has some: frozen blocks may be left out
    of checkpoints. Tensors of the list itself, beside its blocks, do not count.
    """
    first = next(iter(block_list.modules._modules))
    stem = first.rstrip(digits)
    names = {key.removeprefix(prefix).partition(".")[0] for key in state_dict if key.startswith(prefix)}
    numbers = [int(name.removeprefix(stem)) for name in names if re.fullmatch(rf"{re.escape(stem)}\d+", name)]
    count = max(numbers) + 1 - int(first.removeprefix(stem) or 0) if numbers else 0
    return count - block_list.skip_first - block_list.skip_last


class IndexField(NamedTuple):
    """Attribute in which each block of a list keeps its index."""

    part: str  # name within a block of the module that has the attribute; empty for the block itself
    name: str  # such as `layer_idx`
    first: int  # value in the first block of the list: 0, or 1 where blocks are counted from 1


def index_fields(modules: Blocks) -> list[IndexField]:
    """Return the attributes that hold, in every block of a list, the block's index: `layer_idx` of an attention.

    Values alone prove little in a list of one block or two: the attribute's name must match INDEX_NAME there.
    """
    fields, blocks = [], list(modules)
    modules_of_blocks = [dict(block.named_modules()) for block in blocks]
    for part, module in modules_of_blocks[-1].items():
        attributes_of_blocks = [vars(named[part]) for named in modules_of_blocks if part in named]
        if len(attributes_of_blocks) < len(blocks):  # a block lacks this module
            continue
        is_expert = len(blocks) == 1 and any(piece.isdigit() for piece in part.split("."))  # or another numbered part
        for name, last in vars(module).items():
            if type(last) is not int:
                continue
            first = last - len(blocks) + 1
            values = [attributes.get(name) for attributes in attributes_of_blocks]
            counts_up = first in (0, 1) and values == [*range(first, last + 1)] and bool not in map(type, values)
            is_named = INDEX_NAME.search(name) and (not is_expert or OF_BLOCKS.search(name))
            if counts_up and (len(blocks) > 2 or is_named):
                fields.append(IndexField(part, name, first))
    return fields


ValueOfSources = Callable[[Sequence[int]], Any]  # value of a setting, by the former index of each block's source


class CountField(NamedTuple):
    """Setting or attribute of a network that depends on its number of blocks."""

    holder: MutableMapping[str, Any]  # attributes of a module, or settings in a configuration, by name
    name: str
    value: ValueOfSources

    @property
    def per_block(self) -> bool:
        """True if the setting is a list with a value for each block; a list of `depths` has one for each stage."""
        return isinstance(self.holder[self.name], list | tuple) and "depth" not in self.name


def count_fields(block_list: BlockList) -> list[CountField]:
    """Return what the modules on the way to a list, and their configurations, keep about its number of blocks.

    These are numbers of blocks (`num_hidden_layers`, `n_layer`, `depth`, also `depths[k]` of the k-th stage), lists
    with a value for each block (`layer_types`), and lists of the indices of some blocks (`mlp_only_layers`).
    """
    fields: dict[tuple[int, str], CountField] = {}
    for holder, path in block_list.holders():
        words_of_name = {name: words for name in holder if (words := _count_words(str(name)))}
        values: dict[str, ValueOfSources] = {}
        for name, words in words_of_name.items():
            if (value := _value_of_sources(holder[name], words, path=path, block_list=block_list)) is not None:
                values[name] = value
        # If a decoder has its own setting, `num_decoder_layers`, a plain `num_layers` is about the encoder; if only the
        # encoder has its own, `encoder_layers`, the plain one is about the decoder.
        is_named = "decoder" in ".".join(path) and any("decoder" in words_of_name[name] for name in values)
        for name, value in values.items():
            if not is_named or words_of_name[name] - PLAIN_WORDS:
                fields.setdefault((id(holder), name), CountField(holder, name, value))
    return list(fields.values())


def lists_of_one_count(block_list: BlockList) -> list[str]:
    """Return the names of other lists of like blocks in the network whose number is in the same configuration.

    An example is a teacher that was built with the configuration of its student: it would follow the student's number.
    """
    attributes = {id(vars(module)) for module in block_list.network.modules()}
    of_configs = (field for field in count_fields(block_list) if id(field.holder) not in attributes)
    settings = {(id(field.holder), field.name) for field in of_configs}
    inside, names = set(block_list.modules.modules()), []
    for name, part in _named_modules(block_list.network).items():
        if isinstance(part, Blocks) and part not in inside and any(True for _ in part.parameters()):
            other = BlockList(block_list.network, name, part, block_list.skip_first, block_list.skip_last)
            with suppress(ValueError):
                _check_like(other)
                if settings & {(id(field.holder), field.name) for field in count_fields(other)}:
                    names.append(name)
    return names


def _count_words(name: str) -> set[str]:
    """Return the words of a setting's name; empty if the name cannot be about a number of blocks."""
    words = {word.lower() for word in re.findall(r"[A-Z]?[a-z]+", name)}
    return words if words & COUNT_WORDS or words == {"attention", "types"} else set()


def _value_of_sources(
    value: Any, words: set[str], *, path: Sequence[str], block_list: BlockList
) -> ValueOfSources | None:
    """Return how a setting depends on the sources of the blocks; None if it is not about this list.

    `value` is its present value, `words` are those of its name, and `path` the names from its module to the list.
    """
    count, list_name = len(block_list.modules), block_list.name
    if type(value) is int:
        is_of_list = value == count and all(word in list_name for word in words - PLAIN_WORDS)
        return len if is_of_list else None
    if type(value) not in (list, tuple) or not value:
        return None
    kind = type(value)
    if not all(word in list_name for word in words & {"encoder", "decoder"}):
        return None
    if all(type(number) is int for number in value):
        if words & {"depth", "depths"}:  # a number for each stage of a network
            stage = next((int(name) for name in path if name.isdigit()), len(value))
            if stage >= len(value) or value[stage] != count:
                return None
            return lambda sources: kind([*value[:stage], len(sources), *value[stage + 1 :]])
        increases = all(a < b for a, b in pairwise(value)) and 0 <= value[0] <= value[-1] < count
        if increases and (len(value) != count or count > 2):  # indices of some blocks
            return lambda sources: kind(i for i, source in enumerate(sources) if source in value)
    if len(value) == count and all(isinstance(entry, str | int | float | None) for entry in value):
        return lambda sources: kind(value[source] for source in sources)
    try:  # pairs of a pattern and how often it is repeated, as in GPT-Neo
        types = list(chain.from_iterable(list(pattern) * times for pattern, times in value))
    except (TypeError, ValueError):
        return None
    return (lambda sources: [[[types[source] for source in sources], 1]]) if len(types) == count else None


class BlockFields:
    """Attributes in which a network keeps the index of each block of a list, and settings with the number of blocks."""

    def __init__(self, block_list: BlockList) -> None:
        self.modules, self.counts = block_list.modules, count_fields(block_list)
        self.indices = index_fields(block_list.modules)
        self._first_blocks = dict(block_list.modules._modules)
        self._first_values = [field.holder[field.name] for field in self.counts]

    def fill(self, blocks: Sequence[nn.Module], sources: Sequence[int]) -> None:
        """Fill the list with blocks, in place, and set their indices and the network's settings about their number.

        `sources` has the source of each block, by the index that it had when this object was made.
        """
        self._fill(dict(zip(numbered(self.modules, len(blocks)), blocks, strict=True)))
        self.set_counts(sources)

    def restore(self) -> None:
        """Undo `fill`: list, indices and settings are again as they were when this object was made."""
        self._fill(self._first_blocks)
        for field, value in zip(self.counts, self._first_values, strict=True):
            field.holder[field.name] = value

    def _fill(self, blocks: Mapping[str, Any]) -> None:
        self.modules._modules.clear()
        self.modules._modules.update(blocks)
        for i, block in enumerate(self.modules):
            for field in self.indices:
                setattr(block.get_submodule(field.part), field.name, field.first + i)

    def set_counts(self, sources: Sequence[int]) -> None:
        """Set the network's settings for a list whose blocks have these sources; the list itself stays as it is."""
        for field in self.counts:
            field.holder[field.name] = field.value(sources)
