"""Episodes in which training diverges, for comparison with other runs of the same episode."""

import random
from collections.abc import Callable, Sequence
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from esper_lightning.envs import Action, HostPool, Op, StepResult
from esper_lightning.envs.governor import Verdict
from esper_lightning.envs.measurements import unpack_validations
from esper_lightning.envs.rewards import objective
from esper_lightning.growth.lifecycle import slots_of
from esper_lightning.tasks import Split
from tests.decisions import WAIT, act, decide, fossilize, germinate
from tests.envs.breaking import breaking_epoch

MakePool = Callable[..., HostPool]


HORIZON = 9


def random_actions(pool: HostPool, choices: list[random.Random]) -> Action:
    """Choose a possible action for every environment from its own random generator."""
    rows = []
    for masks, fitting, choice in zip(pool.masks.slot.tolist(), pool.masks.blueprint.tolist(), choices, strict=True):
        op, slot = choice.choice([(op, k) for op, row in enumerate(masks) for k, may in enumerate(row) if may])
        blueprint = choice.choice([p for p, fits in enumerate(fitting[slot]) if fits])
        tempo = choice.randrange(len(pool.space.tempo))
        rows.append(decide(Op(op), slot=slot, blueprint=blueprint, tempo=tempo))
    return act(*rows)


class Episode:
    """An episode under random actions, with everything observable in `rows[tick][host]`.

    Args:
        pool: Pool, which is reset.
        rng_seed: RNG seed of hosts and actions.
    """

    def __init__(self, pool: HostPool, rng_seed: int) -> None:
        self.pool = pool
        self.generators = [random.Random(rng_seed + i) for i in range(pool.n_envs)]
        self.rows: list[list[list[Tensor]]] = []
        self.verdicts: list[list[Verdict]] = []
        pool.reset([rng_seed + i for i in range(pool.n_envs)])

    def play(self, ticks: int) -> "Episode":
        """Play a number of further ticks."""
        for _ in range(ticks):
            step = self.pool.step(random_actions(self.pool, self.generators))
            parts = (*step.observation, step.reward, step.terminated, step.truncated, *step.masks, *step.metrics)
            weights = [list(env.network.state_dict().values()) for env in self.pool.envs]
            self.rows.append([[t.clone() for t in (*(p[i] for p in parts), *w)] for i, w in enumerate(weights)])
            self.verdicts.append([(verdict.host, verdict.decision) for verdict in step.verdicts])
        return self

    def play_broken(self, *hosts: int) -> "Episode":
        """Play a tick in which the training of these hosts diverges."""
        with breaking_epoch(self.pool, hosts):
            return self.play(1)

    def rows_of_host(self, host: int) -> list[list[Tensor]]:
        return [row[host] for row in self.rows]

    def continue_in(self, pool: HostPool) -> "Episode":
        """Return the continuation of this episode in another pool of the same state."""
        other = copy(self)
        other.pool, other.generators, other.rows, other.verdicts = pool, deepcopy(self.generators), [], []
        return other


def restored_by_hand(pool: HostPool, state: dict[str, Any], host: int, good: dict[str, Any]) -> HostPool:
    """Load `state` into `pool` (without the Governor), but for `host` the state `good` with its live seeds culled."""
    pool.load_state_dict(state)
    env, tick = pool.envs[host], pool.envs[host].tick
    env.load_state_dict(good)
    env.growing.cull_live_seeds("by hand")
    env.tick = tick
    validated = pool.executor.validate([env], pool.data.validation)
    (validation,) = unpack_validations(validated)
    env.record_validation(validation)
    score = validation.all_seeds.score
    parameters = 390 + sum(p.numel() for slot in env.slots for p in slot.seed.parameters())
    price = pool.config.objective.price
    env.objective = objective(torch.tensor([score]), torch.tensor([parameters]), 390, price).item()
    pool.load_state_dict(deepcopy(pool.state_dict()))  # updates observation and masks
    return pool


def fossilize_in_broken_epoch(pool: HostPool) -> StepResult:
    """Fossilize a seed of host 0 in the fourth tick, in which its training diverges; host 1 waits."""
    pool.reset([3, 4])
    pool.step(act(germinate(0, 1), WAIT))
    for _ in range(2):
        pool.step(act(WAIT, WAIT))
    with breaking_epoch(pool, [0]):
        return pool.step(act(fossilize(0), WAIT))


def score_by_forward_pass(network: nn.Module, data: Split, without: Sequence[str] = ()) -> float:
    """Compute score by a plain forward pass of a copy, without the seeds in some slots."""
    network = deepcopy(network).eval()
    for name in without:
        slots_of(network)[name].empty()
    return (network(data.inputs).argmax(-1) == data.targets).float().mean().item()
