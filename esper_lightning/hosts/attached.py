"""Hosts made from any network by attaching slots behind its modules."""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn

from esper_lightning.growth.attach import attach_at, attach_slots, attached_places
from esper_lightning.growth.blocks import find_blocks
from esper_lightning.growth.depth import depth_slots
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.runtime.registry import import_object

CPU = torch.device("cpu")
"""Device for trial networks; the host itself may be on the meta device, which has no values."""

TRIAL_BATCH_SIZE = 2
"""Batch size of a trial forward pass; with 1 the batch axis would be ambiguous."""

IMAGE_AXES = 4
"""Axes of a batch of images, [B, C, H, W]."""

MAX_RNG_SEED = 2**62
"""Upper bound of RNG seeds for torch's global generator, from which network constructors draw."""


class Attached(nn.Module):
    """Host made from any network. Every episode begins with weights drawn by the network's own constructor.

    Args:
        input_shape: Shape of one input.
        outputs: Number of classes.
        network: Import path of the class or function that makes the network, as `torchvision.models.resnet18`.
        slots: Names of modules, as in `named_modules`, behind which seeds may grow; see `attach_slots`.
        settings: Keyword arguments for `network`.
        classes_as: Name of the argument that takes the number of classes. None: no such argument is passed.
        tokens: True if inputs are token indices (int64) instead of real numbers.
        isolate: Detach the seeds' inputs until they are fossilized (`SeedSlot.detach_input`).
        channels_last: The subset of `slots` whose features have shape [B, H, W, C].
        memory_format: Format in memory of the features of images: `channels_last` [B, H, W, C], or `contiguous`
            [B, C, H, W]. The input is converted; layers and seeds take over its format. Parameters keep theirs.
        depth: Largest number of blocks of lists of like blocks, by name of the list, as `{"encoder.layers": 8}`. The
            network builds the first ones, and copies may be added: at `encoder.layers.stack1` …
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        outputs: int,
        *,
        network: str,
        slots: list[str] | None = None,
        settings: dict[str, Any] | None = None,
        classes_as: str | None = "num_classes",
        tokens: bool = False,
        isolate: bool = False,
        channels_last: list[str] | None = None,
        memory_format: Literal["contiguous", "channels_last"] = "contiguous",
        depth: dict[str, int] | None = None,
    ) -> None:
        super().__init__()
        self._path, self._memory_format = network, memory_format
        self._settings = (settings or {}) | ({} if classes_as is None else {classes_as: outputs})
        records, widths = find_slot_records(
            network,
            json.dumps(self._settings),
            example_shape=(TRIAL_BATCH_SIZE, *input_shape),
            outputs=outputs,
            tokens=tokens,
            slots=tuple(slots or ()),
            isolate=isolate,
            channels_last=tuple(channels_last or ()),
            lists=tuple(depth or ()),
            memory_format=memory_format,
        )
        # Hosts are built on meta, where tensors that are neither parameters nor buffers would stay.
        with CPU, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            self.network = make_network(network, self._settings)
            attach_at(self, [record | {"module": f"network.{record['module']}"} for record in records])
            self.stacks = nn.ModuleList()
            for (blocks, most), width in zip((depth or {}).items(), widths, strict=True):
                self.stacks.extend(depth_slots(self.network, blocks, most, width=width, prefix=f"{blocks}."))

    def initialise_whole(self, generator: torch.Generator) -> None:
        """Initialise the whole network by its own constructor, since its modules may be of any class."""
        rng_seed = torch.randint(MAX_RNG_SEED, (), generator=generator, device=generator.device).item()
        with CPU, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.manual_seed(rng_seed)
            fresh = make_network(self._path, self._settings)
        for slot in slots_of(self).values():
            slot.initialise(generator)
        self.network.load_state_dict(fresh.state_dict())
        # A state dict lacks buffers that are not persistent, and blocks may share one.
        for name, buffer in fresh.named_buffers(remove_duplicate=False):
            self.network.get_buffer(name).copy_(buffer)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(in_format(x, self._memory_format))


def in_format(x: Tensor, memory_format: str) -> Tensor:
    """Return a batch of images [B, C, H, W] in a memory format, or inputs of another shape as they are."""
    if memory_format != "channels_last" or x.ndim != IMAGE_AXES:
        return x
    # Not contiguous(), which leaves an image of one channel as it is.
    return x.clone(memory_format=torch.channels_last)


@lru_cache(maxsize=32)  # a host is made for every episode
def find_slot_records(
    network: str,
    settings: str,
    *,
    example_shape: tuple[int, ...],
    outputs: int,
    tokens: bool,
    slots: tuple[str, ...],
    isolate: bool,
    channels_last: tuple[str, ...],
    lists: tuple[str, ...],
    memory_format: str,
) -> tuple[list[dict[str, Any]], list[int]]:
    """Return records of the slots of a network, and the width of the feature behind each of these lists of blocks.

    They are found by a trial forward pass that leaves random states unchanged.

    Raises ValueError if a slot cannot be attached, or if the output does not fit the task.
    """
    with CPU, torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        trial = make_network(network, json.loads(settings)).eval()
        example = torch.zeros(example_shape, dtype=torch.int64) if tokens else torch.randn(example_shape)
        try:
            with torch.no_grad():
                output = trial(in_format(example, memory_format))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"host Attached: {network} takes no inputs {list(example_shape[1:])}: {reason}") from error
        ends = [f"{blocks}.{[*find_blocks(trial, blocks).modules._modules][-1]}" for blocks in lists]
        named = [*dict.fromkeys([*slots, *ends])]
        attach_slots(trial, named, example, detach_input=isolate, channels_last=channels_last)
    if not isinstance(output, Tensor) or output.shape[-1] != outputs:
        found = list(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise ValueError(
            f"host Attached: {network} answers with {found}, the task has {outputs} classes; name the argument that "
            f"takes their number by data.host.init_args.classes_as"
        )
    places = {place["slot"]: place for place in attached_places(trial)}
    return [place for name, place in places.items() if name in slots], [places[end]["width"] for end in ends]


def make_network(path: str, settings: dict[str, Any]) -> nn.Module:
    """Return the network with an import path. Raises ValueError if the arguments do not fit, or if it is none."""
    try:
        network = import_object(path, "host Attached")(**settings)
    except TypeError as error:
        raise ValueError(f"host Attached: {error}; see data.host.init_args.settings and classes_as") from error
    if not isinstance(network, nn.Module):
        raise ValueError(f"host Attached: data.host.init_args.network made a {type(network).__name__}, not a network")
    return network
