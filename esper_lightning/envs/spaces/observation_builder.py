"""Observations and action masks of a pool's environments. N environments, K slots, B blueprints."""

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.device_transfer import copy_to_device
from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.actions import ActionSpace, Op
from esper_lightning.envs.spaces.masks import Masks, make_masks, possible_ops
from esper_lightning.envs.spaces.rows import Descriptions, RowSizes, compute_features
from esper_lightning.envs.vector_env import Observation

PARTS = ("", "slot.", "blueprint.")
"""Prefixes of the names of features: of the host, of a slot, of a blueprint in a slot."""

PRESENT = "present"


class ObservationBuilder:
    """Builds observation, masks and privileged features of N environments, in tensors that are updated in place.

    Args:
        envs: Environments, or networks in another training; the entries of the list may be replaced.
        space: Action space of all environments.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool, or [N, K, blueprints] if environments
            differ; see `update_growable`.
        config: Settings of actions and observation.
        device: Device of observation and masks.
        num_privileged: Number of privileged features P of each episode; 0: nothing is hidden.

    Attributes:
        names: Names of the observed features: those of the host, of a slot and of a blueprint.
        rows: Sizes of the parts of a row.
        observation: Observation of all environments.
        masks: Masks that a policy receives; all True under `masks: false`, except `ended`.
        masks_on_cpu: Masks of the possible actions, on the CPU.
        privileged: Hidden context variables of each episode, [N, P] float. None: nothing is hidden.
        refusals: Reasons of the lifecycle gates against stage changes of each seed, [N][K].

    Raises ValueError if a pattern in `config.sight` matches no feature.
    """

    def __init__(
        self,
        envs: Sequence[Subject],
        space: ActionSpace,
        growable: Tensor,
        *,
        config: EnvConfig,
        device: torch.device,
        num_privileged: int = 0,
    ) -> None:
        self.envs = envs
        self.actions = config.actions
        self.device = device
        self.config = config.sight
        self.masks_on_cpu = make_masks(len(envs), space, growable)
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        if not self.config.masks:
            self.masks = Masks(*(torch.ones_like(mask, memory_format=torch.contiguous_format) for mask in self.masks))
        self.descriptions: Descriptions = WeakKeyDictionary()
        features = compute_features(envs[:1], self.masks_on_cpu.blueprint[:1], self.descriptions)
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

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the descriptions, which are made again: weak references do not go to other processes."""
        return vars(self) | {"descriptions": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, descriptions=WeakKeyDictionary())

    def update_growable(self, growable: Tensor) -> None:
        """Update the masks of the blueprints, at the start of episodes, from `growable` [N, K, blueprints] bool."""
        self.masks_on_cpu.blueprint.copy_(growable)
        if self.config.masks:
            self.masks.blueprint.copy_(copy_to_device(growable, self.device))

    def update(self) -> None:
        """Update observation, masks and refusals from the environments."""
        self.update_masks()
        self.update_observation()

    def update_masks(self) -> None:
        """Update masks and refusals from the environments."""
        self.refusals = [env.growing.refusal_reasons() for env in self.envs]
        slot = torch.tensor(
            [
                possible_ops(env.growing, refusals, self.actions, ended=env.ended)
                for env, refusals in zip(self.envs, self.refusals, strict=True)
            ]
        )
        slot[:, Op.GERMINATE] &= self.masks_on_cpu.blueprint.any(-1)
        ended = torch.tensor([env.ended for env in self.envs])
        for masks in (self.masks_on_cpu, self.masks):
            masks.ended.copy_(copy_to_device(ended, masks.ended.device))
            if self.config.masks or masks is self.masks_on_cpu:
                masks.slot.copy_(copy_to_device(slot, masks.slot.device))

    def update_observation(self) -> None:
        """Update the observation from the environments and the masks."""
        self.observation.features.copy_(copy_to_device(self._build_rows(), self.device))

    def _build_rows(self) -> Tensor:  # [N, K, R]
        growable = self.masks_on_cpu.blueprint
        host, slots, blueprints = compute_features(self.envs, growable, self.descriptions)
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

    def mask_invalid(self, actions: Sequence[tuple[int, ...]], fallback: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the actions with impossible ones replaced by `fallback`; all unchanged if the policy's masks are
        on."""
        if self.config.masks:
            return list(actions)
        return [row if self.masks_on_cpu.allows(i, row) else fallback for i, row in enumerate(actions)]
