"""Hill climbing with rent: a seed is grown, and fossilized if the objective is higher with it than without."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from esper_lightning.blueprints import get_blueprint, suggest_name
from esper_lightning.controllers.fixed_schedule import WAIT_ACTION, is_possible
from esper_lightning.controllers.learned import Hosts
from esper_lightning.envs import Action, Op
from esper_lightning.envs.host_env import Subject
from esper_lightning.envs.spaces.actions import to_action
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.growth.lifecycle import count_parameters
from esper_lightning.growth.stages import Stage
from esper_lightning.rewards import ObjectiveConfig, compute_rent, rent

Order = Literal["listed", "cheapest", "dearest"]


@dataclass(frozen=True, kw_only=True)
class ClimbingConfig:
    """Order in which hill climbing tries seeds, and conditions for fossilizing them."""

    order: Order = "dearest"
    """Order of the candidate seeds. listed: the first blueprint in every slot, then the second, and so on.
    cheapest, dearest: by the number of parameters. Candidates are tried again when all possible ones have been
    tried."""

    blueprints: list[str] | None = None
    """Blueprints to try, in this order. None: all available ones."""

    last_slot_first: bool = False
    """Among slots with the same priority prefer the one nearest to the output, not the one nearest to the input."""

    at_once: int = 3
    """Maximum number of seeds that grow at the same time.
    With 1 no seed disturbs the measurement of another, but in a short episode most seeds get too little time."""

    margin: float = 0.0
    """Minimum net gain of the objective, after rent, for a seed to be fossilized."""

    patience: int = 3
    """Ticks for which a blended seed with too little gain may continue before it is culled."""

    zero_gradient: bool = False
    """Cull a seed as soon as no gradient reaches it, because it cannot learn."""

    def __post_init__(self) -> None:
        if self.at_once < 1:
            raise ValueError(f"climbing.at_once must be at least 1, got {self.at_once}")
        if self.patience < 0:
            raise ValueError(f"climbing.patience must not be negative, got {self.patience}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("climbing.blueprints is empty; name at least one, or leave it out for all")


class HillClimbing:
    """Germinates the next seed of a fixed order, and fossilizes it after blending if its gain exceeds its rent.

    Otherwise it culls the seed. No seed germinates when too little time is left to judge it.
    """

    def __init__(self, config: ClimbingConfig = ClimbingConfig()) -> None:
        self.config = config

    def reset(self, pool: Hosts) -> None:
        # Hosts of a family may differ in widths alone: seeds are then tried in the order of the first host.
        masks = pool.masks_on_cpu.blueprint
        alike = bool((masks == masks[:1]).all())
        self.candidates = [list_candidates(pool, self.config, 0 if alike else host) for host in range(pool.n_envs)]
        self.tempo, ticks = fastest_tempo(pool)
        self.ticks_to_judge = min_ticks_to_judge(pool.config.lifecycle, ticks)
        self.tried: list[set[tuple[int, int]]] = [set() for _ in pool.envs]

    def state_dict(self) -> dict[str, Any]:
        """Return the seeds that have been tried, for an episode that is continued later."""
        return {"tried": [[list(pair) for pair in sorted(tried)] for tried in self.tried]}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.reset(pool)
        self.tried = [{(slot, blueprint) for slot, blueprint in tried} for tried in state["tried"]]

    def act(self, pool: Hosts) -> Action:
        return to_action([self._choose_action(pool, host) for host in range(pool.n_envs)], pool.device)

    def _choose_action(self, pool: Hosts, host: int) -> tuple[int, ...]:
        env = pool.envs[host]
        live = [k for k, slot in enumerate(env.slots) if slot.live]
        for k in live:
            for op in self._preferred_ops(env, k, pool.config.objective):
                action = make_action(op, k)
                if is_possible(pool, host, action):
                    return action
        if len(live) < self.config.at_once and env.tick < env.horizon - self.ticks_to_judge:
            return self._germinate(pool, host)
        return WAIT_ACTION

    def _preferred_ops(self, env: Subject, k: int, objective: ObjectiveConfig) -> list[Op]:
        """Return the desired ops for the seed in slot k, in order of preference."""
        slot, record = env.slots[k], env.records[k]
        if self.config.zero_gradient and record.gradient is not None and has_no_gradient(record.gradient):
            return [Op.CULL]
        is_judged = slot.stage is Stage.PROBATIONARY and env.growing.evidence(slot.name).alpha_at_target
        if not is_judged or record.contribution is None:
            return []
        is_profitable = net_gain(env, k, objective) > self.config.margin
        is_overdue = slot.ticks_in_stage >= self.config.patience  # also reached if the gate asks for more than the rent
        return [Op.FOSSILIZE] * is_profitable + [Op.CULL] * is_overdue

    def _germinate(self, pool: Hosts, host: int) -> tuple[int, ...]:
        tried = self.tried[host]
        actions = {pair: make_action(Op.GERMINATE, *pair, tempo=self.tempo) for pair in self.candidates[host]}
        available = [pair for pair, action in actions.items() if is_possible(pool, host, action)]
        if not available:
            return WAIT_ACTION
        if tried.issuperset(available):
            tried.difference_update(available)
        chosen = next(pair for pair in available if pair not in tried)
        tried.add(chosen)
        return actions[chosen]


def make_action(op: Op, slot: int, blueprint: int = 0, *, tempo: int = 0) -> tuple[int, ...]:
    """Return an action with a choice for every head; heads that are not given choose 0."""
    return (op, slot, blueprint, 0, tempo)  # in the order of HEADS


def list_candidates(pool: Hosts, config: ClimbingConfig, host: int = 0) -> list[tuple[int, int]]:
    """Return slot and blueprint of every seed that can grow on a host, in the order in which they are tried."""
    blueprints = pool.space.blueprint
    for name in config.blueprints or ():
        if name not in blueprints:
            raise ValueError(f"climbing.blueprints: {name!r} is not available; {suggest_name(name, blueprints)}")
    selected = [blueprints.index(name) for name in config.blueprints or blueprints]
    growable = pool.masks_on_cpu.blueprint[host].tolist()
    slots = list(enumerate(pool.envs[host].slots))
    pairs = [(k, b) for b in selected for k, _ in (slots[::-1] if config.last_slot_first else slots) if growable[k][b]]

    def parameters(pair: tuple[int, int]) -> int:
        slot = slots[pair[0]][1]
        return get_blueprint(blueprints[pair[1]], slot.layout).parameters(slot.width)

    match config.order:
        case "listed":
            return pairs
        case "cheapest":
            return sorted(pairs, key=parameters)
        case "dearest":
            return sorted(pairs, key=lambda pair: -parameters(pair))


def fastest_tempo(pool: Hosts) -> tuple[int, int]:
    """Return the index of the tempo with the shortest blending, and its host epochs."""
    ticks = [pool.config.actions.tempos[name] for name in pool.space.tempo]
    return ticks.index(min(ticks)), min(ticks)


def min_ticks_to_judge(lifecycle: LifecycleConfig, blending: int) -> int:
    """Return the minimum number of host epochs from a germination to the first action on the blended seed."""
    return 1 + lifecycle.training_ticks + blending


def has_no_gradient(gradient: GradientStats) -> bool:
    """Return True if no gradient reaches any part of the seed."""
    return gradient.vanished == 1.0


def net_gain(env: Subject, k: int, config: ObjectiveConfig) -> float:
    """Return the net gain of the objective from the seed in slot k: its contribution to accuracy minus its rent."""
    slot, contribution = env.slots[k], env.records[k].contribution
    assert contribution is not None, "the caller asks for the gain of measured seeds only"
    prices = env.prices
    parameters = torch.tensor([env.fossilized_parameters]) + torch.tensor([0, count_parameters(slot.seed)])
    compute: Tensor | float = 0.0
    if config.charges_compute:
        assert env.flops is not None, "they are counted where compute has a price"
        flops = torch.tensor([env.fossilized_flops]) + torch.tensor([0, env.flops.seed_flops(slot)])
        compute = compute_rent(flops, env.flops.host, torch.tensor(prices.compute))
    without, with_seed = rent(
        parameters, env.host_parameters, config, price=torch.tensor(prices.parameters), compute_cost=compute
    ).tolist()
    return contribution / 100.0 - (with_seed - without)
