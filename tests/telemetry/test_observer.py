"""What telemetry sees of the hosts suffices to follow every seed, and its statistics are those of real pools."""

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from esper_lightning.controllers.rules import RandomValid
from esper_lightning.envs import ActionConfig, HostPool, HostVerdict
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.growth.gates import GradientStats, LifecycleConfig
from esper_lightning.growth.lifecycle import SeedEvent
from esper_lightning.growth.stages import Stage
from esper_lightning.runtime.ranks import ALONE, Ranks
from esper_lightning.telemetry.events import Contributed
from esper_lightning.telemetry.metrics import episode_metrics
from esper_lightning.telemetry.observer import HOST, SLOT, Observer, Tick, join, observe
from tests.runs import load

HOSTS, HORIZON, EPISODES = 6, 12, 3

SILENT = GradientStats(norm=0.0, rms=0.0, vanished=1.0, exploded=0.0)


def make_observer(pool: HostPool) -> Observer:
    return Observer(pool.space.slot, pool.space.blueprint, horizon=pool.horizon, n_envs=pool.n_envs)


class Played(NamedTuple):
    """A step of a pool with what was seen of it, and the events that were told."""

    pool: HostPool
    step: Any
    seen: Tick
    told: list[Any]


def play(pool: HostPool, observer: Observer, episodes: int = EPISODES) -> list[Played]:
    """Play episodes of random actions, and compare each tick with the hosts as it ends."""
    controller, played, known = RandomValid(3), [], {}
    for episode in range(episodes):
        pool.reset(range(episode * HOSTS, episode * HOSTS + pool.n_envs))
        known = {(i, slot.name): Stage.DORMANT for i, env in enumerate(pool.envs) for slot in env.slots}
        for tick in range(pool.horizon):
            step = pool.step(controller.act(pool))
            seen = join([observe(pool, step, episode * pool.horizon + tick + 1)], ALONE)
            told = observer.update(seen)
            for change in (event for event in told if isinstance(event, SeedEvent)):
                assert known[change.host, change.slot] == change.before, change
                known[change.host, change.slot] = change.after
            assert known == {(i, s.name): s.stage for i, env in enumerate(pool.envs) for s in env.slots}
            played.append(Played(pool, step, seen, told))
    return played


@pytest.fixture(scope="module", params=[0.05, 30.0], ids=["healthy", "diverging"])
def run(make_pool: Callable[..., HostPool], request: pytest.FixtureRequest) -> tuple[Observer, list[Played]]:
    """Observed episodes in which seeds are germinated and culled at random; with a large rate hosts diverge."""
    pool = make_pool(
        HOSTS,
        horizon=HORIZON,
        training=HostTraining(lr=request.param, batches=2, max_grad_norm=None, optimizer="sgd"),
        lifecycle=LifecycleConfig(training_ticks=1, min_contribution=None, embargo_ticks=1),
        actions=ActionConfig(blueprints=["norm", "conv_small", "conv_light"], tempos={"FAST": 1}),
    )
    observer = make_observer(pool)
    played = play(pool, observer)
    rolled_back = sum(isinstance(event, HostVerdict) for one in played for event in one.told)
    assert (rolled_back > 5) == (request.param > 1.0)
    return observer, played


def test_a_seed_is_counted_once_with_the_contribution_known_when_its_fate_was_decided() -> None:
    observer, hosts, slots = Observer(["a"], ["norm"], horizon=4, n_envs=1), np.zeros(1, HOST), np.zeros((1, 1), SLOT)
    hosts["health"] = slots["health"] = np.nan
    lives = [  # stages before and after, contribution of the change, and as measured in the tick
        ("DORMANT", "GERMINATED", None, np.nan),
        ("BLENDING", "BLENDING", None, 3.0),
        ("BLENDING", "CULLED", None, np.nan),
        ("DORMANT", "GERMINATED", None, np.nan),
        ("PROBATIONARY", "FOSSILIZED", 5.0, np.nan),
        ("DORMANT", "GERMINATED", None, np.nan),
        ("TRAINING", "CULLED", None, np.nan),
    ]
    for before, after, contribution, measured in lives:
        slots["blended"], slots["contribution"] = before == "BLENDING", measured
        change = SeedEvent("a", "norm", Stage[before], Stage[after], "", 1, contribution)
        observer.update(Tick(2, 2, hosts, slots, {}, [change]))

    assert {name.rpartition("/")[2]: value for name, value in observer.metrics().items()} == {
        "germinated": 3.0,
        "kept": 1.0,
        "churn": pytest.approx(2 / 3),
        "contribution": 4.0,
    }


def test_the_reward_s_terms_add_up_to_the_return(run: tuple[Observer, list[Played]]) -> None:
    observer, played = run
    returns = sum(one.step.reward.mean().item() for one in played[-HORIZON:])

    terms = [value for tag, value in observer.metrics().items() if tag.startswith("rollout/reward.")]
    assert len(terms) > 1 and sum(terms) == pytest.approx(returns, rel=1e-5)


@pytest.mark.parametrize("cut", [HORIZON // 2, HORIZON])
def test_a_saved_observer_goes_on_within_the_rollout(
    run: tuple[Observer, list[Played]], cut: int, tmp_path: Path
) -> None:
    played = run[1]
    first, second = make_observer(played[0].pool), make_observer(played[0].pool)
    for one in played[:cut]:
        first.update(one.seen)
    torch.save(first.state_dict(), tmp_path / "state.ckpt")

    second.load_state_dict(load(tmp_path / "state.ckpt"))

    for one in played[cut:]:
        assert second.update(one.seen) == first.update(one.seen) == one.told
        assert second.metrics() == first.metrics()


def test_an_episode_that_was_not_seen_from_its_start_has_no_sums_of_rewards(run: tuple[Observer, list[Played]]) -> None:
    observer = make_observer(run[1][0].pool)
    for one in run[1][2:HORIZON]:
        observer.update(one.seen)

    assert not [tag for tag in observer.metrics() if tag.startswith("rollout/reward.")]


def test_ranks_see_together_what_one_process_sees(run: tuple[Observer, list[Played]]) -> None:
    """Rows of two processes, in the order of the hosts of two tasks."""
    one = run[1][-1]
    ranks = Ranks([2, 4], world=2)
    parts = []
    for rank in range(2):
        own = Ranks([2, 4], rank, 2).own
        whole = observe(one.pool, one.step, 36)
        parts.append(
            whole._replace(
                hosts=[whole.hosts[i] for i in own],
                slots=[whole.slots[i] for i in own],
                terms={name: [paid[i] for i in own] for name, paid in whole.terms.items()},
                events=[event for event in whole.events if event.host in own],
            )
        )

    joined = join(parts, ranks)

    assert str(joined.hosts) == str(one.seen.hosts) and str(joined.slots) == str(one.seen.slots)  # equal, also NaN
    assert sorted(map(str, joined.events)) == sorted(map(str, one.seen.events))


def gradients_of_a_rollout(pool: HostPool, silenced: Collection[str], ill: bool = False) -> dict[str, float]:
    """Return what is told of gradients if seeds of some blueprints, and the hosts if `ill`, have none."""
    observer, controller = make_observer(pool), RandomValid(0)
    pool.reset(range(pool.n_envs))
    for tick in range(pool.horizon):
        step = pool.step(controller.act(pool))
        with pytest.MonkeyPatch.context() as patch:
            for env in pool.envs:
                if ill:
                    patch.setattr(env, "host_gradient", SILENT)
                for slot, record in zip(env.slots, env.records, strict=True):
                    if slot.blueprint in silenced:
                        patch.setattr(record, "gradient", SILENT)
            observer.update(join([observe(pool, step, tick + 1)], ALONE))
    return {tag: value for tag, value in observer.metrics().items() if tag.startswith(("rollout/dead", "rollout/grad"))}


def test_seeds_without_any_gradient_are_told_by_blueprint(make_pool: Callable[..., HostPool]) -> None:
    found = gradients_of_a_rollout(make_pool(16), silenced=["norm"])

    assert 0.9 < found.pop("rollout/gradient_health") <= 1.0
    assert found == {
        "rollout/dead_seeds.norm": 1.0,
        "rollout/dead_seeds.conv_small": 0.0,
        "rollout/dead_seeds.conv_light": 0.0,
    }
    few = gradients_of_a_rollout(make_pool(1), silenced=["norm"])
    assert set(few) == {"rollout/gradient_health"}, "a share of one seed says nothing"


def test_in_an_ill_host_a_seed_without_gradient_is_not_to_blame(make_pool: Callable[..., HostPool]) -> None:
    assert gradients_of_a_rollout(make_pool(16), ["norm"], ill=True) == {"rollout/gradient_health": 0.5}


@pytest.mark.parametrize(
    ("contribution", "gain", "reliance"), [(30.0, 5.0, 1.0), (30.0, -20.0, 1.0), (4.0, 0.0, 0.0), (30.0, 7.0, 0.0)]
)
def test_a_host_relies_on_a_seed_that_contributes_far_more_than_was_gained(
    contribution: float, gain: float, reliance: float
) -> None:
    hosts, slots = np.zeros(2, HOST), np.zeros((2, 1), SLOT)
    hosts["stopped"] = [True, False]
    slots["stage"] = [[Stage.FOSSILIZED], [Stage.DORMANT]]
    slots["blended"] = [[True], [False]]
    slots["contribution"], slots["gain"] = contribution, gain

    found = episode_metrics(Tick(1, 1, hosts, slots, {}, []), {})

    assert found["rollout/reliance"] == reliance
    assert found["rollout/fossils"] == found["rollout/rolled_back"] == 0.5


def test_contributions_of_hosts_whose_episode_has_ended_are_not_told() -> None:
    hosts, slots = np.zeros(2, HOST), np.zeros((2, 1), SLOT)
    hosts["ended"], slots["blended"], slots["contribution"] = [True, False], True, [[3.0], [4.0]]

    told = Observer(["a"], ["norm"], horizon=4, n_envs=2).update(Tick(2, 2, hosts, slots, {}, []))

    assert [event for event in told if isinstance(event, Contributed)] == [Contributed(2, [1], ["a"], [4.0])]
