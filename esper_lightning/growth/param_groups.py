"""Parameter groups of one optimizer for a host and its seeds, which come and go, and their learning rates.

A scheduler of `torch.optim.lr_scheduler` keeps a number for each parameter group and fails, or computes wrong rates,
once groups are added or removed. `follow` shows it the host's groups alone.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from esper_lightning.growth.growing_network import GrowingNetwork

HOST_GROUP = "host"

SEED_GROUP_PREFIX = "seed."  # prefix of the names of seeds' parameter groups

UNFIT_OPTIMIZERS = {
    "LBFGS": "cannot hold parameter groups that come and go",
    "ZeroRedundancyOptimizer": "cannot hold parameter groups that come and go",
    "Muon": "trains matrices alone, and seeds have other parameters",
    "SparseAdam": "takes sparse gradients alone, and those of seeds are dense",
}
"""Optimizers of torch that cannot train seeds, and the reasons."""

WRAPPED_DEEPEST = 3  # levels of containers and objects within an optimizer in which another one is looked for

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Attributes in which PyTorch's schedulers keep a list with a value for each parameter group."""

CYCLED = ("momentum", "betas")
"""Options of an optimizer that OneCycleLR and CyclicLR change together with the learning rate."""

Scheduler = TypeVar("Scheduler", bound=LRScheduler)


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer is of a kind that cannot train seeds."""
    kind = type(optimizer).__name__
    if kind in UNFIT_OPTIMIZERS:
        raise ValueError(f"{kind} {UNFIT_OPTIMIZERS[kind]}; use SGD, Adam or AdamW")
    if optimizer.param_groups[0].get("use_muon"):  # as in Keller Jordan's MuonWithAuxAdam
        raise ValueError(f"{kind}: its first group, whose options seeds take, is for matrices alone; put it last")


def optimizers_in(*optimizers: Optimizer) -> list[Optimizer]:
    """Return optimizers with those that they wrap at any depth, such as the inner one of SAM or Lookahead."""
    every: list[Optimizer] = []
    waiting: list[tuple[Any, int]] = [(optimizer, 0) for optimizer in optimizers]  # values, with levels to an optimizer
    while waiting:
        value, depth = waiting.pop(0)
        if isinstance(value, Optimizer):
            if any(value is other for other in every):
                continue
            every.append(value)
            depth = 0
        if depth == WRAPPED_DEEPEST or isinstance(value, nn.Module | torch.Tensor | type):
            continue
        if not isinstance(value, Mapping | list | tuple | set):
            value = getattr(value, "__dict__", {})
        waiting += [(x, depth + 1) for x in (value.values() if isinstance(value, Mapping) else value)]
    return every


def hooked_optimizers(*optimizers: Optimizer) -> list[Optimizer]:
    """Return optimizers, with those within, but those that run no hooks, since they do not call their base class."""
    return [part for part in optimizers_in(*optimizers) if "_optimizer_load_state_dict_pre_hooks" in vars(part)]


def seed_group_name(slot: str) -> str:
    """Return the name of the parameter group of the seed in `slot`."""
    return f"{SEED_GROUP_PREFIX}{slot}"


def group_names(optimizer: Optimizer) -> list[str]:
    """Return the group names in the order of addition; empty for a group that was created elsewhere without one."""
    return [group.get("name", "") for group in optimizer.param_groups]


def find_group(optimizer: Optimizer, name: str) -> dict[str, Any]:
    """Return the group called `name`, which must exist."""
    return next(group for group in optimizer.param_groups if group.get("name") == name)


def has_group(optimizer: Optimizer, name: str, module: nn.Module) -> bool:
    """Return True if group `name` holds exactly the parameters of `module`, compared by identity."""
    held = [[id(p) for p in group["params"]] for group in optimizer.param_groups if group.get("name") == name]
    return held == [[id(p) for p in module.parameters()]]


def host_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups that belong to no seed."""
    return [group for group in optimizer.param_groups if not group.get("name", "").startswith(SEED_GROUP_PREFIX)]


def seed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of seeds."""
    return [group for group in optimizer.param_groups if group.get("name", "").startswith(SEED_GROUP_PREFIX)]


def add_group(optimizer: Optimizer, name: str, module: nn.Module, **options: float) -> None:
    """Add `module` as group `name` with the first group's present options, overridden by `options` (lr, …).

    Parameters that another group holds are moved, with their optimizer state. Raises ValueError if an optimizer within
    this one, as in SAM or Lookahead, does not share its groups, so that it would not train the module.
    """
    _remove_from_groups(optimizer, set(module.parameters()))
    # An optimizer created with named parameters requires names for all.
    has_names = any("param_names" in group for group in optimizer.param_groups)
    named = list(module.named_parameters(prefix=name))
    # A learning-rate scheduler may have changed the first group; the new group follows it.
    first = optimizer.param_groups[0]
    copied = {key: value for key, value in first.items() if key not in ("params", "param_names")}
    # A learning rate or a count in a tensor, which steps change in place, is of each group.
    copied = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in copied.items()}
    if "initial_lr" in first:
        copied["initial_lr"] = options.get("lr", first["initial_lr"])
    params = named if has_names else [parameter for _, parameter in named]
    optimizer.add_param_group({**copied, **options, "params": params, "name": name})
    for inner in optimizers_in(optimizer)[1:]:
        if name not in group_names(inner):
            optimizer.param_groups.pop()
            raise ValueError(
                f"{type(optimizer).__name__} holds a {type(inner).__name__} that does not share its parameter groups, "
                f"and would not train seeds; let both have one list of groups: self.param_groups = inner.param_groups"
            )
    # When it loads a state, torch adds an option to the defaults of optimizers whose groups are made without it.
    for key in optimizer.defaults.keys() - first.keys():
        optimizer.param_groups[-1].pop(key, None)


def remove_group(optimizer: Optimizer, name: str, parameters: Iterable[nn.Parameter] = ()) -> None:
    """Remove group `name`, if it exists, and `parameters`, which another group may hold, all with their state."""
    removed = [group["params"] for group in optimizer.param_groups if group.get("name") == name]
    remove_parameters(optimizer, set(chain(parameters, *removed)))
    optimizer.param_groups[:] = [group for group in optimizer.param_groups if group.get("name") != name]


def remove_parameters(optimizer: Optimizer, parameters: Collection[nn.Parameter]) -> None:
    """Remove parameters with their state from all groups; the state of others is unchanged."""
    _remove_from_groups(optimizer, parameters)
    for inner in optimizers_in(optimizer):
        for parameter in parameters:
            inner.state.pop(parameter, None)


def _remove_from_groups(optimizer: Optimizer, removed: Collection[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        kept = [i for i, parameter in enumerate(group["params"]) if parameter not in removed]
        if len(kept) < len(group["params"]):
            for key in {"params", "param_names"} & set(group):
                group[key] = [group[key][i] for i in kept]


def order_groups(optimizer: Optimizer, names: Sequence[str]) -> None:
    """Sort the groups as the names of a saved state are, whose parameters are known by their order alone.

    Groups of equal name, such as those without one, keep their order. Raises ValueError if the names differ.
    """
    present = group_names(optimizer)
    if sorted(present) != sorted(names):
        raise ValueError(
            f"the saved optimizer has the groups {list(names)}, this one has {present}; load the state of the network "
            f"first, and that of the optimizer into one that is made alike, without a group for the slots alone"
        )
    by_name: dict[str, list[dict[str, Any]]] = {name: [] for name in present}
    for name, group in zip(present, optimizer.param_groups, strict=True):
        by_name[name].append(group)
    optimizer.param_groups[:] = [by_name[name].pop(0) for name in names]


@torch.no_grad()
def reset_optimizer_state(optimizer: Optimizer) -> None:
    """Zero momenta and step counts in place: the initial state of Adam, SGD without dampening, and many others."""
    for state in optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                value.zero_()


class HostGroups:
    """An optimizer as a scheduler sees it: with the parameter groups of the host alone.

    It passes for the optimizer itself, by type and in comparisons, because Lightning looks for a scheduler's optimizer
    among its own.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.whole = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return host_groups(self.whole)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return type(self.whole)

    def __getattr__(self, name: str) -> Any:
        if name == "whole":  # a copy in the making has no optimizer yet
            raise AttributeError(name)
        return getattr(self.whole, name)

    def __eq__(self, other: object) -> bool:
        return other is self.whole or (type(other) is HostGroups and other.whole is self.whole)

    def __hash__(self) -> int:
        return hash(self.whole)


def schedulers_in(*schedulers: Any) -> list[Any]:
    """Return schedulers and those that they contain, at any depth."""
    found = list(schedulers)
    for scheduler in found:  # the list grows meanwhile
        values = vars(scheduler).values()
        parts = chain.from_iterable(value if isinstance(value, list | tuple) else [value] for value in values)
        known = set(map(id, found))
        found += [part for part in parts if isinstance(part, LRScheduler) and id(part) not in known]
    return found


def follow(scheduler: Scheduler, growing: "GrowingNetwork") -> Scheduler:
    """Let a scheduler of the optimizer `growing.optimizer` and a growing network work together, and return it.

    The host's learning rates, and the scheduler's `state_dict`, are those without growth. A seed has the rate of the
    host's first parameter group. If `seed_options` names a rate, a seed has that one where the host has its nominal
    rate, which is the one given to the optimizer, or `max_lr` of OneCycleLR and CyclicLR; half where the host has half.
    Rates of seeds are set when the optimizer steps.

    Call it once for each of several schedulers, and before states are loaded. Raises ValueError if the scheduler
    belongs to another optimizer.
    """
    optimizer = growing.optimizer
    schedulers = schedulers_in(scheduler)
    for part in schedulers:
        if part.optimizer != optimizer:
            raise ValueError(
                f"the {type(part).__name__} schedules another optimizer than that of the growing network; "
                f"make it from growing.optimizer"
            )
    is_of_host = [not name.startswith(SEED_GROUP_PREFIX) for name in group_names(optimizer)]
    for part in schedulers:
        if type(part.optimizer) is not HostGroups:
            # A scheduler that was made after seeds germinated has values for their groups, too.
            for attribute in PER_GROUP:
                values = getattr(part, attribute, None)
                if isinstance(values, list) and len(values) == len(is_of_host):
                    setattr(part, attribute, list(compress(values, is_of_host)))
            part.optimizer = HostGroups(optimizer)
    host = host_groups(optimizer)[0]
    host.setdefault("initial_lr", host["lr"])  # kept in checkpoints; ReduceLROnPlateau alone does not set it
    peaks = [float(part.max_lrs[0]) for part in schedulers if hasattr(part, "max_lrs")]
    cycles_momentum = any(getattr(part, "cycle_momentum", False) for part in schedulers)

    def set_rates_of_seeds(*_: Any) -> None:
        host, seed_lr = host_groups(optimizer)[0], growing.seed_options.get("lr")
        rate = host["lr"] if seed_lr is None else seed_lr * (host["lr"] / max([nominal_lr(host), *peaks]))
        for group in seed_groups(optimizer):
            group["lr"] = rate
            if cycles_momentum:
                group.update({key: host[key] for key in CYCLED if key in host and key not in growing.seed_options})

    for part in hooked_optimizers(optimizer):  # a manual optimization may step the inner one of SAM alone
        part.register_step_pre_hook(set_rates_of_seeds)
    return scheduler


def nominal_lr(group: Mapping[str, Any]) -> float:
    """Return the nominal learning rate of a parameter group: the largest that its schedulers name, else the present.

    0 if the group has none, as those of an Adafactor that finds its steps itself.
    """
    if group["lr"] is None:
        return 0.0
    return max(float(group.get("initial_lr", group["lr"])), float(group.get("max_lr", 0.0)))
