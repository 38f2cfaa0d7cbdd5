"""Diagnostics of one host of a pool, which change neither the host nor any random generator."""

from esper_lightning.envs.host_pool import HostPool
from esper_lightning.growth.counterfactual import all_variants, interactions, shapley_values
from esper_lightning.growth.stages import Stage
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
