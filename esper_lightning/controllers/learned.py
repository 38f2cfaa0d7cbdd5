"""Interface of all controllers, and the controller that acts by a learned policy."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from esper_lightning.envs import Action, ActionConfig, ActionSpace, EnvConfig, HostPool, Masks
from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.ppo.policy import Policy
from esper_lightning.runtime.serialization import excerpt


class Hosts(Protocol):
    """Attributes of N growing networks that controllers read: those of a pool, or of a training of your own."""

    n_envs: int
    observation: Observation
    masks: Masks
    masks_on_cpu: Masks
    episode_starts: Tensor  # [N] bool
    space: ActionSpace
    growable: Tensor  # [K, blueprints] bool, whatever an episode offers
    config: EnvConfig
    feature_names: list[str]
    device: torch.device

    @property
    def envs(self) -> Sequence[GrowthRecord]: ...


class Controller(Protocol):
    """Chooses the actions for every host of a pool, one per tick."""

    def reset(self, pool: HostPool) -> None:
        """Reset the controller's own state: an episode has begun in every environment."""

    def act(self, pool: HostPool) -> Action:
        """Return one action per environment that is possible according to `pool.masks`."""
        ...


class TrainingRules(NamedTuple):
    """Rules by which seeds grew on the training hosts."""

    lifecycle: LifecycleConfig
    actions: ActionConfig
    """Choices but those of blueprints, of which other hosts offer others."""


class TrainingHosts(NamedTuple):
    """Hosts on which a policy was trained, as far as other hosts must be like them."""

    space: ActionSpace
    """Choices of all heads; other hosts may have other slots and blueprints."""
    features: list[str]
    """Names of the observed features."""
    observation: ObservationConfig
    """Settings of the observation."""
    rules: TrainingRules

    def check(self, pool: Hosts) -> None:
        """Raise ValueError unless the hosts of a pool offer the same choices and show the same features."""
        for head, trained, offered in zip(ActionSpace._fields, self.space, pool.space, strict=True):
            if head not in ("slot", "blueprint") and trained != offered:
                defaults = asdict(ActionConfig())
                changed = {name: value for name, value in asdict(self.rules.actions).items() if value != defaults[name]}
                raise ValueError(
                    f"Tamiyo chooses among {excerpt(trained)} with its {head} head, these hosts offer "
                    f"{excerpt(offered)}; set data.env.actions as in its training: {excerpt(json.dumps(changed))}"
                )
        trained, offered = self.rules.actions.tempos, pool.config.actions.tempos
        if trained != offered:
            raise ValueError(
                f"Tamiyo learned with seeds that are blended in within {trained} ticks, those of these hosts within "
                f"{offered}; set data.env.actions.tempos as in its training"
            )
        if pool.feature_names != self.features:
            differing = sorted({*pool.feature_names} ^ {*self.features})
            if differing == ["budget"]:
                ours, theirs = ("with", "have none") if "budget" in self.features else ("without", "have one")
                raise ValueError(
                    f"the policy was trained {ours} a budget of FLOPs, and these hosts {theirs}; let the rule scaling "
                    f"or the policy tamiyo_depth decide about depth, and other policies about all else"
                )
            raise ValueError(
                f"the policy reads other features than these hosts show, as {excerpt(', '.join(differing))}; make the "
                "pool with observation=controller.observation (data.env.observation) and the lifecycle of the training"
            )


class LearnedController:
    """Takes the policy's most likely action: the most likely op, then the most likely choice of each further head.

    `normalise` turns raw features into those that the network knows. `training` describes the hosts of the policy's
    training, which those of an episode must be like. None: they are the same hosts. `source`, a path, and
    `training_seed` (None: unknown) identify the policy.
    """

    def __init__(
        self,
        policy: Policy,
        normalise: Callable[[Tensor], Tensor],
        training: TrainingHosts | None = None,
        *,
        source: str = "the policy of this run",
        training_seed: int | None = None,
    ) -> None:
        self.policy, self.normalise, self.training = policy, normalise, training
        self.source, self.training_seed = source, training_seed

    @property
    def observation(self) -> ObservationConfig | None:
        """Observation of the training, with which a pool must be made. None: unknown."""
        return self.training and self.training.observation

    @property
    def rules(self) -> TrainingRules | None:
        """Rules of growth of the training. None: unknown."""
        return self.training and self.training.rules

    def reset(self, pool: Hosts) -> None:
        """Start an episode. Raises ValueError if the hosts do not fit the policy."""
        if self.training is not None:
            self.training.check(pool)
        self.state = self.policy.initial_state(pool.n_envs)

    @torch.no_grad()
    def act(self, pool: Hosts) -> Action:
        # As in training, a rollback begins a new trajectory and resets the recurrent state.
        observation = Observation(self.normalise(pool.observation.features))
        hidden, self.state = self.policy.encode_step(observation, self.state, pool.episode_starts)
        return self.policy.heads.decide(hidden, pool.masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the recurrent state, for an episode that is continued later."""
        return {"state": tuple(self.state)}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict` of the same policy, in place of `reset`."""
        self.reset(pool)
        self.state = type(self.state)(*state["state"])
