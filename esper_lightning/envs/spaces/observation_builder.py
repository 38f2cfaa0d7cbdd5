"""Observations and action masks of a pool's environments. N environments, D features, K slots."""

from collections.abc import Sequence

import torch
from torch import Tensor

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.device_transfer import copy_to_device
from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.actions import ActionSpace, Op
from esper_lightning.envs.spaces.masks import HostMasks, Masks, compute_masks, make_masks
from esper_lightning.envs.spaces.observation import BLUEPRINTS, Observation, blueprint_id, compute_features
from esper_lightning.envs.spaces.rows import FeatureSource, RowBuilder, RowSizes
from esper_lightning.envs.vector_env import VectorObservation


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
        names: Names of the D observed features. In rows: of a host's, a slot's and a blueprint's.
        rows: Sizes of the parts of a row. None: the observation is flat.
        observation: Observation of all environments.
        masks: Masks that a policy receives; all True under `masks: false`, except `ended`.
        masks_on_cpu: Masks of the possible actions, on the CPU.
        privileged: Hidden context variables of each episode, [N, P] float. None: nothing is hidden.
        refusals: Reasons of the lifecycle gates against stage changes of each seed, [N][K].
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
        self.space = space
        self.actions = config.actions
        self.device = device
        self.config = config.sight
        n_envs = len(envs)
        self.masks_on_cpu = make_masks(n_envs, space, growable)
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        if not self.config.masks:
            self.masks = Masks(*(torch.ones_like(mask, memory_format=torch.contiguous_format) for mask in self.masks))
        self.row_builder: RowBuilder | None = None
        self.added: FeatureSource | None = None  # of a flat observation
        self.observation: Observation | VectorObservation
        if self.config.layout == "rows":
            self.row_builder = RowBuilder(envs, self.config)
            self.names = self.row_builder.names
            rows = self.row_builder.build(envs, self.masks_on_cpu.blueprint)
            self.observation = VectorObservation(torch.zeros(rows.shape, device=device))
        else:
            self.added = FeatureSource(self.config) if self.config.groups else None
            names = [*compute_features(envs[0]), *self._added_features(envs[:1])]
            *selected, self.shows_blueprints = self.config.select([*names, BLUEPRINTS])
            self.columns = [i for i, shown in enumerate(selected) if shown]
            self.names = [names[i] for i in self.columns]
            self.observation = Observation(
                features=torch.zeros(n_envs, len(self.names), device=device),
                blueprints=torch.zeros(n_envs, len(space.slot), dtype=torch.int64, device=device),
            )
        self.privileged = torch.zeros(n_envs, num_privileged, device=device) if num_privileged else None

    @property
    def rows(self) -> RowSizes | None:
        return None if self.row_builder is None else self.row_builder.sizes

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
        envs = self.envs
        self.refusals = [env.growing.refusal_reasons() for env in envs]
        rows = zip(
            *(
                compute_masks(env.growing, refusals, self.space, config=self.actions, ended=env.ended)
                for env, refusals in zip(envs, self.refusals, strict=True)
            ),
            strict=True,
        )
        for name, row in zip(HostMasks._fields, rows, strict=True):
            mask = getattr(self.masks_on_cpu, name)
            mask.copy_(torch.tensor(row))
            if name == "slot":
                mask[:, Op.GERMINATE] &= self.masks_on_cpu.blueprint.any(-1)
            if self.config.masks or name == "ended":
                getattr(self.masks, name).copy_(copy_to_device(mask, self.device))

    def update_observation(self) -> None:
        """Update the observation from the environments and the masks."""
        envs = self.envs
        if self.row_builder is not None:
            rows = self.row_builder.build(envs, self.masks_on_cpu.blueprint)
            self.observation.features.copy_(copy_to_device(rows, self.device))
            return
        values = [list(compute_features(env).values()) for env in envs]
        if self.added is not None:
            columns = torch.stack(list(self._added_features(envs).values()), -1)
            values = [[*row, *more] for row, more in zip(values, columns.tolist(), strict=True)]
        table = torch.tensor([[row[i] for i in self.columns] for row in values])
        self.observation.features.copy_(copy_to_device(table, self.device))
        if self.shows_blueprints and isinstance(self.observation, Observation):
            blueprint_ids = torch.tensor([[blueprint_id(env, slot.blueprint) for slot in env.slots] for env in envs])
            self.observation.blueprints.copy_(copy_to_device(blueprint_ids, self.device))

    def _added_features(self, envs: Sequence[Subject]) -> dict[str, Tensor]:  # [N] each
        """Return the features of a flat observation beside the measurements, by names of slots and blueprints."""
        if self.added is None:
            return {}
        slots, blueprints = self.added.compute(envs)
        of_slots = {
            f"{slot}.{name}": column
            for name, values in slots.items()
            for slot, column in zip(self.space.slot, values.unbind(1), strict=True)
        }
        of_blueprints = {
            f"{slot}.{blueprint}.{name}": values[:, k, b]
            for name, values in blueprints.items()
            for k, slot in enumerate(self.space.slot)
            for b, blueprint in enumerate(self.space.blueprint)
        }
        return of_slots | of_blueprints

    def update_privileged(self, values: Sequence[Sequence[float]]) -> None:
        """Update the privileged features, at the start of episodes, from `values` [N][P]."""
        if self.privileged is not None:
            self.privileged.copy_(copy_to_device(torch.tensor(values), self.device))

    def mask_invalid(self, actions: Sequence[tuple[int, ...]], fallback: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return the actions with impossible ones replaced by `nothing`; all unchanged if the policy's masks are on."""
        if self.config.masks:
            return list(actions)
        return [row if self.masks_on_cpu.allows(i, row) else fallback for i, row in enumerate(actions)]
