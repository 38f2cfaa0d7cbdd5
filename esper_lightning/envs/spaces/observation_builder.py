"""Observations and action masks of a pool's environments.

A row of an observation has the features of the host, of a slot, and of each blueprint in that slot. Slots in which
nothing can grow, and blueprints that cannot grow in a slot, are absent: the first number of their part of a row is 0,
and so are all others. N environments, K slots, B blueprints.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.device_transfer import copy_to_device
from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.rewards.reward import SMALLEST_HOST
from esper_lightning.envs.spaces.actions import ActionSpace, Masks, Op, possible_ops
from esper_lightning.envs.spaces.descriptions import (
    BLUEPRINT_DESCRIPTION,
    SLOT_DESCRIPTION,
    HostDescription,
    describe,
)
from esper_lightning.envs.spaces.observation import CONTRIBUTION_SCALE, clip, host_features, slot_features
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.growing_network import RefusalReasons

PARTS = ("", "slot.", "blueprint.")
"""Prefixes of the names of features: of the host, of a slot, of a blueprint in a slot."""

PRESENT = "present"

RENT_SCALE = 0.2
"""Rent in units of the score that maps to 1."""

GAIN_SCALE = 0.1
"""Contribution minus rent in units of the score that maps to 1; larger ones are clipped."""

LOG_COUNT_SCALE = 3.0
"""Divisor of the logarithm of a number of slots or blueprints; 20 map to 1."""

LARGEST_RENT = 3.0
"""Largest feature of a rent."""


class RowSizes(NamedTuple):
    """Numbers of features in the parts of a row. They depend neither on slots nor on blueprints."""

    host: int
    slot: int  # the first is 1 if anything can grow there
    blueprint: int  # the first is 1 if it can grow there

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows [..., K, R] into features of the host [...], the slots [..., K] and the blueprints [..., K, B]."""
        host, slot, blueprints = rows.split([self.host, self.slot, rows.shape[-1] - self.host - self.slot], -1)
        return host[..., 0, :], slot, blueprints.unflatten(-1, (-1, self.blueprint))


def describe_all(envs: Sequence[GrowthRecord]) -> HostDescription:  # [N, …] each
    """Return the descriptions of environments; each host keeps its own in all its episodes."""
    for env in envs:
        env.description = env.description or describe(env)
    known = [env.description for env in envs if env.description is not None]
    return HostDescription(*(torch.stack(parts) for parts in zip(*known, strict=True)))


def compute_features(
    envs: Sequence[GrowthRecord], growable: Tensor, described: HostDescription
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the features of hosts [N], slots [N, K] and blueprints in slots [N, K, B] by name.

    `growable` [N, K, B] bool tells which blueprint can grow in which slot; `described` comes from `describe_all`.
    """
    rows = [host_features(env) for env in envs]
    host = dict(zip(rows[0], torch.tensor([list(row.values()) for row in rows]).unbind(-1), strict=True))
    # Means and maxima over rows do not tell their number.
    host["slots.offered"] = growable.any(-1).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    host["blueprints.offered"] = growable.any(-2).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    measured = [[slot_features(env, k) for k in range(len(env.slots))] for env in envs]
    table = torch.tensor([[list(features.values()) for features in row] for row in measured])  # [N, K, features]
    slots = dict(zip(measured[0][0], table.unbind(-1), strict=True))
    growing = torch.tensor(
        [[[slot.blueprint == name for name in env.space.blueprint] for slot in env.slots] for env in envs],
        dtype=torch.float32,
    )  # [N, K, B]
    # Where a blueprint's contribution was measured in this episode, and the last one.
    last = [[[trials.get(name) for name in env.space.blueprint] for trials in env.trials] for env in envs]
    tried = [[[float(points is not None) for points in row] for row in env] for env in last]
    trial = [[[clip((points or 0.0) / CONTRIBUTION_SCALE) for points in row] for row in env] for env in last]
    seed_rents, blueprint_rents = _rents(envs, described.parameters)
    blueprints = {"here": growing, "tried": torch.tensor(tried), "trial": torch.tensor(trial)}
    blueprints["rent"] = (blueprint_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    slots["rent"] = (seed_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    contributions = torch.tensor([[(record.contribution or 0.0) / 100.0 for record in env.records] for env in envs])
    slots["gain"] = ((contributions - seed_rents) / GAIN_SCALE).clamp(-1.0, 1.0) * growing.amax(-1)
    slots |= zip(SLOT_DESCRIPTION, described.slots.unbind(-1), strict=True)
    blueprints |= zip(BLUEPRINT_DESCRIPTION, described.blueprints.unbind(-1), strict=True)
    seeds = (growing.unsqueeze(-1) * described.blueprints).sum(2)  # [N, K, description] of the seed in each slot
    slots |= zip((f"seed.{name}" for name in BLUEPRINT_DESCRIPTION), seeds.unbind(-1), strict=True)
    return host, slots, blueprints


def _rents(envs: Sequence[GrowthRecord], blueprint_parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the additional rent of fossilizing now the seed of each slot [N, K], and one of each blueprint [N, K, B].

    Empty slots and fossilized seeds have none.
    """
    seeds = [[slot.size if slot.live else 0 for slot in env.slots] for env in envs]
    added = torch.cat([torch.tensor(seeds, dtype=torch.float32).unsqueeze(-1), blueprint_parameters], -1)
    sizes = [
        [float(max(env.host_parameters, SMALLEST_HOST)), float(env.fossilized_parameters - env.host_parameters)]
        for env in envs
    ]
    host, grown = torch.tensor(sizes)[:, None, None].unbind(-1)  # [N, 1, 1] each
    prices = torch.tensor([env.price for env in envs])[:, None, None]
    rent = prices * (torch.log1p((grown + added) / host) - torch.log1p(grown / host))
    live = torch.tensor([[slot.live for slot in env.slots] for env in envs])
    return rent[..., 0] * live, rent[..., 1:]


class ObservationBuilder:
    """Builds observation, masks and privileged features of N environments, in tensors that are updated in place.

    Args:
        envs: Environments, or networks in another training; the entries of the list may be replaced between episodes.
        space: Action space of all environments.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool; see `update_growable`.
        config: Settings of actions and observation.
        device: Device of observation and masks.
        num_privileged: Number of privileged features P of each episode; 0: nothing is hidden.
    """

    def __init__(
        self,
        envs: Sequence[GrowthRecord],
        space: ActionSpace,
        growable: Tensor,
        *,
        config: EnvConfig,
        device: torch.device,
        num_privileged: int = 0,
    ) -> None:
        self.envs, self.device, self.config = envs, device, config.sight
        self.refusals: list[list[RefusalReasons]] = []  # of the lifecycle gates against changes of each seed, [N][K]
        self.masks_on_cpu = Masks(  # of the possible actions
            slot=torch.zeros(len(envs), len(Op), len(space.slot), dtype=torch.bool),
            blueprint=growable.expand(len(envs), -1, -1).clone(),
            ended=torch.zeros(len(envs), dtype=torch.bool),
        )
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        self.described = describe_all(envs)
        features = compute_features(envs[:1], self.masks_on_cpu.blueprint[:1], describe_all(envs[:1]))
        names = [[prefix + name for name in part] for prefix, part in zip(PARTS, features, strict=True)]
        shown = iter(self.config.select([name for part in names for name in part]))
        # Names without prefix of the observed features of the host, of a slot and of a blueprint.
        self.selected = [[name for name in part if next(shown)] for part in features]
        host, slot, blueprint = (len(part) for part in self.selected)
        self.rows = RowSizes(host, 1 + slot, 1 + blueprint)
        self.names = [
            prefix + name
            for prefix, part in zip(PARTS, self.selected, strict=True)
            for name in ([PRESENT] if prefix else []) + part
        ]
        self.observation = Observation(torch.zeros(self._build_rows().shape, device=device))
        self.privileged = torch.zeros(len(envs), num_privileged, device=device) if num_privileged else None

    def update_growable(self, growable: Tensor) -> None:
        """Update what stays the same in an episode; `growable` [N, K, blueprints] bool is what can grow in it."""
        self.described = describe_all(self.envs)
        self.masks_on_cpu.blueprint.copy_(growable)
        self.masks.blueprint.copy_(copy_to_device(growable, self.device))

    def update(self) -> None:
        """Update observation, masks and refusals from the environments."""
        self.update_masks()
        self.update_observation()

    def update_masks(self) -> None:
        """Update masks and refusals from the environments."""
        self.refusals = [env.growing.refusal_reasons() for env in self.envs]
        refusals = zip(self.envs, self.refusals, strict=True)
        slot = torch.tensor([possible_ops(env.growing, reasons, env.ended) for env, reasons in refusals])
        slot[:, Op.GERMINATE] &= self.masks_on_cpu.blueprint.any(-1)
        ended = torch.tensor([env.ended for env in self.envs])
        for masks in (self.masks_on_cpu, self.masks):
            masks.ended.copy_(copy_to_device(ended, masks.ended.device))
            masks.slot.copy_(copy_to_device(slot, masks.slot.device))

    def update_observation(self) -> None:
        """Update the observation from the environments and the masks."""
        self.observation.features.copy_(copy_to_device(self._build_rows(), self.device))

    def _build_rows(self) -> Tensor:  # [N, K, R]
        growable = self.masks_on_cpu.blueprint
        host, slots, blueprints = compute_features(self.envs, growable, self.described)
        host_names, slot_names, blueprint_names = self.selected
        can_grow = growable.float()  # [N, K, B]
        has_slot = can_grow.amax(-1)  # [N, K]
        of_host = torch.stack([host[name] for name in host_names], -1) if host_names else has_slot[:, :0]
        of_slots = torch.stack([has_slot, *(slots[name] * has_slot for name in slot_names)], -1)
        of_blueprints = torch.stack([can_grow, *(blueprints[name] * can_grow for name in blueprint_names)], -1)
        rows = of_host.unsqueeze(1).expand(-1, has_slot.shape[1], -1)
        return torch.cat([rows, of_slots, of_blueprints.flatten(-2)], -1)

    def update_privileged(self, values: Sequence[Sequence[float]]) -> None:
        """Update the privileged features, at the start of episodes, from `values` [N][P]."""
        if self.privileged is not None:
            self.privileged.copy_(copy_to_device(torch.tensor(values), self.device))
