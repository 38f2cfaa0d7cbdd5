"""Trained policies loaded from checkpoints: one per training seed, and rivals that were trained in another way."""

from ast import literal_eval
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from esper_lightning.checkpointing.policy_file import names_policy_alone, read_policy
from esper_lightning.checkpointing.validate import (
    IDENTITY_KEY,
    RULES_KEY,
    SETTINGS_KEY,
    check_identity,
    checkpoint_errors,
    differences,
)
from esper_lightning.controllers.learned import Controller, LearnedController, SampledController
from esper_lightning.controllers.transfer import (
    FEATURES_KEY,
    SetTransferController,
    TrainingRules,
    TrainingSpaces,
    TransferController,
    make_transferable,
)
from esper_lightning.datamodules.hosts import SIGHT_KEY, HostPoolData
from esper_lightning.envs.spaces.observation import DEFAULT_GROUPS, ObservationConfig
from esper_lightning.module import TamiyoModule, run_identity
from esper_lightning.serialization.checks import load_settings
from esper_lightning.serialization.excerpt import excerpt
from esper_lightning.serialization.safe_load import CPU
from esper_lightning.tamiyo.policy import Policy

SEED_SETTING = "seed_everything"

IGNORED_SETTINGS = (SEED_SETTING, "data.seed", "evaluation.")
"""Prefixes of settings in which runs may differ: RNG seeds, and settings unrelated to training."""

OBSERVATION_SETTING = "data.env.sight"

ADVICE = "leave --config out to evaluate on the hosts of the training, or evaluate on others with transfer"
"""End of the error message about a policy that was trained on other hosts."""

ADVICE_WITHOUT_RUN = "evaluate on others with transfer"
"""The same for a policy without the settings of its training."""

RIVAL_PREFIX = "rival "
"""Prefix of the names of rivals."""


class TrainedPolicy(NamedTuple):
    """Trained policy with its observation normalisation."""

    training_seed: int | None  # None: unknown
    source: str
    """Path of the checkpoint, or a name for the run that has just ended."""
    policy: Policy
    normalise: nn.Module
    training_spaces: TrainingSpaces | None = None
    """Spaces of the training hosts, if the policy is evaluated on hosts of another kind."""
    sight: ObservationConfig | None = None
    """Observation of the training. None: the one that is set for the hosts."""
    rules: TrainingRules | None = None
    """Rules of growth of the training hosts, if they are known and the policy is evaluated on hosts of another kind."""

    def greedy(self) -> Controller:
        """Return a controller that takes the most likely actions."""
        return self._adapt(LearnedController(self.policy, self.normalise))

    def sampled(self, rng_seed: int) -> Controller:
        """Return a controller that samples actions, as in training."""
        return self._adapt(SampledController(self.policy, self.normalise, rng_seed))

    def _adapt(self, controller: LearnedController) -> Controller:
        if self.training_spaces is None:
            return controller
        sight = self.sight or ObservationConfig()
        return make_transferable(controller, self.training_spaces, sight, rules=self.rules)


def path_list(paths: str | Sequence[str] | None) -> list[str]:
    """Return paths as a list; a string holds one path, or several with commas between them."""
    return paths.split(",") if isinstance(paths, str) else list(paths or ())


def check_distinct(paths: Sequence[str]) -> None:
    """Raise ValueError if a checkpoint is named twice."""
    path_by_file: dict[Path, str] = {}
    for path in paths:
        same = path_by_file.setdefault(Path(path).resolve(), path)
        if same is not path:
            raise ValueError(f"checkpoint {path!r} is named twice; name each once")


def load_policies(
    model: TamiyoModule, data: HostPoolData, checkpoints: Mapping[str, dict[str, Any]]
) -> list[TrainedPolicy]:
    """Load policies from checkpoints of the same kind of run with different training seeds.

    Args:
        model: Module that is built for `data` here; its weights are overwritten.
        data: Hosts to evaluate on; the pool must be built.
        checkpoints: Contents of the checkpoints by path.

    Raises ValueError, naming the checkpoint, if it is damaged, foreign or from another kind of run.
    """

    model.build_for(data)
    model.to(data.pool.device)

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> TrainedPolicy:
        advice = ADVICE_WITHOUT_RUN if names_policy_alone(path) else ADVICE
        check_identity(checkpoint[IDENTITY_KEY], run_identity(model, data), advice)
        model.load_state_dict(checkpoint["state_dict"])
        return TrainedPolicy(seed, path, deepcopy(model.policy), deepcopy(model.observation_norm))

    policies = _load_each(checkpoints, load)
    _check_training_seeds(policies)
    return policies


def load_transferred(
    checkpoints: Mapping[str, dict[str, Any]], stand_ins: Mapping[str, str], data: HostPoolData
) -> list[TrainedPolicy]:
    """Load policies from checkpoints with different training seeds, for evaluation on hosts of any kind.

    Args:
        checkpoints: Contents of the checkpoints by path.
        stand_ins: Blueprints that replace those of training; see `TrainingSpaces`.
        data: Hosts to evaluate on; the pool must be built and not yet stepped.

    Raises ValueError, naming the checkpoint, if it is damaged or foreign, or if the hosts do not fit the policy.
    """

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> TrainedPolicy:
        model, spaces = load_module_and_spaces(checkpoint, stand_ins, data.pool.device)
        return TrainedPolicy(
            seed,
            path,
            model.policy,
            model.observation_norm,
            training_spaces=spaces,
            sight=set_sight(model, checkpoint),
            rules=training_rules(checkpoint),
        )

    policies = _load_each(checkpoints, load)
    _check_training_seeds(policies)
    for policy in policies:
        if policy.sight != policies[0].sight:
            raise ValueError(
                f"{policy.source}: its policy observes other features than that of {policies[0].source}; evaluate the "
                f"two one after the other"
            )
        for task, pool in data.pools.items():
            if policy.sight is not None:
                pool = data.make_pool(1, task=task, sight=policy.sight)
            policy.greedy().reset(pool)  # raises ValueError now if the hosts do not fit
    return policies


def set_sight(module: TamiyoModule, checkpoint: Mapping[str, Any]) -> ObservationConfig | None:
    """Return the observation that a policy over sets was trained on; None for another policy, which pools adapt to.

    Raises ValueError if it is missing in the checkpoint, or damaged.
    """
    if module.policy_shape.rows is None:
        return None
    return load_settings(ObservationConfig, checkpoint[IDENTITY_KEY].get(SIGHT_KEY))


def training_rules(checkpoint: Mapping[str, Any]) -> TrainingRules | None:
    """Return the rules of growth of the training hosts, or None for a checkpoint without. ValueError if damaged."""
    return TrainingRules.from_saved(checkpoint[RULES_KEY]) if RULES_KEY in checkpoint else None


def load_module_and_spaces(
    checkpoint: Mapping[str, Any], stand_ins: Mapping[str, str], device: torch.device
) -> tuple[TamiyoModule, TrainingSpaces]:
    """Return the module in a checkpoint of a run on hosts, and the spaces of these hosts.

    Raises ValueError, RuntimeError, LookupError or TypeError if one of them is damaged, or if they do not belong
    together.
    """
    spaces = TrainingSpaces.from_identity(checkpoint[IDENTITY_KEY], stand_ins)
    module = TamiyoModule.from_checkpoint(checkpoint).to(device)
    shape = module.policy_shape
    n_features = shape.features + shape.slot_features + shape.blueprint_features
    if (shape.space, n_features) != (spaces.space, len(spaces.features)):
        raise ValueError("its policy is not one for the hosts that it names")
    return module, spaces


def load_controller(path: str | Path, device: torch.device = CPU) -> TransferController | SetTransferController:
    """Return a controller that takes the most likely actions of a trained policy.

    It acts on any pool that fits the policy: hosts of its own task, of another one with the same blueprints, or a
    network that the callback `Grow` grows. A policy over sets acts on hosts with any slots and blueprints, in a pool
    whose `EnvConfig` has the controller's `sight` and offers the tempos, styles and ops of `controller.rules.actions`.

    Args:
        path: Checkpoint of a run on hosts, policy as safetensors, or `tamiyo`, the policy that comes with the package.
        device: Device of the pool that the controller acts on.

    Raises ValueError, in one line, if the file is damaged or foreign, or its policy was not trained on hosts. The
    controller's `reset` raises ValueError if a pool does not fit; see `TransferController`.
    """
    checkpoint = read_policy(path)
    with checkpoint_errors(path, "loaded"):
        module, spaces = load_module_and_spaces(checkpoint, {}, device)
        sight = set_sight(module, checkpoint) or ObservationConfig()
        rules = training_rules(checkpoint)
    return make_transferable(module.controller(), spaces, sight, rules=rules)


def load_rivals(
    checkpoints: Mapping[str, dict[str, Any]], compared: Sequence[str], data: HostPoolData
) -> dict[str, TrainedPolicy]:
    """Load policies that were trained on the same hosts in another way, by the names of their rows.

    Task, hosts, actions, host optimizer and horizon must agree with those of `data`. Reward, observation, architecture
    of the policy and settings of PPO may differ.

    Args:
        checkpoints: Contents of the checkpoints by path.
        compared: Paths of the checkpoints of the policy with which they are compared.
        data: Hosts to evaluate on; the pool must be built.

    Raises ValueError, naming the checkpoint and what differs, if one is damaged, foreign or from other hosts.
    """
    hosts = {name: value for name, value in data.identity().items() if name not in (FEATURES_KEY, SIGHT_KEY)}

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> TrainedPolicy:
        identity = checkpoint[IDENTITY_KEY]
        check_identity(identity, hosts, "a rival must have been trained on these hosts, with these actions")
        spaces = TrainingSpaces.from_identity(identity, {})
        sight = _observation_config(checkpoint.get(SETTINGS_KEY, {}))
        features = data.make_pool(1, sight=sight).feature_names
        if spaces.features != features:  # some features exist only where compute has a price
            raise ValueError(
                f"observed features: the checkpoint and this run differ in "
                f"{excerpt(sorted({*spaces.features} ^ {*features}))}; set data.env.objective as in its training"
            )
        model, _ = load_module_and_spaces(checkpoint, {}, data.pool.device)
        return TrainedPolicy(seed, path, model.policy, model.observation_norm, sight=sight)

    return dict(zip(rival_names([*checkpoints], compared), _load_each(checkpoints, load), strict=True))


def rival_names(paths: Sequence[str], compared: Sequence[str]) -> list[str]:
    """Return a different name for each rival: its file name, behind folders that tell it from files of the same name.

    Args:
        paths: Paths of the rivals.
        compared: Further paths, from which the names tell the rivals.
    """
    files = [Path(path).absolute() for path in (*paths, *compared)]
    names = []
    for file in files[: len(paths)]:
        # Folders from the innermost outwards, without the root.
        rest = [other.parent.parts[:0:-1] for other in files if other.name == file.name and other != file]
        telling: list[str] = []
        for level, folder in enumerate(file.parent.parts[:0:-1]):
            same = [folders for folders in rest if folders[level : level + 1] == (folder,)]
            telling += [folder] * (len(same) < len(rest))
            rest = same
        names.append(RIVAL_PREFIX + "/".join([*reversed(telling), file.name]))
    return names


def _observation_config(settings: Mapping[str, str]) -> ObservationConfig:
    """Return the settings of the observation in a checkpoint. Raises ValueError if they are missing or damaged."""
    try:
        # Text is recorded without quotes.
        texts = {field.name: settings[f"{OBSERVATION_SETTING}.{field.name}"] for field in fields(ObservationConfig)}
        values: dict[str, Any] = {
            name: text if text in DEFAULT_GROUPS else literal_eval(text) for name, text in texts.items()
        }
        return ObservationConfig(**values)
    except (KeyError, SyntaxError) as error:
        raise ValueError(f"its settings of the observation are missing or damaged: {error}") from error


def _load_each(
    checkpoints: Mapping[str, dict[str, Any]], load: Callable[[int | None, str, dict[str, Any]], TrainedPolicy]
) -> list[TrainedPolicy]:
    """Load a policy from each checkpoint with `load(training seed, path, checkpoint)`.

    Raises ValueError, naming the checkpoint, if one cannot be loaded.
    """
    policies = []
    for path, checkpoint in checkpoints.items():
        with checkpoint_errors(path, "evaluated"):
            policies.append(load(training_seed(checkpoint), path, checkpoint))
    return policies


def _check_training_seeds(policies: Sequence[TrainedPolicy]) -> None:
    """Raise ValueError if two policies have the same training seed."""
    path_by_seed: dict[int, str] = {}
    for policy in policies:
        seed, path = policy.training_seed, policy.source
        if seed is not None and (same := path_by_seed.setdefault(seed, path)) is not path:
            raise ValueError(
                f"checkpoint {path!r} and {same!r} are both of training seed {seed}; give one per training seed"
            )


def training_seed(checkpoint: Mapping[str, Any]) -> int | None:
    """Return the RNG seed of the run that wrote the checkpoint, or None if it is not recorded."""
    text = checkpoint.get(SETTINGS_KEY, {}).get(SEED_SETTING, "")
    return int(text) if text.isdecimal() else None


def setting_differences(checkpoints: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return one line per setting in which a further checkpoint differs from the first, apart from RNG seeds."""
    compared = {
        path: {k: v for k, v in checkpoint.get(SETTINGS_KEY, {}).items() if not k.startswith(IGNORED_SETTINGS)}
        for path, checkpoint in checkpoints.items()
    }
    first = next(iter(compared.values()), {})
    return [
        f"{path}: {line.replace(' before, ', ' in the first, ').removesuffix(' now')} here"
        for path, settings in compared.items()
        for line in differences(first, settings)
    ]
