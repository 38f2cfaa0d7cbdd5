"""One optimizer for a host and its seeds: each is a parameter group, and groups come and go without a trace."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

HOST_GROUP = "host"

SEED = "seed."
"""How the names of seeds' groups begin."""


def group_of(slot: str) -> str:
    """Name of the parameter group of the seed in `slot`."""
    return f"{SEED}{slot}"


def add_group(optimizer: Optimizer, name: str, module: nn.Module, **options: float) -> None:
    """Lets `module` learn as group `name`, as the first group does now but for `options` (lr, weight_decay …).

    Parameters that another group holds leave it, with what the optimizer knows of them.
    """
    _strip(optimizer, module)
    # An optimizer that was given named parameters wants names for all.
    named = any("param_names" in group for group in optimizer.param_groups)
    parameters = [(f"{name}.{own_name}", p) for own_name, p in module.named_parameters()]
    params = parameters if named else [parameter for _, parameter in parameters]
    # What a learning-rate scheduler has made of the first group holds for a newcomer too.
    first = {key: optimizer.param_groups[0][key] for key in optimizer.defaults}
    if "initial_lr" in optimizer.param_groups[0]:
        first["initial_lr"] = options.get("lr", optimizer.param_groups[0]["initial_lr"])
    optimizer.add_param_group({**first, **options, "params": params, "name": name})


def remove_group(optimizer: Optimizer, name: str) -> None:
    """Drops group `name` with its state; every other group's state stays as it is."""
    group = find_group(optimizer, name)
    # By identity: comparing groups would compare tensors.
    optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]
    for parameter in group["params"]:
        optimizer.state.pop(parameter, None)


def take_out(optimizer: Optimizer, name: str, module: nn.Module) -> None:
    """Drops `module` from the optimizer with its state, whatever group holds it, and group `name` if there is one."""
    _strip(optimizer, module)
    for parameter in module.parameters():
        optimizer.state.pop(parameter, None)
    if name in group_names(optimizer):
        remove_group(optimizer, name)


def _strip(optimizer: Optimizer, module: nn.Module) -> None:
    own = set(module.parameters())
    for group in optimizer.param_groups:
        keep = [i for i, parameter in enumerate(group["params"]) if parameter not in own]
        if len(keep) < len(group["params"]):
            for key in {"params", "param_names"} & set(group):
                group[key] = [group[key][i] for i in keep]


def holds(optimizer: Optimizer, name: str, module: nn.Module) -> bool:
    """Is there a group `name` with the parameters of `module`, these very ones?"""
    wanted = [id(parameter) for parameter in module.parameters()]
    found = [group["params"] for group in optimizer.param_groups if group.get("name") == name]
    return len(found) == 1 and [id(parameter) for parameter in found[0]] == wanted


def find_group(optimizer: Optimizer, name: str) -> dict[str, Any]:
    """The group called `name`; there must be one."""
    return next(group for group in optimizer.param_groups if group.get("name") == name)


def group_names(optimizer: Optimizer) -> list[str]:
    """Names in the order in which the groups were added, which is the order of a saved optimizer state.

    A group that somebody else made may have no name: then it is empty here.
    """
    return [group.get("name", "") for group in optimizer.param_groups]


@torch.no_grad()
def forget(optimizer: Optimizer) -> None:
    """Sets momenta and step counts to zero in place: as new, without new memory.

    So it is for SGD (without dampening), Adam and their like, whose state begins with zeros.
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
