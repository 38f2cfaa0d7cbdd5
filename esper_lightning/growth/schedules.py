"""Learning-rate schedulers of PyTorch for networks that grow.

A scheduler of `torch.optim.lr_scheduler` keeps a number for each parameter group and fails, or computes wrong rates,
once groups are added or removed. `follow` shows it the host's groups alone, so that it computes what it would compute
without growth, and lets the seeds' groups follow the host.
"""

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from esper_lightning.growth.growing_network import GrowingNetwork
from esper_lightning.growth.param_groups import SEED_GROUP_PREFIX, group_names

Scheduler = TypeVar("Scheduler", bound=LRScheduler)

PER_GROUP = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs", "base_momentums", "max_momentums")
"""Attributes in which PyTorch's schedulers keep a list with a value for each parameter group."""

CYCLED = ("momentum", "betas")
"""Options of an optimizer that OneCycleLR and CyclicLR change together with the learning rate."""


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


def follow(scheduler: Scheduler, growing: GrowingNetwork) -> Scheduler:
    """Let a learning-rate scheduler and a growing network work together, and return the scheduler.

    The host's learning rates are those of the scheduler without growth, whatever germinates or is culled. A seed has
    the host's rate. If `seed_options` names an own rate, a seed has that rate where the host has its nominal one, and
    the host's relative schedule: half the rate where the host has half. The nominal rate is the one given to the
    optimizer; for OneCycleLR and CyclicLR it is `max_lr`. The host's rate is that of its first parameter group.

    The rates of seeds are set when `growing.optimizer` steps. The scheduler's `state_dict` is that of a scheduler
    without growth. To continue a run, call `follow` before states are loaded.

    Args:
        scheduler: Any scheduler of the optimizer `growing.optimizer`, made at any time, also one that contains others.
            With several, such as one for epochs and one for plateaus, call `follow` for each.
        growing: The growing network.

    Raises ValueError if the scheduler belongs to another optimizer.
    """
    schedulers = list(_nested(scheduler))
    for each in schedulers:
        if each.optimizer != growing.optimizer:
            raise ValueError(
                f"the {type(each).__name__} schedules another optimizer than that of the growing network; "
                f"make it from growing.optimizer"
            )
    for each in schedulers:
        if type(each.optimizer) is not HostGroups:
            _drop_seed_values(each, growing.optimizer)
            each.optimizer = HostGroups(growing.optimizer)
    host = host_groups(growing.optimizer)[0]
    host.setdefault("initial_lr", host["lr"])  # kept in checkpoints; ReduceLROnPlateau alone does not set it
    peaks = [float(each.max_lrs[0]) for each in schedulers if hasattr(each, "max_lrs")]
    cycles_momentum = any(getattr(each, "cycle_momentum", False) for each in schedulers)

    def set_rates_of_seeds(optimizer: Optimizer, *_: Any) -> None:
        seeds = seed_groups(optimizer)
        if not seeds:
            return
        host, own = host_groups(optimizer)[0], growing.seed_options.get("lr")
        rate = host["lr"]
        if own is not None:
            rate = own * (host["lr"] / max([nominal_lr(host), *peaks]))
        for group in seeds:
            group["lr"] = rate
            if cycles_momentum:
                group.update({key: host[key] for key in CYCLED if key in host and key not in growing.seed_options})

    growing.optimizer.register_step_pre_hook(set_rates_of_seeds)
    return scheduler


def nominal_lr(group: Mapping[str, Any]) -> float:
    """Return the nominal learning rate of a parameter group: the largest that its schedulers name, else the present."""
    return max(float(group.get("initial_lr", group["lr"])), float(group.get("max_lr", 0.0)))


def host_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups that belong to no seed."""
    return [group for group in optimizer.param_groups if not _is_of_seed(group.get("name", ""))]


def seed_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the parameter groups of seeds."""
    return [group for group in optimizer.param_groups if _is_of_seed(group.get("name", ""))]


def _is_of_seed(name: str) -> bool:
    return name.startswith(SEED_GROUP_PREFIX)


def _nested(scheduler: Any) -> Iterator[Any]:
    """Yield a scheduler and all schedulers that it contains."""
    yield scheduler
    for part in getattr(scheduler, "_schedulers", ()):
        yield from _nested(part)


def _drop_seed_values(scheduler: Any, optimizer: Optimizer) -> None:
    """Remove the values of seeds' groups from a scheduler that was made after they germinated."""
    names = group_names(optimizer)
    for attribute in PER_GROUP:
        values = getattr(scheduler, attribute, None)
        if isinstance(values, list) and len(values) == len(names):
            kept = [value for value, name in zip(values, names, strict=True) if not _is_of_seed(name)]
            setattr(scheduler, attribute, kept)
