"""Hand-written rules: waiting, random actions, a heuristic, seeds at fixed intervals, and hill climbing with rent.

`StaticController` waits on hosts that have their final network from the first tick.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any, Literal, NamedTuple

import torch

from esper_lightning.controllers.learned import Hosts
from esper_lightning.controllers.schedules import is_possible
from esper_lightning.envs import Action, Op
from esper_lightning.envs.actions import to_action
from esper_lightning.envs.host_env import GrowthRecord, HostEnv
from esper_lightning.envs.host_pool import WAIT_ACTION
from esper_lightning.envs.measurements import copy_to_device
from esper_lightning.envs.rewards import rent
from esper_lightning.growth.blend import Ramp
from esper_lightning.growth.blueprints import STACK, initialise, suggest_name
from esper_lightning.growth.depth import DepthSlot
from esper_lightning.growth.gates import LifecycleConfig
from esper_lightning.growth.stages import STAGES_TO_FOSSILIZED, Stage
from esper_lightning.ppo.distribution import uniform_distribution


class WaitOnly:
    """Always waits, so the host never grows."""

    def reset(self, pool: Hosts) -> None:
        pass

    def act(self, pool: Hosts) -> Action:
        return to_action([(Op.WAIT,)] * pool.n_envs, pool.device)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        pass


class FossilizedSeed(NamedTuple):
    """One fossilized seed, described without its weights."""

    slot: str
    blueprint: str


Topology = tuple[FossilizedSeed, ...]
"""All fossilized seeds of one host, in the order of its slots."""


class StaticController(WaitOnly):
    """Gives every host its final network, the topology with its index, before the first tick and then only waits.

    The weights of seeds and of further blocks are drawn from the host's own generator. Every seed is fossilized, so all
    of the network learns from the first minibatch, on the same data as in any other episode.
    """

    def __init__(self, topologies: Sequence[Topology]) -> None:
        self.topologies = topologies

    def reset(self, pool: Hosts) -> None:
        for env, topology in zip(pool.envs, self.topologies, strict=True):
            for seed in topology:
                env.growing.germinate(seed.slot, seed.blueprint)
                slot = env.growing.slots[seed.slot]
                if isinstance(slot, DepthSlot):  # its blocks are permanent at once; they get fresh weights in place of
                    for block in slot.grown:  # copied ones
                        initialise(block, env.growing.generator)
                    # A host may have rules of its own for the size of weights by depth, which it applies anew.
                    if (initialise_host := getattr(env.growing.module, "initialise", None)) is not None:
                        initialise_host(env.growing.generator)
                    continue
                slot.start_ramp(Ramp())
                for stage in STAGES_TO_FOSSILIZED:
                    slot.move_to(stage)
            if isinstance(env, HostEnv) and env.monitor is not None:
                env.take_snapshot()  # a rollback restores this network, not the bare host


class RandomValid:
    """Draws a possible op uniformly, then a slot that is possible for it, then a choice of every other head."""

    def __init__(self, rng_seed: int) -> None:
        self.generator = torch.Generator().manual_seed(rng_seed)

    def reset(self, pool: Hosts) -> None:
        pass

    def act(self, pool: Hosts) -> Action:
        action = uniform_distribution(pool.space.sizes, pool.masks_on_cpu).sample(self.generator)
        return Action(*copy_to_device(torch.stack(action), pool.device))


class Rule(ABC):
    """Controller that chooses one host's action after the other."""

    memories: list[dict[str, Any]]
    """All that the rule remembers of each host, as plain values."""

    def act(self, pool: Hosts) -> Action:
        return to_action([self.choose(pool, host, memory) for host, memory in enumerate(self.memories)], pool.device)

    @abstractmethod
    def reset(self, pool: Hosts) -> None:
        """Begin an episode: give every host its first memory."""

    @abstractmethod
    def choose(self, pool: Hosts, host: int, memory: dict[str, Any]) -> tuple[int, ...]:
        """Return the action on one host as one index per head; heads that are left out choose 0."""

    def state_dict(self) -> dict[str, Any]:
        """Return what the rule remembers, for an episode that is continued later."""
        return {"memories": deepcopy(self.memories)}

    def load_state_dict(self, pool: Hosts, state: Mapping[str, Any]) -> None:
        """Continue an episode from a state of `state_dict`, in place of `reset`."""
        self.reset(pool)
        self.memories = deepcopy(state["memories"])


class Heuristic(Rule):
    """Germinates blueprints in rotation when the host is on a stable plateau, and fossilizes what the gate allows.

    Changes of score are in points of 100, times in host epochs. Another heuristic is a subclass with other numbers.
    """

    stable_loss = 0.03  # relative fall of the validation loss in a tick below which the host counts as stable
    stable_ticks = 3  # consecutive stable ticks before the first germination
    min_age = 5  # ticks before the first germination
    plateau_points, plateau_ticks = 0.5, 3  # so many ticks with a smaller gain are a plateau
    cull_points, cull_ticks = -2.0, 5  # change since germination below which a seed of this age is culled
    # A seed that claims to contribute while score fell appears useful only because the host depends on it by now.
    least_ransom, least_change = 0.1, -0.2

    def reset(self, pool: Hosts) -> None:
        self.memories = [{"next_blueprint": 0, "is_stable": False, "score_before": {}} for _ in pool.envs]

    def choose(self, pool: Hosts, host: int, memory: dict[str, Any]) -> tuple[int, ...]:
        """Return an op, its slot and a blueprint; a seed is kept or culled first, and germinated on a plateau."""
        env, allowed = pool.envs[host], pool.masks_on_cpu.slot[host].tolist()
        score = 100.0 * env.history.score[-1]
        losses = env.history.loss[-self.stable_ticks - 1 :]
        memory["is_stable"] |= len(losses) > self.stable_ticks and all(
            after > (1.0 - self.stable_loss) * before for before, after in pairwise(losses)
        )
        for k, slot in enumerate(env.slots):
            contribution, least = env.records[k].contribution, env.lifecycle.min_contribution
            is_useful = contribution is not None and (contribution > 0.0 if least is None else contribution >= least)
            if allowed[Op.FOSSILIZE][k] and is_useful:
                return Op.FOSSILIZE, k
            if allowed[Op.CULL][k]:
                change = score - memory["score_before"][k]
                is_ransom = (contribution or 0.0) > self.least_ransom and change < self.least_change
                if is_ransom or (slot.ticks_in_stage >= self.cull_ticks and change < self.cull_points):
                    return Op.CULL, k
        recent = env.history.score[-self.plateau_ticks - 1 :]
        gains = [100.0 * (after - before) for before, after in pairwise(recent)]
        is_on_plateau = len(gains) == self.plateau_ticks and max(gains) < self.plateau_points
        is_growing = any(slot.live for slot in env.slots)
        if memory["is_stable"] and is_on_plateau and not is_growing and env.tick >= self.min_age:
            growable = pool.masks_on_cpu.blueprint[host].tolist()
            for k in (k for k, is_free in enumerate(allowed[Op.GERMINATE]) if is_free):
                first = memory["next_blueprint"]
                for blueprint in (*range(first, len(growable[k])), *range(first)):
                    if growable[k][blueprint]:
                        memory["next_blueprint"] = (blueprint + 1) % len(growable[k])
                        memory["score_before"][k] = score
                        return Op.GERMINATE, k, blueprint
        return WAIT_ACTION


@dataclass(frozen=True, kw_only=True)
class PeriodicConfig:
    """Interval of germinations, and blueprints to germinate."""

    every: int = 4
    """Ticks from one germination to the next."""

    blueprints: list[str] | None = None
    """Blueprints to germinate in turn. None: all available ones."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"periodic.every must be at least 1, got {self.every}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("periodic.blueprints is empty; name at least one, or leave it out for all")


class Periodic(Rule):
    """Germinates the next blueprint in the next free slot at fixed intervals, and fossilizes as soon as possible."""

    def __init__(self, config: PeriodicConfig = PeriodicConfig()) -> None:
        self.config = config

    def reset(self, pool: Hosts) -> None:
        self.blueprints = chosen_blueprints("periodic", self.config.blueprints, pool)
        self.tempo, _ = fastest_tempo(pool)
        # Of the next germination: its tick, the slot to try first, and the position in the rotation of blueprints.
        self.memories = [{"tick": 0, "slot": 0, "blueprint": 0} for _ in pool.envs]

    def choose(self, pool: Hosts, host: int, memory: dict[str, Any]) -> tuple[int, ...]:
        n_slots, tick = len(pool.space.slot), pool.envs[host].tick
        for k in range(n_slots):
            if is_possible(pool, host, make_action(Op.FOSSILIZE, k)):
                return make_action(Op.FOSSILIZE, k)
        if tick < memory["tick"]:
            return WAIT_ACTION
        for k in ((memory["slot"] + offset) % n_slots for offset in range(n_slots)):
            for offset in range(len(self.blueprints)):
                position = (memory["blueprint"] + offset) % len(self.blueprints)
                action = make_action(Op.GERMINATE, k, self.blueprints[position], tempo=self.tempo)
                if is_possible(pool, host, action):
                    memory.update(tick=tick + self.config.every, slot=k + 1, blueprint=position + 1)
                    return action
        return WAIT_ACTION


@dataclass(frozen=True, kw_only=True)
class ClimbingConfig:
    """Order in which hill climbing tries seeds, and conditions for fossilizing them."""

    order: Literal["listed", "cheapest", "dearest"] = "dearest"
    """Order of the candidates: listed, one blueprint after the other in every slot, or by the number of parameters."""

    blueprints: list[str] | None = None
    """Blueprints to try, in this order. None: all available ones."""

    last_slot_first: bool = False
    """Among slots with the same priority prefer the one nearest to the output, not the one nearest to the input."""

    at_once: int = 3
    """Maximum number of seeds that grow at the same time. With 1 no seed disturbs the measurement of another."""

    patience: int = 3
    """Ticks for which a blended seed with too little gain may continue before it is culled."""

    def __post_init__(self) -> None:
        for name, least in (("at_once", 1), ("patience", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"climbing.{name} must be at least {least}, got {getattr(self, name)}")
        if self.blueprints is not None and not self.blueprints:
            raise ValueError("climbing.blueprints is empty; name at least one, or leave it out for all")


class HillClimbing(Rule):
    """Germinates the next seed of a fixed order, and fossilizes it after blending if its gain exceeds its rent.

    Otherwise it culls the seed. No seed germinates when too little time is left to judge it.
    """

    def __init__(self, config: ClimbingConfig = ClimbingConfig()) -> None:
        self.config = config

    def reset(self, pool: Hosts) -> None:
        # Hosts of a family may differ in widths alone: seeds are then tried in the order of the first host.
        masks = pool.masks_on_cpu.blueprint
        grow_alike = bool((masks == masks[:1]).all())
        hosts = [0 if grow_alike else host for host in range(pool.n_envs)]
        self.candidates = [list_candidates(pool, self.config, host) for host in hosts]
        self.tempo, ticks = fastest_tempo(pool)
        self.ticks_to_judge = min_ticks_to_judge(pool.config.lifecycle, ticks)
        self.memories = [{"tried": []} for _ in pool.envs]  # (slot, blueprint) of the seeds that have been tried

    def choose(self, pool: Hosts, host: int, memory: dict[str, Any]) -> tuple[int, ...]:
        """Decide on blended seeds first; else germinate the next untried (slot, blueprint)."""
        env, tried = pool.envs[host], memory["tried"]
        live = [k for k, slot in enumerate(env.slots) if slot.live]
        for k in live:
            slot = env.slots[k]
            is_blended = slot.stage is Stage.PROBATIONARY and env.growing.evidence(slot.name).alpha == 1.0
            if not is_blended or env.records[k].contribution is None:
                continue
            fossilize, cull = make_action(Op.FOSSILIZE, k), make_action(Op.CULL, k)
            if net_gain(env, k) > 0.0 and is_possible(pool, host, fossilize):
                return fossilize
            # Also a seed that is worth its rent, if the gate asks for more.
            if slot.ticks_in_stage >= self.config.patience and is_possible(pool, host, cull):
                return cull
        if len(live) >= self.config.at_once or env.tick >= env.horizon - self.ticks_to_judge:
            return WAIT_ACTION
        actions = {pair: make_action(Op.GERMINATE, *pair, tempo=self.tempo) for pair in self.candidates[host]}
        available = [pair for pair, action in actions.items() if is_possible(pool, host, action)]
        if not available:
            return WAIT_ACTION
        if set(available) <= set(tried):  # all that can grow now have been tried: begin again with them
            tried[:] = [pair for pair in tried if pair not in available]
        chosen = next(pair for pair in available if pair not in tried)
        tried.append(chosen)
        return actions[chosen]


class Scaling(Rule):
    """Deepens a network step by step, as far as the FLOPs that are left suffice for its size.

    They suffice if they train the deeper network on `targets` tokens or labels per parameter; how this number was
    chosen is on the page docs/results/depth.md.
    """

    targets = 15.0
    begin = 0.25  # share of the horizon after which the first block grows, and another one in each later tick

    def reset(self, pool: Hosts) -> None:
        self.memories = [{} for _ in pool.envs]

    def choose(self, pool: Hosts, host: int, memory: dict[str, Any]) -> tuple[int, ...]:
        env = pool.envs[host]
        if env.flops_left is None or env.tick < self.begin * env.horizon:
            return WAIT_ACTION
        stacks = ((k, slot) for k, slot in enumerate(env.slots) if slot.layout == STACK)
        for (k, slot), (blueprint, name) in product(stacks, enumerate(pool.space.blueprint)):
            action = make_action(Op.GERMINATE, k, blueprint)
            if is_possible(pool, host, action):
                parameters = env.fossilized_parameters + slot.seed_parameters(name)
                return action if env.targets_per_parameter(parameters) >= self.targets else WAIT_ACTION
        return WAIT_ACTION


def make_action(op: Op, slot: int, blueprint: int = 0, *, tempo: int = 0) -> tuple[int, ...]:
    """Return an action with a choice for every head; heads that are not given choose 0."""
    return (op, slot, blueprint, tempo)  # in the order of HEADS


def chosen_blueprints(rule: str, names: Sequence[str] | None, pool: Hosts) -> list[int]:
    """Return the indices of the blueprints with these names. None: of all."""
    available = pool.space.blueprint
    for name in names or ():
        if name not in available:
            raise ValueError(f"{rule}.blueprints: {name!r} is not available; {suggest_name(name, available)}")
    return [available.index(name) for name in names or available]


def list_candidates(pool: Hosts, config: ClimbingConfig, host: int = 0) -> list[tuple[int, int]]:
    """Return slot and blueprint of every seed that can grow on a host, in the order in which they are tried."""
    chosen = chosen_blueprints("climbing", config.blueprints, pool)
    growable, slots = pool.masks_on_cpu.blueprint[host].tolist(), pool.envs[host].slots
    slot_order = range(len(slots))[:: -1 if config.last_slot_first else 1]
    pairs = [(k, b) for b in chosen for k in slot_order if growable[k][b]]
    sign = {"listed": 0, "cheapest": 1, "dearest": -1}[config.order]  # with 0 the order of `pairs` stays
    parameters = {(k, b): slots[k].seed_parameters(pool.space.blueprint[b]) for k, b in pairs}
    return sorted(pairs, key=lambda pair: sign * parameters[pair])


def fastest_tempo(pool: Hosts) -> tuple[int, int]:
    """Return the index of the tempo with the shortest blending, and its host epochs."""
    ticks = [pool.config.actions.tempos[name] for name in pool.space.tempo]
    return ticks.index(min(ticks)), min(ticks)


def min_ticks_to_judge(lifecycle: LifecycleConfig, blending: int) -> int:
    """Return the minimum number of host epochs from a germination to the first action on the blended seed."""
    return 1 + lifecycle.training_ticks + blending


def net_gain(env: GrowthRecord, k: int) -> float:
    """Return the net gain of the objective from the seed in slot k: its contribution to score minus its rent."""
    slot, contribution = env.slots[k], env.records[k].contribution
    assert contribution is not None, "the caller asks for the gain of measured seeds only"
    parameters = torch.tensor([env.fossilized_parameters]) + torch.tensor([0, slot.size])
    without, with_seed = rent(parameters, env.host_parameters, torch.tensor(env.price)).tolist()
    return contribution / 100.0 - (with_seed - without)
