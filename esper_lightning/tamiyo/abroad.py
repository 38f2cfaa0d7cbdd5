"""Transfer of a policy to hosts of another kind: adapters between the spaces of training and those of the new hosts.

Slots are paired in order, blueprints by name or by their stand-ins. Slots that the hosts lack appear empty and are
masked. N environments, D features, K slots and P blueprints of the training hosts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from esper_lightning.blueprints import nearest
from esper_lightning.envs import HEADS, Action, HostPool, Masks, Op
from esper_lightning.envs.actions import ActionSpace
from esper_lightning.envs.observation import SHARE, Observation
from esper_lightning.growth.stages import Stage
from esper_lightning.tamiyo.controller import Controller

PAIRED = ("slot", "blueprint")
"""Heads whose choices may differ between training and new hosts."""

CHOICES, FEATURES = "choices of the {} head", "observed features"


class Home(NamedTuple):
    """Action space and features of the training hosts, with stand-ins for blueprints that other hosts lack."""

    space: ActionSpace
    features: list[str]
    stand_ins: Mapping[str, str]

    @classmethod
    def of(cls, identity: Mapping[str, Any], stand_ins: Mapping[str, str]) -> "Home":
        """Return the spaces recorded in a checkpoint's identity.

        Raises ValueError if they are missing, or if a stand-in replaces an unknown blueprint.
        """
        try:
            space = ActionSpace(*(list(identity[CHOICES.format(head)]) for head in HEADS))
            features = [str(name) for name in identity[FEATURES]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"it does not say what its policy knows: {error}") from error
        for name in stand_ins:
            if name not in space.blueprint:
                raise ValueError(f"stand_ins: she knows no blueprint {name!r}; {nearest(name, space.blueprint)}")
        return cls(space, features, stand_ins)


class Guise:
    """Presents a pool in the spaces of the training hosts, with the attributes that `LearnedController` reads.

    Args:
        spaces: Spaces of the training hosts.
        pool: Pool at the beginning of an episode: the features of empty slots are read from it.

    Raises ValueError if the hosts have more slots than the policy, if none of its blueprints is available there, or if
    other choices or features differ.
    """

    def __init__(self, home: Home, pool: HostPool) -> None:
        assert all(slot.stage is Stage.DORMANT for env in pool.envs for slot in env.slots), "an episode begins"
        check_heads(home.space, pool.space)
        self.pool = pool
        self.n_envs = pool.n_envs
        space = pool.space
        here = [home.stand_ins.get(name, name) for name in home.space.blueprint]
        somewhere = pool.masks_on_cpu.blueprint[0].any(0).tolist()  # with several tasks each has its own mask
        growing = [name for name, grows in zip(space.blueprint, somewhere, strict=True) if grows]
        check_blueprints(here, growing, home)
        self.slots, self.places = len(space.slot), len(home.space.slot)
        # Index of each of the policy's blueprints on these hosts, or 0; `is_growable` masks the missing ones.
        numbers = [space.blueprint.index(name) if name in space.blueprint else 0 for name in here]
        self.blueprint_here = torch.tensor(numbers, device=pool.device)
        self.grows = torch.tensor([name in growing for name in here], device=pool.device)
        # Id under which the policy observes each blueprint of these hosts, or 0 if it has none for it.
        known = [0] + [1 + here.index(name) if name in here else 0 for name in space.blueprint]
        self.known_as = torch.tensor(known, device=pool.device)
        columns = self._columns(home, pool)
        self.columns = torch.tensor(columns, device=pool.device)
        first = pool.observation.features[0, self.columns]
        padded = [place_of(name, home.space.slot)[0] >= self.slots for name in home.features]
        self.padded = torch.tensor(padded, device=pool.device)
        self.empty = torch.where(self.padded, first, torch.zeros_like(first))
        # The only feature of an empty slot that changes is the time for which it has been empty.
        counting = [name.endswith(".ticks_in_stage") for name in home.features]
        self.counting = torch.tensor(counting, device=pool.device) & self.padded
        # Shares of slots in a stage are relative to all slots of the policy.
        shares = {f"{SHARE}{stage.name}": float(stage is Stage.DORMANT) for stage in Stage}
        self.shared = torch.tensor([name in shares for name in home.features], device=pool.device)
        idle = torch.tensor([shares.get(name, 0.0) for name in home.features], device=pool.device)
        self.idle = idle * (self.places - self.slots) / self.places

    def _columns(self, home: Home, pool: HostPool) -> list[int]:
        """Return the column of each of the policy's features on these hosts.

        Features of slots that the hosts lack get the column of the first slot; its value is replaced later.
        """
        columns = []
        for name in home.features:
            place, rest = place_of(name, home.space.slot)
            here = name if place < 0 else f"{pool.space.slot[place if place < self.slots else 0]}.{rest}"
            if here not in pool.feature_names:
                raise ValueError(f"the policy observes {name!r}, but these hosts have no {here!r}; see data.env.sight")
            columns.append(pool.feature_names.index(here))
        return columns

    @property
    def episode_starts(self) -> Tensor:  # [N] bool
        return self.pool.episode_starts

    @property
    def observation(self) -> Observation:
        """Observation in the policy's spaces: features [N, D] and blueprint ids [N, K]."""
        seen = self.pool.observation
        features = torch.where(self.padded, self.empty, seen.features[:, self.columns])
        if self.places > self.slots:
            passed = torch.tensor([[env.tick / env.horizon] for env in self.pool.envs], device=self.pool.device)
            features = torch.where(self.counting, passed, features)
            of_all = features * (self.slots / self.places) + self.idle
            features = torch.where(self.shared, of_all, features)
        return Observation(features, self._pad(self.known_as[seen.blueprints]))

    @property
    def masks(self) -> Masks:
        """Masks in the policy's spaces; no action is possible in slots that the hosts lack."""
        masks = self.pool.masks
        blueprint = self._pad((masks.blueprint[..., self.blueprint_here] & self.grows).mT).mT
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
        return torch.nn.functional.pad(part, (0, self.places - self.slots))

    def translate(self, action: Action) -> Action:
        """Return the action with the hosts' own indices, or WAIT where it is impossible on them."""
        sown = action.op == Op.GERMINATE
        possible = (action.slot < self.slots) & (~sown | self.grows[action.blueprint])
        blueprint = torch.where(sown, self.blueprint_here[action.blueprint], 0)
        return Action(*(part * possible for part in action._replace(blueprint=blueprint)))


def place_of(feature: str, slots: Sequence[str]) -> tuple[int, str]:
    """Return the index of a feature's slot and its name within the slot.

    For features of the whole host the index is -1 and the name is unchanged.
    """
    own = [slot for slot in slots if feature.startswith(f"{slot}.")]
    if not own:
        return -1, feature
    slot = max(own, key=len)  # `block1.pool.alpha` is no feature of `block1`
    return slots.index(slot), feature.removeprefix(f"{slot}.")


def check_heads(known: ActionSpace, here: ActionSpace) -> None:
    """Raise ValueError unless the choices of all heads except slots and blueprints agree and the slots suffice."""
    for head, ours, theirs in zip(HEADS, known, here, strict=True):
        if head not in PAIRED and ours != theirs:
            raise ValueError(f"Tamiyo chooses among {ours} by her {head} head, these hosts offer {theirs}")
    if len(here.slot) > len(known.slot):
        raise ValueError(
            f"these hosts have {len(here.slot)} slots, Tamiyo knows {len(known.slot)}; name fewer of {here.slot}"
        )


def check_blueprints(here: Sequence[str], growing: Sequence[str], home: Home) -> None:
    """Raise ValueError if a stand-in is not growable or replaces two blueprints, or if no blueprint is growable."""
    for name in home.stand_ins.values():
        if name not in growing:
            raise ValueError(f"stand_ins: {name!r} does not grow here; {nearest(name, growing)}")
        if list(here).count(name) > 1:
            raise ValueError(f"stand_ins: {name!r} would be two of the blueprints that she knows; name each once")
    if not set(here) & set(growing):
        raise ValueError(
            f"nothing that Tamiyo knows ({', '.join(home.space.blueprint)}) grows here; name stand_ins among "
            f"{', '.join(growing)}"
        )


class Abroad:
    """Lets a controller act on hosts of another kind than it was trained on.

    Args:
        controller: Controller that reads observation and masks only, such as `LearnedController`.
        spaces: Spaces of its training hosts.
    """

    def __init__(self, controller: Controller, home: Home) -> None:
        self.controller = controller
        self.home = home

    def reset(self, pool: HostPool) -> None:
        """Start an episode. Raises ValueError if the hosts do not fit the policy's spaces."""
        self.guise = Guise(self.home, pool)
        self.controller.reset(self.guise)

    def act(self, pool: HostPool) -> Action:
        return self.guise.translate(self.controller.act(self.guise))
