"""Spaces, observations and masks of hosts in the form of Gymnasium: flat arrays. N environments, K slots."""

import numpy as np
import torch
from gymnasium.spaces import Box, MultiDiscrete
from torch import Tensor
from torch.nn.functional import one_hot

from esper_lightning.envs import ActionSpace, Masks, Observation, Op
from esper_lightning.envs.device_transfer import download


def make_action_space(space: ActionSpace) -> MultiDiscrete:
    """Return the action space of one host: one number per head, in the order of `HEADS`."""
    return MultiDiscrete(list(space.sizes.values()))


def make_observation_space(space: ActionSpace, features: int) -> Box:
    """Return the observation space of one host with so many features; see `flatten_observation`."""
    return Box(-1.0, 1.0, (features + len(space.slot) * (1 + len(space.blueprint)),), np.float32)


def flatten_observation(observation: Observation, space: ActionSpace) -> np.ndarray:  # [N, D + K·(1 + blueprints)]
    """Return the features of each host, then the blueprint in each slot as a one-hot code; code 0 is an empty slot."""
    codes = one_hot(download(observation.blueprints), 1 + len(space.blueprint)).flatten(1)
    return torch.cat([download(observation.features), codes], 1).to(torch.float32).numpy()


def observation_names(space: ActionSpace, features: list[str]) -> list[str]:
    """Return the name of each number of a flat observation."""
    codes = [f"{slot}.blueprint.{name}" for slot in space.slot for name in ("none", *space.blueprint)]
    return [*features, *codes]


def choice_masks(masks: Masks, space: ActionSpace) -> dict[str, Tensor]:  # [N, choices] bool by head
    """Return the choices of each head that are part of at least one possible action in which the head has an effect.

    A head without an effect in any possible action has choice 0 alone. The masks of one head know nothing of the
    choices of the others, so not every combination of choices within them is a possible action.
    """
    acting = masks.slot.clone()  # [N, ops, K]
    acting[:, Op.WAIT] = False
    ops = len(space.op)
    germinating = acting[:, Op.GERMINATE]  # [N, K]
    timed_ops = [op for op in (Op.CULL, Op.SET_ALPHA) if op < ops]
    speeds = (masks.speed & acting[..., None])[:, timed_ops].flatten(1, 2).any(1)  # [N, speeds]
    found = {
        "op": masks.op,
        "slot": acting.any(1),
        "blueprint": (masks.blueprint & germinating[..., None]).any(1),
        "style": germinating.any(1, keepdim=True).expand(-1, len(space.style)),
        "tempo": germinating.any(1, keepdim=True).expand(-1, len(space.tempo)),
        "target": (masks.target & acting[:, Op.SET_ALPHA, :, None]).any(1)
        if ops > Op.SET_ALPHA
        else torch.zeros(len(acting), len(space.target), dtype=torch.bool),
        "speed": speeds,
        "curve": (masks.curve & speeds[..., None]).any(1),
    }
    return {name: with_fallback(possible) for name, possible in found.items()}


def with_fallback(possible: Tensor) -> Tensor:  # [N, choices] bool
    """Return the mask with choice 0 possible where no choice is."""
    first = torch.arange(possible.shape[1]) == 0
    return possible | (first & ~possible.any(1, keepdim=True))


def flatten_masks(masks: Masks, space: ActionSpace) -> np.ndarray:  # [N, sum of choices] bool
    """Return the masks of `choice_masks`, the heads one after the other."""
    return torch.cat(list(choice_masks(masks, space).values()), 1).numpy()
