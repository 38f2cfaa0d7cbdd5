"""Controllers by their names, and trained policies from checkpoints."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from esper_lightning.controllers import CONTROLLERS, make_controller
from esper_lightning.controllers.learned import LearnedController, TrainingHosts, TrainingRules
from esper_lightning.controllers.rules import WaitOnly
from esper_lightning.controllers.schedules import FixedSchedule, read_schedule
from esper_lightning.datamodules import HostPoolData
from esper_lightning.envs import ActionConfig, ActionSpace
from esper_lightning.envs.observation import ObservationConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.ppo.policy import Policy, PolicyConfig, PolicyShape, use_ieee_float32
from esper_lightning.ppo.running_norm import make_norm
from esper_lightning.runtime.checkpoint import (
    CHECKPOINT_SUFFIX,
    FEATURES_KEY,
    HYPER_PARAMETERS_KEY,
    IDENTITY_KEY,
    MODULE_KEY,
    NAMED_POLICIES,
    POLICY_SUFFIX,
    RULES_KEY,
    checkpoint_errors,
    names_policy,
    read_policy,
)
from esper_lightning.runtime.machine import CPU
from esper_lightning.runtime.serialization import load_settings


def restore_policy(checkpoint: Mapping[str, Any], source: str, device: torch.device) -> LearnedController:
    """Return a controller of the policy in the content of a checkpoint, with its observation normaliser.

    Raises ValueError if it was not trained on hosts; ValueError, RuntimeError, LookupError or TypeError if its settings
    or weights are damaged.
    """
    use_ieee_float32()
    settings, weights = checkpoint[HYPER_PARAMETERS_KEY], checkpoint["state_dict"]
    shape = PolicyShape.from_state_dict(checkpoint[MODULE_KEY]["shape"])
    if not isinstance(shape.space, ActionSpace):
        raise ValueError("its policy was not trained on hosts")
    with torch.device("meta"):  # initial weights would draw from the global random numbers
        policy = Policy(shape, load_settings(PolicyConfig, settings["policy"]))
        normalise = make_norm(shape.rows or shape.features)
    for prefix, module in {"policy.": policy, "observation_norm.": normalise}.items():
        state = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        module.load_state_dict(state, assign=True)
        module.to(device)
    rules = checkpoint[RULES_KEY]
    training = TrainingHosts(
        space=shape.space,
        features=checkpoint[IDENTITY_KEY][FEATURES_KEY],
        observation=load_settings(ObservationConfig, rules["observation"]),
        rules=TrainingRules(
            lifecycle=load_settings(LifecycleConfig, rules["lifecycle"]),
            # Without blueprints: other hosts may offer others.
            actions=load_settings(ActionConfig, rules["actions"] | {"blueprints": None}),
        ),
    )
    seed = checkpoint[MODULE_KEY].get("seed")
    return LearnedController(policy, normalise, training, source=source, training_seed=seed)


def load_policies(paths: Sequence[str], data: HostPoolData) -> list[LearnedController]:
    """Load policies by path or name to compare them, each with its own observation of the hosts.

    Raises ValueError, naming the checkpoint, if it is damaged or foreign, or if the hosts do not fit its policy.
    """
    policies = []
    for path in paths:
        checkpoint = read_policy(path)
        with checkpoint_errors(path, "evaluated"):
            loaded = restore_policy(checkpoint, path, data.pool.device)
            for task, pool in data.pools.items():  # the reset raises ValueError if hosts and policy do not fit
                has_same_observation = loaded.observation in (None, pool.config.observation)
                loaded.reset(
                    pool if has_same_observation else data.make_pool(1, task=task, observation=loaded.observation)
                )
            policies.append(loaded)
    return policies


def check_training_seeds(policies: Sequence[LearnedController]) -> None:
    """Raise ValueError unless policies are of one kind of training: different seeds, the same observed features."""
    for first, second in combinations(policies, 2):
        both = f"checkpoints {first.source!r} and {second.source!r}"
        if first.training_seed is not None and first.training_seed == second.training_seed:
            raise ValueError(f"{both} are both of training seed {first.training_seed}; give one per training seed")
        if first.observation != second.observation:
            raise ValueError(f"{both} observe different features; name one of them in model.evaluation.against")


def load_controller(path: str | Path, device: torch.device = CPU) -> LearnedController:
    """Return a controller that takes the most likely actions of a trained policy.

    It acts on hosts with any slots and blueprints, or on a network that the callback `Grow` grows, in a pool whose
    `EnvConfig` has the controller's `observation` and offers the tempos of `controller.rules.actions`.

    Args:
        path: Checkpoint of a run on hosts, policy as safetensors, or `tamiyo`, the policy that comes with the package.
        device: Device of the pool that the controller acts on.

    Raises ValueError, in one line, if the file is damaged or foreign, or its policy was not trained on hosts.
    """
    checkpoint = read_policy(path)
    with checkpoint_errors(path, "loaded"):
        return restore_policy(checkpoint, str(path), device)


def find_controller(name: str, setting: str, *, others: Sequence[str] = (), device: torch.device = CPU) -> Any:
    """Return the controller with a name: a rule, a trained policy, the file of a schedule, `wait`, or the user's own.

    Args:
        name: Registered name, import path, path of a schedule (.json) or of a policy, `tamiyo`, or `wait`.
        setting: Beginning of the error for an unknown name: the setting that gave the name.
        others: Further names that the error may suggest.
        device: Device of the pool that a trained policy acts on.

    Raises ValueError if there is none, or if the file is missing or damaged.
    """
    if name == "wait":
        return WaitOnly()
    if name.endswith(".json"):
        return FixedSchedule(read_schedule(name))
    if names_policy(name):
        return load_controller(name, device)
    try:
        CONTROLLERS.find(name, others)
    except ValueError as error:
        raise ValueError(
            f"{setting}: {error}; or name a schedule (.json), a policy ({CHECKPOINT_SUFFIX} or {POLICY_SUFFIX}), "
            f"{', '.join(NAMED_POLICIES)}, or wait"
        ) from error
    return make_controller(name)
