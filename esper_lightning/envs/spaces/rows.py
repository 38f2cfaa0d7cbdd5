"""Features of hosts in rows: of the host, of each slot, and of each blueprint in each slot.

Slots in which nothing can grow, and blueprints that cannot grow in a slot, are absent: the first number of their part
of a row is 0, and so are all others. N environments, K slots, B blueprints.
"""

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.descriptions import (
    BLUEPRINT_DESCRIPTION,
    SLOT_DESCRIPTION,
    HostDescription,
    describe,
)
from esper_lightning.envs.spaces.observation import CONTRIBUTION_SCALE, clip, host_features, slot_features
from esper_lightning.growth.lifecycle import count_parameters

RENT_SCALE = 0.2
"""Rent in accuracy (0 to 1) that maps to 1."""

GAIN_SCALE = 0.1
"""Contribution minus rent in accuracy (0 to 1) that maps to 1; larger ones are clipped."""

LOG_COUNT_SCALE = 3.0
"""Divisor of the logarithm of a number of slots or blueprints; 20 map to 1."""

LARGEST_RENT = 3.0
"""Largest feature of a rent."""


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


class Features(NamedTuple):
    """All features of N environments by name."""

    host: dict[str, Tensor]  # [N] each
    slots: dict[str, Tensor]  # [N, K] each
    blueprints: dict[str, Tensor]  # [N, K, B] each


Descriptions = WeakKeyDictionary[Subject, HostDescription]
"""Descriptions of hosts that have been met; a host keeps its description in all its episodes."""


def compute_features(envs: Sequence[Subject], growable: Tensor, descriptions: Descriptions) -> Features:
    """Return the features of environments with equal numbers of slots and of blueprints.

    Args:
        envs: The environments.
        growable: Which blueprint can grow in which slot, [N, K, B] bool.
        descriptions: Descriptions of the hosts; missing ones are added.
    """
    rows = [host_features(env) for env in envs]
    host = dict(zip(rows[0], torch.tensor([list(row.values()) for row in rows]).unbind(-1), strict=True))
    # Means and maxima over rows do not tell their number.
    host["slots.offered"] = growable.any(-1).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    host["blueprints.offered"] = growable.any(-2).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    measured = [[slot_features(env, k) for k in range(len(env.slots))] for env in envs]
    table = torch.tensor([[list(features.values()) for features in row] for row in measured])  # [N, K, features]
    slots = dict(zip(measured[0][0], table.unbind(-1), strict=True))
    for env in envs:
        if env not in descriptions:
            descriptions[env] = describe(env)
    described = [descriptions[env] for env in envs]
    growing = torch.tensor(
        [[[slot.blueprint == name for name in env.space.blueprint] for slot in env.slots] for env in envs],
        dtype=torch.float32,
    )  # [N, K, B]
    blueprints = {"here": growing}
    blueprints["tried"], blueprints["trial"] = _trials(envs)
    seed_rents, blueprint_rents = _rents(envs, described)
    blueprints["rent"] = (blueprint_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    slots["rent"] = (seed_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    contributions = torch.tensor([[(record.contribution or 0.0) / 100.0 for record in env.records] for env in envs])
    slots["gain"] = ((contributions - seed_rents) / GAIN_SCALE).clamp(-1.0, 1.0) * growing.amax(-1)
    slots |= zip(SLOT_DESCRIPTION, torch.stack([one.slots for one in described]).unbind(-1), strict=True)
    kinds = torch.stack([one.blueprints for one in described])  # [N, K, B, description]
    blueprints |= zip(BLUEPRINT_DESCRIPTION, kinds.unbind(-1), strict=True)
    seeds = (growing.unsqueeze(-1) * kinds).sum(2)  # [N, K, description] of the seed that grows in each slot
    slots |= zip((f"seed.{name}" for name in BLUEPRINT_DESCRIPTION), seeds.unbind(-1), strict=True)
    return Features(host, slots, blueprints)


def _trials(envs: Sequence[Subject]) -> tuple[Tensor, Tensor]:
    """Return where a blueprint's contribution was measured in this episode, and the last one, both [N, K, B]."""
    last = [[[trials.get(name) for name in env.space.blueprint] for trials in env.trials] for env in envs]
    tried = [[[float(points is not None) for points in row] for row in env] for env in last]
    scaled = [[[clip((points or 0.0) / CONTRIBUTION_SCALE) for points in row] for row in env] for env in last]
    return torch.tensor(tried), torch.tensor(scaled)


def _rents(envs: Sequence[Subject], described: Sequence[HostDescription]) -> tuple[Tensor, Tensor]:
    """Return the additional rent of fossilizing now the seed of each slot [N, K], and one of each blueprint [N, K, B].

    Empty slots and fossilized seeds have none.
    """

    def growth(seeds: list[list[int]], blueprints: list[Tensor], sizes: list[list[float]]) -> Tensor:  # [N, K, 1 + B]
        """Return the rise of ln(1 + growth) by each seed and each blueprint, in parameters or FLOPs.

        `sizes` [N][2] are the size of the host, to which growth is relative, and that of its fossilized seeds.
        """
        added = torch.cat([torch.tensor(seeds, dtype=torch.float32).unsqueeze(-1), torch.stack(blueprints)], -1)
        host, grown = torch.tensor(sizes)[:, None, None].unbind(-1)
        return torch.log1p((grown + added) / host) - torch.log1p(grown / host)

    prices = torch.tensor([list(env.prices) for env in envs])[:, None, None]  # [N, 1, 1, 2]
    parameters = [[count_parameters(slot.seed) if slot.live else 0 for slot in env.slots] for env in envs]
    hosts = [float(max(env.host_parameters, env.objective_config.smallest_host)) for env in envs]
    fossilized = [float(env.fossilized_parameters - env.host_parameters) for env in envs]
    sizes = [list(pair) for pair in zip(hosts, fossilized, strict=True)]
    rent = prices[..., 0] * growth(parameters, [one.parameters for one in described], sizes)
    if any(env.objective_config.charges_compute for env in envs):
        flops = [[env.flops.seed_flops(slot) if slot.live else 0 for slot in env.slots] for env in envs]
        compute = [[float(env.flops.host), float(env.fossilized_flops - env.flops.host)] for env in envs]
        rent = rent + prices[..., 1] * growth(flops, [one.flops for one in described], compute)
    live = torch.tensor([[slot.live for slot in env.slots] for env in envs])
    return rent[..., 0] * live, rent[..., 1:]
