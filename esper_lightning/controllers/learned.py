"""Interface of all controllers, and the controllers that act by a learned policy: most likely action, or sampled."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from esper_lightning.envs import Action, ActionSpace, EnvConfig, HostPool, Masks
from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.observation import Observation
from esper_lightning.envs.vector_env import VectorObservation
from esper_lightning.tamiyo.policy import Policy


class ObservedHosts(Protocol):
    """Attributes of N hosts that a policy reads; pools have them, and so do pools presented in other spaces."""

    @property
    def n_envs(self) -> int: ...

    @property
    def observation(self) -> Observation | VectorObservation: ...

    @property
    def masks(self) -> Masks: ...

    @property
    def episode_starts(self) -> Tensor: ...  # [N] bool


class Hosts(ObservedHosts, Protocol):
    """Attributes of N growing networks that controllers read: those of a pool, or of a training of your own."""

    @property
    def envs(self) -> Sequence[Subject]: ...

    @property
    def space(self) -> ActionSpace: ...

    @property
    def masks_on_cpu(self) -> Masks: ...

    @property
    def growable(self) -> Tensor: ...  # [K, blueprints] bool, whatever an episode offers

    @property
    def config(self) -> EnvConfig: ...

    @property
    def feature_names(self) -> list[str]: ...

    @property
    def device(self) -> torch.device: ...


class PolicyController(Protocol):
    """Controller that reads observation and masks only, so it also acts on hosts with another action space."""

    def reset(self, pool: ObservedHosts) -> None:
        """Reset the controller's own state: an episode has begun in every environment."""

    def act(self, pool: ObservedHosts) -> Action:
        """Return one action per environment that is possible according to `pool.masks`."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the controller's own state."""
        ...

    def load_state_dict(self, pool: ObservedHosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""


class Controller(Protocol):
    """Chooses the actions for every host of a pool, one per tick."""

    def reset(self, pool: HostPool) -> None:
        """Reset the controller's own state: an episode has begun in every environment."""

    def act(self, pool: HostPool) -> Action:
        """Return one action per environment that is possible according to `pool.masks`."""
        ...


class LearnedController:
    """Takes the policy's most likely action: the most likely op, then the most likely choice of each further head.

    Args:
        policy: The network.
        normalise: Function from raw features to the normalised features that the network was trained on.
    """

    def __init__(self, policy: Policy, normalise: Callable[[Tensor], Tensor]) -> None:
        self.policy = policy
        self.normalise = normalise

    def reset(self, pool: ObservedHosts) -> None:
        self.state = self.policy.initial_state(pool.n_envs)

    @torch.no_grad()
    def act(self, pool: ObservedHosts) -> Action:
        observation = pool.observation._replace(features=self.normalise(pool.observation.features))
        # As in training, a rollback begins a new trajectory and resets the recurrent state.
        action, self.state = self.policy.decide(observation, self.state, pool.masks, starts=pool.episode_starts)
        return action

    def state_dict(self) -> dict[str, Any]:
        """Return the recurrent state, for an episode that is continued later."""
        return {"state": tuple(self.state), "policy": digest(self.policy)}

    def load_state_dict(self, pool: ObservedHosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`.

        Raises ValueError if it is the state of a policy with other weights.
        """
        if state["policy"] != digest(self.policy):
            raise ValueError("the policy has other weights than the one that began; give the same, or begin anew")
        self.reset(pool)
        self.state = type(self.state)(*state["state"])


def digest(module: nn.Module) -> str:
    """Return the SHA-256 of a module's weights and buffers."""
    content = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        content.update(name.encode())
        content.update(tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


class SampledController(LearnedController):
    """Samples actions from the policy's distribution.

    Args:
        policy: The network.
        normalise: Function from raw features to the normalised features that the network was trained on.
        rng_seed: RNG seed; every episode continues the stream of random numbers.
    """

    def __init__(self, policy: Policy, normalise: Callable[[Tensor], Tensor], rng_seed: int) -> None:
        super().__init__(policy, normalise)
        self.generator = torch.Generator(next(policy.parameters()).device).manual_seed(rng_seed)

    @torch.no_grad()
    def act(self, pool: ObservedHosts) -> Action:
        observation = pool.observation._replace(features=self.normalise(pool.observation.features))
        distribution, self.state = self.policy.step_actor(
            observation, self.state, pool.masks, starts=pool.episode_starts
        )
        return distribution.sample(self.generator)
