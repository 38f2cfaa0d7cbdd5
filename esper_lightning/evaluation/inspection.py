"""Diagnostics of one host of a pool, which change neither the host nor any random generator."""

import numpy as np
import torch
from torch.func import functional_call

from esper_lightning.envs.host_pool import HostPool
from esper_lightning.growth.counterfactual import SeedVariant
from esper_lightning.growth.shapley import CreditAllocation, allocate_credit
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import fetch
from esper_lightning.telemetry.events import SeedCredited

SHAPLEY_PAIRS = 8
"""Pairs of random permutations for Shapley values of more seeds than can be enumerated exactly."""


def shapley_of_fossilized(pool: HostPool, host: int) -> CreditAllocation | None:
    """Return the Shapley values of a host's fossilized seeds, in accuracy points on validation data.

    Returns None without fossilized seeds. Raises MemoryError if the host runs out of memory.
    """
    pool, host = pool.locate_host(host)
    players = [slot.name for slot in pool.envs[host].slots if slot.stage is Stage.FOSSILIZED]
    if not players:
        return None

    def coalition_values(variants: list[SeedVariant]) -> list[float]:
        return (100.0 * pool.variant_accuracies(host, variants, pool.data.validation)).tolist()

    return allocate_credit(coalition_values, players, SHAPLEY_PAIRS, rng=np.random.default_rng(host))


def credit_fossilized_seeds(pool: HostPool, num_hosts: int, tick: int) -> list[SeedCredited]:
    """Return the Shapley value of each fossilized seed of the first `hosts` hosts, as events at `tick`."""
    events = []
    for host, env in enumerate(pool.envs[:num_hosts]):
        if (shares := shapley_of_fossilized(pool, host)) is not None:
            for player, credit in shares.credit.items():
                blueprint = env.growing.slots[player].blueprint
                assert blueprint is not None, "that of a fossilized seed"
                events.append(SeedCredited(tick, host, player, blueprint, credit.value, shares.interaction_of(player)))
    return events


def layer_gradients(pool: HostPool, host: int) -> dict[str, float]:
    """Return the gradient norm of each parameter by name, on the host's next minibatch or its first micro-batch."""
    pool, host = pool.locate_host(host)
    env = pool.envs[host]
    generator_state = env.generator.get_state()
    batch = env.draw_batches(pool.data.train.samples).split(env.training.micro_batches).minibatch(0)
    data = fetch(pool.data.train.to(env.device), batch, env.training.augment)
    network, training = env.network, env.network.training
    names, parameters = zip(*network.named_parameters(), strict=True)
    buffers = {name: buffer.clone() for name, buffer in network.named_buffers()}  # for the pass to update
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), env.training.autocast(env.device):
        outputs = functional_call(network.train(), buffers, (data.inputs,))
        loss = pool.task.measure(outputs, data.targets).loss.mean()
    network.train(training)
    env.generator.set_state(generator_state)  # not earlier, because dropout has drawn from it, too
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    failing = {id(parameter) for slot in env.failing_slots for parameter in slot.seed.parameters()}  # failing seeds
    norms = [
        torch.linalg.vector_norm(gradient) * (id(parameter) not in failing)
        for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    return dict(zip(names, torch.stack(norms).tolist(), strict=True))
