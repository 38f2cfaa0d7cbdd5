"""Parameter groups of one optimizer for a host and its seeds, added and removed without affecting other groups."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

HOST_GROUP = "host"

SEED_GROUP_PREFIX = "seed."
"""Prefix of the names of seeds' parameter groups."""

UNFIT_OPTIMIZERS = {
    "LBFGS": "cannot hold parameter groups that come and go",
    "ZeroRedundancyOptimizer": "cannot hold parameter groups that come and go",
    "Muon": "trains matrices alone, and seeds have other parameters",
    "SparseAdam": "takes sparse gradients alone, and those of seeds are dense",
}
"""Optimizers of torch that cannot train seeds, and the reasons."""


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer is of a kind that cannot train seeds."""
    kind = type(optimizer).__name__
    if kind in UNFIT_OPTIMIZERS:
        raise ValueError(f"{kind} {UNFIT_OPTIMIZERS[kind]}; use SGD, Adam or AdamW")


def seed_group_name(slot: str) -> str:
    """Return the name of the parameter group of the seed in `slot`."""
    return f"{SEED_GROUP_PREFIX}{slot}"


def add_group(optimizer: Optimizer, name: str, module: nn.Module, **options: float) -> None:
    """Add `module` as group `name` with the first group's present options, overridden by `options` (lr, …).

    Parameters that another group holds are moved, with their optimizer state.
    """
    _remove_from_groups(optimizer, module)
    # An optimizer created with named parameters requires names for all.
    has_names = any("param_names" in group for group in optimizer.param_groups)
    named_parameters = [(f"{name}.{own_name}", p) for own_name, p in module.named_parameters()]
    params = named_parameters if has_names else [parameter for _, parameter in named_parameters]
    # A learning-rate scheduler may have changed the first group; the new group follows it.
    first = optimizer.param_groups[0]
    first_options = {key: first[key] for key in optimizer.defaults if key in first}
    if "initial_lr" in first:
        first_options["initial_lr"] = options.get("lr", first["initial_lr"])
    optimizer.add_param_group({**first_options, **options, "params": params, "name": name})
    # When it loads a state, torch adds an option to the defaults of optimizers whose groups are made without it.
    for key in optimizer.defaults.keys() - first.keys():
        optimizer.param_groups[-1].pop(key, None)


def remove_group(optimizer: Optimizer, name: str) -> None:
    """Remove group `name` with its state; the state of other groups is unchanged."""
    group = find_group(optimizer, name)
    # By identity: comparing groups would compare tensors.
    optimizer.param_groups[:] = [other for other in optimizer.param_groups if other is not group]
    for parameter in group["params"]:
        optimizer.state.pop(parameter, None)


def remove_module(optimizer: Optimizer, name: str, module: nn.Module) -> None:
    """Remove the parameters of `module` with their state from all groups, and group `name` if it exists.

    Both, because another group may hold the parameters, and because group `name` would be left behind empty.
    """
    _remove_from_groups(optimizer, module)
    for parameter in module.parameters():
        optimizer.state.pop(parameter, None)
    if name in group_names(optimizer):
        remove_group(optimizer, name)


def _remove_from_groups(optimizer: Optimizer, module: nn.Module) -> None:
    removed = set(module.parameters())
    for group in optimizer.param_groups:
        kept_indices = [i for i, parameter in enumerate(group["params"]) if parameter not in removed]
        if len(kept_indices) < len(group["params"]):
            for key in {"params", "param_names"} & set(group):
                group[key] = [group[key][i] for i in kept_indices]


def has_group(optimizer: Optimizer, name: str, module: nn.Module) -> bool:
    """Return True if group `name` holds exactly the parameters of `module`, compared by identity."""
    wanted_ids = [id(parameter) for parameter in module.parameters()]
    found = [group["params"] for group in optimizer.param_groups if group.get("name") == name]
    return len(found) == 1 and [id(parameter) for parameter in found[0]] == wanted_ids


def find_group(optimizer: Optimizer, name: str) -> dict[str, Any]:
    """Return the group called `name`, which must exist."""
    return next(group for group in optimizer.param_groups if group.get("name") == name)


def group_names(optimizer: Optimizer) -> list[str]:
    """Return the group names in the order of addition, which is the order of a saved optimizer state.

    The name is empty for a group that was created elsewhere without one.
    """
    return [group.get("name", "") for group in optimizer.param_groups]


def match_groups(optimizer: Optimizer, saved: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return saved parameter groups in the order of the optimizer's groups of the same names.

    Groups of equal name, such as those without one, keep their order. Raises ValueError if the names differ.
    """
    names, saved_names = group_names(optimizer), [group.get("name", "") for group in saved]
    if sorted(names) != sorted(saved_names):
        raise ValueError(
            f"the saved optimizer has the groups {saved_names}, this one has {names}; load the state of the network "
            f"first, and that of the optimizer into one that is made alike"
        )
    waiting = {name: [group for group in saved if group.get("name", "") == name] for name in set(names)}
    return [waiting[name].pop(0) for name in names]


@torch.no_grad()
def reset_optimizer_state(optimizer: Optimizer) -> None:
    """Set momenta and step counts to zero, in place.

    This resets optimizers whose initial state is zero, such as SGD without dampening and Adam.
    """
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
