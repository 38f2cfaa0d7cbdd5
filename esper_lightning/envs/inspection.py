"""Diagnostics of one host of a pool, which change neither the host nor any random generator."""

import numpy as np
import torch
from torch.func import functional_call

from esper_lightning.envs.pool import HostPool
from esper_lightning.growth.counterfactual import Variant
from esper_lightning.growth.shapley import Shares, share_out
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import fetch
from esper_lightning.telemetry.events import SeedCredited

PAIRS = 8
"""Pairs of random permutations for Shapley values of more seeds than can be enumerated exactly."""


def shares_of_kept(pool: HostPool, host: int) -> Shares | None:
    """Return the Shapley values of a host's fossilized seeds, in accuracy points on validation data.

    Returns None without fossilized seeds. Raises MemoryError if the host runs out of memory.
    """
    pool, host = pool.home_of(host)
    players = [slot.name for slot in pool.envs[host].slots if slot.stage is Stage.FOSSILIZED]
    if not players:
        return None

    def worth(variants: list[Variant]) -> list[float]:
        return (100.0 * pool.accuracy_of(host, variants, pool.data.validation)).tolist()

    return share_out(worth, players, PAIRS, np.random.default_rng(host))


def share_among_kept(pool: HostPool, hosts: int, tick: int) -> list[SeedCredited]:
    """Return the Shapley value of each fossilized seed of the first `hosts` hosts, as events at `tick`."""
    found = []
    for host, env in enumerate(pool.envs[:hosts]):
        if (shares := shares_of_kept(pool, host)) is not None:
            for player, credit in shares.credit.items():
                kind = env.growing.slots[player].blueprint
                found.append(SeedCredited(tick, host, player, kind, credit.value, shares.interaction_of(player)))
    return found


def layer_gradients(pool: HostPool, host: int) -> dict[str, float]:
    """Return the gradient norm of each parameter by name, on the host's next minibatch or its first micro-batch."""
    pool, host = pool.home_of(host)
    env = pool.envs[host]
    before = env.generator.get_state()
    batch = env.draw_batches(pool.data.train.samples).in_parts(env.training.micro_batches).at(0)
    env.generator.set_state(before)
    data = fetch(pool.data.train.to(env.device), batch, env.training.augment)
    network, training = env.network, env.network.training
    names, parameters = zip(*network.named_parameters(), strict=True)
    running = {name: buffer.clone() for name, buffer in network.named_buffers()}  # for the pass to update
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), env.training.autocast(env.device):
        outputs = functional_call(network.train(), running, (data.inputs,))
        loss = pool.task.measure(outputs, data.targets).loss.mean()
    network.train(training)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    idle = {id(parameter) for slot in env.failing for parameter in slot.seed.parameters()}  # failing seeds
    norms = [
        torch.linalg.vector_norm(gradient) * (id(parameter) not in idle)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return dict(zip(names, torch.stack(norms).tolist(), strict=True))
