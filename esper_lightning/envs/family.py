"""Distribution over contexts: episodes differ in hidden settings, as in a contextual Markov decision process.

A *variable* (a "fact" in messages) is a setting that is drawn for every episode from its RNG seed alone. A *context*
(a "member" of the family) has one value for each variable. Policies do not observe it.
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
"""Name of a variable -> its values. Every combination of values is a context."""

HOST, DATA, FAIL, TRAINING, PRICE = "host", "data", "fail", "training", "objective.price"

OPTIONS = ("lr", "seed_lr_factor", "weight_decay")
"""Settings of host training that may be variables: those that may differ between hosts trained together."""


class Member(NamedTuple):
    """Context of an episode: pairs of variable name and value, in a fixed order."""

    facts: tuple[tuple[str, Any], ...] = ()

    def of(self, group: str) -> dict[str, Any]:
        """Return the variables named `<group>.<rest>`, by `<rest>`."""
        return {name.removeprefix(f"{group}."): value for name, value in self.facts if name.startswith(f"{group}.")}

    @property
    def architecture(self) -> dict[str, Any]:
        """Keyword arguments of the host factory."""
        return self.of(HOST)

    @property
    def variant(self) -> Variant:
        return Variant(**self.of(DATA))

    @property
    def price(self) -> float | None:
        return dict(self.facts).get(PRICE)

    @property
    def may_fail(self) -> bool:
        """True if seeds may fail, that is, receive no gradient."""
        return FAIL in dict(self.facts) or bool(self.of(FAIL))

    def training(self, usual: HostTraining) -> HostTraining:
        """Return the training settings of this context's hosts; `usual` holds the configured ones."""
        facts = self.of(TRAINING)
        return replace(usual, **facts) if facts else usual

    def chance_to_fail(self, blueprint: str) -> float:
        """Return the probability that a slot gives seeds of this blueprint no gradient."""
        return self.of(FAIL).get(blueprint, dict(self.facts).get(FAIL, 0.0))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.facts) or "as configured"


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Contexts of episodes: the variables that differ between episodes, and their values.

    Names of variables are `host.<argument of the host>`, `data.<field of a data variant>` (transform, noise,
    label_noise, classes, samples), `training.lr` (or seed_lr_factor, weight_decay), `objective.price`, and `fail` or
    `fail.<blueprint>`: the probability that a slot gives a blueprint's seeds no gradient for the whole episode.
    """

    train: list[Facts] = field(default_factory=list)
    """Contexts of training episodes: in each group of variables, all combinations of values. Empty: no variables."""

    held_out: list[Facts] = field(default_factory=list)
    """Contexts that only evaluations use, in the same form."""

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
        """Return the distinct contexts of training or the held-out ones; a single empty context if there are none."""
        groups = self.held_out if held_out else self.train
        made = [
            Member(tuple(sorted(zip(facts, values, strict=True))))
            for facts in groups
            for values in product(*facts.values())
        ]
        return list({repr(member): member for member in made}.values()) or [Member()]

    @property
    def checksum(self) -> str:
        """Checksum of the training contexts, to compare families."""
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
    """Return the distinct values of each variable, in order; None where a context leaves it as configured."""
    names = sorted({name for member in members for name, _ in member.facts})
    found: dict[str, list[Any]] = {name: [] for name in names}
    for facts in (dict(member.facts) for member in members):
        for name in names:
            if facts.get(name) not in found[name]:
                found[name].append(facts.get(name))
    return found


class Family:
    """Uniform distribution over contexts.

    Args:
        config: Variables and values.
        held_out: True to draw held-out contexts instead of those of training.
    """

    def __init__(self, config: FamilyConfig, held_out: bool = False) -> None:
        if held_out and not config.held_out:
            raise ValueError("there are no held-out members; name some in data.env.family.held_out")
        self.members = config.members(held_out)
        # The encoding depends on training contexts even if held-out ones are drawn: the critic was built for it.
        self.known = {name: values for name, values in values_of(config.members()).items() if len(values) > 1}
        self.fails = any(member.may_fail for member in config.members())

    def draw(self, seed: int) -> Member:
        """Draw the context of the episode with this RNG seed, from it alone, so all controllers meet the same."""
        return self.members[random.Random(f"member {seed}").randrange(len(self.members))]

    def tell(self, member: Member) -> list[float]:
        """Encode a context as concatenated one-hot vectors, one per variable that differs between training contexts.

        A vector is all zeros if the context leaves the variable as configured.
        """
        facts = dict(member.facts)
        return [
            float(facts.get(name) == value)
            for name, values in self.known.items()
            for value in values
            if value is not None
        ]


def fails(seed: int, slot: str, blueprint: str, chance: float) -> bool:
    """Return True if seeds of this blueprint receive no gradient in `slot`, in the episode with this RNG seed."""
    return chance > 0.0 and random.Random(f"graft {seed} {slot} {blueprint}").random() < chance
