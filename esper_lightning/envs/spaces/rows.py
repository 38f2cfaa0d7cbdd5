"""Observations beyond the measurements of host and seeds, and their layout in rows.

An observation in rows has one row for each slot: features of the host, of the slot, and of each blueprint in it. Slots
in which nothing can grow, and blueprints that cannot grow in a slot, are absent: the first number of their part is 0.
N environments, K slots, B blueprints.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.descriptions import (
    BLUEPRINT_DESCRIPTION,
    NAME_CODE,
    SLOT_DESCRIPTION,
    HostDescription,
    describe,
)
from esper_lightning.envs.spaces.observation import (
    CONTRIBUTION_SCALE,
    LOG_SIZE_SCALE,
    STAGE_SHARE_PREFIX,
    ObservationConfig,
    clip,
    host_features,
    slot_features,
)
from esper_lightning.growth.lifecycle import count_parameters

RENT_SCALE = 0.2
"""Rent in accuracy (0 to 1) that maps to 1."""

GAIN_SCALE = 0.1
"""Contribution minus rent in accuracy (0 to 1) that maps to 1; larger ones are clipped."""

LOG_COUNT_SCALE = 3.0
"""Divisor of the logarithm of a number of slots or blueprints; 20 map to 1."""

LARGEST_RENT = 3.0
"""Largest feature of a rent."""

SLOT_PREFIX, BLUEPRINT_PREFIX, PRESENT = "slot.", "blueprint.", "present"


class RowSizes(NamedTuple):
    """Numbers of features in the parts of a row. They depend neither on slots nor on blueprints."""

    host: int
    """Features of the host."""
    slot: int
    """Features of a slot; the first is 1 if anything can grow there."""
    blueprint: int
    """Features of a blueprint in a slot; the first is 1 if it can grow there."""

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows [..., K, R] into features of the host [..., host], the slots [..., K, slot] and the blueprints
        [..., K, B, blueprint]."""
        host, slot, blueprints = rows.split([self.host, self.slot, rows.shape[-1] - self.host - self.slot], -1)
        return host[..., 0, :], slot, blueprints.unflatten(-1, (-1, self.blueprint))


class AddedFeatures(NamedTuple):
    """Features beside the measurements, by name."""

    slots: dict[str, Tensor]  # [N, K] each
    blueprints: dict[str, Tensor]  # [N, K, B] each


class FeatureSource:
    """Computes features beside the measurements. It keeps the description of each host that it has met.

    Args:
        config: Groups of features.
    """

    def __init__(self, config: ObservationConfig) -> None:
        self.groups = config.groups
        self.has_rows = config.layout == "rows"
        self.needs_flops = config.needs_flops
        self.descriptions: WeakKeyDictionary[Subject, HostDescription] = WeakKeyDictionary()

    def compute(self, envs: Sequence[Subject]) -> AddedFeatures:
        """Return the added features of environments with equal numbers of slots and of blueprints."""
        slots: dict[str, Tensor] = {}
        blueprints: dict[str, Tensor] = {}
        hosts = [self._description(env) for env in envs] if self.needs_flops else []
        growing = torch.tensor(
            [[[slot.blueprint == name for name in env.space.blueprint] for slot in env.slots] for env in envs],
            dtype=torch.float32,
        )  # [N, K, B]
        if self.has_rows:
            blueprints["here"] = growing
        if "trials" in self.groups:
            blueprints["tried"], blueprints["trial"] = _trials(envs)
        if "rents" in self.groups:
            slot_rents, blueprint_rents = _rents(envs, hosts)
            blueprints["rent"] = (blueprint_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
            slots["rent"] = (slot_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
            slots["gain"] = ((_contributions(envs) - slot_rents) / GAIN_SCALE).clamp(-1.0, 1.0) * growing.amax(-1)
        if "descriptions" in self.groups:
            slots |= zip(SLOT_DESCRIPTION, torch.stack([host.slots for host in hosts]).unbind(-1), strict=True)
            self._add_kinds(
                slots, blueprints, growing, BLUEPRINT_DESCRIPTION, torch.stack([host.blueprints for host in hosts])
            )
        if "names" in self.groups:
            codes = torch.stack([host.names for host in hosts]).unsqueeze(1).expand(*growing.shape, -1)
            self._add_kinds(slots, blueprints, growing, NAME_CODE, codes)
        return AddedFeatures(slots, blueprints)

    def _add_kinds(
        self,
        slots: dict[str, Tensor],
        blueprints: dict[str, Tensor],
        growing: Tensor,
        names: Sequence[str],
        values: Tensor,
    ) -> None:
        """Add numbers [N, K, B, names] of each blueprint in each slot, and those of the seed that grows there."""
        blueprints |= zip(names, values.unbind(-1), strict=True)
        seeds = (growing.unsqueeze(-1) * values).sum(2)  # [N, K, names]
        slots |= {f"seed.{name}": column for name, column in zip(names, seeds.unbind(-1), strict=True)}

    def _description(self, env: Subject) -> HostDescription:
        if env not in self.descriptions:
            self.descriptions[env] = describe(env)
        return self.descriptions[env]


def _trials(envs: Sequence[Subject]) -> tuple[Tensor, Tensor]:
    """Return where a blueprint's contribution was measured in this episode, and the last one, both [N, K, B]."""

    def table(number: Callable[[dict[str, float], str], float]) -> Tensor:
        return torch.tensor(
            [[[number(trials, name) for name in env.space.blueprint] for trials in env.trials] for env in envs]
        )

    return (
        table(lambda trials, name: float(name in trials)),
        table(lambda trials, name: clip(trials.get(name, 0.0) / CONTRIBUTION_SCALE)),
    )


def _contributions(envs: Sequence[Subject]) -> Tensor:
    """Return the contributions of the seeds in accuracy (0 to 1), [N, K]; 0 where none is known."""
    return torch.tensor([[(record.contribution or 0.0) / 100.0 for record in env.records] for env in envs])


def _rents(envs: Sequence[Subject], hosts: Sequence[HostDescription]) -> tuple[Tensor, Tensor]:
    """Return the additional rent of fossilizing now the seed of each slot [N, K], and one of each blueprint [N, K, B].

    Empty slots and fossilized seeds have none.
    """
    live = [[slot.live for slot in env.slots] for env in envs]
    seeds = [[count_parameters(slot.seed) if slot.live else 0 for slot in env.slots] for env in envs]
    parameters = torch.cat(
        [torch.tensor(seeds, dtype=torch.float32).unsqueeze(-1), torch.stack([host.parameters for host in hosts])], -1
    )  # [N, K, 1 + B]
    prices = torch.tensor([list(env.prices) for env in envs])[:, None, None]  # [N, 1, 1, 2]
    sizes = torch.tensor(
        [
            [
                float(max(env.host_parameters, env.objective_config.smallest_host)),
                float(env.fossilized_parameters - env.host_parameters),
            ]
            for env in envs
        ]
    )[:, None, None]
    rent = prices[..., 0] * _log_growth(parameters, sizes)
    if any(env.objective_config.charges_compute for env in envs):
        seed_flops = [
            [env.flops.seed_flops(slot) if slot.live else 0 for slot in env.slots] for env in envs if env.flops
        ]
        flops = torch.cat(
            [torch.tensor(seed_flops, dtype=torch.float32).unsqueeze(-1), torch.stack([host.flops for host in hosts])],
            -1,
        )
        compute = torch.tensor(
            [[float(env.flops.host), float(env.fossilized_flops - env.flops.host)] for env in envs if env.flops]
        )[:, None, None]
        rent = rent + prices[..., 1] * _log_growth(flops, compute)
    return rent[..., 0] * torch.tensor(live), rent[..., 1:]


def _log_growth(added: Tensor, sizes: Tensor) -> Tensor:
    """Return the rise of ln(1 + growth) by further parameters or FLOPs.

    Args:
        added: Parameters or FLOPs of a seed, [N, K, …].
        sizes: Size of the host, to which growth is relative, and size of its fossilized seeds, [N, 1, 1, 2].
    """
    host, grown = sizes.unbind(-1)
    return torch.log1p((grown + added) / host) - torch.log1p(grown / host)


class RowBuilder:
    """Builds observations in rows.

    Args:
        envs: Environments that all have the same numbers of slots and of blueprints.
        config: Features to show.

    Attributes:
        sizes: Numbers of features in the parts of a row.
        names: Names of the features: those of the host, of a slot and of a blueprint.

    Raises ValueError if a pattern in `config` matches no feature.
    """

    def __init__(self, envs: Sequence[Subject], config: ObservationConfig) -> None:
        self.source = FeatureSource(config)
        space = envs[0].space
        host, slots, blueprints = self._compute(
            envs[:1], torch.ones(1, len(space.slot), len(space.blueprint), dtype=torch.bool)
        )
        names = [*host, *(SLOT_PREFIX + name for name in slots), *(BLUEPRINT_PREFIX + name for name in blueprints)]
        shown = dict(zip(names, config.select(names), strict=True))
        self.host = [name for name in host if shown[name]]
        self.slot = [name for name in slots if shown[SLOT_PREFIX + name]]
        self.blueprint = [name for name in blueprints if shown[BLUEPRINT_PREFIX + name]]
        self.sizes = RowSizes(len(self.host), 1 + len(self.slot), 1 + len(self.blueprint))
        self.names = [
            *self.host,
            *(SLOT_PREFIX + name for name in (PRESENT, *self.slot)),
            *(BLUEPRINT_PREFIX + name for name in (PRESENT, *self.blueprint)),
        ]

    def _compute(
        self, envs: Sequence[Subject], growable: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        """Return all features by name: of hosts [N], of slots [N, K] and of blueprints [N, K, B]."""
        rows = [row_host_features(env) for env in envs]
        host = dict(zip(rows[0], torch.tensor([list(row.values()) for row in rows]).unbind(-1), strict=True))
        # Means and maxima over rows do not tell their number.
        host["slots.offered"] = growable.any(-1).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
        host["blueprints.offered"] = growable.any(-2).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
        # A slot that a host lacks has the features of an empty one, which are hidden later.
        measured = [[slot_features(env, k) for k in range(len(env.slots))] for env in envs]
        table = torch.tensor([[list(features.values()) for features in row] for row in measured])  # [N, K, features]
        slots = dict(zip(measured[0][0], table.unbind(-1), strict=True))
        added = self.source.compute(envs)
        return host, slots | added.slots, added.blueprints

    def build(self, envs: Sequence[Subject], growable: Tensor) -> Tensor:  # [N, K, R]
        """Return the rows of all environments; `growable` [N, K, B] tells which blueprint can grow in which slot."""
        host, slots, blueprints = self._compute(envs, growable)
        can_grow = growable.float()
        has_slot = can_grow.amax(-1)  # [N, K]
        host_part = torch.stack([host[name] for name in self.host], -1) if self.host else has_slot[:, :0]  # [N, host]
        slot_part = torch.stack([has_slot, *(slots[name] * has_slot for name in self.slot)], -1)
        blueprint_part = torch.stack([can_grow, *(blueprints[name] * can_grow for name in self.blueprint)], -1)
        rows = host_part.unsqueeze(1).expand(-1, has_slot.shape[1], -1)
        return torch.cat([rows, slot_part, blueprint_part.flatten(-2)], -1)


def row_host_features(env: Subject) -> dict[str, float]:
    """Return the features of a host by name, without those that depend on the number of its slots."""
    values = {"price.compute": 0.0, "compute.committed": 0.0} | {
        name: value for name, value in host_features(env).items() if not name.startswith(STAGE_SHARE_PREFIX)
    }
    values["ticks_left"] = math.log1p(max(0, env.horizon - env.tick)) / LOG_SIZE_SCALE
    values["lr"] = env.lr_share
    values["host.parameters"] = math.log(env.host_parameters) / (2 * LOG_SIZE_SCALE)
    return values
