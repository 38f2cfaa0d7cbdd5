"""Distribution over contexts: episodes differ in hidden settings, as in a contextual Markov decision process.

A *variable* is a setting that is drawn for every episode from its RNG seed alone. A *context* has one value for each
variable. Policies do not observe it.
"""

import math
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, NamedTuple

from esper_lightning.blueprints import check_blueprint_name, suggest_name
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.tasks import Variant

VariableGrid = dict[str, list[Any]]
"""Name of a variable -> its values. Every combination of values is a context."""

HOST, DATA, FAIL, TRAINING, PRICE_VARIABLE = "host", "data", "fail", "training", "objective.price"

HORIZON_VARIABLE = "horizon"
"""Variable that shortens an episode: its length in environment steps."""

OFFERED_SLOTS, OFFERED_BLUEPRINTS = "offer.slots", "offer.blueprints"
"""Variables that limit what an episode offers."""

TRAINING_VARIABLES = ("lr", "lr_schedule", "seed_lr_factor", "weight_decay")
"""Settings of host training that may be variables: those that may differ between hosts trained together."""


MAX_CONTEXTS = 2_000
"""Maximum number of contexts of training, and of held-out ones; each of one kind is compared with all of the other."""


class Context(NamedTuple):
    """Context of an episode: pairs of variable name and value, in a fixed order."""

    variables: tuple[tuple[str, Any], ...] = ()

    def variables_in(self, group: str) -> dict[str, Any]:
        """Return the variables named `<group>.<rest>`, by `<rest>`."""
        return {name.removeprefix(f"{group}."): value for name, value in self.variables if name.startswith(f"{group}.")}

    @property
    def architecture(self) -> dict[str, Any]:
        """Keyword arguments of the host factory."""
        return self.variables_in(HOST)

    @property
    def variant(self) -> Variant:
        return Variant(**self.variables_in(DATA))

    @property
    def price(self) -> float | None:
        return dict(self.variables).get(PRICE_VARIABLE)

    @property
    def horizon(self) -> int | None:
        """Length of an episode in environment steps. None: as configured."""
        return dict(self.variables).get(HORIZON_VARIABLE)

    def offered(self, variable: str) -> int | None:
        """Return the number of slots or of blueprints on offer. None: all."""
        return dict(self.variables).get(variable)

    @property
    def limits_offer(self) -> bool:
        """True if not all slots or not all blueprints may be on offer."""
        return (self.offered(OFFERED_SLOTS) or self.offered(OFFERED_BLUEPRINTS)) is not None

    @property
    def seeds_may_fail(self) -> bool:
        """True if seeds may fail, that is, receive no gradient."""
        return FAIL in dict(self.variables) or bool(self.variables_in(FAIL))

    def training(self, base: HostTraining) -> HostTraining:
        """Return the training settings of this context's hosts; `usual` holds the configured ones."""
        overrides = self.variables_in(TRAINING)
        return replace(base, **overrides) if overrides else base

    def failure_probability(self, blueprint: str) -> float:
        """Return the probability that a slot gives seeds of this blueprint no gradient."""
        return self.variables_in(FAIL).get(blueprint, dict(self.variables).get(FAIL, 0.0))

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.variables) or "as configured"


@dataclass(frozen=True, kw_only=True)
class FamilyConfig:
    """Contexts of episodes: the variables that differ between episodes, and their values.

    Names of variables are `host.<argument of the host>`, `data.<field of a data variant>` (transform, noise,
    label_noise, classes, samples), `training.lr` (or lr_schedule, seed_lr_factor, weight_decay), `objective.price`,
    `horizon`: the length of the episode, at most env.horizon, `offer.slots` and `offer.blueprints`: numbers of slots
    and of blueprints on offer, which the RNG seed of the episode selects, and `fail` or `fail.<blueprint>`: the
    probability that a slot gives a blueprint's seeds no gradient for the whole episode.
    """

    train: list[VariableGrid] = field(default_factory=list)
    """Contexts of training episodes: in each group of variables, all combinations of values. Empty: no variables."""

    held_out: list[VariableGrid] = field(default_factory=list)
    """Contexts that only evaluations use, in the same form."""

    def __post_init__(self) -> None:
        for name in ("train", "held_out"):
            groups = getattr(self, name)
            _check_variables(f"family.{name}", groups)
            contexts = sum(math.prod(map(len, values_by_name.values())) for values_by_name in groups)
            if contexts > MAX_CONTEXTS:
                raise ValueError(f"family.{name} has {contexts} contexts, more than {MAX_CONTEXTS}; leave out values")
        if self.held_out and not self.train:
            raise ValueError("family.held_out has contexts and family.train has none; name those of training")
        train_contexts = self.contexts()
        for context in self.contexts(held_out=True) if self.held_out else ():
            if context in train_contexts:
                raise ValueError(f"family.held_out: {context} is a context of family.train; it would not be held out")

    def contexts(self, held_out: bool = False) -> list[Context]:
        """Return the distinct contexts of training or the held-out ones; a single empty context if there are none."""
        groups = self.held_out if held_out else self.train
        contexts = [
            Context(tuple(sorted(zip(values_by_name, values, strict=True))))
            for values_by_name in groups
            for values in product(*values_by_name.values())
        ]
        return list({repr(context): context for context in contexts}.values()) or [Context()]

    @property
    def checksum(self) -> str:
        """Checksum of the training contexts, to compare families."""
        return f"{zlib.crc32(chr(10).join(map(repr, self.contexts())).encode()):08x}"


def _check_variables(where: str, groups: Sequence[VariableGrid]) -> None:
    for values_by_name in groups:
        for name, values in values_by_name.items():
            if not isinstance(values, list) or not values:
                raise ValueError(f"{where}: {name} needs a list of values, got {values!r}")
            group, _, variable = name.partition(".")
            if group == DATA:
                _check_name(where, name, [f"data.{option.name}" for option in fields(Variant)])
                for value in values:
                    _check_settings(where, name, Variant, settings={variable: value})
            elif group == TRAINING:
                _check_name(where, name, [f"training.{option}" for option in TRAINING_VARIABLES])
                if variable != "lr_schedule" and not all(map(_is_number, values)):
                    raise ValueError(f"{where}: {name} must be a number, got {values}")
                for value in values:
                    _check_settings(where, name, HostTraining, settings={variable: value})
            elif group == FAIL:
                if variable:
                    _check_settings(where, name, check_blueprint_name, settings={"name": variable})
                if not all(_is_number(value) and 0.0 <= value <= 1.0 for value in values):
                    raise ValueError(f"{where}: {name} is a chance, from 0 to 1, got {values}")
            elif name == PRICE_VARIABLE:
                if not all(_is_number(value) and value >= 0.0 for value in values):
                    raise ValueError(f"{where}: {name} must not be negative, got {values}")
            elif name in (HORIZON_VARIABLE, OFFERED_SLOTS, OFFERED_BLUEPRINTS):
                if not all(type(value) is int and value >= 1 for value in values):
                    raise ValueError(f"{where}: {name} needs whole numbers from 1 on, got {values}")
            elif group != HOST or not variable:
                raise ValueError(
                    f"{where}: unknown variable {name!r}; there are host.<argument>, data.<field>, "
                    f"training.lr, {PRICE_VARIABLE}, {HORIZON_VARIABLE}, {OFFERED_SLOTS}, {OFFERED_BLUEPRINTS}, fail "
                    f"and fail.<blueprint>"
                )


def _check_name(where: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        raise ValueError(f"{where}: unknown variable {name!r}; {suggest_name(name, known)}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _check_settings(where: str, name: str, kind: Callable[..., Any], *, settings: Mapping[str, Any]) -> None:
    try:
        kind(**settings)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {name}: {error}") from error


def distinct_values(contexts: Sequence[Context]) -> dict[str, list[Any]]:
    """Return the distinct values of each variable, in order; None where a context leaves it as configured."""
    names = sorted({name for context in contexts for name, _ in context.variables})
    values_by_name: dict[str, list[Any]] = {name: [] for name in names}
    for variables in (dict(context.variables) for context in contexts):
        for name in names:
            if variables.get(name) not in values_by_name[name]:
                values_by_name[name].append(variables.get(name))
    return values_by_name


class ContextDistribution:
    """Uniform distribution over contexts.

    Args:
        config: Variables and values.
        held_out: True to draw held-out contexts instead of those of training.
    """

    def __init__(self, config: FamilyConfig, held_out: bool = False) -> None:
        if held_out and not config.held_out:
            raise ValueError("there are no held-out contexts; name some in data.env.family.held_out")
        self.contexts = config.contexts(held_out)
        # The encoding depends on training contexts even if held-out ones are drawn: the critic was built for it.
        self.encoded_variables = {
            name: values for name, values in distinct_values(config.contexts()).items() if len(values) > 1
        }
        self.seeds_may_fail = any(context.seeds_may_fail for context in config.contexts())

    def draw(self, rng_seed: int) -> Context:
        """Draw the context of an episode from its RNG seed alone, so every controller gets the same context."""
        return self.contexts[random.Random(f"member {rng_seed}").randrange(len(self.contexts))]

    def encode(self, context: Context) -> list[float]:
        """Encode a context as concatenated one-hot vectors, one per variable that differs between training contexts.

        A vector is all zeros if the context leaves the variable as configured.
        """
        variables = dict(context.variables)
        return [
            float(variables.get(name) == value)
            for name, values in self.encoded_variables.items()
            for value in values
            if value is not None
        ]


def select_offer(growable: Sequence[Sequence[bool]], context: Context, rng_seed: int) -> list[list[bool]]:
    """Return which blueprint may grow in which slot [K][B] in the episode with this RNG seed.

    Args:
        growable: True where a blueprint can grow in a slot of the host, [K][B].
        context: Context with the numbers of slots and blueprints on offer; where there are fewer, all are.
        rng_seed: RNG seed of the episode, which selects them.
    """
    rng = random.Random(f"offer {rng_seed}")

    def select(candidates: list[int], number: int | None) -> set[int]:
        return set(candidates if number is None else rng.sample(candidates, min(number, len(candidates))))

    slots = select([k for k, row in enumerate(growable) if any(row)], context.offered(OFFERED_SLOTS))
    grow_there = [b for b in range(len(growable[0])) if any(growable[k][b] for k in slots)]
    blueprints = select(grow_there, context.offered(OFFERED_BLUEPRINTS))
    return [[grows and k in slots and b in blueprints for b, grows in enumerate(row)] for k, row in enumerate(growable)]


def seed_fails(rng_seed: int, slot: str, blueprint: str, *, probability: float) -> bool:
    """Return True if seeds of this blueprint receive no gradient in `slot`, in the episode with this RNG seed."""
    return probability > 0.0 and random.Random(f"graft {rng_seed} {slot} {blueprint}").random() < probability
