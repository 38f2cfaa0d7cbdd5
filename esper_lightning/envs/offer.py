"""Description of a host architecture and discovery of its action space, on a throw-away host."""

import zlib

import torch
from torch import Tensor, nn

from esper_lightning.blueprints import Birth, names
from esper_lightning.envs.actions import ActionConfig, ActionSpace
from esper_lightning.envs.places import Common
from esper_lightning.growth.network import count_parameters, slots_of
from esper_lightning.growth.probe import probe_seeds
from esper_lightning.tasks import Split, Task


def describe_host(network: nn.Module) -> str:
    """Return a short description that differs between host architectures."""
    shapes = repr([(name, tuple(p.shape)) for name, p in network.named_parameters()])
    return f"{count_parameters(network)} parameters, layout {zlib.crc32(shapes.encode()):08x}"


def offer(
    host: nn.Module,
    task: Task,
    batch: Split,
    actions: ActionConfig,
    birth: Birth,
    common: Common | None = None,
) -> tuple[ActionSpace, Tensor]:
    """Find the action space of a host, and which of P blueprints can grow in which slot, [K, P] bool.

    Args:
        host: Host with empty slots; it cannot be used afterwards.
        task: Computes the loss of outputs.
        batch: Training data on which seeds are tried.
        actions: Configured choices.
        birth: Initialisation of seeds.
        common: Slots and blueprints shared with hosts of other tasks, whether they can grow here or not; `host` must
            already have these slots.

    Raises ValueError if the host has no slots, or a slot or a blueprint cannot be used at all.
    """
    slots = slots_of(host)
    if not slots:
        raise ValueError("the host has no slots; name at least one place where seeds may grow")
    layouts = {slot.layout: None for slot in slots.values()}
    every = dict.fromkeys(name for layout in layouts for name in names(layout, batch.inputs.device))
    wanted = common.blueprints if common is not None else actions.blueprints or list(every)

    def loss_of(network: nn.Module) -> Tensor:
        return task.measure(network(batch.inputs), batch.targets).loss.mean()

    reasons = probe_seeds(host, wanted, loss_of, birth)
    growable = torch.tensor([[not reasons[slot, blueprint] for blueprint in wanted] for slot in slots])
    if common is not None:
        allowed = [name in (actions.blueprints or wanted) for name in wanted]
        return actions.space(list(slots), wanted), growable & torch.tensor(allowed)
    for k, slot in enumerate(slots):
        if not growable[k].any():
            raise ValueError(f"slot {slot!r}: nothing can grow there; {wanted[0]}: {reasons[slot, wanted[0]][0]}")
    for p, blueprint in enumerate(wanted):
        if not growable[:, p].any():
            slot = next(iter(slots))
            raise ValueError(f"blueprint {blueprint!r} can grow in no slot; {slot}: {reasons[slot, blueprint][0]}")
    return actions.space(list(slots), wanted), growable
