"""Trained policies loaded from checkpoints: one per training seed, and rivals that were trained in another way."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from esper_lightning.checkpointing.policy_file import read_policy
from esper_lightning.checkpointing.validate import (
    HYPER_PARAMETERS_KEY,
    IDENTITY_KEY,
    MODULE_KEY,
    RULES_KEY,
    check_identity,
    checkpoint_errors,
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
from esper_lightning.envs.spaces.observation import ObservationConfig
from esper_lightning.machine import CPU
from esper_lightning.ppo.running_norm import NormalizeConfig, make_norm
from esper_lightning.serialization.checks import load_settings
from esper_lightning.serialization.excerpt import excerpt
from esper_lightning.tamiyo.policy import Policy, PolicyConfig, PolicyShape, use_ieee_float32
from esper_lightning.tamiyo.set_policy import make_policy

RIVAL_PREFIX = "rival "
"""Prefix of the names of rivals."""


class SavedPolicy(NamedTuple):
    """Policy restored from a checkpoint, without its critic's statistics and its optimizer."""

    policy: Policy
    normalise: nn.Module
    shape: PolicyShape


def restore_policy(checkpoint: Mapping[str, Any], device: torch.device = CPU) -> SavedPolicy:
    """Return the policy in the content of a checkpoint, with its observation normaliser.

    Raises ValueError, RuntimeError, LookupError or TypeError if its settings or weights are damaged.
    """
    use_ieee_float32()
    settings, weights = checkpoint[HYPER_PARAMETERS_KEY], checkpoint["state_dict"]
    shape = PolicyShape.from_state_dict(checkpoint[MODULE_KEY]["shape"])
    with torch.device("meta"):  # initial weights would draw from the global random numbers
        policy = make_policy(shape, load_settings(PolicyConfig, settings["policy"]))
        observed = shape.features if shape.rows is None else shape.rows
        normalise = make_norm(observed, load_settings(NormalizeConfig, settings["normalize"]))
    for prefix, part in {"policy.": policy, "observation_norm.": normalise}.items():
        own = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        part.load_state_dict(own, assign=True)
        part.to(device)
    return SavedPolicy(policy, normalise, shape)


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


def load_policies(checkpoints: Mapping[str, dict[str, Any]], data: HostPoolData) -> list[TrainedPolicy]:
    """Load policies from checkpoints of the same kind of run with different training seeds.

    Args:
        checkpoints: Contents of the checkpoints by path.
        data: Hosts to evaluate on; the pool must be built.

    Raises ValueError, naming the checkpoint, if it is damaged, foreign or from another kind of run.
    """

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> TrainedPolicy:
        advice = "set model.evaluation.transfer to true to evaluate it on other hosts"
        check_identity(checkpoint[IDENTITY_KEY], data.identity(), advice)
        saved = restore_policy(checkpoint, data.pool.device)
        return TrainedPolicy(seed, path, saved.policy, saved.normalise)

    return _of_different_seeds(_load_each(checkpoints, load))


def load_transferred(checkpoints: Mapping[str, dict[str, Any]], data: HostPoolData) -> list[TrainedPolicy]:
    """Load policies from checkpoints with different training seeds, for evaluation on hosts of any kind.

    Args:
        checkpoints: Contents of the checkpoints by path.
        data: Hosts to evaluate on; the pool must be built and not yet stepped.

    Raises ValueError, naming the checkpoint, if it is damaged or foreign, or if the hosts do not fit the policy.
    """

    def load(seed: int | None, path: str, checkpoint: dict[str, Any]) -> TrainedPolicy:
        saved, spaces = load_with_spaces(checkpoint, data.pool.device)
        return TrainedPolicy(
            seed,
            path,
            saved.policy,
            saved.normalise,
            training_spaces=spaces,
            sight=set_sight(saved, checkpoint),
            rules=training_rules(checkpoint),
        )

    policies = _of_different_seeds(_load_each(checkpoints, load))
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


def set_sight(saved: SavedPolicy, checkpoint: Mapping[str, Any]) -> ObservationConfig | None:
    """Return the observation that a policy over sets was trained on; None for another policy, which pools adapt to.

    Raises ValueError if it is missing in the checkpoint, or damaged.
    """
    if saved.shape.rows is None:
        return None
    return load_settings(ObservationConfig, checkpoint[IDENTITY_KEY].get(SIGHT_KEY))


def training_rules(checkpoint: Mapping[str, Any]) -> TrainingRules | None:
    """Return the rules of growth of the training hosts, or None for a checkpoint without. ValueError if damaged."""
    return TrainingRules.from_saved(checkpoint[RULES_KEY]) if RULES_KEY in checkpoint else None


def load_with_spaces(checkpoint: Mapping[str, Any], device: torch.device) -> tuple[SavedPolicy, TrainingSpaces]:
    """Return the policy in a checkpoint of a run on hosts, and the spaces of these hosts.

    Raises ValueError, RuntimeError, LookupError or TypeError if one of them is damaged, or if they do not belong
    together.
    """
    spaces = TrainingSpaces.from_identity(checkpoint[IDENTITY_KEY])
    saved = restore_policy(checkpoint, device)
    n_features = saved.shape.features + saved.shape.slot_features + saved.shape.blueprint_features
    if (saved.shape.space, n_features) != (spaces.space, len(spaces.features)):
        raise ValueError("its policy is not one for the hosts that it names")
    return saved, spaces


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
        saved, spaces = load_with_spaces(checkpoint, device)
        sight = set_sight(saved, checkpoint) or ObservationConfig()
        rules = training_rules(checkpoint)
    return make_transferable(LearnedController(saved.policy, saved.normalise), spaces, sight, rules=rules)


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
        sight = load_settings(ObservationConfig, checkpoint[RULES_KEY]["sight"])
        saved, spaces = load_with_spaces(checkpoint, data.pool.device)
        features = data.make_pool(1, sight=sight).feature_names
        if spaces.features != features:  # some features exist only where compute has a price
            raise ValueError(
                f"observed features: the checkpoint and this run differ in "
                f"{excerpt(sorted({*spaces.features} ^ {*features}))}; set data.env.objective as in its training"
            )
        return TrainedPolicy(seed, path, saved.policy, saved.normalise, sight=sight)

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


def _load_each(
    checkpoints: Mapping[str, dict[str, Any]], load: Callable[[int | None, str, dict[str, Any]], TrainedPolicy]
) -> list[TrainedPolicy]:
    """Load a policy from each checkpoint with `load(training seed, path, checkpoint)`.

    Raises ValueError, naming the checkpoint, if one cannot be loaded.
    """
    policies = []
    for path, checkpoint in checkpoints.items():
        with checkpoint_errors(path, "evaluated"):
            policies.append(load(checkpoint[MODULE_KEY].get("seed"), path, checkpoint))
    return policies


def _of_different_seeds(policies: list[TrainedPolicy]) -> list[TrainedPolicy]:
    """Return the policies. Raises ValueError if two of them have the same training seed."""
    path_by_seed: dict[int, str] = {}
    for policy in policies:
        seed, path = policy.training_seed, policy.source
        if seed is not None and (same := path_by_seed.setdefault(seed, path)) is not path:
            raise ValueError(
                f"checkpoint {path!r} and {same!r} are both of training seed {seed}; give one per training seed"
            )
    return policies
