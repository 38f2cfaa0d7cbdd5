"""Episodes of a comparison: pieces of work that need nothing from each other. H hosts."""

from collections.abc import Sequence
from typing import NamedTuple

from esper_lightning.controllers.fixed_schedule import RecordingController, parameter_prices
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.schedule import Schedule
from esper_lightning.envs import HostPool
from esper_lightning.evaluation.checkpoints import TrainedPolicy
from esper_lightning.evaluation.networks import GrownHost, best_hosts
from esper_lightning.evaluation.play import Outcome, play_episode
from esper_lightning.evaluation.static_host import StaticController, affordable_ticks


class Played(NamedTuple):
    """An episode, and what is kept of the hosts as it left them."""

    outcome: Outcome
    networks: list[GrownHost]
    """The best hosts, the best first, as many as are to be saved."""
    prices: list[float]  # [H]
    """Price of parameters of each host."""
    schedules: Sequence[Schedule] = ()  # [H]
    """Actions that a trained policy chose on each host. Empty for other controllers."""


def play(
    pool: HostPool, name: str, controller: Controller, *, rng_seeds: Sequence[int], save_networks: int = 0
) -> list[Played]:
    """Play one episode; see `play_episode`. Returns one result, with the best `save_networks` hosts."""
    outcome = play_episode(pool, name, controller, rng_seeds=rng_seeds)
    return [Played(outcome, best_hosts(pool, outcome, save_networks), parameter_prices(pool))]


def play_policy(
    pool: HostPool,
    name: str,
    policy: TrainedPolicy,
    *,
    rng_seeds: Sequence[int],
    save_networks: int = 0,
) -> list[Played]:
    """Play one episode of a trained policy's most likely actions, and record them. Returns one result.

    Args:
        pool: The hosts.
        name: Name of the policy in reports.
        policy: The policy.
        rng_seeds: RNG seeds, one per host.
        save_networks: Number of hosts to return, the best ones.
    """
    recording = RecordingController(policy.greedy())
    (played,) = play(pool, name, recording, rng_seeds=rng_seeds, save_networks=save_networks)
    return [played._replace(schedules=recording.schedules)]


def play_static(pool: HostPool, name: str, grown: Outcome, *, rng_seeds: Sequence[int]) -> list[Played]:
    """Play the static controls of an episode: its final networks, complete from the first tick.

    Returns two results: with as many host epochs, and with as much training compute.
    """
    controller = StaticController(grown.topologies)
    (static,) = play(pool, name, controller, rng_seeds=rng_seeds)
    limits = affordable_ticks(static.outcome, grown.flops)
    equal_flops = play_episode(pool, f"{name}, equal FLOPs", controller, rng_seeds=rng_seeds, tick_limits=limits)
    return [static, static._replace(outcome=equal_flops)]
