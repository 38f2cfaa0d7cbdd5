"""A policy on hosts of another kind than those that it was trained on: they are shown to it as what it knows.

Its places and theirs are paired in order, its blueprints and theirs by name, or by what shall stand in for them. What
the hosts lack is there, empty, and masked. N environments, D features, K slots and P blueprints that the policy knows.
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
"""Heads of which the choices may be others on other hosts."""

CHOICES, FEATURES = "choices of the {} head", "observed features"


class Home(NamedTuple):
    """What a policy knows, and what takes the place of a seed that cannot grow elsewhere."""

    space: ActionSpace
    features: list[str]
    stand_ins: Mapping[str, str]

    @classmethod
    def of(cls, identity: Mapping[str, Any], stand_ins: Mapping[str, str]) -> "Home":
        """As a checkpoint says. Raises ValueError if it does not, or if a stand-in is for nothing that is known."""
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
    """A pool as a policy from elsewhere sees it: what `LearnedController` asks of a pool.

    Args:
        home: What the policy knows.
        pool: At the beginning of an episode: what empty slots look like is read from it.

    Raises ValueError if the hosts have more slots than the policy, if nothing it knows grows there, or if other choices
    or features differ.
    """

    def __init__(self, home: Home, pool: HostPool) -> None:
        assert all(slot.stage is Stage.DORMANT for env in pool.envs for slot in env.slots), "an episode begins"
        check_heads(home.space, pool.space)
        self.pool = pool
        self.n_envs = pool.n_envs
        space = pool.space
        here = [home.stand_ins.get(name, name) for name in home.space.blueprint]
        somewhere = pool.masks_on_cpu.blueprint[0].any(0).tolist()  # of several tasks each has its own
        growing = [name for name, grows in zip(space.blueprint, somewhere, strict=True) if grows]
        check_blueprints(here, growing, home)
        self.slots, self.places = len(space.slot), len(home.space.slot)
        # Of each of its blueprints the number here, and 0 where there is none; `grows` says which.
        numbers = [space.blueprint.index(name) if name in space.blueprint else 0 for name in here]
        self.blueprint_here = torch.tensor(numbers, device=pool.device)
        self.grows = torch.tensor([name in growing for name in here], device=pool.device)
        # Of each seed here the number it is known by; it plants no others.
        known = [0] + [1 + here.index(name) if name in here else 0 for name in space.blueprint]
        self.known_as = torch.tensor(known, device=pool.device)
        columns = self._columns(home, pool)
        self.columns = torch.tensor(columns, device=pool.device)
        first = pool.observation.features[0, self.columns]
        padded = [place_of(name, home.space.slot)[0] >= self.slots for name in home.features]
        self.padded = torch.tensor(padded, device=pool.device)
        self.empty = torch.where(self.padded, first, torch.zeros_like(first))
        # Of an empty slot nothing changes but how long it has been empty.
        counting = [name.endswith(".ticks_in_stage") for name in home.features]
        self.counting = torch.tensor(counting, device=pool.device) & self.padded
        # Shares of slots in a stage are shares of all places.
        shares = {f"{SHARE}{stage.name}": float(stage is Stage.DORMANT) for stage in Stage}
        self.shared = torch.tensor([name in shares for name in home.features], device=pool.device)
        idle = torch.tensor([shares.get(name, 0.0) for name in home.features], device=pool.device)
        self.idle = idle * (self.places - self.slots) / self.places

    def _columns(self, home: Home, pool: HostPool) -> list[int]:
        """Where each known feature is found here; those of a place that is not there in the first slot's, for now."""
        columns = []
        for name in home.features:
            place, rest = place_of(name, home.space.slot)
            here = name if place < 0 else f"{pool.space.slot[place if place < self.slots else 0]}.{rest}"
            if here not in pool.feature_names:
                raise ValueError(f"Tamiyo looks at {name!r}, and these hosts do not show {here!r}; see data.env.sight")
            columns.append(pool.feature_names.index(here))
        return columns

    @property
    def episode_starts(self) -> Tensor:  # [N] bool
        return self.pool.episode_starts

    @property
    def observation(self) -> Observation:
        """[N, D] and [N, K]."""
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
        """As those of the hosts; nothing can be done in a place that is not there."""
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
        """The same decisions with the hosts' own numbers; WAIT for what cannot be done here."""
        sown = action.op == Op.GERMINATE
        possible = (action.slot < self.slots) & (~sown | self.grows[action.blueprint])
        blueprint = torch.where(sown, self.blueprint_here[action.blueprint], 0)
        return Action(*(part * possible for part in action._replace(blueprint=blueprint)))


def place_of(feature: str, slots: Sequence[str]) -> tuple[int, str]:
    """Number of the slot that a feature is of, and what it is called there; -1 if it is of the whole host."""
    own = [slot for slot in slots if feature.startswith(f"{slot}.")]
    if not own:
        return -1, feature
    slot = max(own, key=len)  # `block1.pool.alpha` is no feature of `block1`
    return slots.index(slot), feature.removeprefix(f"{slot}.")


def check_heads(known: ActionSpace, here: ActionSpace) -> None:
    """Raises ValueError unless all choices but slots and blueprints are the same, and every slot has its place."""
    for head, ours, theirs in zip(HEADS, known, here, strict=True):
        if head not in PAIRED and ours != theirs:
            raise ValueError(f"Tamiyo chooses among {ours} by her {head} head, these hosts offer {theirs}")
    if len(here.slot) > len(known.slot):
        raise ValueError(
            f"these hosts have {len(here.slot)} slots, Tamiyo knows {len(known.slot)}; name fewer of {here.slot}"
        )


def check_blueprints(here: Sequence[str], growing: Sequence[str], home: Home) -> None:
    """Raises ValueError if stand-ins do not grow or stand for two, or if nothing that is known is `growing` here."""
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
    """Lets a controller decide that knows other hosts.

    Args:
        controller: Looks at observation and masks alone, as `LearnedController`.
        home: What it knows.
    """

    def __init__(self, controller: Controller, home: Home) -> None:
        self.controller = controller
        self.home = home

    def reset(self, pool: HostPool) -> None:
        """Raises ValueError if the hosts cannot be shown as what is known."""
        self.guise = Guise(self.home, pool)
        self.controller.reset(self.guise)

    def act(self, pool: HostPool) -> Action:
        return self.guise.translate(self.controller.act(self.guise))
