"""Distribution over contexts: episodes differ in hidden settings, as in a contextual Markov decision process.

A *variable* is a setting that is drawn for every episode from its RNG seed alone. A *context* has one value for each.
"""

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple

from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.blueprints import check_blueprint_name, suggest_name
from esper_lightning.tasks import TRANSFORMS

VariableGrid = dict[str, list[Any]]
"""Name of a variable -> its values. Every combination of values is a context."""

HOST, FAIL, TRAINING = "host", "fail", "training"
"""Groups of variables, such as `host.kernel`."""

TRANSFORM, PRICE, HORIZON = "data.transform", "objective.price", "horizon"

OFFERED_SLOTS, OFFERED_BLUEPRINTS = "offer.slots", "offer.blueprints"
"""Variables that limit what an episode offers."""

COUNTS = (HORIZON, OFFERED_SLOTS, OFFERED_BLUEPRINTS)

TRAINING_VARIABLES = ("lr", "lr_schedule", "weight_decay", "flops")
"""Settings of host training that may be variables: those that may differ between hosts trained together."""

MAX_CONTEXTS = 2_000
"""Maximum number of contexts of training, and of held-out ones; each of one kind is compared with all of the other."""


class Context(NamedTuple):
    """Context of an episode: pairs of variable name and value, in a fixed order."""

    variables: tuple[tuple[str, Any], ...] = ()

    def value(self, variable: str, default: Any = None) -> Any:
        return dict(self.variables).get(variable, default)

    def variables_in(self, group: str) -> dict[str, Any]:
        """Variables named `<group>.<rest>`, by `<rest>`."""
        return {name.removeprefix(f"{group}."): value for name, value in self.variables if name.startswith(f"{group}.")}

    @property
    def architecture(self) -> dict[str, Any]:  # keyword arguments of the host factory
        return self.variables_in(HOST)

    @property
    def architecture_name(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.architecture.items())

    @property
    def transform(self) -> str:
        return self.value(TRANSFORM, "none")

    @property
    def price(self) -> float | None:
        return self.value(PRICE)

    @property
    def horizon(self) -> int | None:  # in environment steps
        return self.value(HORIZON)

    @property
    def seeds_may_fail(self) -> bool:
        """True if seeds may fail, that is, receive no gradient."""
        return FAIL in dict(self.variables) or bool(self.variables_in(FAIL))

    def seed_fails(self, rng_seed: int, slot: str, blueprint: str) -> bool:
        """Return True if seeds of this blueprint receive no gradient in `slot`, in the episode with this RNG seed."""
        probability = self.variables_in(FAIL).get(blueprint, self.value(FAIL, 0.0))
        return probability > 0.0 and random.Random(f"graft {rng_seed} {slot} {blueprint}").random() < probability

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.variables) or "as configured"


class HostContext(NamedTuple):
    """Settings of all hosts in one context."""

    context: Context
    training: HostTraining
    variant_index: int  # of the hosts' data among the data variants of the pool
    horizon: int  # length of an episode in environment steps
    price: float  # of growth


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Contexts of episodes: the variables that differ between episodes, and their values.

    Names of variables are `host.<argument of the host>`, `data.transform`, `training.lr` (or lr_schedule,
    weight_decay, flops), `objective.price`, `horizon`, `offer.slots`, `offer.blueprints`, and `fail` or
    `fail.<blueprint>`; see docs/concepts/environment.md.
    """

    train: list[VariableGrid] = field(default_factory=list)
    """Contexts of training episodes: in each group of variables, all combinations of values. Empty: no variables."""

    held_out: list[VariableGrid] = field(default_factory=list)
    """Contexts that only evaluations use, in the same form."""

    def __post_init__(self) -> None:
        for where, groups in (("family.train", self.train), ("family.held_out", self.held_out)):
            for name, values in (pair for group in groups for pair in group.items()):
                if not isinstance(values, list) or not values:
                    raise ValueError(f"{where}: {name} needs a list of values, got {values!r}")
                for value in values:
                    try:
                        _check_variable(name, value)
                    except (TypeError, ValueError) as error:
                        raise ValueError(f"{where}: {name}: {error}") from error
            contexts = sum(math.prod(map(len, group.values())) for group in groups)
            if contexts > MAX_CONTEXTS:
                raise ValueError(f"{where} has {contexts} contexts, more than {MAX_CONTEXTS}; leave out values")
        if self.held_out and not self.train:
            raise ValueError("family.held_out has contexts and family.train has none; name those of training")
        train_contexts = self.contexts()
        for context in self.contexts(held_out=True):
            if context in train_contexts:
                raise ValueError(f"family.held_out: {context} is a context of family.train; it would not be held out")

    def contexts(self, held_out: bool = False) -> list[Context]:
        """Return the distinct contexts of training, at least an empty one, or the held-out ones."""
        groups = self.held_out if held_out else self.train
        contexts = [
            Context(tuple(sorted(zip(values_by_name, values, strict=True))))
            for values_by_name in groups
            for values in product(*values_by_name.values())
        ]
        return list({repr(context): context for context in contexts}.values()) or ([] if held_out else [Context()])

    @property
    def all_contexts(self) -> list[Context]:
        """Contexts of training, then the held-out ones."""
        return [*self.contexts(), *self.contexts(held_out=True)]

    @property
    def architectures(self) -> dict[str, Context]:
        """A context with each architecture of a host, by `Context.architecture_name`."""
        return {context.architecture_name: context for context in self.all_contexts}

    @property
    def checksum(self) -> str:
        """Checksum of the training contexts, to compare families."""
        return f"{zlib.crc32(chr(10).join(map(repr, self.contexts())).encode()):08x}"


def _check_variable(name: str, value: Any) -> None:
    """Raise ValueError or TypeError unless there is a variable of this name that can have this value."""
    group, _, rest = name.partition(".")
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if group == TRAINING:
        if rest not in TRAINING_VARIABLES:
            known = [f"{TRAINING}.{option}" for option in TRAINING_VARIABLES]
            raise ValueError(f"unknown variable; {suggest_name(name, known)}")
        if rest != "lr_schedule" and not is_number:
            raise ValueError(f"it must be a number, got {value!r}")
        setting: dict[str, Any] = {rest: value}
        HostTraining(**setting)
    elif group == FAIL:
        if rest:
            check_blueprint_name(rest)
        if not is_number or not 0.0 <= value <= 1.0:
            raise ValueError(f"it is a chance, from 0 to 1, got {value!r}")
    elif name == TRANSFORM and value not in TRANSFORMS:
        raise ValueError(f"unknown transform {value!r}; there are: {', '.join(TRANSFORMS)}")
    elif name == PRICE and not (is_number and value >= 0.0):
        raise ValueError(f"it must be a number and not negative, got {value!r}")
    elif name in COUNTS and (type(value) is not int or value < 1):
        raise ValueError(f"it must be a whole number from 1 on, got {value!r}")
    elif name not in (TRANSFORM, PRICE, *COUNTS) and (group != HOST or not rest):
        raise ValueError(
            f"unknown variable; there are host.<argument>, {TRANSFORM}, training.lr, {PRICE}, {', '.join(COUNTS)}, "
            f"fail and fail.<blueprint>"
        )


class ContextDistribution:
    """Uniform distribution over the contexts of training, or over the held-out ones."""

    def __init__(self, config: FamilyConfig, held_out: bool = False) -> None:
        if held_out and not config.held_out:
            raise ValueError("there are no held-out contexts; name some in data.env.family.held_out")
        self.contexts, of_training = config.contexts(held_out), config.contexts()
        # The encoding depends on training contexts even if held-out ones are drawn: the critic was built for it.
        # Values of each variable that differs between contexts; None where a context leaves it as configured.
        self.encoded_variables: dict[str, list[Any]] = {}
        for name in sorted({name for context in of_training for name, _ in context.variables}):
            values = [context.value(name) for context in of_training]  # may be lists, which no set can hold
            if len(different := [value for i, value in enumerate(values) if value not in values[:i]]) > 1:
                self.encoded_variables[name] = different
        self.seeds_may_fail = any(context.seeds_may_fail for context in of_training)

    def draw(self, rng_seed: int) -> Context:
        """Draw the context of an episode from its RNG seed alone, so every controller gets the same context."""
        return self.contexts[random.Random(f"member {rng_seed}").randrange(len(self.contexts))]

    def encode(self, context: Context) -> list[float]:
        """Encode a context as one-hot vectors of the variables that differ in training; zeros: it is as configured."""
        return [
            float(context.value(name) == value)
            for name, values in self.encoded_variables.items()
            for value in values
            if value is not None
        ]


def select_offer(growable: Sequence[Sequence[bool]], context: Context, rng_seed: int) -> list[list[bool]]:
    """Return which blueprint may grow in which slot [K][B] in the episode with this RNG seed, which selects them.

    `growable` [K][B] is where a blueprint can grow at all. All are selected where the context has no number, or more.
    """
    rng = random.Random(f"offer {rng_seed}")

    def select(candidates: list[int], number: int | None) -> set[int]:
        return set(candidates if number is None else rng.sample(candidates, min(number, len(candidates))))

    slots = select([k for k, row in enumerate(growable) if any(row)], context.value(OFFERED_SLOTS))
    grow_there = [b for b in range(len(growable[0])) if any(growable[k][b] for k in slots)]
    blueprints = select(grow_there, context.value(OFFERED_BLUEPRINTS))
    return [[grows and k in slots and b in blueprints for b, grows in enumerate(row)] for k, row in enumerate(growable)]
