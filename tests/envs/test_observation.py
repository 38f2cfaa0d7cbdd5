"""Features of hosts, slots and blueprints, and the choice among them and their masks."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper_lightning.controllers.rules import RandomValid, WaitOnly
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.family import FamilyConfig
from esper_lightning.envs.host_env import HostEnv
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.measurements import EpochResult, LossAndScore, TrainingStats, Validation
from esper_lightning.envs.observation import (
    MISSING,
    ObservationConfig,
    host_features,
    layers_of_blueprint,
    slot_features,
)
from esper_lightning.envs.rewards import ObjectiveConfig, rent
from esper_lightning.growth.blueprints import get_blueprint
from esper_lightning.growth.gates import GradientStats
from esper_lightning.hosts import CNN
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.policy import Policy
from esper_lightning.ppo.running_norm import RowNorm, RunningMeanStd, make_norm
from tests.decisions import WAIT, act, cull, fossilize, germinate

MakePool = Callable[..., HostPool]
MakePolicy = Callable[..., Policy]


def gradient_of(norm: float, vanished: float = 0.0) -> GradientStats:
    return GradientStats(norm, rms=0.1 * norm, vanished=vanished, exploded=0.0)


def measured(env: HostEnv, loss: float = 1.0, score: float = 0.5, norm: float = 1.0) -> EpochResult:
    gradient, both, slots = gradient_of(norm), LossAndScore(loss, score), len(env.slots)
    training = TrainingStats(loss, score, 0, gradient, [gradient] * slots)
    return EpochResult(training, Validation(both, [both] * slots, both))


class Named(NamedTuple):
    """Observed features of a host, of its slots and of the blueprints in each, by name."""

    host: dict[str, float]
    slots: list[dict[str, float]]
    blueprints: list[list[dict[str, float]]]


def seen(pool: HostPool, env: int = 0) -> Named:
    host, slot, blueprint = (part.tolist() for part in pool.rows.split(pool.observation.features[env]))
    names = pool.feature_names
    of_slot = [name.removeprefix("slot.") for name in names if name.startswith("slot.")]
    of_blueprint = [name.removeprefix("blueprint.") for name in names if name.startswith("blueprint.")]
    return Named(
        dict(zip(names, host, strict=False)),
        [dict(zip(of_slot, row, strict=True)) for row in slot],
        [[dict(zip(of_blueprint, row, strict=True)) for row in rows] for rows in blueprint],
    )


def within_bounds(values: Sequence[float], bound: float = 1.0001) -> bool:
    return all(math.isfinite(value) and abs(value) <= bound for value in values)


def test_every_feature_stays_finite_bounded_and_below_its_name(make_pool: MakePool) -> None:
    """A9: every number of an observation is the feature of its name, wherever a random walk leads."""
    pool = make_pool(3, horizon=10)
    assert len(set(pool.feature_names)) == len(pool.feature_names) == sum(pool.rows)
    for episode in range(2):
        wanderer = RandomValid(episode)
        pool.reset([10 * episode + i for i in range(3)])
        for _ in range(pool.config.horizon):
            pool.step(wanderer.act(pool))
            for i, env in enumerate(pool.envs):
                host, slots, blueprints = seen(pool, i)
                for shown, expected in [(host, host_features(env))] + [
                    (row, slot_features(env, k)) for k, row in enumerate(slots)
                ]:
                    assert {name: shown[name] for name in expected} == pytest.approx(expected)
                assert within_bounds(host.values()) and within_bounds([v for row in slots for v in row.values()], 3.0)
                assert within_bounds([v for rows in blueprints for row in rows for v in row.values()], 3.0)


def test_what_has_not_been_measured_yet_says_so_and_the_newest_value_comes_first(make_pool: MakePool) -> None:
    pool = make_pool(1)
    pool.reset([1])
    (env,) = pool.envs
    host, slots, _ = seen(pool)

    assert [host[f"train_loss.{age}"] for age in range(5)] == [MISSING] * 5
    assert [host[f"score.{age}"] for age in range(1, 5)] == [MISSING] * 4
    assert host["host.gradient_norm"] == slots[2]["gradient.norm"] == slots[2]["gradient.health"] == MISSING
    assert host["gap"] == host["progress"] == slots[2]["contribution.known"] == 0
    assert slots[2]["DORMANT"] == host["last_op.WAIT"] == 1
    for score in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6):
        env.finish_step(measured(env, score=score), judged=False)
    shown = host_features(env)
    assert [shown[f"score.{age}"] for age in range(5)] == [0.6, 0.5, 0.4, 0.3, 0.2]


@pytest.fixture(scope="module")
def spare(make_pool: MakePool) -> HostEnv:
    """Return an environment that a test may change."""
    return make_pool(1).envs[0]


def test_a_host_whose_weights_are_not_numbers_is_observed_within_bounds(make_pool: MakePool) -> None:
    pool, wait = make_pool(2, governor=None), WaitOnly()  # no rollback
    with torch.no_grad():
        pool.envs[0].network.head.weight.fill_(math.nan)

    step = pool.step(wait.act(pool))

    assert within_bounds(step.observation.features.flatten().tolist(), 3.0)
    assert seen(pool).host["loss.0"] == 1.0, "no better than any other"
    assert math.isnan(step.metrics.loss[0]) and step.reward.isfinite().all()


def test_a_seed_is_seen_through_its_life(make_pool: MakePool) -> None:
    pool = make_pool(1, horizon=8)
    lives = []
    for row in [germinate(1, 2, tempo=1), WAIT, WAIT, WAIT, cull(1)]:
        pool.step(act(row))
        now = seen(pool).slots[1]
        stage = next(name for name, value in now.items() if name.isupper() and value == 1)
        lives.append((stage, now["alpha"], now["alpha.velocity"], now["age"] * 8, now["contribution.known"]))

    assert lives == [
        ("TRAINING", 0.0, 0.0, 1.0, 0.0),
        ("BLENDING", 0.5, 0.5, 2.0, 0.0),
        ("BLENDING", 1.0, 0.5, 3.0, 1.0),
        ("PROBATIONARY", 1.0, 0.0, 4.0, 1.0),
        ("EMBARGOED", 0.0, 0.0, 0.0, 0.0),
    ]


def test_contribution_and_gradient_are_shown_with_change_and_ratio_and_clipped(spare: HostEnv) -> None:
    spare.reset(0)
    record = spare.records[1]
    record.previous_contribution, record.contribution = 2.0, -1.0
    spare.host_gradient, record.gradient = gradient_of(2.0), gradient_of(2.0 * math.e, vanished=1.0)
    shown = slot_features(spare, 1)
    assert (shown["contribution"], shown["contribution.velocity"]) == pytest.approx((-0.1, -0.3))
    assert (shown["gradient.ratio"], shown["gradient.health"]) == pytest.approx((1 / 5, 0.5))

    record.contribution, spare.host_gradient = 60.0, gradient_of(0.0)
    shown = slot_features(spare, 1)
    assert shown["contribution"] == shown["contribution.velocity"] == 1.0 and shown["gradient.ratio"] == 0.0


def test_rows_hold_prices_descriptions_rents_and_trials(make_pool: MakePool) -> None:
    training = HostTraining(batches=1, lr_schedule="cosine")
    pool = make_pool(2, objective=ObjectiveConfig(price=0.1), governor=None, training=training)
    env, kept, tried = pool.envs[0], 1, 2
    pool.step(act(germinate(0, kept), WAIT))
    assert seen(pool).host["parameters.live"] == pytest.approx(math.log(1 + 20 / 390) / 5)
    for _ in range(3):
        pool.step(act(WAIT, WAIT))
    pool.step(act(fossilize(0), germinate(1, tried)))
    host, slots, blueprints = seen(pool)

    assert (host["price"], host["last_op.FOSSILIZE"], host["parameters.live"]) == pytest.approx((0.1, 1.0, 0.0))
    assert host["parameters.committed"] == pytest.approx(math.log(410 / 390) / 5)
    assert host["lr"] == pytest.approx(env.optimizer.param_groups[0]["lr"] / training.lr) and 0.0 < host["lr"] < 1.0
    assert [row["depth"] for row in slots] == sorted(row["depth"] for row in slots) and slots[0]["depth"] > 0.0
    assert [row["here"] for row in blueprints[0]] == [0.0, 1.0, 0.0] and not any(b["here"] for b in blueprints[1])
    assert blueprints[0][kept]["tried"] == 1.0 and not any(row["tried"] for row in blueprints[1])
    assert blueprints[0][kept]["trial"] == pytest.approx(env.trials[0]["conv_small"] / 10.0, abs=1e-6)
    for name in ("parameters", "kernel", "channel_mixing"):
        assert slots[0][f"seed.{name}"] == blueprints[0][kept][name] and slots[1][f"seed.{name}"] == 0.0

    def total_rent(*added: int) -> float:
        sizes = torch.tensor([float(env.host_parameters + sum(added))])
        return rent(sizes, env.host_parameters, env.price).item()

    committed = env.fossilized_parameters - env.host_parameters
    for b, name in enumerate(pool.space.blueprint):
        parameters = get_blueprint(name, "image").parameters(env.slots[2].width)
        expected = total_rent(committed, parameters) - total_rent(committed)
        assert blueprints[2][b]["rent"] == pytest.approx(expected / 0.2, rel=1e-4)
    assert slots[0]["rent"] == 0.0, "a fossilized seed has been paid for"


def test_a_culled_seed_is_remembered_by_what_it_has_shown_even_after_a_checkpoint(make_pool: MakePool) -> None:
    pool = make_pool(2, governor=None)
    pool.step(act(germinate(0), WAIT))
    for _ in range(3):
        pool.step(act(WAIT, WAIT))
    shown = dict(pool.envs[0].trials[0])
    pool.step(act(cull(0), WAIT))
    rows, state = pool.observation.features.clone(), pool.state_dict()

    assert shown.keys() == {"norm"} and pool.envs[0].trials[0] == shown
    assert seen(pool).blueprints[0][0]["tried"] == 1.0
    pool.reset([5, 6])
    assert not seen(pool).blueprints[0][0]["tried"]
    pool.load_state_dict(state)
    assert torch.equal(pool.observation.features, rows)


@pytest.mark.parametrize(
    ("name", "layout", "kinds", "widths"),
    [
        ("conv_heavy", "image", {"kernel", "dense_kernel", "channel_mixing", "nonlinear"}, [16, 16]),
        ("conv_small", "image", {"channel_mixing"}, [16]),
        ("depthwise", "image", {"kernel", "channel_mixing", "nonlinear"}, [16, 16]),
        ("norm", "image", {"norm"}, []),
        ("gated", "vector", {"channel_mixing", "gating", "nonlinear"}, [32, 16]),
        ("attention", "sequence", {"channel_mixing"}, [48, 16]),
    ],
)
def test_blueprints_are_described_by_their_layers(name: str, layout: str, kinds: set[str], widths: list[int]) -> None:
    found, found_widths = layers_of_blueprint(name, layout, 16)

    assert {kind for kind, has_it in found.items() if has_it} == kinds and found_widths == widths


RAGGED = FamilyConfig(train=[{"host.widths": [[4, 8, 8], [6, 6]]}])
"""Hosts with three slots and with two."""


@pytest.fixture(scope="module")
def ragged(make_pool: MakePool) -> HostPool:
    return make_pool(6, partial(CNN, kernel=1, isolate=False, channels_last=False), family=RAGGED)


def test_hosts_of_a_family_may_have_different_numbers_of_slots(ragged: HostPool) -> None:
    ragged.reset(range(6))
    slots = {env.architecture: sum(slot.layout == "image" for slot in env.slots) for env in ragged.envs}

    assert sorted(slots.values()) == [2, 3] and ragged.space.slot == ["place1", "place2", "place3"]
    for i, env in enumerate(ragged.envs):
        present = [bool(row["present"]) for row in seen(ragged, i).slots]
        assert present == [True, True, slots[env.architecture] == 3]
        assert ragged.masks.slot[i, Op.GERMINATE].tolist() == ragged.masks.blueprint[i].any(-1).tolist() == present
        assert present[2] or not ragged.observation.features[i, 2, ragged.rows.host :].any()


def collector_of(pool: HostPool, policy: Policy, norm: nn.Module) -> RolloutCollector:
    value_norm = RunningMeanStd((), clip=float("inf"))
    return RolloutCollector(
        pool, policy, observation_norm=norm, value_norm=value_norm, config=PPOConfig(), run_rng_seed=3
    )


def test_a_rollout_begins_with_ratio_1_and_learns_from_all_hosts(ragged: HostPool, make_policy: MakePolicy) -> None:
    policy, norm = make_policy(ragged), make_norm(ragged.rows)
    assert isinstance(norm, RowNorm)
    collector = collector_of(ragged, policy, norm)
    for _ in range(2):  # the second one is normalised
        collector.reset()
        for _ in range(ragged.horizon):
            collector.step()
        terms = ppo_terms(policy, collector.finish()[0], PPOConfig())
        assert terms.ratio_error < 1e-5

    assert norm.host.count == 2 * 6 * ragged.horizon < norm.slot.count < norm.blueprint.count
    (terms.policy + 0.5 * terms.value - 0.01 * terms.entropy).backward()
    assert [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_hidden_features_are_not_there_and_the_others_are_the_same(make_pool: MakePool) -> None:
    whole, part = make_pool(1), make_pool(1, observation=ObservationConfig(hidden=["*.contribution*", "blueprint.*"]))
    for pool in (whole, part):
        pool.reset([3])
        for row in (germinate(0, 1), WAIT, WAIT):
            pool.step(act(row))
    kept = [n for n in whole.feature_names if "contribution" not in n and not n.startswith("blueprint.")]

    assert part.feature_names == [*kept, "blueprint.present"]
    columns = torch.tensor([whole.feature_names.index(name) for name in kept])
    n = len(kept)
    assert torch.equal(part.observation.features[..., :n], whole.observation.features[..., columns])
    progress = make_pool(1, observation=ObservationConfig(shown=["progress"]))
    assert progress.feature_names == ["progress", "slot.present", "blueprint.present"]
    norm = make_norm(progress.rows)
    norm.update(progress.reset([3]).features.repeat(2, 1, 1))
    assert norm(progress.observation.features).shape == progress.observation.features.shape


def test_an_episode_offers_as_many_slots_and_blueprints_as_its_context_says(make_pool: MakePool) -> None:
    """The RNG seed of the episode selects them; what is not on offer is masked and absent."""
    pool = make_pool(12, family=FamilyConfig(train=[{"offer.slots": [2], "offer.blueprints": [1, 2]}]))
    pool.reset(range(12))

    offered: Tensor = pool.masks.blueprint.clone()
    for env, mask in zip(pool.envs, offered, strict=True):
        assert mask.any(-1).sum() == 2
        assert mask.any(0).sum() == env.context.context.value("offer.blueprints")
    assert torch.equal(pool.masks.slot[:, Op.GERMINATE], offered.any(-1))
    host, slot, blueprint = pool.rows.split(pool.observation.features)
    assert torch.equal(slot[..., 0] > 0, offered.any(-1)) and torch.equal(blueprint[..., 0] > 0, offered)
    assert len({tuple(mask.flatten().tolist()) for mask in offered}) > 3, "hosts differ in what they offer"
    column = pool.feature_names.index("blueprints.offered")
    assert torch.allclose((3.0 * host[:, column]).exp(), offered.any(1).sum(-1).float())
    state = pool.state_dict()
    pool.reset(range(20, 32))
    assert not torch.equal(pool.masks.blueprint, offered)
    pool.load_state_dict(state)
    assert torch.equal(pool.masks.blueprint, offered)
