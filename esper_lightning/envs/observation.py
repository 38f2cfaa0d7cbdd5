"""Observations and action masks of hosts, in named features, each approximately within [-1, 1].

A row of an observation has the features of the host, of a slot, and of each blueprint in that slot. Slots in which
nothing can grow, and blueprints that cannot grow in a slot, are absent: the first number of their part of a row is 0,
and so are all others. Slots and blueprints are described by size, compute and layers, without their names, so that one
policy reads any host. N environments, K slots, B blueprints.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor, nn

from esper_lightning.envs.actions import ActionSpace, Masks, Op
from esper_lightning.envs.host_env import GrowthRecord
from esper_lightning.envs.measurements import POINTS_PER_UNIT, copy_to_device
from esper_lightning.envs.rewards import SMALLEST_HOST
from esper_lightning.envs.vector_env import Observation
from esper_lightning.growth.blueprints import blueprint_names, get_blueprint, suggest_name
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.gates import GradientStats
from esper_lightning.growth.growing_network import RefusalReasons
from esper_lightning.growth.slot import ABSENT, Layout, SeedSlot
from esper_lightning.growth.stages import LIVE, Stage

HISTORY_WINDOW = 5
"""Host epochs of history in an observation: enough for a trend; longer plateaus are the feature `plateau`."""

MISSING = -1.0
"""Value of a feature that has not been measured; measured values of those features are never negative."""

PLATEAU_MIN_RISE = 0.005
"""Minimum rise of the best score that ends a plateau: one image of 200."""

# Divisors of features, so that usual values lie within [-1, 1]; larger ones are clipped.
CONTRIBUTION_SCALE = 10.0  # of points
RENT_SCALE, LARGEST_RENT = 0.2, 3.0  # of a rent in units of the score, and the largest such feature
GAIN_SCALE = 0.1  # of contribution minus rent, in units of the score
LOG_LOSS_SCALE = 7.0  # of the logarithm of a loss: 1,096 maps to 1
LOG_SIZE_SCALE = 5.0  # of the logarithm of growth: to 148 times the host maps to 1
LOG_NORM_SCALE = 5.0  # of the logarithm of a gradient norm: 147 maps to 1
LOG_COUNT_SCALE = 3.0  # of the logarithm of a number of slots or blueprints: 20 map to 1
LAYERS_SCALE = 4.0  # of a seed's number of layers
INNER_WIDTH_SCALE = 3.0  # of the logarithm of a seed's inner width over the width of the feature

PARTS = ("", "slot.", "blueprint.")
"""Prefixes of the names of features: of the host, of a slot, of a blueprint in a slot."""

LAYOUTS = get_args(Layout)

STAGE_NAMES = [stage.name for stage in Stage]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

SLOT_DESCRIPTION = ("depth", *LAYOUTS, "width", "positions")
"""Names of the numbers that describe a slot. depth: share of the host's FLOPs before it; then the layout as one-hot,
the width of the feature, and its number of positions (pixels or tokens)."""

LAYER_KINDS = ("kernel", "dense_kernel", "channel_mixing", "norm", "gating", "nonlinear")
"""Names of the kinds of layers that a seed has or not. kernel, dense_kernel: a convolution over several positions, one
that mixes channels, too."""

BLUEPRINT_DESCRIPTION = (
    *("parameters", "flops", "size"),
    *LAYER_KINDS,
    *("position_exponent", "layers", "widest", "narrowest"),
)
"""Names of the numbers that describe a blueprint in a slot. parameters and flops: growth of the host by such a seed;
size: its parameters; position_exponent: power with which FLOPs grow with the number of positions, 0 for a seed that
acts on their mean and more than 1 for attention; layers: linear layers and convolutions; widest, narrowest: widths
between its layers."""


@dataclass(frozen=True, kw_only=True)
class ObservationConfig:
    """Features that a policy observes. Rule-based controllers are not affected."""

    shown: list[str] = field(default_factory=lambda: ["*"])
    """Names or patterns of observed features (`loss.*`, `slot.*`, `blueprint.*`). [progress]: time only."""

    hidden: list[str] = field(default_factory=list)
    """Names or patterns of features to remove from `shown`. ["*.contribution*"]: no counterfactuals."""

    def select(self, names: Sequence[str]) -> set[str]:
        """Return the observed ones of these names. Raises ValueError if a pattern or all of them match none."""
        for pattern in (*self.shown, *self.hidden):
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"env.observation: no feature is called {pattern!r}; {suggest_name(pattern, names)}")
        selected = {
            name
            for name in names
            if any(fnmatchcase(name, pattern) for pattern in self.shown)
            and not any(fnmatchcase(name, pattern) for pattern in self.hidden)
        }
        if not selected:
            raise ValueError("env.observation shows no feature; show one at least, as `progress`")
        return selected


class RowSizes(NamedTuple):
    """Numbers of features in the parts of a row. They depend neither on slots nor on blueprints."""

    host: int
    slot: int  # the first is 1 if anything can grow there
    blueprint: int  # the first is 1 if it can grow there

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split rows [..., K, R] into features of the host [...], the slots [..., K] and the blueprints [..., K, B]."""
        host, slot, blueprints = rows.split([self.host, self.slot, rows.shape[-1] - self.host - self.slot], -1)
        return host[..., 0, :], slot, blueprints.unflatten(-1, (-1, self.blueprint))


def symlog(x: float, scale: float) -> float:
    """Return sign(x) · log(1 + |x|) / `scale`, clipped to [-1, 1]; NaN gives 1, as infinity does."""
    if math.isnan(x):
        return 1.0
    return math.copysign(min(1.0, math.log1p(abs(x)) / scale), x)


def clip(x: float, bound: float = 1.0) -> float:
    return max(-bound, min(bound, x))


def last_values(values: list[float], name: str) -> dict[str, float]:
    """Return the last HISTORY_WINDOW values, newest first, named by their age in ticks."""
    newest_first = values[: -HISTORY_WINDOW - 1 : -1]
    padded = newest_first + [MISSING] * (HISTORY_WINDOW - len(newest_first))
    return {f"{name}.{age}": value for age, value in enumerate(padded)}


def host_features(env: GrowthRecord) -> dict[str, float]:
    """Return the features of the host as a whole by name. None depends on the number of its slots."""
    history = env.history
    # Compute once had a price: the policies of the package have weights for these two.
    values = {"price.compute": 0.0, "compute.committed": 0.0, "progress": min(1.0, env.tick / env.horizon)}
    for name, losses in (("train_loss", history.train_loss), ("loss", history.loss)):
        values |= last_values([symlog(loss, LOG_LOSS_SCALE) for loss in losses[-HISTORY_WINDOW:]], name)
    values |= last_values(history.score, "score")
    values["gap"] = history.train_score[-1] - history.score[-1] if history.train_score else 0.0
    best, since_rise = 0.0, -1
    for score in history.score:
        since_rise += 1
        if score > best + PLATEAU_MIN_RISE:
            best, since_rise = score, 0
    values["plateau"] = max(since_rise, 0) / env.horizon
    values["price"] = min(1.0, env.price)
    values["parameters.committed"] = log_size(env.fossilized_parameters - env.host_parameters, env)
    values["parameters.live"] = log_size(env.seed_parameters(LIVE), env)
    values["host.gradient_norm"] = log_norm(env.host_gradient)
    values |= {f"last_op.{op}": float(env.last_op.name == op) for op in env.space.op}
    values["ticks_left"] = math.log1p(max(0, env.horizon - env.tick)) / LOG_SIZE_SCALE
    values["lr"] = env.lr_share
    values["host.parameters"] = math.log(env.host_parameters) / (2 * LOG_SIZE_SCALE)
    if env.flops_left is not None:
        values["budget"] = clip(math.log(env.targets_per_parameter(env.fossilized_parameters)) / LOG_SIZE_SCALE)
    return values


def slot_features(env: GrowthRecord, k: int) -> dict[str, float]:
    """Return the features of slot `k` by name."""
    slot, record = env.slots[k], env.records[k]
    gradient, contribution, previous = record.gradient, record.contribution, record.previous_contribution
    values = dict.fromkeys(STAGE_NAMES, 0.0) | {slot.stage.name: 1.0}
    values["alpha"] = slot.alpha_now
    values["alpha.velocity"] = slot.alpha_velocity
    values["alpha.target"] = float(slot.occupied)
    values["age"] = slot.age / env.horizon
    values["ticks_in_stage"] = min(1.0, slot.ticks_in_stage / env.horizon)
    values["contribution.known"] = float(contribution is not None)
    values["contribution"] = clip((contribution or 0.0) / CONTRIBUTION_SCALE)
    rise = contribution - previous if contribution is not None and previous is not None else 0.0
    values["contribution.velocity"] = clip(rise / CONTRIBUTION_SCALE)
    values["gradient.norm"] = log_norm(gradient)
    values["gradient.health"] = gradient.health if gradient else MISSING
    ratio = gradient.ratio(env.host_gradient) if gradient and env.host_gradient else None  # None: also of 0 and inf
    values["gradient.ratio"] = 0.0 if ratio is None else clip(math.log(ratio) / LOG_NORM_SCALE)
    values["parameters"] = log_size(slot.size, env)
    return values


def log_size(added_parameters: int, env: GrowthRecord) -> float:
    """Return log(1 + added / host) for a number of added parameters, scaled and clipped."""
    return clip(math.log1p(added_parameters / env.host_parameters) / LOG_SIZE_SCALE)


def log_norm(gradient: GradientStats | None) -> float:
    """Return log(1 + gradient norm), scaled and clipped; MISSING without a gradient."""
    return MISSING if gradient is None else symlog(gradient.norm, LOG_NORM_SCALE)


class HostDescription(NamedTuple):
    """Numbers of one host that stay the same in all its episodes."""

    slots: Tensor  # [K, len(SLOT_DESCRIPTION)]
    blueprints: Tensor  # [K, B, len(BLUEPRINT_DESCRIPTION)]; 0 where the blueprint has no module for the layout
    parameters: Tensor  # [K, B] parameters of a seed


def describe(env: GrowthRecord) -> HostDescription:
    """Return numbers that describe each slot, and each blueprint in each slot."""
    slots = []
    for slot in env.slots:
        depth = 1.0 - env.flops.behind.get(slot.name, 0) / max(env.flops.host, 1)
        sizes = math.log(slot.width) / LOG_SIZE_SCALE, math.log(_positions(env, slot)) / LOG_SIZE_SCALE
        slots.append([depth, *(float(slot.layout == layout) for layout in LAYOUTS), *sizes])
    described = [[_describe_blueprint(env, slot, blueprint) for blueprint in env.space.blueprint] for slot in env.slots]
    return HostDescription(
        slots=torch.tensor(slots),
        blueprints=torch.tensor([[numbers for numbers, _ in row] for row in described]),
        parameters=torch.tensor([[float(parameters) for _, parameters in row] for row in described]),
    )


def _positions(env: GrowthRecord, slot: SeedSlot) -> int:
    """Return the largest number of positions with which the forward pass reaches a slot; 1 if it does not."""
    return max(env.flops.positions.get(slot.name) or [1])


def _describe_blueprint(env: GrowthRecord, slot: SeedSlot, name: str) -> tuple[list[float], int]:
    """Return the description of a blueprint in a slot, and the parameters of such a seed."""
    if slot.layout == ABSENT or name not in blueprint_names(slot.layout):
        return [0.0] * len(BLUEPRINT_DESCRIPTION), 0
    width, n, parameters = slot.width, _positions(env, slot), slot.seed_parameters(name)
    if isinstance(slot, DepthSlot):
        flops, exponent = slot.count * env.flops.blocks.get(slot.name, 0), 1.0
        kinds, widths = read_layers(slot.block_list.blocks[0].modules())
        widths = widths * slot.count
    else:
        flops_of_pass = get_blueprint(name, slot.layout).flops
        flops = sum(flops_of_pass(width, positions) for positions in env.flops.positions.get(slot.name, ()))
        once, twice = flops_of_pass(width, n), flops_of_pass(width, 2 * n)
        exponent = math.log2(twice / once) if once else 0.0
        kinds, widths = layers_of_blueprint(name, slot.layout, width)
    numbers = [
        math.log1p(parameters / env.host_parameters) / LOG_SIZE_SCALE,
        math.log1p(flops / max(env.flops.host, 1)) / LOG_SIZE_SCALE,
        math.log1p(parameters) / (2 * LOG_SIZE_SCALE),
        *(float(kinds[kind]) for kind in LAYER_KINDS),
        exponent,
        len(widths) / LAYERS_SCALE,
        math.log(max(widths, default=width) / width) / INNER_WIDTH_SCALE,
        math.log(min(widths, default=width) / width) / INNER_WIDTH_SCALE,
    ]
    return [clip(number, 2.0) for number in numbers], parameters


@cache
def layers_of_blueprint(name: str, layout: str, width: int) -> tuple[dict[str, bool], list[int]]:
    """Return `read_layers` of a blueprint's module, which is built on the meta device, without memory."""
    with torch.device("meta"):
        return read_layers(get_blueprint(name, layout).build(width).modules())


def read_layers(parts: Iterable[nn.Module]) -> tuple[dict[str, bool], list[int]]:
    """Return the kinds of layers in a seed, and the width behind each linear layer or convolution."""
    modules = list(parts)
    convs = [module for module in modules if isinstance(module, CONVOLUTIONS)]
    linear = [module for module in modules if isinstance(module, nn.Linear)]
    spatial = [conv for conv in convs if max(conv.kernel_size) > 1]
    kinds = {
        "kernel": bool(spatial),
        "dense_kernel": any(conv.groups == 1 for conv in spatial),
        "channel_mixing": bool(linear) or any(conv.groups == 1 for conv in convs),
        "norm": any(isinstance(module, NORMS) for module in modules),
        "gating": any(isinstance(module, nn.GLU) for module in modules),
        "nonlinear": any(type(module).__module__ == "torch.nn.modules.activation" for module in modules),
    }
    return kinds, [conv.out_channels for conv in convs] + [layer.out_features for layer in linear]


def describe_all(envs: Sequence[GrowthRecord]) -> HostDescription:  # [N, …] each
    """Return the descriptions of environments; each host keeps its own in all its episodes."""
    described = []
    for env in envs:
        env.description = env.description or describe(env)
        described.append(env.description)
    return HostDescription(*(torch.stack(parts) for parts in zip(*described, strict=True)))


def tabulate(rows: Iterable[Mapping[str, float]]) -> Tensor:  # [rows, features]
    """Return the values of dictionaries with equal keys; through NumPy, which reads a list in a fifth of the time."""
    return torch.from_numpy(np.array([list(row.values()) for row in rows], np.float32))


def compute_features(
    envs: Sequence[GrowthRecord], growable: Tensor, described: HostDescription
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return the features of hosts [N], slots [N, K] and blueprints in slots [N, K, B] by name.

    `growable` [N, K, B] bool tells which blueprint can grow in which slot; `described` comes from `describe_all`.
    """
    rows = [host_features(env) for env in envs]
    host = dict(zip(rows[0], tabulate(rows).unbind(-1), strict=True))
    # Means and maxima over rows do not tell their number.
    host["slots.offered"] = growable.any(-1).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    host["blueprints.offered"] = growable.any(-2).sum(-1).clamp(min=1).log() / LOG_COUNT_SCALE
    measured = [[slot_features(env, k) for k in range(len(env.slots))] for env in envs]
    table = tabulate(chain.from_iterable(measured)).unflatten(0, (len(envs), -1))  # [N, K, features]
    slots = dict(zip(measured[0][0], table.unbind(-1), strict=True))
    # What grows where; where a blueprint's contribution was measured in this episode, and the last one. [N, K, B] each.
    growing, tried, trial = np.zeros((3, *growable.shape), np.float32)  # torch takes 40 times as long to write a number
    index = {name: b for b, name in enumerate(envs[0].space.blueprint)}
    for i, env in enumerate(envs):
        for k, (slot, trials) in enumerate(zip(env.slots, env.trials, strict=True)):
            if slot.blueprint in index:
                growing[i, k, index[slot.blueprint]] = 1.0
            for name in index.keys() & trials.keys():
                tried[i, k, index[name]], trial[i, k, index[name]] = 1.0, clip(trials[name] / CONTRIBUTION_SCALE)
    seed_rents, blueprint_rents = _rents(envs, described.parameters)
    arrays = {"here": growing, "tried": tried, "trial": trial}
    blueprints = {name: torch.from_numpy(array) for name, array in arrays.items()}
    blueprints["rent"] = (blueprint_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    slots["rent"] = (seed_rents / RENT_SCALE).clamp(max=LARGEST_RENT)
    contributions = torch.tensor(
        [[(record.contribution or 0.0) / POINTS_PER_UNIT for record in env.records] for env in envs]
    )
    slots["gain"] = ((contributions - seed_rents) / GAIN_SCALE).clamp(-1.0, 1.0) * blueprints["here"].amax(-1)
    slots |= zip(SLOT_DESCRIPTION, described.slots.unbind(-1), strict=True)
    blueprints |= zip(BLUEPRINT_DESCRIPTION, described.blueprints.unbind(-1), strict=True)
    # Of the seed in each slot, [N, K, description].
    seeds = (blueprints["here"].unsqueeze(-1) * described.blueprints).sum(2)
    slots |= zip((f"seed.{name}" for name in BLUEPRINT_DESCRIPTION), seeds.unbind(-1), strict=True)
    return host, slots, blueprints


def _rents(envs: Sequence[GrowthRecord], blueprint_parameters: Tensor) -> tuple[Tensor, Tensor]:
    """Return the additional rent of fossilizing now the seed of each slot [N, K], and one of each blueprint [N, K, B].

    Empty slots and fossilized seeds have none.
    """
    seeds = [[slot.size if slot.live else 0 for slot in env.slots] for env in envs]
    added = torch.cat([torch.tensor(seeds, dtype=torch.float32).unsqueeze(-1), blueprint_parameters], -1)
    sizes = [
        [float(max(env.host_parameters, SMALLEST_HOST)), float(env.fossilized_parameters - env.host_parameters)]
        for env in envs
    ]
    host, grown = torch.tensor(sizes)[:, None, None].unbind(-1)  # [N, 1, 1] each
    prices = torch.tensor([env.price for env in envs])[:, None, None]
    rent = prices * (torch.log1p((grown + added) / host) - torch.log1p(grown / host))
    return rent[..., 0], rent[..., 1:]


class ObservationBuilder:
    """Builds observation, masks and privileged features of N environments, in tensors that are updated in place.

    Args:
        envs: Environments, or networks in another training; the entries of the list may be replaced between episodes.
        space: Action space of all environments.
        growable: True where a blueprint can grow in a slot, [K, blueprints] bool; see `update_constants`.
        config: Choice among the features.
        device: Device of observation and masks.
        num_privileged: Number of privileged features P of each episode; 0: nothing is hidden.
    """

    def __init__(
        self,
        envs: Sequence[GrowthRecord],
        space: ActionSpace,
        growable: Tensor,
        *,
        config: ObservationConfig,
        device: torch.device,
        num_privileged: int = 0,
    ) -> None:
        self.envs, self.device = envs, device
        self.refusals: list[list[RefusalReasons]] = []  # of the lifecycle gates against changes of each seed, [N][K]
        self.masks_on_cpu = Masks(  # of the possible actions
            slot=torch.zeros(len(envs), len(Op), len(space.slot), dtype=torch.bool),
            blueprint=growable.expand(len(envs), -1, -1).clone(),
            ended=torch.zeros(len(envs), dtype=torch.bool),
        )
        self.masks = Masks(*(mask.to(device) for mask in self.masks_on_cpu))
        self.described = describe_all(envs)
        # Features of one environment, for their names: of the host, of a slot, of a blueprint in a slot.
        features = compute_features(envs[:1], self.masks_on_cpu.blueprint[:1], describe_all(envs[:1]))
        prefixed = zip(PARTS, features, strict=True)
        observed = config.select([prefix + name for prefix, by_name in prefixed for name in by_name])
        # Names without prefix of the observed features of the host, of a slot and of a blueprint.
        self.selected = [
            [name for name in by_name if prefix + name in observed]
            for prefix, by_name in zip(PARTS, features, strict=True)
        ]
        host_names, slot_names, blueprint_names = self.selected
        # Rows of slots and of blueprints begin with the number `present`, since hosts may have fewer of them.
        self.rows = RowSizes(len(host_names), 1 + len(slot_names), 1 + len(blueprint_names))
        self.names = [*host_names]
        for prefix, names in zip(PARTS[1:], self.selected[1:], strict=True):
            self.names += [prefix + name for name in ("present", *names)]
        self.observation = Observation(torch.zeros(self._build_rows().shape, device=device))
        self.privileged = torch.zeros(len(envs), num_privileged, device=device) if num_privileged else None

    def update_constants(self, growable: Tensor, privileged: Sequence[Sequence[float]]) -> None:
        """Update what stays the same in an episode: what can grow, [N, K, blueprints] bool, and privileged features."""
        self.described = describe_all(self.envs)
        self.masks_on_cpu.blueprint.copy_(growable)
        self.masks.blueprint.copy_(copy_to_device(growable, self.device))
        if self.privileged is not None:
            self.privileged.copy_(copy_to_device(torch.tensor(privileged), self.device))

    def update(self) -> None:
        """Update observation, masks and refusals from the environments."""
        self.update_masks()
        self.update_observation()

    def update_masks(self) -> None:
        """Update masks and refusals from the environments."""
        self.refusals = [[*map(env.growing.refusal_reasons, env.growing.slots)] for env in self.envs]
        rows = []
        for env, refusals in zip(self.envs, self.refusals, strict=True):
            may_change = not env.ended
            possible = {
                Op.WAIT: [True for _ in refusals],
                Op.GERMINATE: [may_change and slot.is_open for slot in env.slots],
                Op.CULL: [may_change and not reasons.culling for reasons in refusals],
                Op.FOSSILIZE: [may_change and not reasons.fossilizing for reasons in refusals],
            }
            rows.append([possible[op] for op in Op])
        slot = torch.from_numpy(np.array(rows))
        slot[:, Op.GERMINATE] &= self.masks_on_cpu.blueprint.any(-1)
        ended = torch.tensor([env.ended for env in self.envs])
        for masks in (self.masks_on_cpu, self.masks):
            masks.ended.copy_(copy_to_device(ended, masks.ended.device))
            masks.slot.copy_(copy_to_device(slot, masks.slot.device))

    def update_observation(self) -> None:
        """Update the observation from the environments and the masks."""
        self.observation.features.copy_(copy_to_device(self._build_rows(), self.device))

    def _build_rows(self) -> Tensor:  # [N, K, R]
        growable = self.masks_on_cpu.blueprint
        host, slots, blueprints = compute_features(self.envs, growable, self.described)
        host_names, slot_names, blueprint_names = self.selected
        can_grow = growable.float()  # [N, K, B]
        has_slot = can_grow.amax(-1)  # [N, K]
        of_host = torch.stack([host[name] for name in host_names], -1) if host_names else has_slot[:, :0]
        of_slots = torch.stack([has_slot, *(slots[name] for name in slot_names)], -1) * has_slot.unsqueeze(-1)
        of_blueprints = torch.stack([can_grow, *(blueprints[name] for name in blueprint_names)], -1)
        of_blueprints = of_blueprints * can_grow.unsqueeze(-1)
        rows = of_host.unsqueeze(1).expand(-1, has_slot.shape[1], -1)
        return torch.cat([rows, of_slots, of_blueprints.flatten(-2)], -1)
