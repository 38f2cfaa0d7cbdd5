"""Diagnostics of one host of a pool, which change neither the host nor any random generator."""

import torch
from torch.func import functional_call

from esper_lightning.envs.host_pool import HostPool
from esper_lightning.growth.counterfactual import all_variants, interactions, shapley_values
from esper_lightning.growth.stages import Stage
from esper_lightning.tasks import fetch
from esper_lightning.telemetry.events import SeedCredited

MAX_SEEDS = 4
"""Largest number of fossilized seeds of a host whose 2^k combinations are measured."""


def credit_fossilized_seeds(pool: HostPool, num_hosts: int, tick: int) -> list[SeedCredited]:
    """Return the Shapley value of each fossilized seed of the first `num_hosts` hosts, as events at `tick`.

    Hosts with more than MAX_SEEDS of them are left out. Raises MemoryError if a host runs out of memory.
    """
    events = []
    for host, env in enumerate(pool.envs[:num_hosts]):
        players = [slot.name for slot in env.slots if slot.stage is Stage.FOSSILIZED]
        if not 0 < len(players) <= MAX_SEEDS:
            continue
        owner, number = pool.locate_host(host)
        variants = all_variants(players)
        accuracies = 100.0 * owner.variant_accuracies(number, variants, owner.data.validation)
        points = dict(zip(variants, accuracies.tolist(), strict=True))
        values, pairs = shapley_values(points, players), interactions(points, players)
        for player in players:
            blueprint = env.growing.slots[player].blueprint
            assert blueprint is not None, "that of a fossilized seed"
            interaction = sum(value for pair, value in pairs.items() if player in pair)
            events.append(SeedCredited(tick, host, player, blueprint, values[player], interaction))
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
