"""Families of environments: hosts that differ by facts which an episode hides, and only training reveals.

A *fact* is a setting that is drawn anew for every episode, from its seed alone. A *member* has one value for each.
"""

import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

from esper_lightning.blueprints import check_known, nearest
from esper_lightning.envs.training import HostTraining
from esper_lightning.tasks import Variant

Facts = dict[str, list[Any]]
"""Name of a fact -> its values. Every combination is a member."""

HOST, DATA, FAIL, TRAINING, PRICE = "host", "data", "fail", "training", "objective.price"

OPTIONS = ("lr", "seed_lr_factor", "weight_decay")
"""Settings of host training that may be facts: all that hosts trained side by side need not share."""


class Member(NamedTuple):
    """The facts of one kind of episode: pairs of name and value, in a fixed order."""

    facts: tuple[tuple[str, Any], ...] = ()

    def of(self, group: str) -> dict[str, Any]:
        """The facts whose names begin so, by the rest of their names."""
        return {name.removeprefix(f"{group}."): value for name, value in self.facts if name.startswith(f"{group}.")}

    @property
    def architecture(self) -> dict[str, Any]:
        """Arguments of the host."""
        return self.of(HOST)

    @property
    def variant(self) -> Variant:
        return Variant(**self.of(DATA))

    @property
    def price(self) -> float | None:
        return dict(self.facts).get(PRICE)

    @property
    def may_fail(self) -> bool:
        """Is there a chance that seeds get no gradient?"""
        return FAIL in dict(self.facts) or bool(self.of(FAIL))

    def training(self, usual: HostTraining) -> HostTraining:
        """How its hosts learn."""
        facts = self.of(TRAINING)
        return replace(usual, **facts) if facts else usual

    def chance_to_fail(self, blueprint: str) -> float:
        """Of each seed of this blueprint."""
        return self.of(FAIL).get(blueprint, dict(self.facts).get(FAIL, 0.0))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.facts) or "as configured"


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Which facts differ between episodes.

    Names of facts are `host.<argument of the host>`, `data.<field of a data variant>` (transform, noise, label_noise,
    classes, samples), `training.lr` (or seed_lr_factor, weight_decay), `objective.price`, and `fail` or
    `fail.<blueprint>`: the chance that a slot gives a blueprint's seeds no gradient for the whole episode.
    """

    train: list[Facts] = field(default_factory=list)
    """Members that training meets, all combinations of each of these groups of facts. Empty: no facts."""

    held_out: list[Facts] = field(default_factory=list)
    """Members that only evaluations meet."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            _check_facts(f"family.{name}", getattr(self, name))
        if self.held_out and not self.train:
            raise ValueError("family.held_out has members and family.train has none; name what training meets")
        met = self.members()
        for member in self.members(held_out=True) if self.held_out else ():
            if member in met:
                raise ValueError(f"family.held_out: {member} is a member of family.train; it would not be held out")

    def members(self, held_out: bool = False) -> list[Member]:
        """Those of training, or those that are held out; one without facts where there are none."""
        groups = self.held_out if held_out else self.train
        made = [
            Member(tuple(sorted(zip(facts, values, strict=True))))
            for facts in groups
            for values in product(*facts.values())
        ]
        return list({repr(member): member for member in made}.values()) or [Member()]

    @property
    def checksum(self) -> str:
        """Equal for families of which training meets the same members."""
        return f"{zlib.crc32(chr(10).join(map(repr, self.members())).encode()):08x}"


def _check_facts(where: str, groups: Sequence[Facts]) -> None:
    for facts in groups:
        for name, values in facts.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{where}: {name} needs a list of values, got {values!r}")
            group, _, rest = name.partition(".")
            if group == DATA:
                _check_name(where, name, [f"data.{option.name}" for option in fields(Variant)])
                for value in values:
                    _build(where, name, Variant, {rest: value})
            elif group == TRAINING:
                _check_name(where, name, [f"training.{option}" for option in OPTIONS])
                if not all(map(_is_number, values)):
                    raise ValueError(f"{where}: {name} must be a number, got {values}")
                for value in values:
                    _build(where, name, HostTraining, {rest: value})
            elif group == FAIL:
                if rest:
                    _build(where, name, check_known, {"name": rest})
                if not all(_is_number(value) and 0.0 <= value <= 1.0 for value in values):
                    raise ValueError(f"{where}: {name} is a chance, from 0 to 1, got {values}")
            elif name == PRICE:
                if not all(_is_number(value) and value >= 0.0 for value in values):
                    raise ValueError(f"{where}: {name} must not be negative, got {values}")
            elif group != HOST or not rest:
                raise ValueError(
                    f"{where}: unknown fact {name!r}; there are host.<argument>, data.<field>, training.lr, {PRICE}, "
                    f"fail and fail.<blueprint>"
                )


def _check_name(where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: unknown fact {name!r}; {nearest(name, known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _build(where: str, name: str, kind: Callable[..., Any], settings: Mapping[str, Any]) -> None:
    try:
        kind(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {name}: {error}") from error


def values_of(members: Sequence[Member]) -> dict[str, list[Any]]:
    """Of each fact its different values, in order; None where a member leaves it as configured."""
    names = sorted({name for member in members for name, _ in member.facts})
    found: dict[str, list[Any]] = {name: [] for name in names}
    for facts in (dict(member.facts) for member in members):
        for name in names:
            if facts.get(name) not in found[name]:
                found[name].append(facts.get(name))
    return found


class Family:
    """The members that environments are drawn from.

    Args:
        config: Which facts there are.
        held_out: Draw from the members that training never meets.
    """

    def __init__(self, config: FamilyConfig, held_out: bool = False) -> None:
        if held_out and not config.held_out:
            raise ValueError("there are no held-out members; name some in data.env.family.held_out")
        self.members = config.members(held_out)
        # What training knows, whoever the members are: a critic is made for that.
        self.known = {name: values for name, values in values_of(config.members()).items() if len(values) > 1}
        self.fails = any(member.may_fail for member in config.members())

    def draw(self, seed: int) -> Member:
        """The member of the episode that begins with `seed`: of that alone, so every controller meets the same."""
        return self.members[random.Random(f"member {seed}").randrange(len(self.members))]

    def tell(self, member: Member) -> list[float]:
        """Its facts as numbers: for each that differs between members of training, 1 at its value and 0 elsewhere;
        nothing but 0 where it has none."""
        facts = dict(member.facts)
        return [
            float(facts.get(name) == value)
            for name, values in self.known.items()
            for value in values
            if value is not None
        ]


def fails(seed: int, slot: str, blueprint: str, chance: float) -> bool:
    """Does `slot` give this blueprint's seeds no gradient in the episode that begins with `seed`?"""
    return chance > 0.0 and random.Random(f"graft {seed} {slot} {blueprint}").random() < chance
