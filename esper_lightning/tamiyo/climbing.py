"""Hill climbing with rent: a seed is grown, and kept if the objective is higher with it than without."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from esper_lightning.blueprints import get, nearest
from esper_lightning.envs import Action, HostPool, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradients import GradientStats
from esper_lightning.growth.network import count_parameters
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig, compute_rent, rent
from esper_lightning.tamiyo.replay import WAIT, possible

Order = Literal["listed", "cheapest", "dearest"]


@dataclass(frozen=True, kw_only=True)
class ClimbingConfig:
    """What hill climbing tries in which order, and what it keeps."""

    order: Order = "dearest"
    """Which seed is tried next. listed: every slot with the first blueprint, then with the second, and so on. cheapest,
    dearest: by the parameters that it would add. What was tried comes again when nothing else is possible."""

    blueprints: list[str] | None = None
    """Blueprints that are tried, in this order. None: all that are on offer."""

    last_slot_first: bool = False
    """Of the slots with the same claim take the one nearest to the output, not the one nearest to the input."""

    at_once: int = 3
    """Seeds that may grow at the same time. 1: one after the other, so that no seed confuses another's verdict; but in
    a short episode that leaves most of them too little time."""

    margin: float = 0.0
    """What a seed must add to the objective, rent already paid, to be kept."""

    patience: int = 3
    """Ticks for which a blended seed may go on although it adds too little, before it is culled."""

    zero_gradient: bool = False
    """Cull at once a seed that no gradient reaches: it will never learn."""

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"climbing.at_once must be at least 1, got {self.at_once}")
        if self.patience < 0:
            raise ValueError(f"climbing.patience must not be negative, got {self.patience}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("climbing.blueprints is empty; name at least one, or leave it out for all")


class HillClimbing:
    """Germinates the next seed of a fixed order; once it is blended in, fossilizes it if it is worth its rent, and
    else culls it. A seed for which there is no time any more is not begun."""

    def __init__(self, config: ClimbingConfig = ClimbingConfig()) -> None:
        self.config = config

    def reset(self, pool: HostPool) -> None:
        self.candidates = candidates(pool, self.config)
        self.tempo, ticks = fastest(pool)
        self.last_start = pool.config.horizon - 1 - ticks_to_judge(pool.config.lifecycle, ticks)
        self.tried: list[set[tuple[int, int]]] = [set() for _ in pool.envs]

    def act(self, pool: HostPool) -> Action:
        return to_action([self._decide(pool, host) for host in range(pool.n_envs)], pool.device)

    def _decide(self, pool: HostPool, host: int) -> tuple[int, ...]:
        env = pool.envs[host]
        live = [k for k, slot in enumerate(env.slots) if slot.live]
        for k in live:
            for op in self._wanted(env, k, pool.config.objective):
                decision = complete(op, k)
                if op < len(pool.space.op) and possible(pool, host, decision):
                    return decision
        if len(live) < self.config.at_once and env.tick <= self.last_start:
            return self._germinate(pool, host)
        return WAIT

    def _wanted(self, env: HostEnv, k: int, objective: ObjectiveConfig) -> list[Op]:
        """What should be done about the seed in slot k, the best first."""
        slot, record = env.slots[k], env.records[k]
        if self.config.zero_gradient and record.gradient is not None and dead(record.gradient):
            return [Op.CULL]
        if slot.stage is not Stage.PROBATIONARY:
            return [Op.ADVANCE]
        if record.contribution is None or not env.growing.evidence(slot.name).alpha_rests:
            return []
        worth_it = gain(env, k, objective) > self.config.margin
        overdue = slot.ticks_in_stage >= self.config.patience  # or the lifecycle asks for more than its rent
        return [Op.FOSSILIZE] * worth_it + [Op.CULL] * overdue

    def _germinate(self, pool: HostPool, host: int) -> tuple[int, ...]:
        tried = self.tried[host]
        offered = {pair: complete(Op.GERMINATE, *pair, tempo=self.tempo) for pair in self.candidates}
        now = [pair for pair, decision in offered.items() if possible(pool, host, decision)]
        if not now:
            return WAIT
        if tried.issuperset(now):
            tried.difference_update(now)
        chosen = next(pair for pair in now if pair not in tried)
        tried.add(chosen)
        return offered[chosen]


def complete(op: Op, slot: int, blueprint: int = 0, tempo: int = 0) -> tuple[int, ...]:
    """A number for every head; those that are not given are 0."""
    return Action(op, slot, blueprint, 0, tempo, 0, 0, 0)


def candidates(pool: HostPool, config: ClimbingConfig) -> list[tuple[int, int]]:
    """Slot and blueprint of every seed that can grow in the pool, in the order in which they are tried."""
    offered = pool.space.blueprint
    for name in config.blueprints or ():
        if name not in offered:
            raise ValueError(f"climbing.blueprints: {name!r} is not on offer; {nearest(name, offered)}")
    wanted = [offered.index(name) for name in config.blueprints or offered]
    growable = pool.masks_on_cpu.blueprint[0].tolist()
    slots = list(enumerate(pool.envs[0].slots))
    pairs = [(k, b) for b in wanted for k, _ in (slots[::-1] if config.last_slot_first else slots) if growable[k][b]]

    def parameters(pair: tuple[int, int]) -> int:
        slot = slots[pair[0]][1]
        return get(offered[pair[1]], slot.layout).parameters(slot.width)

    match config.order:
        case "listed":
            return pairs
        case "cheapest":
            return sorted(pairs, key=parameters)
        case "dearest":
            return sorted(pairs, key=lambda pair: -parameters(pair))


def fastest(pool: HostPool) -> tuple[int, int]:
    """The tempo that blends in the fewest host epochs, and these."""
    ticks = [pool.config.actions.tempos[name] for name in pool.space.tempo]
    return ticks.index(min(ticks)), min(ticks)


def ticks_to_judge(lifecycle: LifecycleConfig, blending: int) -> int:
    """Host epochs from the germination of a seed to the first decision about it as a blended one, at the least."""
    return 1 + lifecycle.training_ticks + blending


def dead(gradient: GradientStats) -> bool:
    """Does no gradient reach any part of the seed?"""
    return gradient.vanished == 1.0


def gain(env: HostEnv, k: int, config: ObjectiveConfig) -> float:
    """What the seed in slot k adds to the objective: accuracy that it contributes minus rent that keeping it costs."""
    slot = env.slots[k]
    prices = env.prices
    parameters = torch.tensor([env.committed_parameters]) + torch.tensor([0, count_parameters(slot.seed)])
    compute: Tensor | float = 0.0
    if config.prices_compute:
        flops = torch.tensor([env.committed_flops]) + torch.tensor([0, env.compute.of(slot)])
        compute = compute_rent(flops, env.compute.host, torch.tensor(prices.compute))
    without, with_it = rent(parameters, env.host_parameters, config, torch.tensor(prices.parameters), compute).tolist()
    return env.records[k].contribution / 100.0 - (with_it - without)
