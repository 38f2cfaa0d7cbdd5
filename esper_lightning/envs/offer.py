"""What a pool's hosts are, and what can grow on them: found out once, on a host of its own."""

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
    """Tells hosts of different architecture apart, in a few words."""
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
    """The choices there are on `host`, and which blueprint can grow in which slot [K, P]; the host is used up.

    Args:
        batch: Training data to try seeds on.
        birth: How seeds will begin.
        common: What is offered on hosts of other tasks, too, whether it can grow here or not; `host` has its places.

    Raises ValueError if a blueprint or a slot is useless: nothing to learn from, nothing to grow.
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
