"""Transfer of a policy to hosts of another kind: adapters between the spaces of training and those of the new hosts.

Slots are paired in order, blueprints by name or by their stand-ins. Slots that the hosts lack appear empty and are
masked. In shapes, N is the number of environments; D, K and P are the numbers of features, slots and blueprints of the
training hosts.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.controllers.learned import Hosts, PolicyController
from esper_lightning.envs import HEADS, Action, Masks, Op
from esper_lightning.envs.spaces.actions import CHOICES_KEY, ActionConfig, ActionSpace
from esper_lightning.envs.spaces.observation import STAGE_SHARE_PREFIX, Observation, ObservationConfig
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import Stage
from esper_lightning.serialization.checks import check_keys, load_settings
from esper_lightning.serialization.excerpt import excerpt

MAPPED_HEADS = ("slot", "blueprint")
"""Heads whose choices may differ between training and new hosts."""

FEATURES_KEY = "observed features"


class TrainingSpaces(NamedTuple):
    """Action space and features of the training hosts."""

    space: ActionSpace
    features: list[str]

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> "TrainingSpaces":
        """Return the spaces recorded in a checkpoint's identity. Raises ValueError if they are missing."""
        try:
            space = ActionSpace(*(_plain_list(identity[CHOICES_KEY.format(head)]) for head in HEADS))
            features = _plain_list(identity[FEATURES_KEY])
        except KeyError as error:
            raise ValueError(f"it does not contain the spaces of its policy: {error}") from error
        return cls(space, features)


class TrainingRules(NamedTuple):
    """Rules by which seeds grew on the training hosts."""

    lifecycle: LifecycleConfig
    actions: ActionConfig
    """Choices but those of blueprints, of which other hosts offer others."""

    @classmethod
    def from_saved(cls, saved: Any) -> "TrainingRules":
        """Return the rules in a checkpoint. Raises ValueError if they are damaged."""
        rules = check_keys("the rules of growth", saved, ("lifecycle", "actions"))
        actions = dict(check_keys("the actions", rules["actions"], ())) | {"blueprints": None}
        return cls(load_settings(LifecycleConfig, rules["lifecycle"]), load_settings(ActionConfig, actions))


def _plain_list(values: Any) -> list[Any]:
    """Return the values. Raises ValueError unless it is a list of names and numbers."""
    if not isinstance(values, list) or not all(isinstance(value, str | int | float) for value in values):
        raise ValueError(f"the spaces of its policy are damaged: {excerpt(values)}")
    return values


class SpaceAdapter:
    """Presents a pool in the spaces of the training hosts, with the attributes that `LearnedController` reads.

    Args:
        spaces: Spaces of the training hosts.
        pool: Pool at the beginning of an episode: the features of empty slots are read from it.
        rules: Rules of the training, if they are known.

    Raises ValueError if the hosts have more slots than the policy, if none of its blueprints is available there, or if
    other choices or features differ.
    """

    def __init__(self, spaces: TrainingSpaces, pool: Hosts, rules: TrainingRules | None = None) -> None:
        check_heads(spaces.space, pool.space, rules)
        check_slots(spaces.space, pool.space)
        self.pool = pool
        self.n_envs = pool.n_envs
        space = pool.space
        host_names = spaces.space.blueprint
        growable_anywhere = pool.masks_on_cpu.blueprint[0].any(0).tolist()  # with several tasks each has its own mask
        growable = [name for name, grows in zip(space.blueprint, growable_anywhere, strict=True) if grows]
        check_blueprints(spaces, growable)
        self.n_host_slots, self.n_policy_slots = len(space.slot), len(spaces.space.slot)
        # Index of each of the policy's blueprints on these hosts, or 0; `is_growable` masks the missing ones.
        host_indices = [space.blueprint.index(name) if name in space.blueprint else 0 for name in host_names]
        self.host_blueprint_index = torch.tensor(host_indices, device=pool.device)
        self.is_growable = torch.tensor([name in growable for name in host_names], device=pool.device)
        # Id under which the policy observes each blueprint of these hosts, or 0 if it has none for it.
        policy_ids = [0] + [1 + host_names.index(name) if name in host_names else 0 for name in space.blueprint]
        self.policy_blueprint_id = torch.tensor(policy_ids, device=pool.device)
        columns = self._find_columns(spaces, pool)
        self.feature_columns = torch.tensor(columns, device=pool.device)
        features_at_start = pool.observation.features[0, self.feature_columns]
        padded = [split_feature_name(name, spaces.space.slot)[0] >= self.n_host_slots for name in spaces.features]
        self.is_padded = torch.tensor(padded, device=pool.device)
        self.padding_features = torch.where(self.is_padded, features_at_start, 0.0)
        # The only feature of an empty slot that changes is the time for which it has been empty.
        is_time_in_stage = [name.endswith(".ticks_in_stage") for name in spaces.features]
        self.is_empty_duration = torch.tensor(is_time_in_stage, device=pool.device) & self.is_padded
        # Shares of slots in a stage are relative to all slots of the policy.
        shares = {f"{STAGE_SHARE_PREFIX}{stage.name}": float(stage is Stage.DORMANT) for stage in Stage}
        self.is_stage_share = torch.tensor([name in shares for name in spaces.features], device=pool.device)
        is_dormant_share = torch.tensor([shares.get(name, 0.0) for name in spaces.features], device=pool.device)
        self.padded_share = is_dormant_share * (self.n_policy_slots - self.n_host_slots) / self.n_policy_slots

    def _find_columns(self, spaces: TrainingSpaces, pool: Hosts) -> list[int]:
        """Return the column of each of the policy's features on these hosts.

        Features of slots that the hosts lack get the column of the first slot; its value is replaced later.
        """
        columns = []
        for name in spaces.features:
            slot, local_name = split_feature_name(name, spaces.space.slot)
            host_name = name if slot < 0 else f"{pool.space.slot[slot if slot < self.n_host_slots else 0]}.{local_name}"
            if host_name not in pool.feature_names:
                raise ValueError(
                    f"the policy observes {name!r}, but these hosts have no {host_name!r}; see data.env.sight"
                )
            columns.append(pool.feature_names.index(host_name))
        return columns

    def _host_observation(self) -> Observation:
        """Return the observation of the hosts in their own spaces."""
        observation = self.pool.observation
        assert isinstance(observation, Observation), "the features have been found"
        return observation

    @property
    def episode_starts(self) -> Tensor:  # [N] bool
        return self.pool.episode_starts

    @property
    def observation(self) -> Observation:
        """Observation in the policy's spaces: features [N, D] and blueprint ids [N, K]."""
        host_observation = self._host_observation()
        features = torch.where(
            self.is_padded, self.padding_features, host_observation.features[:, self.feature_columns]
        )
        if self.n_policy_slots > self.n_host_slots:
            features = self._rescale_stage_shares(self._set_empty_durations(features))
        return Observation(features, self._pad(self.policy_blueprint_id[host_observation.blueprints]))

    def _set_empty_durations(self, features: Tensor) -> Tensor:  # [N, D] -> [N, D]
        # A slot that the hosts lack has been empty since the episode began.
        elapsed = torch.tensor([[env.tick / env.horizon] for env in self.pool.envs], device=self.pool.device)
        return torch.where(self.is_empty_duration, elapsed, features)

    def _rescale_stage_shares(self, features: Tensor) -> Tensor:  # [N, D] -> [N, D]
        """Convert the shares of the hosts' own slots in each stage to shares of the policy's slots."""
        rescaled = features * (self.n_host_slots / self.n_policy_slots) + self.padded_share
        return torch.where(self.is_stage_share, rescaled, features)

    @property
    def masks(self) -> Masks:
        """Masks in the policy's spaces; no action is possible in slots that the hosts lack."""
        masks = self.pool.masks
        blueprint = self._pad((masks.blueprint[..., self.host_blueprint_index] & self.is_growable).mT).mT
        slot = self._pad(masks.slot)
        slot[..., Op.WAIT, :] = True
        slot[..., Op.GERMINATE, :] &= blueprint.any(-1)
        return masks._replace(
            slot=slot,
            blueprint=blueprint,
            target=self._pad(masks.target.mT).mT,
            speed=self._pad(masks.speed.mT).mT,
        )

    def _pad(self, part: Tensor) -> Tensor:  # [..., slots] -> [..., K], a copy
        return torch.nn.functional.pad(part, (0, self.n_policy_slots - self.n_host_slots))

    def translate(self, action: Action) -> Action:
        """Return the action with the hosts' own indices, or WAIT where it is impossible on them."""
        germinates = action.op == Op.GERMINATE
        is_possible = (action.slot < self.n_host_slots) & (~germinates | self.is_growable[action.blueprint])
        blueprint = torch.where(germinates, self.host_blueprint_index[action.blueprint], 0)
        return Action(*(part * is_possible for part in action._replace(blueprint=blueprint)))


def split_feature_name(feature: str, slots: Sequence[str]) -> tuple[int, str]:
    """Return the index of a feature's slot and its name within the slot.

    For features of the whole host the index is -1 and the name is unchanged.
    """
    matching = [slot for slot in slots if feature.startswith(f"{slot}.")]
    if not matching:
        return -1, feature
    slot = max(matching, key=len)  # `block1.pool.alpha` is no feature of `block1`
    return slots.index(slot), feature.removeprefix(f"{slot}.")


def check_heads(policy_space: ActionSpace, host_space: ActionSpace, rules: TrainingRules | None) -> None:
    """Raise ValueError unless the choices of all heads except slots and blueprints agree.

    Args:
        policy_space: Choices in the training of the policy.
        host_space: Choices of the hosts.
        rules: Rules of the training, if they are known; the error then names the settings.
    """
    for head, policy_choices, host_choices in zip(HEADS, policy_space, host_space, strict=True):
        if head not in MAPPED_HEADS and policy_choices != host_choices:
            raise ValueError(
                f"Tamiyo chooses among {excerpt(policy_choices)} with its {head} head, these hosts offer "
                f"{excerpt(host_choices)}; set data.env.actions as in its training{_changed_actions(rules)}"
            )


def _changed_actions(rules: TrainingRules | None) -> str:
    """Return the settings of actions that the training changed, as the end of a sentence."""
    if rules is None:
        return ""
    defaults = asdict(ActionConfig())
    changed = {name: value for name, value in asdict(rules.actions).items() if value != defaults[name]}
    return f": {excerpt(json.dumps(changed))}" if changed else ", to the defaults"


def check_slots(policy_space: ActionSpace, host_space: ActionSpace) -> None:
    """Raise ValueError if the hosts have more slots than the policy."""
    if len(host_space.slot) > len(policy_space.slot):
        raise ValueError(
            f"these hosts have {len(host_space.slot)} slots, the policy has {len(policy_space.slot)}; "
            f"name fewer of {host_space.slot}"
        )


def check_blueprints(spaces: TrainingSpaces, growable: Sequence[str]) -> None:
    """Raise ValueError if none of the policy's blueprints can grow on the new hosts."""
    if not set(spaces.space.blueprint) & set(growable):
        raise ValueError(
            f"no blueprint of the policy ({excerpt(', '.join(spaces.space.blueprint))}) grows here, where there are "
            f"{', '.join(growable)}"
        )


class TransferController:
    """Lets a controller act on hosts of another kind than it was trained on.

    Args:
        controller: Controller that reads observation and masks only, such as `LearnedController`.
        spaces: Spaces of its training hosts.
    """

    rules: TrainingRules | None = None
    """Rules of growth of the training hosts, if they are known."""

    def __init__(self, controller: PolicyController, spaces: TrainingSpaces) -> None:
        self.controller = controller
        self.spaces = spaces

    def reset(self, pool: Hosts) -> None:
        """Start an episode. Raises ValueError if the hosts do not fit the policy's spaces."""
        if not all(slot.stage is Stage.DORMANT for env in pool.envs for slot in env.slots):
            raise ValueError("a policy begins with empty slots, and something has grown already; give it a new network")
        self.adapter = SpaceAdapter(self.spaces, pool, self.rules)
        self.controller.reset(self.adapter)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller and of the adapter, for an episode that is continued later."""
        return {"padding": self.adapter.padding_features, "controller": self.controller.state_dict()}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.adapter = SpaceAdapter(self.spaces, pool, self.rules)
        self.adapter.padding_features = state["padding"]
        self.controller.load_state_dict(self.adapter, state["controller"])

    def act(self, pool: Hosts) -> Action:
        return self.adapter.translate(self.controller.act(self.adapter))


class SetTransferController:
    """Lets a policy over sets act on hosts with any numbers of slots and blueprints.

    Args:
        controller: Controller of a policy over sets.
        spaces: Spaces of its training hosts; their slots and blueprints do not matter.
        sight: Observation of its training. A pool must have been made with it, to have its rows.
    """

    rules: TrainingRules | None = None
    """Rules of growth of the training hosts, if they are known."""

    def __init__(self, controller: PolicyController, spaces: TrainingSpaces, sight: ObservationConfig) -> None:
        self.controller = controller
        self.spaces = spaces
        self.sight = sight

    def reset(self, pool: Hosts) -> None:
        """Start an episode. Raises ValueError if the hosts do not fit the policy."""
        self._check(pool)
        self.controller.reset(pool)

    def _check(self, pool: Hosts) -> None:
        check_heads(self.spaces.space, pool.space, self.rules)
        if pool.feature_names != self.spaces.features:
            differing = sorted({*pool.feature_names} ^ {*self.spaces.features})
            raise ValueError(
                f"the policy reads other features in rows than these hosts show, as {excerpt(', '.join(differing))}; "
                f"make the pool with sight=controller.sight (data.env.sight) and the lifecycle and ops of the training"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the controller, for an episode that is continued later."""
        return {"controller": self.controller.state_dict()}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self._check(pool)
        self.controller.load_state_dict(pool, state["controller"])

    def act(self, pool: Hosts) -> Action:
        return self.controller.act(pool)


def make_transferable(
    controller: PolicyController, spaces: TrainingSpaces, sight: ObservationConfig, *, rules: TrainingRules | None
) -> TransferController | SetTransferController:
    """Return a controller that acts on other hosts than those of the training, whose `rules` it brings along."""
    is_flat = sight.layout == "flat"
    adapted = TransferController(controller, spaces) if is_flat else SetTransferController(controller, spaces, sight)
    adapted.rules = rules
    return adapted
