"""Inputs of the anomaly rules from hosts and seeds, on small real pools."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence

import pytest
import torch

from esper_lightning.envs.host_env import HostEnv
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.growth.stages import Stage
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.telemetry.anomaly_metrics import RolloutGradients, host_anomaly_metrics, reliance_ratios, state_rms
from esper_lightning.telemetry.memory import memory_share

SILENT = GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)


def update_with_silenced(
    watch: RolloutGradients, envs: Sequence[HostEnv], silenced: Collection[str], ill: bool = False
) -> None:
    """Update the tracker with a tick in which seeds of some blueprints, and the hosts if `ill`, have no gradient."""
    with pytest.MonkeyPatch.context() as patch:
        for env in envs:
            if ill:
                patch.setattr(env, "host_gradient", SILENT)
            for slot, record in zip(env.slots, env.records, strict=True):
                if slot.blueprint in silenced:
                    patch.setattr(record, "gradient", SILENT)
        watch.update(envs)


def run_rollout(
    loop: RolloutCollector, watch: RolloutGradients, silenced: Collection[str] = (), ill: bool = False
) -> Counter[str]:
    """Run a rollout and return how many seeds of each blueprint were germinated."""
    born: Counter[str] = Counter()
    loop.reset()
    for _ in range(loop.pool.horizon):
        step = loop.step()
        born.update(event.seed_event.blueprint for event in step.events if event.seed_event.after is Stage.GERMINATED)
        update_with_silenced(watch, loop.pool.envs, silenced, ill)
    return born


def test_every_seed_is_followed_from_its_birth_on(make_loop: Callable[..., RolloutCollector]) -> None:
    loop, watch = make_loop(n_envs=6), RolloutGradients()

    born = run_rollout(loop, watch, silenced=["norm"])

    assert watch.born == born
    assert min(born["norm"], born["conv_small"], born["conv_light"]) >= 2
    readings = watch.metrics(least_seeds=2)
    assert {name: share for name, share in readings.items() if name.startswith("dead")} == {
        "dead_seeds.norm": 1.0,
        "dead_seeds.conv_small": 0.0,
        "dead_seeds.conv_light": 0.0,
    }
    assert 0.9 < readings["gradient_health"] <= 1.0
    assert not [name for name in watch.metrics(least_seeds=100) if name.startswith("dead")]


def test_the_next_rollout_begins_with_nothing(make_loop: Callable[..., RolloutCollector]) -> None:
    loop, watch = make_loop(n_envs=4), RolloutGradients()

    run_rollout(loop, watch, silenced=["norm"])
    born = run_rollout(loop, watch)

    assert watch.born == born
    assert watch.metrics(least_seeds=1).get("dead_seeds.norm", 0.0) == 0.0


def test_in_an_ill_host_a_seed_without_gradient_is_not_to_blame(make_loop: Callable[..., RolloutCollector]) -> None:
    watch = RolloutGradients()

    assert run_rollout(make_loop(n_envs=4), watch, silenced=["norm", "conv_small", "conv_light"], ill=True)

    assert watch.metrics(least_seeds=1) == {"gradient_health": 0.5}


def test_a_saved_watch_goes_on_within_the_rollout(make_loop: Callable[..., RolloutCollector]) -> None:
    loop, watch, other = make_loop(n_envs=4), RolloutGradients(), RolloutGradients()
    loop.reset()
    for tick in range(loop.pool.horizon):
        loop.step()
        watch.update(loop.pool.envs)
        if tick < 3:
            other.load_state_dict(watch.state_dict())
        else:
            other.update(loop.pool.envs)

    assert other.state_dict() == watch.state_dict()


def test_fossils_are_counted_per_host(make_loop: Callable[..., RolloutCollector]) -> None:
    loop = make_loop(n_envs=6)
    kept = 0
    loop.reset()
    for _ in range(loop.pool.horizon):
        kept += sum(event.seed_event.after is Stage.FOSSILIZED for event in loop.step().events)

    readings = host_anomaly_metrics(loop.pool.envs, most_reliance=5.0)

    assert kept > 0 and readings["fossils"] == kept / 6
    assert readings["rolled_back"] == 0.0


@pytest.mark.parametrize(("contribution", "gain", "ratio"), [(30.0, 0.05, 6.0), (30.0, -0.2, 30.0), (4.0, 0.0, 0.0)])
def test_a_host_hangs_on_a_seed_that_contributes_more_than_was_gained(
    make_loop: Callable[..., RolloutCollector], contribution: float, gain: float, ratio: float
) -> None:
    loop = make_loop(n_envs=1)
    env = loop.pool.envs[0]
    while not any(slot.blended for slot in env.slots):
        if env.tick in (0, env.horizon):
            loop.reset()
        loop.step()
    for k, slot in enumerate(env.slots):
        if slot.blended:
            env.accounts[k] = env.accounts[k]._replace(accuracy_at_germination=env.history.accuracy[-1] - gain)
            env.records[k].contribution = contribution

    assert next(iter(reliance_ratios(env))) == pytest.approx(ratio)
    assert host_anomaly_metrics([env], most_reliance=5.0)["reliance"] == float(ratio > 5.0)


def test_size_of_a_recurrent_state() -> None:
    assert state_rms((torch.full((2, 3), 3.0), torch.full((2, 3), 4.0))) == {"state_rms": pytest.approx(12.5**0.5)}
    assert state_rms((torch.zeros(2, 0), torch.zeros(2, 0))) == {}, "a policy without memory has none"


def test_memory_is_a_share_of_the_machine_s() -> None:
    assert 0.0 < memory_share(torch.device("cpu"), 0.0)["share"] < 1.0
