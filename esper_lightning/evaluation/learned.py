"""Tamiyo as checkpoints hold her: one per training seed."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from esper_lightning.checkpoint import IDENTITY_KEY, SETTINGS_KEY, check_checkpoint, check_identity, differences
from esper_lightning.data import HostPoolData
from esper_lightning.module import TamiyoModule, identity
from esper_lightning.tamiyo.controller import LearnedController
from esper_lightning.tamiyo.policy import Policy
from esper_lightning.tamiyo.sampled import SampledController

SEED_NAME = "seed_everything"

NOT_OF_THE_RUN = (SEED_NAME, "data.seed", "evaluation.")
"""Settings in which training seeds differ, or that have nothing to do with training."""


class Tamiyo(NamedTuple):
    """A trained policy and what it needs to see."""

    training_seed: int | None  # None: not known
    source: str
    """Where she comes from: a checkpoint's path, or the run that has just ended."""
    policy: Policy
    normalise: nn.Module

    def greedy(self) -> LearnedController:
        """Does what is likeliest."""
        return LearnedController(self.policy, self.normalise)

    def sampled(self, seed: int) -> SampledController:
        """Explores as in training."""
        return SampledController(self.policy, self.normalise, seed)


def check_distinct(paths: Sequence[str]) -> None:
    """Raises ValueError if a checkpoint is named twice."""
    known: dict[Path, str] = {}
    for path in paths:
        same = known.setdefault(Path(path).resolve(), path)
        if same is not path:
            raise ValueError(f"checkpoint {path!r} is named twice; name each training seed's once")


def load_tamiyos(model: TamiyoModule, data: HostPoolData, paths: Sequence[str]) -> list[Tamiyo]:
    """Of these checkpoints, which must be of different training seeds of the same kind of run.

    Args:
        model: Set up for `data`; its weights are used up.
        data: Its pool is built.
        paths: Of the checkpoints.

    Raises ValueError, naming the checkpoint, if it is not whole, not ours, or of another kind of run.
    """
    found: list[Tamiyo] = []
    for path in paths:
        checkpoint = check_checkpoint(path)
        seed = training_seed(checkpoint)
        for other in found:
            if seed is not None and seed == other.training_seed:
                raise ValueError(
                    f"checkpoint {path!r} and {other.source!r} are both of training seed {seed}: they would count as "
                    f"two; give one of each seed"
                )
        try:
            check_identity(checkpoint[IDENTITY_KEY], identity(model, data))
            model.load_state_dict(checkpoint["state_dict"])
        except (ValueError, RuntimeError) as error:  # torch's word for weights of other names or shapes
            raise ValueError(f"checkpoint {path!r} cannot be evaluated: {error}") from error
        found.append(Tamiyo(seed, str(path), deepcopy(model.policy), deepcopy(model.observation_norm)))
    return found


def training_seed(checkpoint: Mapping[str, Any]) -> int | None:
    """The seed of the run that wrote the checkpoint, if it says so."""
    said = checkpoint.get(SETTINGS_KEY, {}).get(SEED_NAME, "")
    return int(said) if said.isdecimal() else None


def other_settings(paths: Sequence[str]) -> list[str]:
    """In what the runs of further checkpoints differ from the first one's, beside their seeds, a line each."""
    first, *others = (check_checkpoint(path).get(SETTINGS_KEY, {}) for path in paths)
    lines = []
    for path, other in zip(paths[1:], others, strict=True):
        without = [{k: v for k, v in one.items() if not k.startswith(NOT_OF_THE_RUN)} for one in (first, other)]
        lines += [
            f"{path}: {line.replace(' before, ', ' in the first, ').removesuffix(' now')} here"
            for line in differences(*without)
        ]
    return lines
