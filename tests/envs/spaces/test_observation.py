import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from esper_lightning.controllers.random import RandomValid, WaitOnly
from esper_lightning.envs import HostPool
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.measurements import EpochResult, Score, TrainingStats, Validation
from esper_lightning.envs.spaces.observation import MISSING, compute_features, plateau_length
from esper_lightning.growth.gradient_stats import GradientStats
from esper_lightning.hosts import CNN
from esper_lightning.rewards import ObjectiveConfig
from tests.decisions import WAIT, act, cull, fossilize, germinate

BOUND = 1.0001


def gradient_of(norm: float, vanished: float = 0.0) -> GradientStats:
    return GradientStats(norm, rms=0.1 * norm, vanished=vanished, exploded=0.0)


def within_bounds(values: Sequence[float]) -> bool:
    return all(math.isfinite(value) and abs(value) <= BOUND for value in values)


def measured(env: HostEnv, loss: float = 1.0, accuracy: float = 0.5, norm: float = 1.0) -> EpochResult:
    gradient, score, slots = gradient_of(norm), Score(loss, accuracy), len(env.slots)
    training = TrainingStats(loss, accuracy, 0, gradient, [gradient] * slots)
    return EpochResult(training, Validation(score, [score] * slots, score, [score] * slots))


def seen(pool: HostPool) -> dict[str, float]:
    return dict(zip(pool.feature_names, pool.observation.features[0].tolist(), strict=True))


def test_every_feature_stays_finite_and_bounded_wherever_a_walk_leads(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(3, horizon=10)
    for episode in range(3):
        wanderer = RandomValid(episode)
        pool.reset([10 * episode + i for i in range(3)])
        assert within_bounds(pool.observation.features.flatten().tolist())
        for _ in range(pool.config.horizon):
            pool.step(wanderer.act(pool))
            assert within_bounds(pool.observation.features.flatten().tolist())
            for env in pool.envs:
                assert list(compute_features(env)) == pool.feature_names


def every_slot(input_shape: Sequence[int], outputs: int) -> nn.Module:
    names = ["block1", "block1.pool", "block2", "block2.pool", "block3"]
    return CNN(input_shape, outputs, base=2, kernel=1, pools=2, slots=names)


def test_no_two_features_share_a_name(make_pool: Callable[..., HostPool]) -> None:
    # 34 of the host, 20 of each slot; a duplicate name would reduce the count.
    assert len(make_pool(1).feature_names) == 34 + 3 * 20
    assert len(make_pool(1, host=every_slot).feature_names) == 34 + 5 * 20


def test_what_has_not_been_measured_yet_says_so(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1)
    pool.reset([1])
    fresh = seen(pool)

    assert [fresh[f"train_loss.{age}"] for age in range(5)] == [MISSING] * 5
    assert fresh["accuracy.0"] == pool.envs[0].history.accuracy[0]
    assert [fresh[f"accuracy.{age}"] for age in range(1, 5)] == [MISSING] * 4
    assert fresh["host.gradient_norm"] == fresh["block3.gradient.norm"] == fresh["block3.gradient.health"] == MISSING
    assert fresh["gap"] == fresh["progress"] == fresh["block3.contribution.known"] == 0
    assert fresh["share.DORMANT"] == fresh["block3.DORMANT"] == fresh["last_op.WAIT"] == 1


def test_the_newest_value_comes_first(make_pool: Callable[..., HostPool]) -> None:
    env = make_pool(1).envs[0]
    for accuracy in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        env.record_epoch(measured(env, accuracy=accuracy))

    shown = compute_features(env)
    assert [shown[f"accuracy.{age}"] for age in range(5)] == [0.6, 0.5, 0.4, 0.3, 0.2]
    assert shown["gap"] == pytest.approx(0.0)


@pytest.fixture(scope="module")
def spare(make_pool: Callable[..., HostPool]) -> HostEnv:
    """Return an environment that a test may change."""
    return make_pool(1).envs[0]


@given(
    loss=st.floats(min_value=0.0) | st.just(math.nan),
    norm=st.floats(min_value=0.0) | st.just(math.nan),
)
def test_a_host_that_diverges_is_still_observed_within_bounds(spare: HostEnv, loss: float, norm: float) -> None:
    spare.reset(0)
    spare.apply(germinate(0))
    spare.record_epoch(measured(spare, loss=loss, norm=norm))

    assert within_bounds(list(compute_features(spare).values()))


def test_a_loss_that_is_not_a_number_looks_no_better_than_any_other(spare: HostEnv) -> None:
    def shown(loss: float) -> float:
        spare.reset(0)
        spare.record_epoch(measured(spare, loss=loss))
        return compute_features(spare)["loss.0"]

    rising = [shown(loss) for loss in (0.1, 2.3, 50.0, 1e4, 1e9, math.inf)]
    assert rising == sorted(rising)
    assert shown(math.nan) == rising[-1]


def test_a_host_whose_weights_are_not_numbers_is_observed_within_bounds(make_pool: Callable[..., HostPool]) -> None:
    pool, wait = make_pool(2, governor=None), WaitOnly()  # no rollback
    with torch.no_grad():
        pool.envs[0].network.head.weight.fill_(math.nan)

    step = pool.step(wait.act(pool))

    assert within_bounds(step.observation.features.flatten().tolist())
    assert math.isnan(step.metrics.loss[0]) and step.reward.isfinite().all()


@pytest.mark.parametrize(
    ("accuracy", "length"),
    [
        ([], 0),
        ([0.0], 0),
        ([0.3], 0),
        ([0.3, 0.3, 0.3], 2),
        ([0.3, 0.5, 0.4, 0.45], 2),
        ([0.3, 0.302, 0.304, 0.306], 0),  # creeping, but by now above the best by more than a step
        ([0.3, 0.304], 1),
        ([0.5, 0.2, 0.4, 0.6], 0),
    ],
)
def test_a_plateau_lasts_since_the_best_accuracy_was_last_beaten(accuracy: list[float], length: int) -> None:
    assert plateau_length(accuracy) == length


def test_the_policy_observes_its_costs(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, horizon=20, objective=ObjectiveConfig(price=0.125))
    pool.step(act(germinate(0, 1)))
    live = seen(pool)
    assert live["price"] == 0.125
    assert live["parameters.committed"] == 0
    assert live["parameters.live"] == pytest.approx(math.log(1 + 20 / 390) / 5)
    assert live["block1.pool.parameters"] == pytest.approx(math.log(1 + 20 / 390) / 5)

    for row in [WAIT] * 2 + [fossilize(0)]:
        pool.step(act(row))
    kept = seen(pool)
    assert kept["parameters.committed"] == pytest.approx(math.log(410 / 390) / 5)
    assert kept["parameters.live"] == 0


def test_a_seed_is_seen_through_its_life(make_pool: Callable[..., HostPool]) -> None:
    pool = make_pool(1, horizon=8)
    rows = [germinate(1, 2, tempo=1), WAIT, WAIT, WAIT, cull(1)]
    lives = []
    for row in rows:
        pool.step(act(row))
        now = {name.removeprefix("block2.pool."): v for name, v in seen(pool).items() if "block2.pool." in name}
        stage = next(name for name, value in now.items() if name.isupper() and value == 1)
        lives.append((stage, now["alpha"], now["alpha.velocity"], now["age"] * 8, now["contribution.known"]))
        assert pool.observation.blueprints.tolist() == [[0, 0 if stage == "EMBARGOED" else 3, 0]]

    assert lives == [
        ("TRAINING", 0.0, 0.0, 1.0, 0.0),
        ("BLENDING", 0.5, 0.5, 2.0, 0.0),
        ("BLENDING", 1.0, 0.5, 3.0, 1.0),
        ("PROBATIONARY", 1.0, 0.0, 4.0, 1.0),
        ("EMBARGOED", 0.0, 0.0, 0.0, 0.0),
    ]


def test_a_contribution_is_shown_with_its_change_and_clipped(spare: HostEnv) -> None:
    spare.reset(0)
    record = spare.records[1]
    record.previous_contribution, record.contribution = 2.0, -1.0
    shown = compute_features(spare)
    assert shown["block2.pool.contribution"] == pytest.approx(-0.1)
    assert shown["block2.pool.contribution.velocity"] == pytest.approx(-0.3)

    record.contribution = 60.0
    shown = compute_features(spare)
    assert shown["block2.pool.contribution"] == shown["block2.pool.contribution.velocity"] == 1.0


def test_a_seeds_gradient_is_compared_with_the_hosts(spare: HostEnv) -> None:
    spare.reset(0)
    spare.host_gradient, spare.records[0].gradient = gradient_of(2.0), gradient_of(2.0 * math.e, vanished=1.0)
    shown = compute_features(spare)
    assert shown["block1.pool.gradient.ratio"] == pytest.approx(1 / 5)
    assert shown["block1.pool.gradient.health"] == 0.5

    spare.host_gradient = gradient_of(0.0)
    assert compute_features(spare)["block1.pool.gradient.ratio"] == 0.0
