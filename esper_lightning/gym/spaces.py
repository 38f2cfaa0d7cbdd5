"""Spaces, observations and masks of hosts in the form of Gymnasium: flat arrays. N environments, K slots."""

import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor

from esper_lightning.envs import ActionSpace, HostPool, Masks, Op
from esper_lightning.envs.device_transfer import download

LARGEST_FEATURE = 3.0
"""Bound of all features in an observation."""


def make_action_space(space: ActionSpace) -> MultiDiscrete:
    """Return the action space of one host: one number per head, in the order of `HEADS`."""
    return MultiDiscrete(list(space.sizes.values()))


def make_observation_space(features: int) -> Box:
    """Return the observation space of one host with so many features; see `flatten_observation`."""
    return Box(-LARGEST_FEATURE, LARGEST_FEATURE, (features,), np.float32)


def flatten_observation(pool: HostPool) -> np.ndarray:  # [N, features]
    """Return the features of each host, then those of its slots, then those of the blueprints in each slot."""
    parts = pool.rows.split(download(pool.observation.features))
    return torch.cat([part.flatten(1) for part in parts], 1).to(torch.float32).numpy()


def observation_names(pool: HostPool) -> list[str]:
    """Return the name of each number of a flat observation."""
    host, slot, _ = pool.rows
    names, space = pool.feature_names, pool.space
    of_slot = [name.removeprefix("slot.") for name in names[host : host + slot]]
    of_blueprint = [name.removeprefix("blueprint.") for name in names[host + slot :]]
    return [
        *names[:host],
        *(f"{place}.{name}" for place in space.slot for name in of_slot),
        *(f"{place}.{kind}.{name}" for place in space.slot for kind in space.blueprint for name in of_blueprint),
    ]


def choice_masks(masks: Masks, space: ActionSpace) -> dict[str, Tensor]:  # [N, choices] bool by head
    """Return the choices of each head that are part of at least one possible action in which the head has an effect.

    A head without an effect in any possible action has choice 0 alone. The masks of one head know nothing of the
    choices of the others, so not every combination of choices within them is a possible action.
    """
    acting = masks.slot.clone()  # [N, ops, K]
    acting[:, Op.WAIT] = False
    germinating = acting[:, Op.GERMINATE]  # [N, K]
    can_germinate = germinating.any(1, keepdim=True)
    found = {
        "op": masks.op,
        "slot": acting.any(1),
        "blueprint": (masks.blueprint & germinating[..., None]).any(1),
        "style": can_germinate.expand(-1, len(space.style)),
        "tempo": can_germinate.expand(-1, len(space.tempo)),
    }
    return {name: with_fallback(possible) for name, possible in found.items()}


def with_fallback(possible: Tensor) -> Tensor:  # [N, choices] bool
    """Return the mask with choice 0 possible where no choice is."""
    first = torch.arange(possible.shape[1]) == 0
    return possible | (first & ~possible.any(1, keepdim=True))


def flatten_masks(masks: Masks, space: ActionSpace) -> np.ndarray:  # [N, sum of choices] bool
    """Return the masks of `choice_masks`, the heads one after the other."""
    return torch.cat(list(choice_masks(masks, space).values()), 1).numpy()
