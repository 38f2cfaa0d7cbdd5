"""A pool of one: a network in a training of its own, in the form in which controllers see the hosts of a pool."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from esper_lightning.envs.config import EnvConfig
from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.measurements import EpochResult, Validation
from esper_lightning.envs.spaces.actions import ActionError, Op, check_is_action, check_possible
from esper_lightning.envs.spaces.observation_builder import ObservationBuilder
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.lifecycle import SeedEvent

CPU = torch.device("cpu")


class SinglePool:
    """One network in training as a pool of one environment; what trains it calls `record` after every epoch.

    Args:
        env: The network with its record.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool.
        config: Horizon, lifecycle, actions, objective and observation; the rest is not used.
    """

    n_envs = 1

    def __init__(self, env: GrowthRecord, growable: Tensor, config: EnvConfig) -> None:
        self.env, self.envs, self.space = env, [env], env.space
        self.growable, self.config, self.device = growable, config, CPU
        self._builder = ObservationBuilder(self.envs, self.space, growable, config=config, device=CPU)
        self.masks, self.masks_on_cpu = self._builder.masks, self._builder.masks_on_cpu
        self.feature_names = self._builder.names
        self._is_observed = False
        self.episode_starts = torch.zeros(1, dtype=torch.bool)

    @property
    def observation(self) -> Observation:
        """Observation of the network. It is computed when it is asked for, because rules do not read it."""
        if not self._is_observed:
            self._builder.update_observation()
            self._is_observed = True
        return self._builder.observation

    def begin(self, validation: Validation) -> None:
        """Record the validation before the first epoch."""
        self.env.record_validation(validation)
        self.update()

    def record(
        self, result: EpochResult, contributions: Mapping[str, float], hold_stages: bool = False
    ) -> list[SeedEvent]:
        """Record the result of an epoch with the contributions of seeds in points, by slot.

        Returns the changes of seeds that happen by themselves.
        """
        events = self.env.record_epoch(result, contributions, hold_stages)
        self.update()
        return events

    def update(self) -> None:
        """Update observation and masks from the network."""
        self._builder.update_masks()
        self._is_observed = False

    def choose(self, controller: Any) -> list[int]:
        """Return the action that a controller chooses, an index per head. Raises ValueError if it is not allowed."""
        try:
            chosen = controller.act(self)
            check_is_action(chosen, self.n_envs)
            action = [int(index) for index in torch.stack(chosen).flatten().tolist()]
            check_possible(self.space, self.masks_on_cpu, 0, action)
        except ActionError as error:
            raise ValueError(f"{type(controller).__name__}: {error}") from error
        return action

    def apply(self, action: list[int]) -> list[SeedEvent]:
        """Execute an action, and return the changes of seeds."""
        last_op = self.env.last_op
        events = self.env.apply(action)
        if not (last_op is self.env.last_op is Op.WAIT):  # to wait again changes nothing
            self.update()
        return events
