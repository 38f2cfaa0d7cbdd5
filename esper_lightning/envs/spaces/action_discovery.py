"""The action space of hosts: discovery on a throw-away host, and the union over the hosts of several tasks."""

import zlib
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from esper_lightning.envs.spaces.actions import ActionConfig, ActionSpace
from esper_lightning.growth.blueprints import STACK, Birth, default_blueprints
from esper_lightning.growth.blueprints.registry import check_parameters
from esper_lightning.growth.lifecycle import count_parameters, slots_of
from esper_lightning.growth.probe import probe_seeds, reasons_of_cache
from esper_lightning.growth.slot import ABSENT, SeedSlot
from esper_lightning.runtime.console import print_status
from esper_lightning.tasks import Split, Task, check_measures, check_outputs


class SharedSpace(NamedTuple):
    """Slots and blueprints in the common action space of several tasks or architectures."""

    slots: list[str]  # every host gets this many, under these names
    blueprints: list[str]  # that can grow on the hosts of at least one task


def union_of_slots(spaces: Sequence[tuple[ActionSpace, Tensor]]) -> SharedSpace:
    """Return the union of action spaces: the largest number of slots, and every blueprint."""
    num_slots = max(len(space.slot) for space, _ in spaces)
    blueprints = dict.fromkeys(name for space, _ in spaces for name in space.blueprint)
    return SharedSpace([f"place{i + 1}" for i in range(num_slots)], list(blueprints))


def pad_slots(network: nn.Module, names: Sequence[str], device: torch.device) -> nn.Module:
    """Rename the slots of a host to `names`, in order; missing ones are added as slots in which nothing can grow."""
    slots = list(slots_of(network).values())
    assert len(slots) <= len(names), "as many names as the host with the most slots has slots"
    for slot, name in zip(slots, names, strict=False):
        slot.name = name
    missing = names[len(slots) :]
    with device:
        network.absent_places = PaddedSlots(SeedSlot(name, ABSENT, 1, detach_input=False) for name in missing)
    return network


class PaddedSlots(nn.ModuleList):
    """Padding slots, through which no feature passes."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x unchanged, because an `nn.Sequential` host runs this module as its last layer."""
        return x


def describe_host(network: nn.Module) -> str:
    """Return a short description that differs between host architectures."""
    shapes = repr([(name, tuple(p.shape)) for name, p in network.named_parameters()])
    return f"{count_parameters(network)} parameters, layout {zlib.crc32(shapes.encode()):08x}"


def discover_action_space(
    host: nn.Module,
    task: Task,
    batch: Split,
    *,
    outputs: int,
    actions: ActionConfig,
    birth: Birth,
    shared_space: SharedSpace | None = None,
) -> tuple[ActionSpace, Tensor]:
    """Find the action space of a host, and which of P blueprints can grow in which slot, [K, P] bool.

    Seeds are tried on a `batch` of training data. The host, whose slots are empty, cannot be used afterwards; it has
    the slots of `shared_space`, whose blueprints other hosts share.

    Raises ValueError if the host has no slots, if a slot or a blueprint cannot be used at all, or if the host
    has too few outputs, or if the task does not measure each sample.
    """

    def loss_of(network: nn.Module) -> Tensor:
        found = network(batch.inputs)
        if type(task).measure is Task.measure:
            check_outputs(found, outputs, task.score)
        measures = task.measure(found, batch.targets)
        check_measures(measures, len(batch.targets), type(task).__name__)
        return measures.loss.mean()

    return probe_action_space(host, loss_of, actions=actions, birth=birth, shared_space=shared_space)


def probe_action_space(
    host: nn.Module,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    actions: ActionConfig,
    birth: Birth,
    shared_space: SharedSpace | None = None,
) -> tuple[ActionSpace, Tensor]:
    """Find the action space of a network, and which of P blueprints can grow in which slot, [K, P] bool.

    `loss_of` runs a network on a batch and returns its loss, with a graph. Other arguments and errors: see
    `discover_action_space`.
    """
    slots = slots_of(host)
    if not slots:
        raise ValueError("the host has no slots; name at least one where seeds may grow")
    layouts = {slot.layout: None for slot in slots.values()}
    available = dict.fromkeys(name for layout in layouts for name in default_blueprints(layout))
    blueprints = shared_space.blueprints if shared_space is not None else actions.blueprints or list(available)
    reasons = probe_seeds(host, blueprints, loss_of, birth=birth)
    if shared_space is None and actions.blueprints is None:
        left_out = [
            name
            for name in blueprints
            if all(reasons[slot, name] for slot in slots)
            and any(reasons_of_cache(host, slot, name) for slot in slots.values())
        ]
        blueprints = [name for name in blueprints if name not in left_out]
        if left_out:
            print_status(f"left out: {', '.join(left_out)}, because {reasons[next(iter(slots)), left_out[0]][0]}")
    growable = torch.tensor([[not reasons[slot, blueprint] for blueprint in blueprints] for slot in slots])
    if shared_space is not None:
        allowed = [name in (actions.blueprints or blueprints) for name in blueprints]
        return actions.make_space(list(slots), blueprints), growable & torch.tensor(allowed)
    for (k, slot), (p, blueprint) in product(enumerate(slots.values()), enumerate(blueprints)):
        if growable[k, p] and slot.layout != STACK:
            check_parameters(blueprint, slot.layout, slot.width)
    for k, slot in enumerate(slots):
        if not growable[k].any():
            raise ValueError(
                f"slot {slot!r}: nothing can grow there; {blueprints[0]}: {reasons[slot, blueprints[0]][0]}"
            )
    for p, blueprint in enumerate(blueprints):
        if not growable[:, p].any():
            slot = next(iter(slots))
            raise ValueError(f"blueprint {blueprint!r} can grow in no slot; {slot}: {reasons[slot, blueprint][0]}")
    return actions.make_space(list(slots), blueprints), growable
