"""Tamiyo as checkpoints hold her: one per training seed."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from esper_lightning.checkpoint import IDENTITY_KEY, SETTINGS_KEY, check_checkpoint, check_identity, differences
from esper_lightning.data import HostPoolData
from esper_lightning.module import NormalizeConfig, TamiyoModule, identity, module_like
from esper_lightning.tamiyo.abroad import Abroad, Home
from esper_lightning.tamiyo.controller import Controller, LearnedController
from esper_lightning.tamiyo.policy import Policy, PolicyShape
from esper_lightning.tamiyo.sampled import SampledController

SEED_NAME = "seed_everything"

CLIP_NAME = "model.normalize.clip"

NOT_OF_THE_RUN = (SEED_NAME, "data.seed", "evaluation.")
"""Settings in which training seeds differ, or that have nothing to do with training."""


class Tamiyo(NamedTuple):
    """A trained policy and what it needs to see."""

    training_seed: int | None  # None: not known
    source: str
    """Where she comes from: a checkpoint's path, or the run that has just ended."""
    policy: Policy
    normalise: nn.Module
    home: Home | None = None
    """What she knows, where she is to meet other hosts than those that she was trained on."""

    def greedy(self) -> Controller:
        """Does what is likeliest."""
        return self._wherever(LearnedController(self.policy, self.normalise))

    def sampled(self, seed: int) -> Controller:
        """Explores as in training."""
        return self._wherever(SampledController(self.policy, self.normalise, seed))

    def _wherever(self, controller: Controller) -> Controller:
        return controller if self.home is None else Abroad(controller, self.home)


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
        model: Is built for `data` here, and its weights are used up.
        data: Its pool is built.
        paths: Of the checkpoints.

    Raises ValueError, naming the checkpoint, if it is not whole, not ours, or of another kind of run.
    """

    model.build_for(data)
    model.to(data.pool.device)

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> Tamiyo:
        check_identity(checkpoint[IDENTITY_KEY], identity(model, data))
        model.load_state_dict(checkpoint["state_dict"])
        return Tamiyo(seed, path, deepcopy(model.policy), deepcopy(model.observation_norm))

    return _load_each(paths, load)


def load_travellers(paths: Sequence[str], stand_ins: Mapping[str, str], data: HostPoolData) -> list[Tamiyo]:
    """Of these checkpoints, whatever hosts their runs were on; of different training seeds.

    Args:
        paths: Of the checkpoints.
        stand_ins: Blueprints that take the place of those that she knows; see `Home`.
        data: The hosts that she is to meet; its pool is built, and has not been stepped.

    Raises ValueError, naming the checkpoint, if it is not whole or not ours, or if the hosts cannot be shown to her.
    """

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> Tamiyo:
        known, weights = checkpoint[IDENTITY_KEY], checkpoint["state_dict"]
        home = Home.of(known, stand_ins)
        model = module_like(known, float(checkpoint.get(SETTINGS_KEY, {}).get(CLIP_NAME, NormalizeConfig.clip)))
        privileged = weights["privileged_norm.mean"].numel() if "privileged_norm.mean" in weights else 0
        if model.policy_config.asymmetric and not privileged:  # it saw them as they are
            privileged = weights["policy.value.0.weight"].shape[1] - model.policy_config.width
        places, categories = len(home.space.slot), len(home.space.blueprint) + 1
        model.build(PolicyShape(len(home.features), home.space, places, categories, privileged))
        model.load_state_dict(weights)
        model.to(data.pool.device)
        return Tamiyo(seed, path, model.policy, model.observation_norm, home)

    tamiyos = _load_each(paths, load)
    for tamiyo in tamiyos:
        for pool in data.pools.values():
            tamiyo.greedy().reset(pool)  # what does not fit is found out now
    return tamiyos


def _load_each(paths: Sequence[str], load: Callable[[int | None, str, dict[str, Any]], Tamiyo]) -> list[Tamiyo]:
    """By training seed, path and checkpoint. Raises ValueError, naming the checkpoint that cannot be loaded."""
    found: dict[int, str] = {}
    tamiyos = []
    for path in paths:
        checkpoint = check_checkpoint(path)
        seed = training_seed(checkpoint)
        if seed is not None and (same := found.setdefault(seed, path)) is not path:
            raise ValueError(
                f"checkpoint {path!r} and {same!r} are both of training seed {seed}: they would count as two; give one "
                f"of each seed"
            )
        try:
            tamiyos.append(load(seed, path, checkpoint))
        # Of a damaged one torch may say anything: names and shapes that are others, places that are not there.
        except (ValueError, RuntimeError, LookupError, TypeError) as error:
            raise ValueError(f"checkpoint {path!r} cannot be evaluated: {error}") from error
    return tamiyos


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
