"""Observations in rows: what their features say, hosts that differ in slots, and a rollout of a policy over sets."""

from collections.abc import Callable
from functools import partial

import pytest
import torch

from esper_lightning.blueprints import get_blueprint
from esper_lightning.controllers.heuristic import Heuristic
from esper_lightning.controllers.hill_climbing import HillClimbing
from esper_lightning.controllers.learned import Controller
from esper_lightning.controllers.periodic import Periodic
from esper_lightning.controllers.random import RandomValid
from esper_lightning.envs import HostPool, Op
from esper_lightning.envs.context.distribution import FamilyConfig
from esper_lightning.envs.host_training import HostTraining
from esper_lightning.envs.spaces.descriptions import name_code, summarise_layers
from esper_lightning.envs.spaces.observation import ObservationConfig, compute_features, slot_features
from esper_lightning.hosts import CNN
from esper_lightning.ppo.collector import RolloutCollector
from esper_lightning.ppo.losses import PPOConfig, ppo_terms
from esper_lightning.ppo.running_norm import RowNorm, RunningMeanStd
from esper_lightning.rewards import ObjectiveConfig, rent
from esper_lightning.tamiyo.policy import PolicyConfig, policy_shape
from esper_lightning.tamiyo.set_policy import make_policy
from tests.decisions import WAIT, act, cull, fossilize, germinate
from tests.ppo.loops import total
from tests.tiers import rest_is_slow

MakePool = Callable[..., HostPool]

ROWS = ObservationConfig(layout="rows")

RAGGED = FamilyConfig(train=[{"host.widths": [[4, 8, 8], [6, 6]]}])
"""Hosts with three slots and with two."""

ragged_host = partial(CNN, kernel=1, isolate=False, channels_last=False)


def is_climbing(rule: Controller) -> bool:
    return isinstance(rule, HillClimbing)


@pytest.fixture(scope="module")
def ragged(make_pool: MakePool) -> HostPool:
    return make_pool(6, ragged_host, family=RAGGED, sight=ROWS)


def named_rows(
    pool: HostPool, env: int
) -> tuple[dict[str, float], list[dict[str, float]], list[list[dict[str, float]]]]:
    """Return the observed features of a host, of its slots and of the blueprints in each, by name."""
    assert pool.rows is not None
    host, slot, blueprint = (part.tolist() for part in pool.rows.split(pool.observation.features[env]))
    names = pool.feature_names
    of_slot = [name.removeprefix("slot.") for name in names if name.startswith("slot.")]
    of_blueprint = [name.removeprefix("blueprint.") for name in names if name.startswith("blueprint.")]
    return (
        dict(zip(names, host, strict=False)),
        [dict(zip(of_slot, row, strict=True)) for row in slot],
        [[dict(zip(of_blueprint, row, strict=True)) for row in rows] for rows in blueprint],
    )


def test_rows_hold_what_their_names_say(make_pool: MakePool) -> None:
    training = HostTraining(batches=1, lr_schedule="cosine")
    pool = make_pool(2, sight=ROWS, objective=ObjectiveConfig(price=0.1), governor=None, training=training)
    env, kept, tried = pool.envs[0], 1, 2
    pool.step(act(germinate(0, kept), WAIT))
    for _ in range(3):
        pool.step(act(WAIT, WAIT))
    pool.step(act(fossilize(0), germinate(1, tried)))
    measured = compute_features(env)
    host, slots, blueprints = named_rows(pool, 0)

    assert {name: host[name] for name in ("loss.0", "price", "last_op.FOSSILIZE")} == pytest.approx(
        {"loss.0": measured["loss.0"], "price": 0.1, "last_op.FOSSILIZE": 1.0}
    )
    assert host["lr"] == pytest.approx(env.optimizer.param_groups[0]["lr"] / training.lr) and 0.0 < host["lr"] < 1.0
    assert not [name for name in host if name.startswith("share.")], "shares depend on the number of slots"
    for k, row in enumerate(slots):
        assert {name: row[name] for name in slot_features(env, k)} == pytest.approx(slot_features(env, k))
    assert [row["depth"] for row in slots] == sorted(row["depth"] for row in slots) and slots[0]["depth"] > 0.0
    assert [row["here"] for row in blueprints[0]] == [0.0, 1.0, 0.0] and not any(b["here"] for b in blueprints[1])
    assert blueprints[0][kept]["tried"] == 1.0 and not any(row["tried"] for row in blueprints[1])
    assert blueprints[0][kept]["trial"] == pytest.approx(env.trials[0]["conv_small"] / 10.0, abs=1e-6)
    for name in ("parameters", "kernel", "channel_mixing"):
        assert slots[0][f"seed.{name}"] == blueprints[0][kept][name] and slots[1][f"seed.{name}"] == 0.0

    def total_rent(*added: int) -> float:
        sizes = torch.tensor([float(env.host_parameters + sum(added))])
        return rent(sizes, env.host_parameters, env.objective_config).item()

    committed = env.fossilized_parameters - env.host_parameters
    for b, name in enumerate(pool.space.blueprint):
        parameters = get_blueprint(name, "image").parameters(env.slots[2].width)
        expected = total_rent(committed, parameters) - total_rent(committed)
        assert blueprints[2][b]["rent"] == pytest.approx(expected / 0.2, rel=1e-4)
    assert slots[0]["rent"] == 0.0, "a fossilized seed has been paid for"


def test_a_culled_seed_is_remembered_by_what_it_has_shown_even_after_a_checkpoint(make_pool: MakePool) -> None:
    pool = make_pool(2, sight=ROWS, governor=None)
    pool.step(act(germinate(0), WAIT))
    for _ in range(3):
        pool.step(act(WAIT, WAIT))
    shown = dict(pool.envs[0].trials[0])
    pool.step(act(cull(0), WAIT))
    rows = pool.observation.features.clone()
    state = pool.state_dict()

    assert shown.keys() == {"norm"} and pool.envs[0].trials[0] == shown
    assert named_rows(pool, 0)[2][0][0]["tried"] == 1.0
    pool.reset([5, 6])
    assert not named_rows(pool, 0)[2][0][0]["tried"]
    pool.load_state_dict(state)
    assert torch.equal(pool.observation.features, rows)


def test_blueprints_are_described_by_their_layers_and_not_by_their_names() -> None:
    heavy, small, depth, gated, attention = (
        summarise_layers(name, layout, 16)
        for name, layout in (
            ("conv_heavy", "image"),
            ("conv_small", "image"),
            ("depthwise", "image"),
            ("gated", "vector"),
            ("attention", "sequence"),
        )
    )

    assert heavy.kernel and heavy.dense_kernel and heavy.nonlinear and heavy.layers == 2
    assert small.channel_mixing and not small.kernel and not small.nonlinear
    assert depth.kernel and not depth.dense_kernel and depth.channel_mixing
    assert gated.gating and gated.widest == 32 and gated.narrowest == 16
    assert attention.widest == 48 and not attention.kernel
    assert summarise_layers("norm", "image", 16).norm
    assert name_code("norm") != name_code("conv_small") and set(name_code("norm")) <= {-1.0, 1.0}


def test_hosts_of_a_family_may_have_different_numbers_of_slots(ragged: HostPool) -> None:
    ragged.reset(range(6))
    slots = {env.architecture: sum(slot.layout == "image" for slot in env.slots) for env in ragged.envs}

    assert sorted(slots.values()) == [2, 3] and ragged.space.slot == ["place1", "place2", "place3"]
    for i, env in enumerate(ragged.envs):
        present = [row["present"] for row in named_rows(ragged, i)[1]]
        assert present == [1.0, 1.0, float(slots[env.architecture] == 3)]
        assert ragged.masks.slot[i, Op.GERMINATE].tolist() == [bool(mark) for mark in present]
        assert ragged.masks.blueprint[i].any(-1).tolist() == [bool(mark) for mark in present]
        absent = ragged.observation.features[i, 2, ragged.rows.host :] if not present[2] else torch.zeros(1)
        assert not absent.any()


@pytest.mark.parametrize("rule", rest_is_slow([RandomValid(0), HillClimbing(), Heuristic(), Periodic()], is_climbing))
def test_rules_play_hosts_of_different_numbers_of_slots(ragged: HostPool, rule: Controller) -> None:
    ragged.reset(range(6))
    rule.reset(ragged)
    for _ in range(ragged.horizon):
        ragged.step(rule.act(ragged))  # raises ValueError if an action is impossible


def test_a_flat_observation_refuses_hosts_of_different_numbers_of_slots(make_pool: MakePool) -> None:
    with pytest.raises(
        ValueError, match=r"other slots or seeds can grow than on the first.*set env\.sight\.layout to rows"
    ):
        make_pool(2, ragged_host, family=RAGGED)


def test_a_rollout_of_a_policy_over_sets_begins_with_ratio_1_and_learns_from_all_hosts(ragged: HostPool) -> None:
    torch.manual_seed(0)
    policy = make_policy(policy_shape(ragged), PolicyConfig(width=16))
    assert ragged.rows is not None
    norm = RowNorm(ragged.rows)
    collector = RolloutCollector(
        ragged,
        policy,
        observation_norm=norm,
        value_norm=RunningMeanStd((), clip=float("inf")),
        config=PPOConfig(),
        run_rng_seed=3,
    )
    for _ in range(2):  # the second one is normalised
        collector.reset()
        for _ in range(ragged.horizon):
            collector.step()
        rollout, _ = collector.finish()
        terms = ppo_terms(policy, rollout, PPOConfig())
        assert terms.ratio_error < 1e-5

    assert norm.host.count == 2 * 6 * ragged.horizon < norm.slot.count < norm.blueprint.count
    total(terms).backward()
    unused = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()]
    assert unused == []


def test_the_layout_is_flat_by_default_and_features_may_be_added_to_it(make_pool: MakePool) -> None:
    plain = make_pool(1)
    added = make_pool(1, sight=ObservationConfig(added=["descriptions", "rents", "trials"]))

    assert (
        plain.feature_names == list(compute_features(plain.envs[0])) == added.feature_names[: len(plain.feature_names)]
    )
    further = dict(zip(added.feature_names, added.observation.features[0].tolist(), strict=True))
    assert further["block2.pool.conv_light.kernel"] == 1.0 and further["block2.pool.conv_small.kernel"] == 0.0
    assert {"block1.pool.depth", "block1.pool.gain", "block3.norm.rent", "block3.norm.trial"} < set(further)


def test_features_in_rows_are_chosen_by_name(make_pool: MakePool) -> None:
    shown = make_pool(1, sight=ObservationConfig(layout="rows", added=["names"], hidden=["*.contribution*"]))
    progress = make_pool(1, sight=ObservationConfig(layout="rows", shown=["progress"]))

    assert shown.feature_names[-8:] == [f"blueprint.name{i}" for i in range(8)]
    assert not [name for name in shown.feature_names if "contribution" in name or "rent" in name or "depth" in name]
    assert progress.feature_names == ["progress", "slot.present", "blueprint.present"]
    with pytest.raises(ValueError, match="a flat observation has ids of blueprints in place of names"):
        ObservationConfig(added=["names"])


def test_an_episode_offers_as_many_slots_and_blueprints_as_its_context_says(make_pool: MakePool) -> None:
    """The RNG seed of the episode selects them; what is not on offer is masked and absent."""
    offers = FamilyConfig(train=[{"offer.slots": [2], "offer.blueprints": [1, 2]}])
    pool = make_pool(12, family=offers, sight=ROWS)
    pool.reset(range(12))

    offered = pool.masks.blueprint.clone()
    for env, mask in zip(pool.envs, offered, strict=True):
        assert mask.any(-1).sum() == 2
        assert mask.any(0).sum() == env.context.context.value("offer.blueprints")
    assert torch.equal(pool.masks.slot[:, Op.GERMINATE], offered.any(-1))
    assert pool.rows is not None
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
    flat = make_pool(12, family=offers)
    flat.reset(range(12))
    assert torch.equal(flat.masks.blueprint, offered), "whatever the policy observes"
